"""Configs that are too large are refused with a short message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks.config import ConfigError, load_config
from te_precision_callbacks.config.yaml_text import MOST_BYTES

SECTION = "s:\n  enabled: True\n  layers: {layer_types: [all]}\n  transformer_engine:\n    LogTensorStats:\n"
OPTIONS = "      enabled: True\n      tensors: [weight]\n"
LONG = "x" * 3_000_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a\n  - *a\n", r"an anchor contains itself"),
        (SECTION + OPTIONS + f"      stats: [{'x' * 10_000_000}]\n", rf"more than {MOST_BYTES:,} bytes"),
        (SECTION + OPTIONS + f"      stats: [{LONG}]\n", r"line 8 .*'stats' of 'LogTensorStats' has 'xxx.*there is no"),
        (SECTION + f"      enabled: {LONG}\n", r"line 6 .*'enabled' of 'LogTensorStats' must be True or False"),
        (
            SECTION.replace("LogTensorStats:", f"? {LONG}\n    : 1"),
            r"there is no feature 'xxx.*xxx' in",
        ),
        (SECTION.replace("all", LONG), r"line 5 .*the options of 'LogTensorStats' must be a mapping, not None"),
        (f"? {LONG}\n: 3", r"line 1 \(section 'xxx.*\.\.\.x*'\): a section must be a mapping"),
        ("s:\n  enabled: True\n  layers: {layer_name_regex_pattern: 'a{99999999999}'}", r"line 3 .*repetition number"),
        (f"s:\n  enabled: True\n  layers: {{layer_numbers: {'9' * 5000}}}", r"(?s)not valid YAML: '999.*line 3"),
        (f"s: *{LONG}", r"not valid YAML: .*undefined alias"),
    ],
    ids=range(10),
)
def test_a_file_that_stands_for_too_much_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path / "config.yaml")
    assert len(str(caught.value)) < 2000


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"'/dev/zero' has more than {MOST_BYTES:,} bytes"):
        load_config("/dev/zero")


def test_a_mapping_that_is_too_large_gets_a_short_message() -> None:
    itself: dict[str, Any] = {}
    itself["s"] = itself
    for source, message in (
        (itself, r"the key 'enabled' is missing"),
        ({"s": {"enabled": "x" * 10_000_000}}, "'enabled' must be True or False"),
        ({"s": {"enabled": 1 << 100_000}}, "not an integer of 100001 bits"),
        ({"s": {"enabled": True, "layers": {"layer_numbers": [1 << 100_000]}}}, "not an integer of 100001 bits"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            load_config(source)
        assert len(str(caught.value)) < 1000


def test_anchors_that_are_used_as_meant_load(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "base:\n  enabled: False\n  transformer_engine: &features\n    LogTensorStats: &stats\n      enabled: True\n"
        "      stats: [max]\n      tensors: [weight]\n      freq: 3\n"
        "one:\n  enabled: True\n  layers: {layer_types: [fc1]}\n  transformer_engine: *features\n"
        "two:\n  enabled: True\n  layers: {layer_types: [fc2]}\n  transformer_engine:\n    LogTensorStats:\n"
        "      <<: *stats\n      freq: 5\n"
    )
    options = [
        section.features["transformer_engine"]["LogTensorStats"] for section in load_config(path).enabled_sections
    ]
    assert options[0] == {"enabled": True, "stats": ["max"], "tensors": ["weight"], "freq": 3}
    assert options[1] == {**options[0], "freq": 5}
    path.write_text(path.read_text().replace("stats: [max]", "stats: [maxx]"))
    with pytest.raises(ConfigError, match="has 2 problems") as caught:
        load_config(path)
    assert all("line 6 " in problem for problem in caught.value.problems), "where it is written"
