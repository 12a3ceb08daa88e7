"""Outputs of commands equal the files in tests/golden/."""

import difflib
from pathlib import Path

import pytest
import torch

from tests.golden.outputs import golden, outputs
from tools.tour import alike


@pytest.mark.skipif(torch.cuda.is_available(), reason="they are of a machine without a GPU")
@pytest.mark.slow
@pytest.mark.processes
def test_each_output_is_as_it_was(tmp_path: Path) -> None:
    """But for decimal numbers that differ by at most a twentieth."""
    made, kept = outputs(tmp_path), golden()
    assert made.keys() == kept.keys()
    differences = [
        line
        for name in made
        if not alike(kept[name], made[name])
        for line in difflib.ndiff(kept[name].splitlines(), made[name].splitlines())
        if not line.startswith("  ")
    ]
    assert not differences, "\n".join([*differences, "", "if this is meant: python -m tests.golden"])
