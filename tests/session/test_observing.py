"""What observing changes of training: the table of docs/observing.md, and that nothing of it is of this package."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.session import observing
from tests.session.observing import ALIKE, RECIPES, TABLE, cell, changed, head, nobody, ours, row, theirs, train

PAGE = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()


@pytest.fixture(autouse=True)
def prepared() -> Iterator[None]:
    with observing.prepared():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_the_page_says_what_observing_changes(name: str) -> None:
    """Made anew by: python -m tests.session.observing"""
    assert f"{row(name)}\n" in PAGE


def test_the_page_has_a_row_for_every_module() -> None:
    table = PAGE.split(head())[1].strip().partition("\n\n")[0]
    assert [line.split(" | ")[0] for line in table.splitlines()] == [f"| {name}" for name in TABLE]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIKE)
def test_one_row_holds_for_several_activations(name: str) -> None:
    """By the recipes under which the rows of the activations differ, two of the three for each activation."""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| LayerNormMLP, {ALIKE[name]} |"))
    of_row = dict(zip(RECIPES, line.strip("| ").split(" | ")[1:], strict=True))
    recipes = ["none", "current", "MXFP8"]
    del recipes[list(ALIKE).index(name) % 3]
    for recipe in recipes:
        assert cell(f"LayerNormMLP, {name}", recipe) == of_row[recipe]


def test_after_a_checkpoint_that_is_not_reentrant_gelu_in_float32_is_the_same() -> None:
    assert cell("LayerNormMLP, gelu", "none") == "y, g / y, g"
    observing.checkpoint(use_reentrant=False)
    assert cell("LayerNormMLP, gelu", "none") == "= / y, g"


@pytest.mark.parametrize(
    ("name", "recipe", "dtype"),
    [
        ("LayerNormLinear", "delayed", "bfloat16"),
        ("LayerNormMLP, gelu", "none", "float32"),
        ("LayerNormMLP, srelu", "MXFP8", "bfloat16"),
        ("TransformerLayer", "current", "bfloat16"),
    ],
)
def test_what_is_changed_transformer_engines_own_features_change_alike(name: str, recipe: str, dtype: str) -> None:
    """Bit for bit; and in steps in which nothing is due nothing is changed."""
    alone, observed = train(name, recipe, dtype, nobody), train(name, recipe, dtype, ours)
    assert changed(alone, observed)
    assert not changed(observed, train(name, recipe, dtype, theirs))
    assert not changed(alone, train(name, recipe, dtype, partial(ours, start_step=100)))
