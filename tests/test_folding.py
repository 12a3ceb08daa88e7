"""Names in few words: nothing is lost, and nothing is added."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from te_precision_callbacks.base import terminal
from te_precision_callbacks.layers.folding import ShortNames, folded, in_sentence
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


def test_a_name_without_letters_is_quoted_in_a_sentence() -> None:
    assert in_sentence("0", "1", "4.0", "net.0") == "'{0-1}' and '4.0' and net.0"


def unfolded(text: str) -> set[str]:
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [
        [part] if not number % 2 else [
            str(item)
            for span in part.split(",")
            for first, _, last in [span.partition("-")]
            for item in range(int(first), int(last or first) + 1)
        ]
        for number, part in enumerate(parts)
    ]  # fmt: skip
    return {"".join(item) for item in itertools.product(*choices)}


@given(names=st.sets(st.from_regex(r"m\.[0-3]\.e\.([0-3]|1[0-2])\.fc[12]", fullmatch=True), min_size=1, max_size=30))
@examples(100)
def test_a_text_stands_for_exactly_its_names(names: set[str]) -> None:
    texts = folded(sorted(names))
    assert sorted([name for text in texts for name in unfolded(text)]) == sorted(names)
    assert len(texts) <= len(names)


ESM2 = [f"model.esm.encoder.layers.{n}.self_attention.layernorm_qkv" for n in (0, 9, 17, 32)]
LLAMA = [
    *(f"base_model.model.model.layers.{n}.{part}.base_layer"
      for n in range(32)
      for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")),
    "base_model.model.lm_head",
]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "most", "texts"),
    [
        (["head", "layers.0.fc"], 11, ["head", "layers.0.fc"]),
        (ESM2, 42, ["…layers.0.self_attention.layernorm_qkv", "…layers.9.self_attention.layernorm_qkv"]),
        (ESM2, 30, ["…layers.0.…layernorm_qkv", "…layers.9.…layernorm_qkv"]),
        (ESM2, 5, ["…0.…", "…9.…", "…17.…"]),
        (LLAMA, 44, ["…model.layers.0.self_attn.q_proj.base_layer", "…model.layers.0.self_attn.k_proj.base_layer"]),
        (LLAMA, 55, ["…model.model.layers.0.self_attn.q_proj.base_layer"]),
        (LLAMA, 30, ["…model.…0.self_attn.q_proj.…", "…model.…0.self_attn.k_proj.…"]),
    ],
)
def test_a_short_name_keeps_the_differing_parts(names: list[str], most: int, texts: list[str]) -> None:
    short = ShortNames(names)
    results = [short.of(name, most) for name in names]
    assert results[: len(texts)] == texts
    assert len(set(results)) == len(names)
    assert max(map(len, results)) <= most


def test_a_name_that_nobody_has_told_loses_its_middle() -> None:
    short = ShortNames([])
    assert short.of("layers.0.attention.query", 12) == "lay…on.query"
    assert short.of("layers", 3) == "ers"


@given(
    st.sets(st.lists(st.sampled_from(["layers", "0", "1", "12", "self_attention", "self_attn", "fc"]), max_size=5)
            .map(".".join), min_size=1, max_size=12),
    st.integers(0, 60),
)  # fmt: skip
@examples(300)
def test_short_names_fit(names: set[str], most: int) -> None:
    short = ShortNames(names)
    results = {name: short.of(name, most) for name in names}
    assert all(len(text) <= most for text in results.values())
    assert all(text == name for name, text in results.items() if len(name) <= most)


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("layers.{0-2}.self_attention.layernorm_qkv", 29, ["layers.{0-2}.self_attention.", "layernorm_qkv"]),
        ("below examples/demo.yaml", 9, ["below", "examples/", "demo.yaml"]),
        ("1234.5678", 7, ["1234.56", "78"]),  # a number has no separators
        ("[bold]a.b", 20, ["[bold]a.b"]),
    ],
)
def test_names_break_after_a_separator(text: str, width: int, lines: list[str]) -> None:
    table = terminal.table("")
    table.show_header = False
    table.add_row(terminal.cell(text))
    console = Console(width=width + 4)  # with the padding and the edges
    with console.capture() as captured:
        console.print(table)
    assert [line.strip() for line in captured.get().splitlines() if line.strip()] == lines
