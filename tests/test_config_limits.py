"""Configs that are too large are refused with a short message."""

from __future__ import annotations

from typing import Any

import pytest

from te_precision_callbacks.config import ConfigError, load_config
from te_precision_callbacks.config.yaml_text import MOST_BYTES


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
