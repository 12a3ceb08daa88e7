"""Content of quantized tensors, and recipes' effect on tensors, against numpy and the formats' definitions.

Some of the tensors are drawn with a seed: any dtype, shape and strides, magnitudes from subnormal to huge, zeros, an
outlier, inf and nan, in one or more micro-batches.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.debug.features.utils.stats_computation import STATS
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

from te_precision_callbacks.base.errors import QuantizationError
from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.kernels import eager
from te_precision_callbacks.engine.quantization import read
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.table import QUANTIZED_STATISTICS
from tests.combinations import grouped, half
from tests.drawn import normal
from tests.engine import exact, forms
from tests.engine.exact import BLOCK_STATISTICS
from tests.engine.forms import FORMS, NAMES, SPECIAL_SCALES, Form, drawn, matrix, spread
from tests.engine.one_step import Found, one_step, statistics
from tests.engine.recipes import BLOCKS, INF, NAN, Pair, by_block, factors_of, quantize
from tests.quantizers import fp8_dtype, quantizer

OF_ANY_RECIPE = [name for name in QUANTIZED_STATISTICS if name not in BLOCK_STATISTICS]


def names_of(recipe: str, form: str) -> list[str]:
    return [form.format(name) for name in (QUANTIZED_STATISTICS if BLOCKS[recipe][0] else OF_ANY_RECIPE)]


def from_numpy(recipe: str, pairs: Sequence[Pair]) -> Found:
    x = np.concatenate([pair.x.reshape(-1) for pair in pairs])
    y = np.concatenate([pair.quantized.values.astype(np.float64).reshape(-1) for pair in pairs])
    limit = np.concatenate([pair.quantized.limits.astype(np.float64).reshape(-1) for pair in pairs])
    columns = exact.comparison(x, y, limit)
    n, error, signal = columns["compared"], columns["error_square_sum"], columns["signal_square_sum"]
    factors = factors_of(recipe, pairs)
    with np.errstate(divide="ignore"):
        sqnr = math.inf if error == 0 else float(10 * np.log10(signal / error))
    return {
        "underflows%": 100 * columns["underflows"] / n if n else 0.0,
        "overflows%": 100 * columns["overflows"] / n if n else 0.0,
        "underflow_norm%": 100 * math.sqrt(columns["underflow_square_sum"] / signal) if signal else 0.0,
        "mse": error / n if n else 0.0,
        "sqnr_db": sqnr,
        "scale_inv_min": factors.min() if len(factors) else 0.0,
        "scale_inv_max": factors.max() if len(factors) else 0.0,
        "scale_inv_std": factors.std(ddof=1) if len(factors) > 1 else 0.0,
        **(by_block(recipe, pairs) if BLOCKS[recipe][0] else {}),
    }


@np.errstate(over="ignore")
def assert_as_numpy(
    found: Found, recipe: str, batches: Sequence[torch.Tensor], form: str, *, rel: float = 1e-13, **options: bool
) -> None:
    pairs = [Pair(matrix(x), quantize(recipe, matrix(x), **options)) for x in batches if x.numel()]
    expected = from_numpy(recipe, pairs)
    sizes = {"mse": 0.0, "scale_inv_min": 0.0, "scale_inv_max": 0.0, "scale_inv_std": 1e-7 * expected["scale_inv_max"]}
    assert found == {
        form.format(name): pytest.approx(value, rel=rel, abs=sizes.get(name, 1e-12), nan_ok=True)
        for name, value in expected.items()
    }


# --- simulated recipes ------------------------------------------------------------------------------------------------


def special(*values: float) -> torch.Tensor:
    x = normal(37, 150)
    x.view(-1)[:: 5550 // 13] = torch.tensor(values).repeat(14)[: len(x.view(-1)[:: 5550 // 13])]
    return x


TENSORS = {
    "normal": normal(37, 150),
    "bfloat16": normal(64, 96).bfloat16(),
    "float16": (normal(64, 96) * 1e-3).half(),
    "of many magnitudes": spread(37, 150, by=12),
    "with zero blocks": normal(37, 150).where(torch.arange(37).view(-1, 1) % 3 > 0, 0).where(torch.arange(150) > 31, 0),
    "not finite": special(INF, -INF, NAN),
    "a block that is not finite": normal(37, 150).where(torch.arange(150) > 31, NAN),
    "subnormal": normal(37, 150) * 1e-40,
    "huge": normal(37, 150).clamp(-3, 3) * 1e38,
    "an outlier": special(0.0, 3e7),
    "zeros": torch.zeros(5, 40),
    "nan": torch.full((5, 40), NAN),
    "3-D": normal(3, 11, 50),
    "1-D": normal(77),
    "0-d": torch.tensor(3.5),
    "transposed": normal(40, 70).t(),
    "one column": normal(200, 1),
    "float64": normal(37, 150).double() * (1 + 1e-9),
    "float64 beyond float32": normal(37, 150).double() * torch.exp(30 * normal(37, 150, seed=1).double()),
    "float64 below float32": normal(37, 150).double() * 1e-60,
}
MICRO_BATCHES = {name: [x] for name, x in TENSORS.items()} | {
    "of different magnitudes": [
        spread(40, 300),
        1e-3 * spread(7, 300, seed=5),
        torch.zeros(3, 300),
        torch.empty(0, 300),
    ],
    **{f"drawn {seed}": [drawn(seed), drawn(seed + 1000), torch.ones(3, 4)] for seed in range(6)},
}


@pytest.mark.few
@pytest.mark.parametrize(("name", "others"), grouped(MICRO_BATCHES, BLOCKS, (False, True), (False, True)))
def test_what_a_recipe_would_give(name: str, others: list[tuple[str, bool, bool]]) -> None:
    for recipe, weight, columnwise in others:
        columnwise &= BLOCKS[recipe][0] is not None
        form = f"{recipe}_{{}}{'_columnwise' if columnwise else ''}"
        for batches in [[x] for x in MICRO_BATCHES[name] if x.numel()] if weight else [MICRO_BATCHES[name]]:
            watched = [Watched("l", "weight" if weight else "activation", 0, x) for x in batches]
            result = statistics(watched, names_of(recipe, form))
            assert_as_numpy(result, recipe, batches, form, weight=weight, columnwise=columnwise)


def test_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "PIECE", 1_700)
    form, x = "nvfp4_{}_columnwise", spread(150, 137)
    names = names_of("nvfp4", form)
    result = statistics([Watched("l", "activation", 0, x)], names)
    both = [Pair(matrix(x), quantize("nvfp4", matrix(x), columnwise=True))]
    expected = {form.format(name): value for name, value in from_numpy("nvfp4", both).items()}
    assert result == pytest.approx({name: expected[name] for name in names}, rel=1e-13)


def test_a_block_whose_scale_underflows_is_lost_below_not_above() -> None:
    """The scales of NVFP4 reach 2^-9 / 448 of the largest: smaller blocks have a factor of 0."""
    x = torch.full((16, 32), 1e-3)
    x[:, 16] = 448 * 6 * 512
    x[0, :16] = 0  # has no scale
    factors = np.repeat([0.0, 448 * 512], [15, 16])
    expected = {
        "underflows%": 100 * (512 - 16 - 16) / 512,
        "overflows%": 0.0,
        "scale_inv_min": 0.0,
        "scale_inv_max": 448 * 512,
        "scale_inv_std": factors.std(ddof=1),
    }
    its = quantizer("nvfp4")
    for values, quantized, form in ((x, None, "nvfp4_{}"), (x, its(x), "{}"), (None, its(x), "{}")):
        watched = Watched("l", "weight", 0, values, quantized, quantized, its)
        names = [name for name in expected if values is not None or "scale" in name]
        found = statistics([watched], [form.format(name) for name in names])
        assert list(found.values()) == pytest.approx([expected[name] for name in names], rel=1e-6)


def test_the_largest_element_is_not_clipped() -> None:
    """The recipe makes the largest code of it, or a smaller one; that its factor is rounded is no overflow."""
    for recipe, dtype in half(BLOCKS, forms.DTYPES):
        beyond = 0
        for amax in np.exp(np.random.default_rng(0).uniform(-9, 9, 12)):
            x = torch.full((32, 128), float(amax)).to(dtype)
            its = quantizer(recipe)
            for real in (None, None if dtype == torch.float64 else its(x)):
                watched = Watched("l", "activation", 0, x, real, real, its)
                assert statistics([watched], [f"{recipe}_overflows%"]) == {f"{recipe}_overflows%": 0.0}
            quantized = quantize(recipe, matrix(x))
            beyond += float(x[0, 0]) > float(quantized.number_format.max) * float(quantized.blocks[0].factor)
        assert beyond > 3 or recipe != "fp8_current_scaling"


# --- of the layer's own recipe ----------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize(("seed", "others"), grouped(range(4), BLOCKS, (False, True)))
def test_of_the_layers_own_recipe(seed: int, others: list[tuple[str, bool]]) -> None:
    """Read from Transformer Engine's quantized tensor, with inf and nan made finite before; with and without the
    recipe in the name."""
    for recipe, weight in others:
        x = drawn(seed, rows=64, columns=96).nan_to_num(0.0, 1.0, -1.0)
        its = quantizer(recipe, weight=weight)
        real = its(x)
        watched = Watched("l", "weight" if weight else "activation", 0, x, real, real, its)
        for columnwise in (False, True):
            in_blocks = BLOCKS[recipe][0] is not None
            end = "_columnwise" if columnwise else ""
            for form in (f"{{}}{end}", f"{recipe}_{{}}{end}" if in_blocks or not columnwise else f"{{}}{end}"):
                result = statistics([watched], names_of(recipe, form))
                rel = 1e-13 if in_blocks else exact.STD_IN_FLOAT
                options = {"weight": weight, "columnwise": columnwise and in_blocks}
                assert_as_numpy(result, recipe, [x], form, rel=rel, **options)


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_a_form_beside_its_tensor(form: Form) -> None:
    forms.check_form(kernels.add, form)
    if (form.recipe, form.columnwise) != ("nvfp4", True):  # which upstream does not read
        x = spread(64, 160)
        quantized = forms.quantized_by(form, x)
        theirs = forms.storage_of(form, quantized, x.shape).dequantize(dtype=torch.float32)
        torch.testing.assert_close(theirs, torch.from_numpy(quantized.values), rtol=3e-7, atol=0.0)


@pytest.mark.parametrize(("form", "scales"), SPECIAL_SCALES)
def test_scales_at_their_ends(form: Form, scales: forms.Scales) -> None:
    forms.check_scales(kernels.add, form, scales)


PER_TENSOR = [("fp8_current_scaling", 1.0), ("fp8_delayed_scaling", 1.0), ("fp8_delayed_scaling", 900.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("recipe", "scale"), PER_TENSOR)
def test_statistics_of_real_quantized_tensors(recipe: str, scale: float, dtype: torch.dtype) -> None:
    for e5m2 in [False, True]:
        x = spread(40, 96, by=4).to(dtype)
        x[3] = 0
        options = {"scale": scale} if recipe == "fp8_delayed_scaling" else {}
        its = quantizer(recipe, e5m2=e5m2, **options)
        float8, largest = exact.FLOAT8[e5m2]
        factor = torch.tensor(scale) if options else torch.tensor(largest) / x.float().abs().max()
        real = its(x)
        result = statistics([Watched("layer", "activation", 0, x, real, real, its)], OF_ANY_RECIPE)

        scale_inv = real._scale_inv.item()
        y = (x.float() * factor).clamp(-largest, largest).to(float8).float() * scale_inv
        limit = np.float32(largest * exact.ROUNDING) * np.float32(scale_inv)
        columns = exact.comparison(exact.as_array(x), exact.as_array(y), float(limit))
        assert result == pytest.approx(
            {
                "underflows%": 100 * columns["underflows"] / x.numel(),
                "underflow_norm%": 100 * math.sqrt(columns["underflow_square_sum"] / columns["signal_square_sum"]),
                "overflows%": 100 * columns["overflows"] / x.numel(),
                "mse": columns["error_square_sum"] / x.numel(),
                "sqnr_db": 10 * math.log10(columns["signal_square_sum"] / columns["error_square_sum"]),
                "scale_inv_min": scale_inv,
                "scale_inv_max": scale_inv,
                "scale_inv_std": 0.0,
            },
            rel=1e-12,
        )
        theirs = upstream(x, real, ["underflows%", "overflows%", "scale_inv_min", "scale_inv_max"])
        assert {name: result[name] for name in theirs} == pytest.approx(theirs, rel=1e-6)
        if dtype == torch.float32:  # of bfloat16 theirs is rounded to it before and after
            assert result["mse"] == pytest.approx(upstream(x, real, ["mse"])["mse"], rel=1e-6)


def upstream(x: torch.Tensor, quantized: Any, names: list[str]) -> dict[str, float]:
    return {name: float(STATS[name][0](x, {"": quantized})) for name in names}


@pytest.mark.parametrize("factor", [INF, NAN])
def test_a_factor_that_is_not_finite_shows_in_the_error(factor: float) -> None:
    x = torch.ones(16, 16)
    x[1, 3] = INF  # is left out itself
    codes = torch.full((16, 16), 0x38, dtype=torch.uint8)
    real = te.Float8TensorStorage(data=codes, fp8_scale_inv=torch.tensor([factor]), fp8_dtype=fp8_dtype(False))
    names = ["mse", "sqnr_db", "underflows%", "overflows%"]
    result = statistics([Watched("l", "activation", 0, x, real, real, None)], names)
    assert list(result.values()) == pytest.approx([factor, -factor, 0.0, 0.0], nan_ok=True)


def test_a_tensor_that_has_only_its_transpose() -> None:
    x = normal(3, 8, 32)
    real = quantizer("fp8_current_scaling", e5m2=True)(x)
    codes = real._data.clone()
    transposed = te.Float8TensorStorage(
        data=None,
        data_transpose=codes.movedim(-1, 0).contiguous(),
        fp8_scale_inv=real._scale_inv,
        fp8_dtype=real._fp8_dtype,
    )
    result = read(transposed, columnwise=True)
    assert torch.equal(result.codes, codes)
    assert result.e5m2
    transposed._transpose_invalid = True
    with pytest.raises(QuantizationError, match="neither its data nor their transpose"):
        read(transposed, columnwise=False)


# --- statistics that cannot be computed -------------------------------------------------------------------------------


def test_what_cannot_be_read() -> None:
    x = normal(32, 32).bfloat16()
    for quantized, message in (
        (NVFP4QuantizerRef(dtype=Fp4Formats.E2M1).quantize(x), "NVFP4TensorRef"),
        (quantizer("nvfp4", with_rht=True, with_post_rht_amax=True)(x), "columnwise data are of a random Hadamard"),
        (forms.storage_of(FORMS[9], forms.quantized_by(FORMS[9], x), x.shape), "no columnwise data"),
    ):
        with pytest.raises(QuantizationError, match=message):
            read(quantized, columnwise=True)


def test_a_quantized_tensor_of_another_shape_is_a_failure() -> None:
    """The C++ pass would read the codes of other elements."""
    its, whole = quantizer("fp8_current_scaling"), normal(32, 32)
    quantized = its(whole)
    watched = Watched("layer", "weight", 0, whole[:16], quantized, quantized, its)
    text = "the quantized tensor has the shape (32, 32), the tensor before quantization (16, 32)"
    assert one_step([watched], ["mse"]) == ({}, [f"mse of layer weight: {text}"])


def test_a_tensor_that_exists_in_its_quantized_form_only() -> None:
    """Its scales can be reported, its blocks' content cannot."""
    x = spread(64, 64)
    x[:2] = 0
    its = quantizer("mxfp8")
    result, (failure,) = one_step([Watched("l", "weight", 0, None, rowwise=its(x), quantizer=its)], BLOCK_STATISTICS)
    expected = by_block("mxfp8", [Pair(matrix(x), quantize("mxfp8", matrix(x)))])
    of_scales = [name for name in BLOCK_STATISTICS if "scale" in name or name == "zero_blocks%"]
    assert result == pytest.approx({name: expected[name] for name in of_scales}, rel=1e-14)
    assert "underflow_blocks%" in failure
    assert failure.endswith("of l weight: the tensor exists only in quantized form")


def test_a_layer_that_scales_per_tensor_has_no_blocks() -> None:
    """Its data is measured all the same; delayed scaling depends on earlier steps."""
    x, its = normal(32, 32), quantizer("fp8_current_scaling")
    watched = Watched("l", "activation", 0, x, rowwise=its(x), quantizer=its)
    names = ["zero_blocks%", "mse", "scale_inv_max", "mxfp8_zero_blocks%", "fp8_delayed_scaling_mse"]
    result, failures = one_step([watched], names)
    assert result.keys() == {"mse", "scale_inv_max", "mxfp8_zero_blocks%"}
    no_blocks, delayed = sorted(failures, reverse=True)
    assert no_blocks.startswith("zero_blocks% of l activation: fp8_current_scaling has one scale")
    assert delayed.startswith("fp8_delayed_scaling_mse of l activation: ")
    assert "its scale comes from the amaxes of earlier steps" in delayed
