"""Modules training in every recipe: every byte, scale and amax that they make, and their results.

Each write of quantized data is recorded on its way through the backend: input and output. The expected
output is computed from the formulas of the recipes, with numpy and torch's own float8 casts, and results of
modules are held against float64 products of that.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)

from te_precision_callbacks.reference.extension import float8, float8_block, mxfp8, nvfp4
from tests.capability import any_capability, stand_for
from tests.combinations import half, pairs
from tests.reference import block_formats as spec
from tests.reference import nvfp4_numpy

ROWS = 320  # unlike any dimension of a weight


MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kw: te.Linear(64, 96, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(64, 96, normalization="RMSNorm", **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(64, 128, **kw),
    "GroupedLinear": lambda **kw: te.GroupedLinear(2, 64, 96, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **kw
    ),
}
BUFFERS = ("data", "transpose", "scale_inv", *(
    name.format(way) for way in ("rowwise", "columnwise") for name in ("{}_data", "{}_scale_inv", "amax_{}")
))  # fmt: skip


class Write:
    """One quantized tensor.

    Attributes:
        quantizer, source: what quantized, and what.
        measured_before: whether the amax came with it.
        buffers: data, scales and amax as they lie in memory; None where a direction is not there.
        swizzled: whether the scales are in the order of a GEMM.
    """

    def __init__(self, quantizer: Any, source: torch.Tensor, out: Any, *, measured_before: bool) -> None:
        self.quantizer, self.source, self.measured_before = quantizer, source.clone(), measured_before
        buffers = {name: getattr(out, f"_{name}", None) for name in BUFFERS}
        self.buffers = {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}
        self.swizzled = bool(getattr(out, "_with_gemm_swizzled_scales", False))

    @property
    def directions(self) -> list[bool]:
        return [columnwise for columnwise in (False, True) if self.buffer("{}_data", columnwise) is not None]

    def buffer(self, name: str, columnwise: bool) -> Any:
        return self.buffers[name.format("columnwise" if columnwise else "rowwise")]


def recorded(monkeypatch: pytest.MonkeyPatch, kinds: dict[type, type[Write]]) -> list[Any]:
    writes: list[Any] = []
    for casting, kind in kinds.items():

        def recording(
            self: Any, quantizer: Any, source: Any, out: Any, *rest: Any,
            write: Any = casting.write, kind: Any = kind, **keywords: Any,
        ) -> None:  # fmt: skip
            write(self, quantizer, source, out, *rest, **keywords)
            amax = keywords.get("amax", rest[1] if len(rest) > 1 else None)
            writes.append(kind(quantizer, source, out, measured_before=amax is not None))

        monkeypatch.setattr(casting, "write", recording)
    return writes


def step(module: Any, recipe: Any, x: torch.Tensor, **keywords: Any) -> None:
    with te.autocast(enabled=True, recipe=recipe):
        out = run(module, x, **keywords)
    (10 * out.float().pow(2).mean()).backward()
    for tensor in (x, *module.parameters()):
        assert bool(tensor.grad.isfinite().all())


def run(module: Any, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """Of half of the rows each, for two experts, or for sequences in a batch of two."""
    rows, columns = x.shape
    if isinstance(module, te.GroupedLinear):
        return module(x, [rows // 2, rows // 2], **keywords)
    in_sequence = isinstance(module, te.TransformerLayer | te.MultiheadAttention)
    return module(x.view(rows // 2, 2, columns) if in_sequence else x, **keywords)


def inputs(steps: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Inputs with blocks of very different sizes."""
    for index in range(steps):
        torch.manual_seed(index)
        sizes = 2.0 ** torch.randint(-8, 3, (ROWS, 1))
        yield (torch.randn(ROWS, 64) * sizes).to(dtype).requires_grad_()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    te.quantization.FP8GlobalStateManager.reset()
    kinds = dict.fromkeys((float8.DelayedScaling, float8.CurrentScaling), Fp8Write)
    kinds |= dict.fromkeys((float8_block.Float8BlockCasting, mxfp8.Mxfp8Casting), BlockWrite)
    return recorded(monkeypatch, kinds | {nvfp4.Nvfp4Casting: Nvfp4Write})


@pytest.fixture(name="stand_for")
def changing() -> Iterator[Callable[[tuple[int, int]], None]]:
    with any_capability():
        yield stand_for


# --- FP8 with one scale for a tensor ----------------------------------------------------------------------------------


MAX = {"E4M3": np.float32(448), "E5M2": np.float32(57344)}
CAST = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


class Fp8Write(Write):
    @property
    def format(self) -> str:
        return str(self.quantizer.dtype.name).removeprefix("kFloat8")

    @property
    def amax(self) -> np.float32:
        return np.float32(self.source.double().abs().max().item())

    @property
    def slot(self) -> tuple[int, int]:
        """Index of a scale in its module: they are views of one tensor a module and direction."""
        return self.quantizer.scale.untyped_storage().data_ptr(), self.quantizer.scale.storage_offset()

    def check(self, scale: np.float32) -> None:
        """The data is the saturating cast of source times scale, the transpose the data's, scale_inv 1 / scale."""
        data, transpose, largest = self.buffers["data"], self.buffers["transpose"], float(MAX[self.format])
        expected = (self.source.float() * torch.tensor(scale)).clamp(-largest, largest).to(CAST[self.format])
        assert torch.equal(data, expected.view(torch.uint8))
        assert self.buffers["scale_inv"].item() == np.float32(1) / scale
        if transpose is not None:
            matrix = data.reshape(-1, data.shape[-1])
            assert torch.equal(transpose.reshape(matrix.shape[1], -1), matrix.t())


def fp8_inputs(steps: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Inputs of very different sizes, so that scales change."""
    for index in range(steps):
        torch.manual_seed(index)
        yield (torch.randn(32, 64) * 4.0 ** ((index % 3) - 1)).to(dtype).requires_grad_()


class History:
    """The amax history and scale of one tensor, by the rules of the delayed scaling recipe."""

    def __init__(self, length: int) -> None:
        self.amaxes = np.zeros(length, dtype=np.float32)
        self.scale = np.float32(1)

    def update(self, amax: np.float32, fp8_max: np.float32, algorithm: str, margin: int) -> None:
        recent = np.append(self.amaxes[1:], amax)
        self.amaxes = np.append(np.float32(0), recent[1:])
        chosen = recent.max() if algorithm == "max" else amax
        if chosen > 0 and np.isfinite(chosen):
            self.scale = np.float32(fp8_max * np.float32(2.0**-margin)) / chosen


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    pairs(
        MODULES,
        [("max", 0, Format.HYBRID), ("most_recent", 1, Format.E4M3)],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_delayed_scaling(
    name: str, options: tuple[str, int, Format], dtype: torch.dtype, writes: list[Fp8Write]
) -> None:
    algorithm, margin, fp8_format = options
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm, margin=margin, fp8_format=fp8_format)
    module = MODULES[name]().to(dtype)
    histories: dict[tuple[int, int], History] = {}
    for x in fp8_inputs(6, dtype):
        writes.clear()
        step(module, recipe, x)
        assert {write.format for write in writes} == ({"E4M3", "E5M2"} if fp8_format is Format.HYBRID else {"E4M3"})
        for write in writes:
            write.check(histories.setdefault(write.slot, History(3)).scale)
        for key in {write.slot for write in writes}:
            of_slot = [write for write in writes if write.slot == key]
            amax = max(write.amax for write in of_slot)
            histories[key].update(amax, MAX[of_slot[0].format], algorithm, margin)
    stored = {}
    for part in module.modules():
        for direction in ("scaling_fwd", "scaling_bwd"):
            meta = getattr(part, "fp8_meta", {}).get(direction)
            for index, scale in enumerate([] if meta is None else meta.scale.tolist()):
                place = meta.scale.untyped_storage().data_ptr(), index
                stored[place] = meta.amax_history[:, index].tolist(), scale
    assert histories
    for key, history in histories.items():
        assert stored[key] == (history.amaxes.tolist(), history.scale)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODULES)
def test_current_scaling(name: str, dtype: torch.dtype, writes: list[Fp8Write]) -> None:
    module = MODULES[name]().to(dtype)
    for x in fp8_inputs(3, dtype):
        writes.clear()
        step(module, Float8CurrentScaling(), x)
        assert len(writes) >= 3
        for write in writes:
            scale = MAX[write.format] / write.amax
            if write.measured_before and dtype is not torch.float32:
                # An MLP's activation is measured before it is rounded to the input's type, as upstream's kernels do.
                assert write.buffers["scale_inv"].item() == pytest.approx(1 / scale, rel=2**-7)
            else:
                write.check(scale)


@pytest.mark.extended
@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()])
def test_the_tensors_of_a_linear_are_its_input_weight_and_output_gradient(recipe: Any, writes: list[Fp8Write]) -> None:
    module = te.Linear(64, 96)
    for x, first in zip(fp8_inputs(4, torch.float32), (True, False, True, False), strict=True):
        writes.clear()
        step(module, recipe, x, is_first_microbatch=first)
        sources = [write.source for write in writes]
        assert torch.equal(sources[0], x)
        assert [torch.equal(source, module.weight) for source in sources if source.shape == module.weight.shape] == (
            [True] if first else []
        ), "in later micro-batches the weight is the cached one"
        assert sources[-1].shape == (32, 96)


# --- FP8 block scaling and MXFP8 --------------------------------------------------------------------------------------


def float32_scales() -> Any:
    """Effect of NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 on the recipe."""
    recipe = Float8BlockScaling()
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, QParams(power_2_scale=False, amax_epsilon=0.0))
    return recipe


BLOCK_RECIPES: dict[str, tuple[tuple[int, int], Callable[[], Any]]] = {
    "blocks, float32 scales, Hopper": ((9, 0), float32_scales),
    "blocks, Hopper": ((9, 0), Float8BlockScaling),
    "blocks, hybrid, Hopper": ((9, 0), lambda: Float8BlockScaling(fp8_format=Format.HYBRID)),
    "blocks, Blackwell": ((10, 0), Float8BlockScaling),
    "MXFP8, Blackwell": ((10, 0), MXFP8BlockScaling),
    "MXFP8, hybrid, Blackwell": ((10, 0), lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID)),
}
FORMATS = {"kFloat8E4M3": spec.E4M3, "kFloat8E5M2": spec.E5M2}
BLOCK_MODULES = MODULES | {
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(64, 128, activation="swiglu", **kw),
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(64, 4, attention_dropout=0.0, fuse_qkv_params=True, **kw),
}


class BlockWrite(Write):
    def expected(self, columnwise: bool) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
        """Codes and scales, of the matrix or, for FP8 blocks columnwise, of its transpose, and the block."""
        fmt = FORMATS[self.quantizer.dtype.name]
        if hasattr(self.quantizer, "with_2d_quantization"):
            return spec.quantized(self.source, columnwise, "mxfp8", fmt)
        powers, weight = self.quantizer.force_pow_2_scales, self.quantizer.block_scaling_dim == 2
        return spec.quantized(
            self.source, columnwise, "fp8_block_scaling", fmt, weight=weight, force_pow_2_scales=powers
        )

    def numbers(self, columnwise: bool) -> torch.Tensor:
        """Values of the data: float64, the matrix or its transpose."""
        codes, scales, block = self.expected(columnwise)
        numbers = torch.from_numpy(spec.decoded(codes, scales, block, FORMATS[self.quantizer.dtype.name]))
        return numbers.t() if scales.dtype == np.uint8 and columnwise else numbers

    def check(self) -> None:
        assert self.directions
        for columnwise in self.directions:
            codes, scales, block = self.expected(columnwise)
            assert np.array_equal(self.buffer("{}_data", columnwise).reshape(codes.shape).numpy(), codes)
            wanted = spec.stored(scales, block, columnwise)
            if self.swizzled:
                wanted = spec.swizzled(wanted.T if columnwise else wanted).reshape(wanted.shape)
            assert np.array_equal(self.buffer("{}_scale_inv", columnwise).numpy(), wanted)


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "recipe", "dtype"),
    [
        (*case, (torch.bfloat16, torch.float32)[number // 2 % 2])
        for number, case in enumerate(half(BLOCK_MODULES, BLOCK_RECIPES))
    ],
)
def test_bytes_of_blocks(name: str, recipe: str, dtype: torch.dtype, writes: list[BlockWrite], stand_for: Any) -> None:
    capability, make = BLOCK_RECIPES[recipe]
    stand_for(capability)
    module = BLOCK_MODULES[name]().to(dtype)
    for x in inputs(2, dtype):
        writes.clear()
        step(module, make(), x)
        assert len(writes) >= 3
        for write in writes:
            write.check()
        formats = {write.quantizer.dtype.name for write in writes}
        assert formats == ({"kFloat8E4M3", "kFloat8E5M2"} if "hybrid" in recipe else {"kFloat8E4M3"})
        if "MXFP8" in recipe:
            assert any(write.swizzled for write in writes), "an ordinary step has its scales in the order of GEMMs"


@pytest.mark.extended
@pytest.mark.parametrize(("name", "recipe"), half(BLOCK_MODULES, BLOCK_RECIPES))
def test_quantized_model_parameters(name: str, recipe: str, writes: list[BlockWrite], stand_for: Any) -> None:
    capability, make = BLOCK_RECIPES[recipe]
    stand_for(capability)
    with te.quantized_model_init(enabled=True, recipe=make()):
        module = BLOCK_MODULES[name](params_dtype=torch.bfloat16)
    quantized = [p for p in module.parameters() if hasattr(p, "_rowwise_data")]
    twice = ("LayerNormMLP", "GroupedLinear", "MultiheadAttention")
    assert len(quantized) == {"TransformerLayer": 4, **dict.fromkeys(twice, 2)}.get(name, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for x in inputs(2, torch.bfloat16):
        writes.clear()
        optimizer.zero_grad()
        with te.autocast(enabled=True, recipe=make()):
            run(module, x).float().pow(2).mean().backward()
        assert not [write for write in writes if write.source.shape in {p.shape for p in quantized}], "they are kept"
        before = [p.dequantize() for p in quantized]
        writes.clear()
        optimizer.step()
        assert len(writes) == len(quantized)
        for parameter, old, write in zip(quantized, before, writes, strict=True):
            write.check()
            torch.testing.assert_close(write.source, old - 0.05 * parameter.grad, rtol=2**-7, atol=1e-6)
            assert torch.equal(parameter._rowwise_data, write.buffers["rowwise_data"])


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
NO_RHT = {"disable_rht": True}
PLAIN = NO_RHT | {"disable_stochastic_rounding": True}
NVFP4_RECIPES: dict[str, dict[str, Any]] = {
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


class Nvfp4Write(Write):
    def matrix(self, columnwise: bool) -> np.ndarray:
        matrix = self.source.float().reshape(-1, self.source.shape[-1]).numpy()
        if columnwise and self.quantizer.with_rht:
            transformed = torch.from_numpy(nvfp4_numpy.hadamard(matrix.T, SIGNS))
            return np.asarray(transformed.bfloat16().float().numpy())
        return matrix.T if columnwise else matrix

    def codes(self, columnwise: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        quantizer = self.quantizer
        return nvfp4_numpy.quantize(
            self.matrix(columnwise),
            self.buffer("amax_{}", columnwise).numpy(),
            square=quantizer.with_2d_quantization,
            largest_scale=quantizer.nvfp4_e4m3_max,
            better_of_two=quantizer.nvfp4_4over6_err_mode if quantizer.nvfp4_use_4over6 else None,
        )

    def data(self, columnwise: bool) -> np.ndarray:
        data = self.buffer("{}_data", columnwise)
        return nvfp4_numpy.unpack(data.reshape(len(self.matrix(columnwise)), -1).numpy())

    def numbers(self, columnwise: bool) -> torch.Tensor:
        """Values of the data: float64, the matrix or its (transformed) transpose."""
        _, scales, _ = self.codes(columnwise)
        amax = self.buffer("amax_{}", columnwise).numpy()
        return torch.from_numpy(
            nvfp4_numpy.dequantize(self.data(columnwise), scales, amax, self.quantizer.nvfp4_e4m3_max)
        )

    def check(self) -> None:
        """Amaxes, scales and data as they lie in memory; where rounding was random, data next to the exact numbers."""
        assert self.directions
        for columnwise in self.directions:
            matrix = self.matrix(columnwise)
            parts = matrix if self.quantizer.row_scaled_nvfp4 else [matrix]
            amax = np.array([nvfp4_numpy.amax(part) for part in parts], dtype=np.float32)
            # Of the float32 result, before it was rounded to bfloat16, where it was measured before.
            tolerance = 2**-8 if self.measured_before else 0.0
            np.testing.assert_allclose(self.buffer("amax_{}", columnwise).numpy(), amax, rtol=tolerance)
            codes, scales, multiplier = self.codes(columnwise)
            padded = spec.pad(scales, 128, 4)
            stored = self.buffer("{}_scale_inv", columnwise).numpy()
            np.testing.assert_array_equal(stored, spec.swizzled(padded) if self.swizzled else padded)
            data = self.data(columnwise)
            if self.quantizer.stochastic_rounding:
                nvfp4_numpy.assert_next_to(data, matrix * multiplier.repeat(16, 1))
            else:
                np.testing.assert_array_equal(data, codes)


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "recipe"),
    # Transformer Engine's LayerNormMLP has no backward in another precision.
    [
        (n, r)
        for n, r in half(MODULES, NVFP4_RECIPES)
        if "backward" not in r or n not in ("LayerNormMLP", "TransformerLayer")
    ],
)
def test_bytes_of_nvfp4(name: str, recipe: str, writes: list[Nvfp4Write], stand_for: Any) -> None:
    stand_for((10, 0))
    options = NVFP4_RECIPES[recipe]
    module = MODULES[name](params_dtype=torch.bfloat16)
    for x in inputs(2, torch.bfloat16):
        writes.clear()
        step(module, NVFP4BlockScaling(**options), x)
        assert len(writes) >= (2 if "backward" in recipe else 3)
        for write in writes:
            write.check()
        quantizers = [write.quantizer for write in writes]
        assert any(q.with_rht for q in quantizers) != options.get("disable_rht", False)
        assert any(q.stochastic_rounding for q in quantizers) == (
            "backward" not in recipe and not options.get("disable_stochastic_rounding", False)
        )
        assert any(q.with_2d_quantization for q in quantizers) != options.get("disable_2d_quantization", False)
        assert any(q.nvfp4_use_4over6 for q in quantizers) == ("nvfp4_4over6" in options)
        assert any(q.row_scaled_nvfp4 for q in quantizers) == ("row_scaled_activation" in options)
        assert all(bool(parameter.grad.any()) for parameter in module.parameters() if parameter.dim() == 2)


def test_scales_are_in_the_order_of_gemms_in_an_ordinary_step(writes: list[Nvfp4Write], stand_for: Any) -> None:
    stand_for((10, 0))
    x = torch.randn(128, 128, dtype=torch.bfloat16, requires_grad=True)
    step(te.Linear(128, 128, params_dtype=torch.bfloat16), NVFP4BlockScaling(), x)
    assert [write.swizzled for write in writes if write.quantizer.with_rht] == [True, True]
    for write in writes:
        write.check()


# --- all of these -----------------------------------------------------------------------------------------------------

BFLOAT16_ALONE = ("default", "1d weights", "row-scaled")  # the transform, and the columns of row-scaled data
LINEARS: dict[str, tuple[tuple[int, int], Callable[[], Any], float]] = {
    **{name: (*recipe, 1e-6) for name, recipe in BLOCK_RECIPES.items()},
    # The tolerance includes the rounding of the scales.
    **{
        name: ((10, 0), partial(NVFP4BlockScaling, **NVFP4_RECIPES[name]), 2e-6)
        for name in (*BFLOAT16_ALONE, "no transform", "plain", "4over6")
    },
}


@pytest.mark.few
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [(name, torch.bfloat16) for name in LINEARS]
    + [(name, torch.float32) for name in LINEARS if name not in BFLOAT16_ALONE],
    ids=str,
)
def test_a_linear_multiplies_what_was_quantized(
    recipe: str, dtype: torch.dtype, writes: list[Any], stand_for: Any
) -> None:
    """Up to the order of float32 sums and the rounding of the result; the tolerance is relative to the magnitudes."""
    capability, make, tolerance = LINEARS[recipe]
    stand_for(capability)
    module = te.Linear(64, 96, params_dtype=dtype)
    (x,) = inputs(1, dtype)
    with te.autocast(enabled=True, recipe=make()):
        out = module(x)
    grad = torch.randn(ROWS, 96).to(dtype) * (2.0 ** torch.randint(-8, 3, (ROWS, 1))).to(dtype)
    out.backward(grad)
    for write, source in zip(writes, (x, module.weight, grad), strict=True):
        assert torch.equal(write.source, source)
    rows, weight, dy = (write.numbers(False) for write in writes)
    rows_t, weight_t, dy_t = (write.numbers(True) for write in writes)
    bias, wide = module.bias.detach().double(), grad.double()
    for actual, expected, bound in (
        (out, rows @ weight.t() + bias, rows.abs() @ weight.abs().t() + bias.abs()),
        (x.grad, dy @ weight_t.t(), dy.abs() @ weight_t.abs().t()),
        # Transforms along the rows that are summed over cancel.
        (module.weight.grad, dy_t @ rows_t.t(), dy_t.abs() @ rows_t.abs().t()),
        (module.bias.grad, wide.sum(0), wide.abs().sum(0)),
    ):
        rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
        error = (actual.double() - expected).abs()
        assert bool((error <= tolerance * bound + rounding * expected.abs()).all()), error.max()
