"""Environment variables that change numbers."""

from __future__ import annotations

import re
from pathlib import Path

from te_precision_callbacks.base.environment import VARIABLES, read_environment

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"


def test_the_page_lists_the_names() -> None:
    listed = PAGE.read_text().partition("\n### Environment variables\n")[2]
    assert set(re.findall(r"`([A-Z]\w{2,})`", listed)) == set(VARIABLES)


def test_only_these_variables_are_read() -> None:
    environ = {"NVTE_FP8_DPA_BWD": "0", "NVTE_NVTX_ENABLED": "1", "WANDB_API_KEY": "hush", "NVTE_TOKEN_OF_MINE": "hush"}
    assert read_environment(environ) == {"NVTE_FP8_DPA_BWD": "0"}
