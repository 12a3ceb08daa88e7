"""Modules training under FP8 block scaling and MXFP8: every byte and scale that they make, and what comes of them.

Each write of quantized data is recorded on its way through the backend: what was quantized, and what came out. What
must come out is computed anew with numpy, and results of modules are held against float64 products of that.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    Format,
    MXFP8BlockScaling,
    QParams,
)

from te_precision_callbacks.reference.extension import float8_block, mxfp8
from tests.capability import any_capability, stand_for
from tests.combinations import half
from tests.reference import block_formats as spec
from tests.reference import training
from tests.reference.training import check_linear, inputs


def float32_scales() -> Any:
    """What NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 makes of the recipe."""
    recipe = Float8BlockScaling()
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, QParams(power_2_scale=False, amax_epsilon=0.0))
    return recipe


RECIPES: dict[str, tuple[tuple[int, int], Callable[[], Any]]] = {
    "blocks, float32 scales, Hopper": ((9, 0), float32_scales),
    "blocks, Hopper": ((9, 0), Float8BlockScaling),
    "blocks, hybrid, Hopper": ((9, 0), lambda: Float8BlockScaling(fp8_format=Format.HYBRID)),
    "blocks, Blackwell": ((10, 0), Float8BlockScaling),
    "MXFP8, Blackwell": ((10, 0), MXFP8BlockScaling),
    "MXFP8, hybrid, Blackwell": ((10, 0), lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID)),
}
FORMATS = {"kFloat8E4M3": spec.E4M3, "kFloat8E5M2": spec.E5M2}
SWIGLU = {"LayerNormMLP": lambda **kw: te.LayerNormMLP(64, 128, activation="swiglu", **kw)}
ATTENTION = {
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(64, 4, attention_dropout=0.0, fuse_qkv_params=True, **kw)
}
MODULES = training.MODULES | SWIGLU | ATTENTION


class Write(training.Write):
    def expected(self, columnwise: bool) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
        """Codes and scales, of the matrix or, for FP8 blocks columnwise, of its transpose, and the block."""
        values, fmt = spec.matrix(self.source), FORMATS[self.quantizer.dtype.name]
        if hasattr(self.quantizer, "with_2d_quantization"):
            block = (32, 1) if columnwise else (1, 32)
            return (*spec.mxfp8(values, block, fmt), block)
        block = (128 if self.quantizer.block_scaling_dim == 2 else 1, 128)
        codes, scales = spec.fp8_block(
            values.T if columnwise else values,
            block,
            fmt,
            power_of_2=self.quantizer.force_pow_2_scales,
            epsilon=0.0,
            largest=spec.LARGEST[self.source.dtype],
        )
        return codes, scales, block

    def numbers(self, columnwise: bool) -> torch.Tensor:
        """What the data stand for: float64, the matrix or its transpose."""
        codes, scales, block = self.expected(columnwise)
        decoded = FORMATS[self.quantizer.dtype.name].decode(codes).astype(np.float64)
        is_mxfp8 = scales.dtype == np.uint8
        factors = spec.power_of_two(scales) if is_mxfp8 else scales.astype(np.float64)
        numbers = torch.from_numpy(decoded * spec.spread(factors, block, codes.shape))
        return numbers.t() if is_mxfp8 and columnwise else numbers

    def check(self) -> None:
        assert self.directions
        for columnwise in self.directions:
            codes, scales, block = self.expected(columnwise)
            assert np.array_equal(self.buffer("{}_data", columnwise).reshape(codes.shape).numpy(), codes)
            if scales.dtype == np.uint8:
                wanted = spec.pad(scales, 4, 128) if columnwise else spec.pad(scales, 128, 4)
                if self.swizzled:
                    wanted = spec.swizzled(wanted.T if columnwise else wanted).reshape(wanted.shape)
            else:
                wanted = spec.pad(scales if block[0] == 128 else scales.T, 1, 4)
            assert np.array_equal(self.buffer("{}_scale_inv", columnwise).numpy(), wanted)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Write]:
    return training.recorded(monkeypatch, Write, float8_block.Float8BlockCasting, mxfp8.Mxfp8Casting)


@pytest.fixture(name="stand_for")
def changing() -> Iterator[Callable[[tuple[int, int]], None]]:
    with any_capability():
        yield stand_for


@pytest.mark.parametrize(("name", "recipe", "dtype"), half(MODULES, RECIPES, (torch.bfloat16, torch.float32)))
def test_bytes(name: str, recipe: str, dtype: torch.dtype, writes: list[Write], stand_for: Any) -> None:
    capability, make = RECIPES[recipe]
    stand_for(capability)
    torch.manual_seed(0)
    module = MODULES[name]().to(dtype)
    for x in inputs(2, dtype):
        writes.clear()
        training.step(module, make(), x)
        assert len(writes) >= 3
        for write in writes:
            write.check()
        formats = {write.quantizer.dtype.name for write in writes}
        assert formats == ({"kFloat8E4M3", "kFloat8E5M2"} if "hybrid" in recipe else {"kFloat8E4M3"})
        if "MXFP8" in recipe:
            assert any(write.swizzled for write in writes), "an ordinary step has its scales in the order of GEMMs"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_multiplies_what_was_quantized(
    recipe: str, dtype: torch.dtype, writes: list[Write], stand_for: Any
) -> None:
    capability, make = RECIPES[recipe]
    stand_for(capability)
    check_linear(make(), dtype, writes, tolerance=1e-6)


@pytest.mark.parametrize(("name", "recipe"), half(MODULES, RECIPES))
def test_quantized_model_parameters(name: str, recipe: str, writes: list[Write], stand_for: Any) -> None:
    capability, make = RECIPES[recipe]
    stand_for(capability)
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=True, recipe=make()):
        module = MODULES[name](params_dtype=torch.bfloat16)
    quantized = [p for p in module.parameters() if hasattr(p, "_rowwise_data")]
    twice = ("LayerNormMLP", "GroupedLinear", "MultiheadAttention")
    assert len(quantized) == {"TransformerLayer": 4, **dict.fromkeys(twice, 2)}.get(name, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for x in inputs(2, torch.bfloat16):
        writes.clear()
        optimizer.zero_grad()
        with te.autocast(enabled=True, recipe=make()):
            training.run(module, x).float().pow(2).mean().backward()
        assert not [write for write in writes if write.source.shape in {p.shape for p in quantized}], "they are kept"
        before = [p.dequantize() for p in quantized]
        writes.clear()
        optimizer.step()
        assert len(writes) == len(quantized)
        for parameter, old, write in zip(quantized, before, writes, strict=True):
            write.check()
            torch.testing.assert_close(write.source, old - 0.05 * parameter.grad, rtol=2**-7, atol=1e-6)
            assert torch.equal(parameter._rowwise_data, write.buffers["rowwise_data"])
