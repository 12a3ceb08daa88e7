"""What quantized tensors hold and what recipes would make of tensors, against numpy and the formats' definitions."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from te_precision_callbacks.base.numerics.recipes import RECIPES as SIMULATED
from te_precision_callbacks.base.numerics.recipes import QuantizerSettings, round_blocks
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.engine.kernels import compiled, eager_blocks
from te_precision_callbacks.engine.kernels.columns import COMPARISON_SUMS, MOMENT_SUMS, InBlocks
from te_precision_callbacks.engine.quantization import (
    PerTensor,
    QuantizationError,
    default_settings,
    read,
    simulate,
)
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import quantized_request
from te_precision_callbacks.statistics.table import QUANTIZED_STATISTICS, Of
from tests.combinations import half
from tests.drawn import normal
from tests.engine import exact
from tests.engine.exact import BLOCK_STATISTICS
from tests.engine.recipes import BLOCKS, Codes, Pair, Quantized, factors_of, quantize

INF, NAN = math.inf, math.nan
COMPILED_FROM = compiled.SMALLEST
RECIPES = list(BLOCKS)


pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


# --- simulated recipes ------------------------------------------------------------------------------------------------


def simulated(recipe: str, x: torch.Tensor, **options: bool) -> tuple[list[float], list[float], list[float]]:
    """COMPARISON_SUMS, SCALE_SUMS and SCALE_MAXIMA of what simulate() makes of a tensor with elements."""
    amax = exact.measure(x)[1][:2].amax()
    columnwise, tensor = options.pop("columnwise", False), "weight" if options.pop("weight", False) else "activation"
    settings = default_settings(recipe, tensor, **options) if recipe in SIMULATED else QuantizerSettings()
    result = simulate(recipe, x, amax, {Of.QUANTIZED, Of.SCALES}, settings, columnwise=columnwise)
    (compared, _), (sums, maxima) = result[Of.QUANTIZED], result[Of.SCALES]
    assert compared is not None
    assert sums is not None
    assert maxima is not None
    assert {compared.dtype, sums.dtype, maxima.dtype} == {torch.float64}
    return compared.tolist(), sums.tolist(), maxima.tolist()


def assert_simulated(recipe: str, x: torch.Tensor, **options: bool) -> dict[str, Any]:
    """What simulate() finds of a tensor is what numpy finds; returns numpy's columns."""
    e5m2, weight, columnwise = (options.get(name, False) for name in ("e5m2", "weight", "columnwise"))
    matrix = x.double().reshape(-1, x.shape[-1] if x.ndim else 1).numpy()
    quantized = quantize(recipe, matrix, e5m2=e5m2, weight=weight, columnwise=columnwise)
    flat = [exact.as_array(x), *(a.astype(np.float64).reshape(-1) for a in (quantized.values, quantized.limits))]
    expected = exact.comparison(*flat)
    scales = factors_of(recipe, [Pair(matrix, quantized)])

    compared, sums, maxima = simulated(recipe, x, **options)
    exact.assert_same(dict(zip(COMPARISON_SUMS, compared, strict=True)), expected)
    assert sums == pytest.approx([len(scales), math.fsum(scales), math.fsum(scales**2)], rel=1e-13)
    assert maxima == [scales.max(initial=-INF), (-scales).max(initial=-INF)]
    return expected


def special(*values: float) -> torch.Tensor:
    x = normal(37, 150)
    x.view(-1)[:: 5550 // 13] = torch.tensor(values).repeat(14)[: len(x.view(-1)[:: 5550 // 13])]
    return x


TENSORS = {
    "normal": normal(37, 150),
    "bfloat16": normal(64, 96).bfloat16(),
    "float16": (normal(64, 96) * 1e-3).half(),
    "of many magnitudes": normal(37, 150) * torch.exp(12 * normal(37, 150, seed=1)),
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


@pytest.mark.parametrize(
    ("name", "recipe", "weight", "columnwise"),
    half(TENSORS, RECIPES, (False, True), (False, True)),
)
def test_simulated_recipes(name: str, recipe: str, weight: bool, columnwise: bool) -> None:
    assert_simulated(recipe, TENSORS[name], weight=weight, columnwise=columnwise)


@pytest.mark.slow
def test_simulated_recipes_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more elements the same, and in pieces; nvfp4 is compiled in tests/engine/test_block_statistics.py."""
    monkeypatch.setattr(compiled, "SMALLEST", COMPILED_FROM)
    monkeypatch.setattr(compiled, "_kernels", {})
    x = normal(150, 137) * torch.exp(3 * normal(150, 137, seed=1))
    assert_simulated("mxfp8", x)
    monkeypatch.setattr(compiled, "_PIECE", 17_000)
    assert_simulated("mxfp8", x, columnwise=True)
    assert not compiled._failed
    assert compiled._kernels


def test_a_block_whose_scale_underflows_is_lost_below_not_above() -> None:
    """The scales of NVFP4 reach 2^-9 / 448 of the largest: what is smaller has a factor of 0."""
    x = torch.full((1, 32), 1e-3)
    x[0, 16] = 448 * 6 * 512
    expected = assert_simulated("nvfp4", x)
    assert (expected["underflows"], expected["overflows"]) == (31, 0)


@pytest.mark.parametrize("shape", [(64, 64), (32, 160), (48, 16)])
@pytest.mark.parametrize("tile", [(1, 16), (16, 16)], ids=["activation", "weight"])
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_nvfp4_is_that_of_transformer_engines_reference(
    shape: tuple[int, int], tile: tuple[int, int], columnwise: bool
) -> None:
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef, cast_from_fp4x2
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    for seed in range(4):
        x = (normal(*shape, seed=seed) * torch.exp(2 * normal(*shape, seed=seed + 9))).bfloat16()
        result = NVFP4QuantizerRef(dtype=Fp4Formats.E2M1, quant_tile_shape=tile).quantize(x)
        data, scale = (result.data_t, result.scale_t) if columnwise else (result.data, result.scale)
        factors = scale.float() * result.global_amax_row * np.float32(1 / 2688)
        values = cast_from_fp4x2(data, torch.float32) * factors.repeat_interleave(16, 1)
        values = values.t() if columnwise else values
        limits = factors.repeat_interleave(16, 1).t() * 6 if columnwise else factors.repeat_interleave(16, 1) * 6
        expected = exact.comparison(*(exact.as_array(tensor) for tensor in (x, values, limits)))
        compared, _, maxima = simulated("nvfp4", x, weight=tile == (16, 16), columnwise=columnwise)
        exact.assert_same(dict(zip(COMPARISON_SUMS, compared, strict=True)), expected)
        assert maxima == [factors.max().item(), -factors.min().item()]


@pytest.fixture
def blockwise_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Of Transformer Engine's own tests, which are in its repository only."""
    folder = Path(os.environ.get("TE_SRC", "/no/such/folder"), "tests", "pytorch")
    if not (folder / "references").is_dir():
        pytest.skip("TE_SRC does not name a checkout of Transformer Engine")
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("references.blockwise_quantizer_reference")
    for name in [name for name in sys.modules if name.split(".")[0] == "references"]:
        del sys.modules[name]


@pytest.mark.parametrize("e5m2", [False, True], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("weight", [False, True], ids=["activation", "weight"])
def test_fp8_blocks_are_those_of_transformer_engines_reference(
    blockwise_reference: ModuleType, weight: bool, e5m2: bool
) -> None:
    dtype, largest = exact.FLOAT8[e5m2]
    for shape in [(128, 256), (300, 200), (5, 129)]:
        x = normal(*shape) * torch.exp(3 * normal(*shape, seed=1))
        x[:, :128] = 0
        result = blockwise_reference.BlockwiseQuantizerReference().quantize(
            x, dtype, return_transpose=True, pow_2_scales=True, quant_tile_shape=BLOCKS["fp8_block_scaling"][weight],
            munge_scale_shapes=False,
        )  # fmt: skip
        for columnwise in (False, True):
            codes, scales = (result.data_t, result.scale_t) if columnwise else (result.data, result.scale)
            spread = scales.repeat_interleave(128, 1)[:, : codes.shape[1]]
            spread = spread.repeat_interleave(128, 0)[: codes.shape[0]] if weight else spread
            values, limits = codes.float() * spread, spread * largest
            pair = (values.t(), limits.t()) if columnwise else (values, limits)
            expected = exact.comparison(*(exact.as_array(tensor) for tensor in (x, *pair)))
            compared, sums, _ = simulated("fp8_block_scaling", x, e5m2=e5m2, weight=weight, columnwise=columnwise)
            exact.assert_same(dict(zip(COMPARISON_SUMS, compared, strict=True)), expected)
            zeros = (1 if weight else 128) if columnwise else 0
            factors = exact.as_array(scales[zeros:] if columnwise else scales[:, 1:])  # without blocks of zeros
            assert sums == pytest.approx([len(factors), factors.sum(), (factors**2).sum()], rel=1e-13)


def test_a_layer_in_high_precision_is_told_what_recipes_would_give() -> None:
    """Over micro-batches; gradients in the format of the recipe's default, and in the one that the name has."""
    batches = [normal(20, 70), 100 * normal(9, 70, seed=1)]
    names = ["mse", "mxfp8_mse_columnwise", "nvfp4_scale_inv_max", "fp8_delayed_scaling_mse"]
    chosen = [
        (f"{recipe}_{('e4m3', 'e5m2')[e5m2]}_mse{'_columnwise' if columnwise else ''}", recipe, e5m2, columnwise)
        for recipe, columnwise in [("fp8_current_scaling", False), ("mxfp8", True), ("fp8_block_scaling", True)]
        for e5m2 in (False, True)
    ]
    names += [name for name, *_ in chosen]
    engine, failures = StatisticsEngine(), []
    engine.on_failure = lambda what, of, error: failures.append((f"{what} {of}", str(error)))
    for x in batches:
        engine.note(Watched("layer", "gradient", 0, x), [quantized_request(name) for name in names])
        engine.measure()
    results = {item.statistic: item.value for item in engine.flush(reduce=False)}

    current = [quantize("fp8_current_scaling", x.numpy(), e5m2=True) for x in batches]
    mxfp8 = [quantize("mxfp8", x.numpy(), columnwise=True) for x in batches]
    nvfp4 = [quantize("nvfp4", x.numpy()) for x in batches]

    def mse(quantized: list[Quantized]) -> float:
        pairs = zip(batches, quantized, strict=True)
        return sum(((x.double().numpy() - y.values) ** 2).sum() for x, y in pairs) / sum(x.numel() for x in batches)

    assert results == pytest.approx(
        {
            "fp8_current_scaling_mse": mse(current),
            "mxfp8_mse_columnwise": mse(mxfp8),
            "nvfp4_scale_inv_max": max(block.factor for quantized in nvfp4 for block in quantized.blocks),
        }
        | {
            name: mse([quantize(recipe, x.numpy(), e5m2=e5m2, columnwise=columnwise) for x in batches])
            for name, recipe, e5m2, columnwise in chosen
        },
        rel=1e-12,
    )
    assert {what for what, _ in failures} == {"fp8_delayed_scaling_mse of layer gradient"}
    assert all("its scale comes from the amaxes of earlier steps" in error for _, error in failures)


def test_a_quantized_tensor_of_another_shape_is_a_failure() -> None:
    """The C++ pass would read the codes of other elements."""
    quantizer = te().Float8CurrentScalingQuantizer(te().DType.kFloat8E4M3, device=torch.device("cpu"))
    engine, failures = StatisticsEngine(), []
    engine.on_failure = lambda what, of, error: failures.append((f"{what} {of}", str(error)))
    whole = normal(32, 32)
    quantized = quantizer(whole)
    engine.note(Watched("layer", "weight", 0, whole[:16], quantized, quantized, quantizer), [quantized_request("mse")])
    engine.measure()
    (failure,) = failures
    text = "the quantized tensor has the shape (32, 32), the tensor before quantization (16, 32)"
    assert failure == ("mse of layer weight", text)
    assert not list(engine.flush(reduce=False))


# --- rounding to a format ---------------------------------------------------------------------------------------------


# --- scales -----------------------------------------------------------------------------------------------------------


# --- Transformer Engine's per-tensor FP8 ------------------------------------------------------------------------------


def te() -> Any:
    import transformer_engine.pytorch

    return transformer_engine.pytorch


def quantizer(recipe: str, *, e5m2: bool, scale: float = 1.0, **usages: bool) -> Any:
    """One of Transformer Engine's own."""
    dtype = te().DType.kFloat8E5M2 if e5m2 else te().DType.kFloat8E4M3
    if recipe == "fp8_delayed_scaling":
        return te().Float8Quantizer(torch.tensor([scale]), torch.zeros(1), dtype, **usages)
    return te().Float8CurrentScalingQuantizer(dtype, device=torch.device("cpu"), **usages)


PER_TENSOR = [("fp8_current_scaling", 1.0), ("fp8_delayed_scaling", 1.0), ("fp8_delayed_scaling", 900.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("e5m2", [False, True], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize(("recipe", "scale"), PER_TENSOR)
def test_statistics_of_real_quantized_tensors(recipe: str, scale: float, e5m2: bool, dtype: torch.dtype) -> None:
    """Beside float64 of torch's own cast, and beside what Transformer Engine's own functions say."""
    x = (normal(40, 96) * torch.exp(4 * normal(40, 96, seed=1))).to(dtype)
    x[3] = 0
    real = quantizer(recipe, e5m2=e5m2, scale=scale)(x)
    result = statistics_of(x, real, quantizer(recipe, e5m2=e5m2))

    float8, largest = exact.FLOAT8[e5m2]
    scale_inv = real._scale_inv.item()
    factor = torch.tensor(largest) / x.float().abs().max() if recipe == "fp8_current_scaling" else torch.tensor(scale)
    y = (x.float() * factor).clamp(-largest, largest).to(float8).float() * scale_inv
    columns = exact.comparison(exact.as_array(x), exact.as_array(y), float(np.float32(largest) * np.float32(scale_inv)))
    assert result == pytest.approx(
        {
            "underflows%": 100 * columns["underflows"] / x.numel(),
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


OF_ANY_RECIPE = [name for name in QUANTIZED_STATISTICS if name not in BLOCK_STATISTICS]


def statistics_of(x: torch.Tensor, quantized: Any, of_quantizer: Any) -> dict[str, Any]:
    """Statistics of the layer's own recipe, through the engine: those that every recipe has."""
    engine = StatisticsEngine()
    watched = Watched("layer", "activation", 0, x, rowwise=quantized, columnwise=quantized, quantizer=of_quantizer)
    engine.note(watched, [quantized_request(name) for name in OF_ANY_RECIPE])
    engine.measure()
    return {item.statistic: item.value for item in engine.flush(reduce=False)}


def upstream(x: torch.Tensor, quantized: Any, names: list[str]) -> dict[str, float]:
    """What Transformer Engine's own functions give for the recipe that the layer runs."""
    from transformer_engine.debug.features.utils.stats_computation import STATS

    return {name: float(STATS[name][0](x, {"": quantized})) for name in names}


@pytest.mark.parametrize("e5m2", [False, True], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_simulated_current_scaling_is_the_real_one_bit_for_bit(dtype: torch.dtype, e5m2: bool) -> None:
    for seed in range(10):
        x = (normal(16, 48, seed=seed) * 10.0 ** (seed - 5)).to(dtype)
        real = quantizer("fp8_current_scaling", e5m2=e5m2)(x)
        would_be = round_blocks("fp8_current_scaling", x, x.float().abs().max(), QuantizerSettings(e5m2))
        assert would_be.factors.item() == real._scale_inv.item()
        assert torch.equal(would_be.values, real.dequantize(dtype=torch.float32))
        own = read(real, columnwise=False)
        assert isinstance(own, PerTensor)
        sums, _ = exact.measure(x, own.codes, own.scale_inv, e5m2=e5m2)
        would, _, _ = simulated("fp8_current_scaling", x, e5m2=e5m2)
        first = len(MOMENT_SUMS)
        compared = sums[first : first + len(COMPARISON_SUMS)].tolist()
        assert would == pytest.approx(compared, rel=1e-14)


def test_a_tensor_that_has_only_its_transpose() -> None:
    x = normal(3, 8, 32)
    real = quantizer("fp8_current_scaling", e5m2=True)(x)
    codes = real._data.clone()
    transposed = te().Float8TensorStorage(
        data=None,
        data_transpose=codes.movedim(-1, 0).contiguous(),
        fp8_scale_inv=real._scale_inv,
        fp8_dtype=real._fp8_dtype,
    )
    result = read(transposed, columnwise=True)
    assert isinstance(result, PerTensor)
    assert torch.equal(result.codes, codes)
    assert result.e5m2
    transposed._transpose_invalid = True
    with pytest.raises(QuantizationError, match="neither its data nor their transpose"):
        read(transposed, columnwise=False)


def test_a_format_of_the_users_own_is_refused() -> None:
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    with pytest.raises(QuantizationError, match="NVFP4TensorRef"):
        read(NVFP4QuantizerRef(dtype=Fp4Formats.E2M1).quantize(normal(16, 16)), columnwise=False)


# --- Transformer Engine's block-scaled formats, from buffers in its layouts -------------------------------------------


def padded(matrix: npt.NDArray[Any], height: int, width: int, filler: float) -> torch.Tensor:
    """As upstream lays scales out: sides are multiples of these; what fills them up is left as it was allocated."""
    rows, columns = (-(-side // unit) * unit for side, unit in zip(matrix.shape, (height, width), strict=True))
    whole = np.full((rows, columns), filler, matrix.dtype)
    whole[: matrix.shape[0], : matrix.shape[1]] = matrix
    return torch.from_numpy(whole)


def scales_of(quantized: Quantized, height: int, width: int, dtype: Any) -> npt.NDArray[Any]:
    """The stored scales, one a block."""
    return quantized.over([block.stored_scale for block in quantized.blocks], dtype)[::height, ::width]


def assert_reads(storage: Any, columnwise: bool, quantized: Quantized) -> None:
    result = read(storage, columnwise=columnwise)
    assert isinstance(result, InBlocks)
    assert torch.equal(result.part.dequantized().reshape(quantized.shape), torch.from_numpy(quantized.values))
    expected = torch.tensor([block.factor for block in quantized.blocks])
    assert torch.equal(result.part.factors().reshape(-1).unique(), expected.unique())
    # Beside a tensor in which everything can happen.
    x = torch.from_numpy(quantized.values).reshape(result.part.shape) * torch.exp(normal(*result.part.shape, seed=3))
    x.view(-1)[::7] = 0
    x.view(-1)[1::97] = NAN
    compared, _ = eager_blocks.columns(result, x, {Of.QUANTIZED})[Of.QUANTIZED]
    assert compared is not None
    pair = (array.astype(np.float64).reshape(-1) for array in (quantized.values, quantized.limits))
    expected_columns = exact.comparison(exact.as_array(x), *pair)
    exact.assert_same(dict(zip(COMPARISON_SUMS, compared.tolist(), strict=True)), expected_columns)


def fp8_dtype(e5m2: bool) -> Any:
    return te().DType.kFloat8E5M2 if e5m2 else te().DType.kFloat8E4M3


def mxfp8_storage(x: torch.Tensor, *, e5m2: bool = False, filler: int = 250) -> tuple[Any, Quantized, Quantized]:
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    matrix = x.reshape(-1, x.shape[-1]).numpy()
    rowwise, columnwise = (quantize("mxfp8", matrix, e5m2=e5m2, columnwise=way) for way in (False, True))
    storage = MXFP8TensorStorage(
        rowwise_data=torch.from_numpy(rowwise.codes).view(x.shape),
        columnwise_data=torch.from_numpy(columnwise.codes).view(x.shape),
        rowwise_scale_inv=padded(scales_of(rowwise, 1, 32, np.uint8), 128, 4, filler),
        columnwise_scale_inv=padded(scales_of(columnwise, 32, 1, np.uint8), 4, 128, filler),
        fp8_dtype=fp8_dtype(e5m2), quantizer=None, with_gemm_swizzled_scales=False,
    )  # fmt: skip
    return storage, rowwise, columnwise


@pytest.mark.parametrize("e5m2", [False, True], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 160)])
def test_mxfp8_storage(shape: tuple[int, ...], e5m2: bool) -> None:
    storage, rowwise, columnwise = mxfp8_storage(normal(*shape) * torch.exp(5 * normal(*shape, seed=1)), e5m2=e5m2)
    assert_reads(storage, False, rowwise)
    assert_reads(storage, True, columnwise)


@pytest.mark.parametrize("weight", [False, True], ids=["1 x 128", "128 x 128"])
@pytest.mark.parametrize("shape", [(256, 384), (2, 65, 200)])
def test_fp8_block_storage(shape: tuple[int, ...], weight: bool) -> None:
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

    x = normal(*shape) * torch.exp(3 * normal(*shape, seed=1))
    matrix = x.reshape(-1, x.shape[-1]).numpy()
    rowwise = quantize("fp8_block_scaling", matrix, weight=weight)
    columnwise = quantize("fp8_block_scaling", matrix, weight=weight, columnwise=True)
    if weight:
        rowwise_scales = scales_of(rowwise, 128, 128, np.float32)
        columnwise_scales = scales_of(columnwise, 128, 128, np.float32).T
    else:  # transposed
        rowwise_scales = scales_of(rowwise, 1, 128, np.float32).T
        columnwise_scales = scales_of(columnwise, 128, 1, np.float32)
    transposed = torch.from_numpy(columnwise.codes).view(x.shape).movedim(-1, 0).contiguous()

    def storage(**direction: Any) -> Any:
        none = dict.fromkeys(["rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"])
        return Float8BlockwiseQTensorStorage(
            **{**none, **direction}, fp8_dtype=fp8_dtype(False), quantizer=None, is_2D_scaled=weight
        )

    by_row = storage(
        rowwise_data=torch.from_numpy(rowwise.codes).view(x.shape), rowwise_scale_inv=padded(rowwise_scales, 1, 4, 1e9)
    )
    by_column = storage(columnwise_data=transposed, columnwise_scale_inv=padded(columnwise_scales, 1, 4, 1e9))
    assert_reads(by_row, False, rowwise)
    assert_reads(by_column, True, columnwise)
    for item, way in ((by_row, rowwise), (by_column, columnwise)):  # and as upstream reads them
        assert torch.equal(item.dequantize(dtype=torch.float32).reshape(way.shape), torch.from_numpy(way.values))
    with pytest.raises(QuantizationError, match="no columnwise data"):
        read(by_row, columnwise=True)


def packed(codes: Codes) -> torch.Tensor:
    """Two codes of 4 bits a byte, the even one below."""
    return torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)


@pytest.mark.parametrize("weight", [False, True], ids=["1 x 16", "16 x 16"])
@pytest.mark.parametrize("shape", [(48, 80), (2, 16, 160)])
def test_nvfp4_storage(shape: tuple[int, ...], weight: bool) -> None:
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    x = normal(*shape) * torch.exp(6 * normal(*shape, seed=1))
    x.view(-1)[0] = 1e12  # the scales of some blocks underflow
    matrix = x.reshape(-1, x.shape[-1]).numpy()
    rowwise, columnwise = (quantize("nvfp4", matrix, weight=weight, columnwise=way) for way in (False, True))
    amax = torch.tensor([rowwise.tensor_amax])
    assert any(block.factor == 0 for block in rowwise.blocks)

    def storage(**options: Any) -> Any:
        return NVFP4TensorStorage(
            rowwise_data=packed(rowwise.codes).view(*x.shape[:-1], -1),
            columnwise_data=packed(np.ascontiguousarray(columnwise.codes.T)),
            rowwise_scale_inv=padded(scales_of(rowwise, 1, 16, np.uint8), 128, 4, 0x7E),
            columnwise_scale_inv=padded(scales_of(columnwise, 16, 1, np.uint8).T, 128, 4, 0x7E),
            amax_rowwise=amax, amax_columnwise=amax, fp4_dtype=te().DType.kFloat4E2M1,
            **{"quantizer": None, "with_gemm_swizzled_scales": False, **options},
        )  # fmt: skip

    assert_reads(storage(), False, rowwise)
    assert_reads(storage(), True, columnwise)
    rotated = storage()
    rotated._quantizer = type("Quantizer", (), {"with_rht": True})()
    assert_reads(rotated, False, rowwise)
    with pytest.raises(QuantizationError, match="Hadamard"):
        read(rotated, columnwise=True)


@pytest.mark.parametrize("recipe", ["fp8_current_scaling", "fp8_block_scaling", "mxfp8", "nvfp4"])
def test_a_factor_that_is_not_finite_shows_in_the_error(recipe: str) -> None:
    """Of one block, where there are blocks: all of the tensor's error is infinite then. E8M0 has nan and no inf."""
    x = torch.ones(128, 128)
    x[1, 3] = INF  # is left out itself
    if recipe == "fp8_current_scaling":
        storage = te().Float8TensorStorage(
            data=torch.full((128, 128), 0x38, dtype=torch.uint8), fp8_scale_inv=torch.tensor([INF]),
            fp8_dtype=fp8_dtype(False),
        )  # fmt: skip
    else:
        storage = te_quantizer(recipe)(torch.ones(128, 128))
        if recipe == "nvfp4":
            storage._amax_rowwise = torch.tensor([INF])
        elif recipe == "mxfp8":
            storage._rowwise_scale_inv[0, 0] = 0xFF
        else:
            storage._rowwise_scale_inv[0, 0] = INF
    result = statistics_of(x, storage, None)
    error = NAN if recipe == "mxfp8" else INF
    assert (result["mse"], result["sqnr_db"]) == pytest.approx((error, -error), nan_ok=True)
    assert (result["underflows%"], result["overflows%"]) == (0.0, 0.0)


def te_quantizer(recipe: str) -> Any:
    if recipe == "mxfp8":
        return te().MXFP8Quantizer(fp8_dtype(False))
    if recipe == "nvfp4":
        return te().NVFP4Quantizer()
    return te().Float8BlockQuantizer(fp8_dtype(False), rowwise=True, columnwise=True, block_scaling_dim=1)
