"""Environment variables that change numbers."""

from __future__ import annotations

import re
from pathlib import Path

from te_precision_callbacks.base.environment import VARIABLES, read_environment

PAGE = Path(__file__).parents[1] / "docs" / "doctor.md"


def test_the_page_lists_the_names() -> None:
    assert re.findall(r"^- `(\w+)`$", PAGE.read_text(), re.MULTILINE) == sorted(VARIABLES)


def test_only_these_variables_are_read() -> None:
    environ = {"NVTE_FP8_DPA_BWD": "0", "NVTE_NVTX_ENABLED": "1", "WANDB_API_KEY": "hush", "NVTE_TOKEN_OF_MINE": "hush"}
    assert read_environment(environ) == {"NVTE_FP8_DPA_BWD": "0"}
