"""A config with mistakes: each mistake is an error with its line and the word that was meant.

The mistakes are made here: in every word of the documented configs that a user could misspell, two letters are swapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from te_precision_callbacks.config import ConfigError, load_config
from te_precision_callbacks.config.schemas import FEATURES
from tests.te_debug_features import EXAMPLES

CONFIGS = [*EXAMPLES, *(schema.example for schema in FEATURES.values())]

FREE = re.compile(
    r"(?<=layer_types: ).*|(?<=exact_layer_names: ).*|(?<=regex_pattern: ).*|(?<=when: ).*|(?<=max_bytes: ).*"
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
    """The word with two neighbours swapped in its middle; None if all are equal."""
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
        load_config(path)
    return caught.value


def test_there_are_many() -> None:
    assert len(FAULTS) > 150
    for config in CONFIGS:
        assert load_config(yaml.safe_load(config)).sections


def test_a_misspelt_word_is_an_error_with_its_line_and_the_word(tmp_path: Path) -> None:
    for line, word, text in FAULTS:
        check_misspelt(tmp_path, line, word, text)


def check_misspelt(tmp_path: Path, line: int, word: str, text: str) -> None:
    error = error_of(tmp_path, text)
    wrong = swapped(word)
    stated = [problem for problem in error.problems if f"'{wrong}'" in problem]
    assert stated, error.problems
    places = [
        re.match(r".*config\.yaml, line (\d+)(?: column (\d+))? \(section '\w+'\): ", problem) for problem in stated
    ]
    assert str(line) in {place and place[1] for place in places} or f"Is {wrong!r} meant" in stated[0]
    for place in places:
        if place and place[2]:
            column = int(place[2]) - 1
            assert text.splitlines()[line - 1].find(str(wrong), column) >= column, "in the entry that begins there"
    assert any(re.search(rf"(?<![\w%]){re.escape(word)}(?![\w%])", problem, re.IGNORECASE) for problem in stated), (
        stated
    )


THREE = {
    "in three sections": """
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
    "in a section": """
one:
  enable: True
  layers: {layer_numbers: [x]}
  transformer_engine:
    DisableFP8GEMM: {enabled: True, gemms: [fprob]}
""",
    "in a feature": """
one:
  enabled: True
  layers: {layer_types: [fc1]}
  transformer_engine:
    LogTensorStats:
      enabled: 1
      tensors: [weigt]
      stats: [maxx]
""",
    "a key twice": """
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
    "in a namespace": """
one:
  enabled: True
  transformer_engin:
    DisableFP8Layer: {enabled: True}
  transformer_engine:
    FakeQuant: {enable: True, gemms: [fprop], tensors: [weight], quant_format: FP8E4M3}
""",
}
LINES = {
    "in three sections": (6, 8, 14),
    "in a section": (2, 4, 6),
    "in a feature": (7, 8, 9),
    "a key twice": (6, 10, 10),
    "in a namespace": (2, 4, 7),
}


@pytest.mark.parametrize("case", THREE)
def test_three_mistakes_are_three_errors(tmp_path: Path, case: str) -> None:
    problems = error_of(tmp_path, THREE[case]).problems
    lines = sorted(int(re.search(r"line (\d+)", problem)[1]) for problem in problems)  # type: ignore[index]
    assert lines == list(LINES[case]), problems
