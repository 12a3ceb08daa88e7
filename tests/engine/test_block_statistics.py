"""Statistics of blocks through the engine, against a loop over the blocks in numpy (tests/engine/recipes.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.engine.kernels import compiled
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import quantized_request
from tests.combinations import half
from tests.drawn import normal
from tests.engine import recipes
from tests.engine.exact import BLOCK_STATISTICS
from tests.engine.recipes import INF, NAN, Pair, quantize
from tests.engine.test_quantization import TENSORS, fp8_dtype, mxfp8_storage, packed, padded, scales_of, te

COMPILED_FROM = compiled.SMALLEST
RECIPES = ["mxfp8", "fp8_block_scaling", "nvfp4"]
MXFP8_WEIGHT = "mxfp8", "weight"
"""Its blocks are those of an activation; the other recipes have square ones."""
Found = dict[str, Any]


pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def spread(*shape: int, seed: int = 0, by: float = 3.0) -> torch.Tensor:
    """Of many magnitudes, in blocks and between them."""
    return normal(*shape, seed=seed) * torch.exp(by * normal(*shape, seed=seed + 1))


def matrix_of(x: torch.Tensor) -> Any:
    return x.double().reshape(-1, x.shape[-1] if x.ndim else 1).numpy()


def measured(watched: Sequence[Watched], names: Sequence[str]) -> tuple[Found, list[str]]:
    """The statistics of one step, and what failed."""
    engine, failures = StatisticsEngine(), []
    engine.on_failure = lambda doing, of, error: failures.append(f"{doing} {of}: {error}")
    for item in watched:
        engine.note(item, [quantized_request(name) for name in names])
        engine.measure()
    results: Found = {item.statistic: item.value for item in engine.flush(reduce=False)}
    return results, failures


def assert_as_expected(found: Found, expected: Found, name: str = "{}") -> None:
    assert found.keys() == {name.format(statistic) for statistic in expected}
    for statistic, value in expected.items():
        assert found[name.format(statistic)] == pytest.approx(value, rel=1e-14), statistic


@pytest.mark.parametrize(
    ("name", "of", "columnwise"),
    half(
        TENSORS,
        [
            (recipe, tensor)
            for recipe in RECIPES
            for tensor in ("activation", "weight")
            if (recipe, tensor) != MXFP8_WEIGHT
        ],
        (False, True),
    ),
)
def test_what_a_recipe_would_give(name: str, of: tuple[str, str], columnwise: bool) -> None:
    x, (recipe, tensor) = TENSORS[name], of
    form = f"{recipe}_{{}}{'_columnwise' if columnwise else ''}"
    result, failures = measured(
        [Watched("layer", tensor, 0, x)], [form.format(statistic) for statistic in BLOCK_STATISTICS]
    )
    assert not failures
    quantized = quantize(recipe, matrix_of(x), weight=tensor == "weight", columnwise=columnwise)
    expected = recipes.by_block(recipe, [Pair(matrix_of(x), quantized)])
    assert expected.keys() == set(BLOCK_STATISTICS)
    assert_as_expected(result, expected, form)


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_are_put_together(recipe: str) -> None:
    batches = [spread(40, 300), 1e-3 * spread(7, 300, seed=5), torch.zeros(3, 300), torch.empty(0, 300)]
    result, _ = measured(
        [Watched("layer", "activation", 0, x) for x in batches],
        [f"{recipe}_{statistic}" for statistic in BLOCK_STATISTICS],
    )
    pairs = [Pair(x.numpy(), quantize(recipe, x.numpy())) for x in batches[:3]]
    assert_as_expected(result, recipes.by_block(recipe, pairs), f"{recipe}_{{}}")


@pytest.mark.slow
def test_compiled_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the recipe with the most to compute; what mxfp8 quantizes is compiled in tests/engine/test_quantization.py."""
    recipe = "nvfp4"
    monkeypatch.setattr(compiled, "SMALLEST", COMPILED_FROM)
    monkeypatch.setattr(compiled, "_PIECE", 17_000)
    x = spread(150, 137)
    result, _ = measured([Watched("l", "activation", 0, x)], [f"{recipe}_{name}" for name in BLOCK_STATISTICS])
    assert_as_expected(
        result, recipes.by_block(recipe, [Pair(x.numpy(), quantize(recipe, x.numpy()))]), f"{recipe}_{{}}"
    )
    assert not compiled._failed


# --- of the layer's own recipe ----------------------------------------------------------------------------------------


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """As cuBLAS's documentation has the layout: tiles of 128 x 4, 512 bytes each, one after the other along a row."""
    rows, columns = scales.shape
    flat = torch.empty(scales.numel(), dtype=scales.dtype)
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * (columns // 4) + column // 4
            flat[tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4] = scales[row, column]
    return flat.view(rows, columns)


@pytest.mark.parametrize("e5m2", [False, True], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("is_swizzled", [False, True], ids=["in rows", "swizzled"])
def test_mxfp8_of_a_layer(is_swizzled: bool, e5m2: bool) -> None:
    x = spread(160, 192)
    x[:, :32] = 0
    x[3, 40:50] = torch.tensor([INF, NAN]).repeat(5)
    storage, rowwise, columnwise = mxfp8_storage(x, e5m2=e5m2)
    assert storage._rowwise_scale_inv.shape == (256, 8)
    if is_swizzled:
        storage._rowwise_scale_inv = swizzled(storage._rowwise_scale_inv)
        transposed = storage._columnwise_scale_inv.t().contiguous()
        storage._columnwise_scale_inv = swizzled(transposed).reshape(storage._columnwise_scale_inv.shape)
        storage._with_gemm_swizzled_scales = True
    assert_of_layer("mxfp8", "MXFP8Quantizer", x, storage, rowwise, columnwise)


def assert_of_layer(
    recipe: str,
    quantizer: str,
    x: torch.Tensor,
    storage: Any,
    rowwise: recipes.Quantized,
    columnwise: recipes.Quantized | None,
    *,
    tensor: str = "activation",
) -> None:
    """Under all three kinds of names."""
    watched = Watched("l", tensor, 0, x, rowwise=storage, columnwise=storage, quantizer=type(quantizer, (), {})())
    for quantized, end in ((rowwise, ""), (columnwise, "_columnwise")):
        if quantized is None:
            continue
        expected = recipes.by_block(recipe, [Pair(matrix_of(x), quantized)])
        for form in (f"{{}}{end}", f"{recipe}_{{}}{end}"):
            result, failures = measured([watched], [form.format(name) for name in BLOCK_STATISTICS])
            assert not failures
            assert_as_expected(result, expected, form)


@pytest.mark.parametrize("weight", [False, True], ids=["1 x 16", "16 x 16"])
@pytest.mark.parametrize("is_swizzled", [False, True], ids=["in rows", "swizzled"])
def test_nvfp4_of_a_layer(is_swizzled: bool, weight: bool) -> None:
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    x = spread(160, 80, by=6)
    x[0, 0] = 1e12  # the scales of some blocks underflow
    x[:, 16:32] = 0
    rowwise, columnwise = (quantize("nvfp4", x.numpy(), weight=weight, columnwise=way) for way in (False, True))
    order = swizzled if is_swizzled else torch.clone
    amax = torch.tensor([rowwise.tensor_amax])
    storage = NVFP4TensorStorage(
        rowwise_data=packed(rowwise.codes), columnwise_data=packed(np.ascontiguousarray(columnwise.codes.T)),
        rowwise_scale_inv=order(padded(scales_of(rowwise, 1, 16, np.uint8), 128, 4, 0x7E)),
        columnwise_scale_inv=order(padded(scales_of(columnwise, 16, 1, np.uint8).T, 128, 4, 0x7E)),
        amax_rowwise=amax, amax_columnwise=amax, fp4_dtype=te().DType.kFloat4E2M1, quantizer=None,
        with_gemm_swizzled_scales=is_swizzled,
    )  # fmt: skip
    # Square blocks have their scale in each row: it is that of one block.
    storage._quantizer = type("Quantizer", (), {"with_2d_quantization": weight})()
    tensor = "weight" if weight else "activation"
    assert_of_layer("nvfp4", "NVFP4Quantizer", x, storage, rowwise, columnwise, tensor=tensor)


@pytest.mark.parametrize("weight", [False, True], ids=["1 x 128", "128 x 128"])
def test_fp8_blocks_of_a_layer(weight: bool) -> None:
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

    x = spread(2, 100, 200)
    x[1, :, :128] = 0
    quantized = quantize("fp8_block_scaling", matrix_of(x), weight=weight)
    scales = scales_of(quantized, *((128, 128) if weight else (1, 128)), np.float32)
    storage = Float8BlockwiseQTensorStorage(
        rowwise_data=torch.from_numpy(quantized.codes).view(x.shape),
        rowwise_scale_inv=padded(scales if weight else scales.T, 1, 4, 1e9),
        columnwise_data=None, columnwise_scale_inv=None, fp8_dtype=fp8_dtype(False), quantizer=None,
        is_2D_scaled=weight,
    )  # fmt: skip
    assert_of_layer("fp8_block_scaling", "Float8BlockQuantizer", x, storage, quantized, None)


def test_a_tensor_that_exists_in_its_quantized_form_only() -> None:
    """Its scales can be told of, and what was in its blocks cannot."""
    x = spread(64, 64)
    x[:2] = 0
    storage, rowwise, _ = mxfp8_storage(x)
    storage.dequantize = lambda: torch.from_numpy(rowwise.values)
    watched = Watched("l", "weight", 0, None, rowwise=storage, quantizer=type("MXFP8Quantizer", (), {})())
    result, failures = measured([watched], BLOCK_STATISTICS)
    expected = recipes.by_block("mxfp8", [Pair(matrix_of(x), rowwise)])
    of_scales = [name for name in BLOCK_STATISTICS if "scale" in name or name == "zero_blocks%"]
    assert_as_expected(result, {name: expected[name] for name in of_scales})
    assert len(failures) == 1
    assert "underflow_blocks%" in failures[0]
    assert failures[0].endswith("of l weight: the tensor exists in its quantized form only")


# --- scales at their limits -------------------------------------------------------------------------------------------


def test_a_scale_that_is_nan_is_saturated() -> None:
    storage, _, _ = mxfp8_storage(torch.ones(32, 64))
    storage._rowwise_scale_inv[5, 1] = 255
    watched = Watched(
        "l", "activation", 0, torch.ones(32, 64), rowwise=storage, quantizer=type("MXFP8Quantizer", (), {})()
    )
    result, _ = measured([watched], ["saturated_scales%", "flushed_scales%", "scale_inv_max"])
    assert result["saturated_scales%"] == 100 / 64
    assert result["flushed_scales%"] == 0
    assert result["scale_inv_max"] == 2.0**-8


# --- what is asked in vain --------------------------------------------------------------------------------------------


def test_a_layer_that_scales_per_tensor_has_no_blocks() -> None:
    """What it has is measured all the same."""
    x = normal(32, 32)
    current = te().Float8CurrentScalingQuantizer(te().DType.kFloat8E4M3, device=torch.device("cpu"))
    watched = Watched("l", "activation", 0, x, rowwise=current(x), quantizer=current)
    result, failures = measured([watched], ["zero_blocks%", "mse", "scale_inv_max", "mxfp8_zero_blocks%"])
    assert result.keys() == {"mse", "scale_inv_max", "mxfp8_zero_blocks%"}
    (failure,) = failures
    assert failure.startswith("zero_blocks% of l activation: fp8_current_scaling has one scale")
