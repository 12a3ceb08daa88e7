"""Names in few words: nothing is lost, and nothing is added."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_precision_callbacks.folding import folded
from tests.properties import examples


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        ([], []),
        (["head"], ["head"]),
        (["layers.0.fc", "layers.1.fc", "layers.4.fc", "head"], ["layers.{0-1,4}.fc", "head"]),
        (["a.0.fc1", "a.0.fc2", "a.1.fc1"], ["a.{0-1}.fc1", "a.0.fc2"]),
        (["h0", "h1", "h1", "h2"], ["h{0-2}"]),
        ([f"h.{i}.e.gemm_{e}" for i in range(32) for e in range(8)], ["h.{0-31}.e.gemm_{0-7}"]),
        (["m.0.0", "m.0.1", "m.1.0", "m.1.1", "m.2.0"], ["m.{0-1}.{0-1}", "m.2.0"]),
        (["l.00", "l.01"], ["l.00", "l.01"]),
        ([f"l.{2 * i}" for i in range(20)], ["l.{0,2,4,6 and 16 more}"]),
        ([str(number) for number in range(20_000)], ["{0-19999}"]),
    ],
)
def test_names(names: list[str], texts: list[str]) -> None:
    assert folded(names) == texts


def test_at_most_so_many_texts() -> None:
    assert folded(["a", "b", "c"], most=2) == ["a", "b", "1 more"]
    assert folded(["a", "b"], most=2) == ["a", "b"]


def unfolded(text: str) -> set[str]:
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [
        [part] if not number % 2 else [
            str(each)
            for span in part.split(",")
            for first, _, last in [span.partition("-")]
            for each in range(int(first), int(last or first) + 1)
        ]
        for number, part in enumerate(parts)
    ]  # fmt: skip
    return {"".join(each) for each in itertools.product(*choices)}


@given(names=st.sets(st.from_regex(r"m\.[0-3]\.e\.([0-3]|1[0-2])\.fc[12]", fullmatch=True), min_size=1, max_size=30))
@examples(100)
def test_a_text_stands_for_exactly_its_names(names: set[str]) -> None:
    texts = folded(sorted(names))
    found = [name for text in texts for name in unfolded(text)]
    assert sorted(found) == sorted(names)
    assert len(texts) <= len(names)
