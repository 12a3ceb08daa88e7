"""Modules training under NVFP4BlockScaling: every byte, scale and amax that they make, and what comes of them.

Each write of quantized data is recorded on its way through the backend: what was quantized, and what came out. What
must come out is computed anew with numpy, and results of modules are held against float64 products of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import NVFP4BlockScaling

from te_precision_callbacks.reference.extension import nvfp4
from tests.capability import any_capability, stand_for
from tests.combinations import half
from tests.reference import nvfp4_numpy as expected
from tests.reference.training import check_linear, inputs, run

SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kw: te.Linear(64, 96, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(64, 96, normalization="RMSNorm", **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(64, 128, **kw),
    "GroupedLinear": lambda **kw: te.GroupedLinear(2, 64, 96, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **kw
    ),
}
NO_RHT = {"disable_rht": True}
PLAIN = NO_RHT | {"disable_stochastic_rounding": True}
RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "no transform": NO_RHT,
    "to nearest": {"disable_stochastic_rounding": True},
    "1d weights": {"disable_2d_quantization": True},
    "plain": PLAIN | {"disable_2d_quantization": True},
    "4over6": PLAIN | {"nvfp4_4over6": "all"},
    "4over6 weights, 448, MSE": {
        "nvfp4_4over6": "weights",
        "nvfp4_4over6_e4m3_use_256": "none",
        "nvfp4_4over6_err_mode": "MSE",
    },
    "row-scaled": PLAIN | {"row_scaled_activation": True},
    "backward in high precision": {"backward_override": "high_precision"},
    "backward of dequantized": {"backward_override": "dequantized"},
}


@dataclass
class Direction:
    """Data, scales and amax as they lie in memory."""

    data: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor


@dataclass
class Write:
    """One quantized tensor; ``measured_before``: its amax came with it."""

    quantizer: Any
    source: torch.Tensor
    measured_before: bool
    rowwise: Direction | None
    columnwise: Direction | None
    swizzled: bool

    def matrix(self, columnwise: bool) -> np.ndarray:
        """What is quantized: the tensor, or its transpose, transformed."""
        matrix = self.source.float().reshape(-1, self.source.shape[-1]).numpy()
        if columnwise and self.quantizer.with_rht:
            transformed = torch.from_numpy(expected.hadamard(matrix.T, SIGNS))
            return np.asarray(transformed.bfloat16().float().numpy())
        return matrix.T if columnwise else matrix

    def codes(self, columnwise: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes, scales and multipliers, as they must be."""
        direction = self.columnwise if columnwise else self.rowwise
        assert direction is not None
        quantizer = self.quantizer
        return expected.quantize(
            self.matrix(columnwise),
            direction.amax.numpy(),
            square=quantizer.with_2d_quantization,
            largest_scale=quantizer.nvfp4_e4m3_max,
            better_of_two=quantizer.nvfp4_4over6_err_mode if quantizer.nvfp4_use_4over6 else None,
        )

    def numbers(self, columnwise: bool) -> torch.Tensor:
        """What the data stand for: float64, the matrix or its (transformed) transpose."""
        direction = self.columnwise if columnwise else self.rowwise
        assert direction is not None
        _, scales, _ = self.codes(columnwise)
        codes = expected.unpack(direction.data.reshape(scales.shape[0], -1).numpy())
        return torch.from_numpy(
            expected.dequantize(codes, scales, direction.amax.numpy(), self.quantizer.nvfp4_e4m3_max)
        )


def assert_bytes(write: Write) -> None:
    """Amaxes, scales and data as they lie in memory; where rounding was random, data next to the exact numbers."""
    assert write.rowwise is not None or write.columnwise is not None
    for columnwise, direction in ((False, write.rowwise), (True, write.columnwise)):
        if direction is None:
            continue
        matrix = write.matrix(columnwise)
        parts = matrix if write.quantizer.row_scaled_nvfp4 else [matrix]
        amax = np.array([expected.amax(part) for part in parts], dtype=np.float32)
        if write.measured_before:  # of the float32 result, before it was rounded to bfloat16
            np.testing.assert_allclose(direction.amax.numpy(), amax, rtol=2**-8)
        else:
            np.testing.assert_array_equal(direction.amax.numpy(), amax)
        codes, scales, multiplier = write.codes(columnwise)
        padded = np.zeros(tuple(direction.scales.shape), dtype=np.uint8)
        padded[: scales.shape[0], : scales.shape[1]] = scales
        np.testing.assert_array_equal(direction.scales.numpy(), expected.swizzle(padded) if write.swizzled else padded)
        data = expected.unpack(direction.data.reshape(codes.shape[0], -1).numpy())
        if not write.quantizer.stochastic_rounding:
            np.testing.assert_array_equal(data, codes)
            continue
        exact = np.clip(np.abs(matrix * multiplier.repeat(16, 1)), 0, 6)
        index = data & 7
        lower, upper = expected.E2M1[np.maximum(index, 1) - 1], expected.E2M1[np.minimum(index + 1, 7)]
        assert ((exact > lower) | (index == 0)).all()
        assert ((exact < upper) | (index == 7)).all()
        np.testing.assert_array_equal(data >= 8, np.signbit(matrix))


@pytest.fixture(autouse=True)
def blackwell() -> Iterator[None]:
    """The GPU that the backend stands for, under a Transformer Engine that has asked for it before."""
    with any_capability():
        stand_for((10, 0))
        yield


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Write]:
    """Every write of NVFP4 data, in order."""
    recorded: list[Write] = []
    original = nvfp4.Nvfp4Casting.write

    def write(self: Any, quantizer: Any, source: Any, out: Any, noop: Any = None, amax: Any = None) -> None:
        original(self, quantizer, source, out, noop, amax)
        kept = {}
        for direction in ("rowwise", "columnwise"):
            names = f"_{direction}_data", f"_{direction}_scale_inv", f"_amax_{direction}"
            buffers = [getattr(out, name) for name in names]
            kept[direction] = None if buffers[0] is None else Direction(*(buffer.clone() for buffer in buffers))
        swizzled = bool(out._with_gemm_swizzled_scales)
        recorded.append(Write(quantizer, source.clone(), amax is not None, **kept, swizzled=swizzled))

    monkeypatch.setattr(nvfp4.Nvfp4Casting, "write", write)
    return recorded


@pytest.mark.parametrize(
    ("name", "recipe"),
    # Transformer Engine's LayerNormMLP has no backward in another precision.
    [(n, r) for n, r in half(MODULES, RECIPES) if "backward" not in r or n not in ("LayerNormMLP", "TransformerLayer")],
)
def test_bytes(name: str, recipe: str, writes: list[Write]) -> None:
    torch.manual_seed(0)
    options = RECIPES[recipe]
    module = MODULES[name](params_dtype=torch.bfloat16)
    for x in inputs(2, torch.bfloat16):
        writes.clear()
        with te.autocast(enabled=True, recipe=NVFP4BlockScaling(**options)):
            out = run(module, x)
        (10 * out.float().pow(2).mean()).backward()
        assert len(writes) >= (2 if "backward" in recipe else 3)
        for write in writes:
            assert_bytes(write)
        quantizers = [write.quantizer for write in writes]
        both = "backward" not in recipe
        assert any(q.with_rht for q in quantizers) != options.get("disable_rht", False)
        assert any(q.stochastic_rounding for q in quantizers) == (
            both and not options.get("disable_stochastic_rounding", False)
        )
        assert any(q.with_2d_quantization for q in quantizers) != options.get("disable_2d_quantization", False)
        assert any(q.nvfp4_use_4over6 for q in quantizers) == ("nvfp4_4over6" in options)
        assert any(q.row_scaled_nvfp4 for q in quantizers) == ("row_scaled_activation" in options)
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())
        assert all(bool(parameter.grad.isfinite().all()) for parameter in module.parameters())
        assert all(bool(parameter.grad.any()) for parameter in module.parameters() if parameter.dim() == 2)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        (name, dtype)
        for name in ("default", "no transform", "1d weights", "plain", "4over6", "row-scaled")
        for dtype in (torch.bfloat16, torch.float32)
        # The transform, and the columns of row-scaled data, take bfloat16 only.
        if dtype == torch.bfloat16 or name in ("no transform", "plain", "4over6")
    ],
    ids=str,
)
def test_a_linear_multiplies_what_was_quantized(recipe: str, dtype: torch.dtype, writes: list[Write]) -> None:
    # The tolerance includes the rounding of the scales.
    check_linear(NVFP4BlockScaling(**RECIPES[recipe]), dtype, writes, tolerance=2e-6)


def test_scales_are_in_the_order_of_gemms_in_an_ordinary_step(writes: list[Write]) -> None:
    torch.manual_seed(0)
    module = te.Linear(128, 128, params_dtype=torch.bfloat16)
    x = torch.randn(128, 128, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(enabled=True, recipe=NVFP4BlockScaling()):
        out = module(x)
    out.sum().backward()
    assert [write.swizzled for write in writes if write.quantizer.with_rht] == [True, True]
    for write in writes:
        assert_bytes(write)
