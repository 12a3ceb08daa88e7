"""A config with mistakes: each mistake is an error with its line and the word that was meant.

The mistakes are made here: in every word of the documented configs that a user could misspell, two letters are swapped.
"""

import contextlib
import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from te_precision_callbacks.config import Config, ConfigError, load_config
from te_precision_callbacks.config.contract import Contract, read_contract
from te_precision_callbacks.config.schemas import FEATURES
from tests.properties import examples
from tests.te_debug_features import EXAMPLES

CONFIGS = [*EXAMPLES, *(schema.example for schema in FEATURES.values())]

FREE = re.compile(
    r"(?<=layer_types: ).*|(?<=exact_layer_names: ).*|(?<=regex_pattern: ).*"
    r"|#.*|^\w+:|\bTrue\b"
)
"""What a user may write as they like."""

WORD = re.compile(r"[A-Za-z_%0-9]*[A-Za-z]{3}[A-Za-z_%0-9]*")


def words(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, word, and the text with two letters of the word swapped."""
    start = 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        free = [item.span() for item in FREE.finditer(line)]
        for item in WORD.finditer(line):
            if any(first <= item.start() < last for first, last in free):
                continue
            wrong = swapped(item[0])
            if wrong is not None:
                at = start + item.start()
                yield number, item[0], text[:at] + wrong + text[at + len(item[0]) :]
        start += len(line)


def swapped(word: str) -> str | None:
    middle = len(word) // 2
    for at in (middle - 1, middle, 0):
        first, other = word[at : at + 2]
        if first.casefold() != other.casefold():
            return word[:at] + other + first + word[at + 2 :]
    return None


FAULTS = list(dict.fromkeys((line, word, text) for config in CONFIGS for line, word, text in words(config)))


def error_of(folder: Path, text: str) -> ConfigError:
    path = folder / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, features=())
    return caught.value


def test_there_are_many() -> None:
    assert len(FAULTS) > 150
    for config in CONFIGS:
        assert load_config(yaml.safe_load(config)).sections


def test_a_misspelt_word_is_an_error_with_its_line_and_the_word(tmp_path: Path) -> None:
    for line, word, text in FAULTS:
        error = error_of(tmp_path, text)
        wrong = swapped(word)
        stated = [problem for problem in error.problems if f"'{wrong}'" in problem]
        assert stated, error.problems
        places = [
            re.match(r".*config\.yaml, line (\d+)(?: column (\d+))? \(section '\w+'\): ", problem) for problem in stated
        ]
        assert str(line) in {place and place[1] for place in places} or f"Is {wrong!r} a misspelling" in stated[0]
        for place in places:
            if place and place[2]:
                column = int(place[2]) - 1
                assert text.splitlines()[line - 1].find(str(wrong), column) >= column, "in the entry that begins there"
        assert any(re.search(rf"(?<![\w%]){re.escape(word)}(?![\w%])", problem, re.IGNORECASE) for problem in stated), (
            stated
        )


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        pytest.param(
            [6, 8, 14],
            """
one:
  enabled: True
  layers: {layer_types: [fc1]}
  transformer_engine:
    LogTensorStatz: {enabled: True}
two:
  enabled: yes please
  layers: {layer_types: [fc1]}
  transformer_engine:
    DisableFP8Layer: {enabled: True}
three:
  enabled: True
  layers: {layer_type: [fc1]}
  transformer_engine:
    DisableFP8Layer: {enabled: True}
""",
            id="in three sections",
        ),
        pytest.param(
            [2, 4, 6],
            """
one:
  enable: True
  layers: {layer_numbers: [x]}
  transformer_engine:
    DisableFP8GEMM: {enabled: True, gemms: [fprob]}
""",
            id="in a section",
        ),
        pytest.param(
            [7, 8, 9],
            """
one:
  enabled: True
  layers: {layer_types: [fc1]}
  transformer_engine:
    LogTensorStats:
      enabled: 1
      tensors: [weigt]
      stats: [maxx]
""",
            id="in a feature",
        ),
        pytest.param(
            [6, 10, 10],
            """
one:
  enabled: True
  layers: {layer_types: [fc1]}
  transformer_engine:
    DisableFP8Layer: {enabled: True, gemms: [fprop]}
two:
  enabled: True
  layers: {layer_types: [fc1]}
  layers: {layer_types: []}
  transformer_engine:
    DisableFP8Layer: {enabled: True}
""",
            id="a key twice",
        ),
        pytest.param(
            [2, 4, 7],
            """
one:
  enabled: True
  transformer_engin:
    DisableFP8Layer: {enabled: True}
  transformer_engine:
    FakeQuant: {enable: True, gemms: [fprop], tensors: [weight], quant_format: FP8E4M3}
""",
            id="in a namespace",
        ),
    ],
)
def test_three_mistakes_are_three_errors(tmp_path: Path, lines: list[int], text: str) -> None:
    problems = error_of(tmp_path, text).problems
    assert sorted(int(re.search(r"line (\d+)", problem)[1]) for problem in problems) == lines, problems  # type: ignore[index]


# ------------------------------------------------------------------------------------------------------------- any text


CONTRACTS = (
    "precision_contract:\n  share: {fp8: 90, fp8 wgrad: 85}\n  layers: {.*mlp.*: mxfp8}\n"
    "  state: {optimizer: float32}\n  by_step: 3\n  on_broken: warn\n",
    "precision_contract:\n  share: [fp8 >= 95%, fp32 < 5%]\n",
)

WORDS = sorted({word for text in (*CONFIGS, *CONTRACTS) for word in WORD.findall(text)})

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 5),
        st.sampled_from([10**30, -(10**30), math.nan, math.inf, -0.0, 1e-320, 0.5]),
        st.text(max_size=6),
        st.sampled_from(WORDS),
        st.sampled_from(["0-3", "3-0", "(", "[a-", "*", "1,2", "fp8 >= 95%", "fp8 >", ">= 3", "100 GB", "1e9 KiB"]),
        st.binary(max_size=3),
        st.dates(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.sampled_from(WORDS), st.integers(0, 3), st.text(max_size=3)), inner, max_size=3),
    ),
    max_leaves=6,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in parts:
        yield from places(value, (*path, key))


@st.composite
def changed(draw: st.DrawFn, texts: tuple[str, ...]) -> Any:
    tree = copy.deepcopy(yaml.safe_load(draw(st.sampled_from(texts))))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(places(tree))))
        if not path:
            return draw(VALUES)
        owner = tree
        for key in path[:-1]:
            owner = owner[key]
        if isinstance(owner, dict) and draw(st.booleans()):
            owner[draw(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)))] = owner.pop(path[-1])
        else:
            owner[path[-1]] = draw(VALUES)
    return tree


@st.composite
def garbled(draw: st.DrawFn, texts: tuple[str, ...]) -> str:
    text = draw(st.sampled_from(texts))
    start = draw(st.integers(0, len(text)))
    end = min(len(text), start + draw(st.integers(0, 12)))
    marks = st.text(alphabet="{}[]:,&*!|>-?#%@`'\"\\ \t\n\0\x85\ufeffa0=<", max_size=6)
    put = draw(st.one_of(marks, st.text(max_size=4), st.sampled_from([*WORDS, text[start:end] * 2])))
    return text[:start] + put + text[end:]


def reads(source: Any) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(load_config(source, features=()), Config)
    with contextlib.suppress(ConfigError):
        assert isinstance(read_contract(source), Contract | None)


@given(source=st.one_of(changed(tuple(CONFIGS)), st.dictionaries(st.text(max_size=3), VALUES, max_size=3)))
@examples(100)
def test_any_mapping(source: Any) -> None:
    reads(source if isinstance(source, dict) else {"section": source})


@given(
    content=st.one_of(
        st.one_of(garbled(tuple(CONFIGS)), garbled(CONTRACTS), st.text(max_size=40)).map(
            lambda text: text.encode(errors="surrogatepass")
        ),
        st.binary(max_size=60),
    )
)
@examples(200)
def test_any_text(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_bytes(content)
    reads(path)
