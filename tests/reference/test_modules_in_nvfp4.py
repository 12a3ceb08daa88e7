"""Modules training under NVFP4BlockScaling: every byte, scale and amax that they make, and what comes of them.

Each write of quantized data is recorded on its way through the backend: what was quantized, and what came out. What
must come out is computed anew with numpy, and results of modules are held against float64 products of that.
"""

from collections.abc import Iterator
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
from tests.reference import training
from tests.reference.block_formats import swizzled
from tests.reference.training import MODULES, check_linear, inputs

SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
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


class Write(training.Write):
    def matrix(self, columnwise: bool) -> np.ndarray:
        matrix = self.source.float().reshape(-1, self.source.shape[-1]).numpy()
        if columnwise and self.quantizer.with_rht:
            transformed = torch.from_numpy(expected.hadamard(matrix.T, SIGNS))
            return np.asarray(transformed.bfloat16().float().numpy())
        return matrix.T if columnwise else matrix

    def codes(self, columnwise: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        quantizer = self.quantizer
        return expected.quantize(
            self.matrix(columnwise),
            self.buffer("amax_{}", columnwise).numpy(),
            square=quantizer.with_2d_quantization,
            largest_scale=quantizer.nvfp4_e4m3_max,
            better_of_two=quantizer.nvfp4_4over6_err_mode if quantizer.nvfp4_use_4over6 else None,
        )

    def data(self, columnwise: bool) -> np.ndarray:
        data = self.buffer("{}_data", columnwise)
        return expected.unpack(data.reshape(len(self.matrix(columnwise)), -1).numpy())

    def numbers(self, columnwise: bool) -> torch.Tensor:
        """What the data stand for: float64, the matrix or its (transformed) transpose."""
        _, scales, _ = self.codes(columnwise)
        amax = self.buffer("amax_{}", columnwise).numpy()
        return torch.from_numpy(expected.dequantize(self.data(columnwise), scales, amax, self.quantizer.nvfp4_e4m3_max))

    def check(self) -> None:
        """Amaxes, scales and data as they lie in memory; where rounding was random, data next to the exact numbers."""
        assert self.directions
        for columnwise in self.directions:
            matrix = self.matrix(columnwise)
            parts = matrix if self.quantizer.row_scaled_nvfp4 else [matrix]
            amax = np.array([expected.amax(part) for part in parts], dtype=np.float32)
            # Of the float32 result, before it was rounded to bfloat16, where it was measured before.
            tolerance = 2**-8 if self.measured_before else 0.0
            np.testing.assert_allclose(self.buffer("amax_{}", columnwise).numpy(), amax, rtol=tolerance)
            codes, scales, multiplier = self.codes(columnwise)
            stored = self.buffer("{}_scale_inv", columnwise).numpy()
            padded = np.zeros(stored.shape, dtype=np.uint8)
            padded[: scales.shape[0], : scales.shape[1]] = scales
            np.testing.assert_array_equal(stored, swizzled(padded) if self.swizzled else padded)
            data = self.data(columnwise)
            if self.quantizer.stochastic_rounding:
                expected.assert_next_to(data, matrix * multiplier.repeat(16, 1))
            else:
                np.testing.assert_array_equal(data, codes)


@pytest.fixture(autouse=True)
def blackwell() -> Iterator[None]:
    """The GPU that the backend stands for, under a Transformer Engine that has asked for it before."""
    with any_capability():
        stand_for((10, 0))
        yield


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Write]:
    return training.recorded(monkeypatch, Write, nvfp4.Nvfp4Casting)


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
        training.step(module, NVFP4BlockScaling(**options), x)
        assert len(writes) >= (2 if "backward" in recipe else 3)
        for write in writes:
            write.check()
        quantizers = [write.quantizer for write in writes]
        both = "backward" not in recipe
        assert any(q.with_rht for q in quantizers) != options.get("disable_rht", False)
        assert any(q.stochastic_rounding for q in quantizers) == (
            both and not options.get("disable_stochastic_rounding", False)
        )
        assert any(q.with_2d_quantization for q in quantizers) != options.get("disable_2d_quantization", False)
        assert any(q.nvfp4_use_4over6 for q in quantizers) == ("nvfp4_4over6" in options)
        assert any(q.row_scaled_nvfp4 for q in quantizers) == ("row_scaled_activation" in options)
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
    x = torch.randn(128, 128, dtype=torch.bfloat16, requires_grad=True)
    training.step(te.Linear(128, 128, params_dtype=torch.bfloat16), NVFP4BlockScaling(), x)
    assert [write.swizzled for write in writes if write.quantizer.with_rht] == [True, True]
    for write in writes:
        write.check()
