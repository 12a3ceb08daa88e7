"""The table of shapes that GEMMs take; that the reference backend follows it is in tests/reference."""

from te_precision_callbacks.base.numerics.gemm_shapes import SCALING_OF_RECIPE, refusals
from te_precision_callbacks.base.vocabulary import RECIPES

HOPPER, BLACKWELL = (9, 0), (10, 0)


def test_every_recipe_has_its_rules() -> None:
    assert set(SCALING_OF_RECIPE) == set(RECIPES)
    for recipe in SCALING_OF_RECIPE:
        for capability in (HOPPER, BLACKWELL):
            assert refusals(recipe, capability, tokens=64, in_features=128, out_features=96) == []
            assert refusals(recipe, capability, tokens=0, in_features=128, out_features=96) == []


def test_a_refusal_names_gemm_dimension_and_next_size() -> None:
    (refusal,) = refusals("fp8_delayed_scaling", HOPPER, tokens=24, in_features=64, out_features=64)
    assert (refusal.gemm, refusal.dimension, refusal.size, refusal.next_size) == ("wgrad", "tokens", 24, 32)
    assert str(refusal).startswith("wgrad: tokens is 24, but must be a multiple of 16 (next: 32) for ")
    assert refusals("fp8_delayed_scaling", BLACKWELL, tokens=24, in_features=64, out_features=64) == []


def test_modules_assert_what_a_gemm_alone_would_take() -> None:
    layer = {"tokens": 30, "in_features": 64, "out_features": 64}
    (refusal,) = refusals("fp8_current_scaling", BLACKWELL, **layer)
    assert (refusal.gemm, refusal.dimension, refusal.multiple) == ("fprop", "tokens", 8)
    assert refusals("fp8_current_scaling", BLACKWELL, **layer, asserted=False) == []
    assert refusals("fp8_current_scaling", BLACKWELL, **layer, gemms=["wgrad"]) == []


def test_the_largest_multiple_of_a_dimension() -> None:
    result = refusals("mxfp8", BLACKWELL, tokens=4, in_features=64, out_features=64)
    assert [(refusal.gemm, refusal.dimension, refusal.multiple) for refusal in result] == [
        ("fprop", "tokens", 32),
        ("dgrad", "tokens", 32),
        ("wgrad", "tokens", 32),
    ]
