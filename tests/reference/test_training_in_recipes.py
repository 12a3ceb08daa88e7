"""A TransformerLayer trains in every recipe, as far from BF16 as the recipe's format explains and no further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import executable
from tests.reference.processes import run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "recipes.py"
RECIPES = {
    "9.0": (
        "DelayedScaling",
        "Float8CurrentScaling",
        "Float8BlockScaling",
        "Float8BlockScaling (float32 scales)",
    ),
    "10.0": ("MXFP8BlockScaling", "NVFP4BlockScaling"),
}


@pytest.mark.processes
@pytest.mark.parametrize("capability", RECIPES)
def test_the_loss_stays_within_what_the_format_explains(capability: str) -> None:
    done = run([executable(), str(SCRIPT), "--capability", capability, "--steps", "12", "--draws", "2", "--json"])
    assert done.stdout, done.stderr
    cases = {case["recipe"]: case for case in json.loads(done.stdout)}
    assert tuple(cases) == RECIPES[capability]
    for case in cases.values():
        assert case["last_loss"] < 4.2, case  # from 5.7
        assert case["distance"] <= 3 * case["most_explained"], case
        assert case["is_explained"], case
    assert done.returncode == 0
    if capability == "10.0":  # the measure tells a coarser format from a finer one
        assert cases["NVFP4BlockScaling"]["distance"] > cases["MXFP8BlockScaling"]["most_explained"]
