"""The table of shapes that GEMMs take; that the reference backend follows it is in tests/reference."""

import pytest

from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.te.gemm_shapes import refusals, takes_any_layout

HOPPER, BLACKWELL = (9, 0), (10, 0)
CONSUMER_BLACKWELL = (12, 0)


def test_a_refusal_names_gemm_dimension_and_next_size() -> None:
    (refusal,) = refusals("fp8_delayed_scaling", HOPPER, tokens=24, in_features=64, out_features=64)
    assert (refusal.gemm, refusal.dimension, refusal.size, refusal.next_size) == ("wgrad", "tokens", 24, 32)
    assert str(refusal).startswith("wgrad: tokens is 24, but must be a multiple of 16 (next: 32) for ")
    assert refusals("fp8_delayed_scaling", BLACKWELL, tokens=24, in_features=64, out_features=64) == []


@pytest.mark.parametrize(
    ("capability", "takes"),
    [
        ((8, 9), False),
        (HOPPER, False),
        (BLACKWELL, True),
        ((10, 3), True),
        ((11, 0), True),
        (CONSUMER_BLACKWELL, False),
        ((12, 1), False),
        ((13, 0), True),
    ],
)
def test_the_capabilities_whose_fp8_gemms_take_any_layout(capability: tuple[int, int], takes: bool) -> None:
    """From ``nvte_is_non_tn_fp8_gemm_supported`` of TE 2.20.2: from 10.0 on, except 12.x."""
    assert takes_any_layout(capability) == takes
    refused = refusals("fp8_delayed_scaling", capability, tokens=24, in_features=64, out_features=64)
    assert [(refusal.gemm, refusal.next_size) for refusal in refused] == [("wgrad", 32)] * (not takes)


def test_modules_assert_what_a_gemm_alone_would_take() -> None:
    layer = {"tokens": 30, "in_features": 64, "out_features": 64}
    (refusal,) = refusals("fp8_current_scaling", BLACKWELL, **layer)
    assert (refusal.gemm, refusal.dimension, refusal.multiple) == ("fprop", "tokens", 8)
    assert refusals("fp8_current_scaling", BLACKWELL, **layer, asserted=False) == []
    assert refusals("fp8_current_scaling", BLACKWELL, **layer, gemms=["wgrad"], asserted=False) == []


def test_every_recipe_has_its_rules() -> None:
    for recipe in RECIPES:
        for capability in (HOPPER, BLACKWELL):
            for tokens in (64, 0):
                assert refusals(recipe, capability, tokens=tokens, in_features=128, out_features=96) == []
    result = refusals("mxfp8", BLACKWELL, tokens=4, in_features=64, out_features=64)
    assert [(refusal.gemm, refusal.dimension, refusal.multiple) for refusal in result] == [
        ("fprop", "tokens", 32),
        ("dgrad", "tokens", 32),
        ("wgrad", "tokens", 32),
    ]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(HOPPER, [("fprop", 8), ("dgrad", 8), ("wgrad", 16)]), (BLACKWELL, [("wgrad", 16)]), ((10, 3), [("wgrad", 16)])],
)
def test_blackwell_multiplies_fp8_in_blocks_as_mxfp8(
    capability: tuple[int, int], expected: list[tuple[str, int]]
) -> None:
    sizes = {"tokens": 4, "in_features": 64, "out_features": 64}
    refused = refusals("fp8_block_scaling", capability, **sizes, asserted=False)
    assert [(refusal.gemm, refusal.multiple) for refusal in refused] == expected
