"""Matrix products of the reference extension, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from te_precision_callbacks.base.numerics import gemm_shapes
from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference.errors import MissingFunctionError, ReferenceBackendError
from te_precision_callbacks.reference.extension import products
from tests.capability import extension_of
from tests.reference import block_formats as spec

KIND = {torch.float32: tex.DType.kFloat32, torch.bfloat16: tex.DType.kBFloat16, torch.float16: tex.DType.kFloat16}
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
LAYOUTS = {"TN": (True, False), "NN": (False, False), "NT": (False, True)}
M, N, K = 48, 32, 64


@pytest.fixture(params=[(9, 0), (10, 0)], ids=["hopper", "blackwell"])
def either_gpu(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    with extension_of(request.param):
        yield request.param


def _gemm(a: Any, b: Any, layout: str, **options: Any) -> list[Any]:
    transa, transb = LAYOUTS[layout]
    out_dtype = options.pop("out_dtype", None)
    return tex.generic_gemm(
        a,
        transa,
        b,
        transb,
        options.pop("out", None),
        options.pop("quantizer", None),
        None if out_dtype is None else KIND[out_dtype],
        options.pop("bias", None),
        options.pop("bias_type", tex.DType.kBFloat16),
        options.pop("gelu", False),
        options.pop("gelu_in", None),
        options.pop("grad", False),
        torch.empty(1),
        1,
        options.pop("accumulate", False),
        options.pop("split", True),
        **options,
    )


def _operands(layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B, and the product in float64."""
    torch.manual_seed(0)
    transa, transb = LAYOUTS[layout]
    a = torch.randn(N, K).to(dtype) if transa else torch.randn(K, N).to(dtype)
    b = torch.randn(K, M).to(dtype) if transb else torch.randn(M, K).to(dtype)
    op_a = a.double().t() if transa else a.double()
    op_b = b.double().t() if transb else b.double()
    return a, b, op_b @ op_a


def _close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[dtype], atol=2e-5)


def _current(fp8: tex.DType = tex.DType.kFloat8E4M3) -> Any:
    return Float8CurrentScalingQuantizer(fp8, device=torch.device("cpu"))


def _delayed(scale: float = 1.0) -> Any:
    return Float8Quantizer(torch.tensor([scale]), torch.zeros(1), tex.DType.kFloat8E4M3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    a, b, expected = _operands(layout, dtype)
    out, bias_grad, gelu_input, extra = _gemm(a, b, layout)
    assert out.dtype == dtype
    _close(out, expected, dtype)
    assert (bias_grad, gelu_input, extra) == (None, None, None)
    out = _gemm(a, b, layout, out_dtype=torch.float32)[0]
    assert out.dtype == torch.float32
    _close(out, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias(dtype: torch.dtype) -> None:
    a, b, expected = _operands("TN", dtype)
    bias = torch.randn(N).to(dtype)
    _close(_gemm(a, b, "TN", bias=bias)[0], expected + bias.double(), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_bfloat16_is_rounded_once(layout: str, with_bias: bool) -> None:
    """Whether or not the CPU has instructions for it. The product and a bias that is much larger are one sum."""
    a, b, expected = _operands(layout, torch.bfloat16)
    bias = 100.0 * torch.randn(expected.shape[-1]).bfloat16() if with_bias else None
    result, *_ = _gemm(a, b, layout, bias=bias)
    exact = expected.double() + (0.0 if bias is None else bias.double())
    _, exponent = torch.frexp(exact)
    half_a_unit = torch.ldexp(torch.full_like(exact, 2.0**-9), exponent)
    assert result.dtype == torch.bfloat16
    assert bool(((result.double() - exact).abs() <= half_a_unit + 1e-5).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_gradient(dtype: torch.dtype) -> None:
    a, b, expected = _operands("NT", dtype)
    out, bias_grad, _, _ = _gemm(a, b, "NT", bias=torch.empty(M, dtype=dtype), grad=True, out_dtype=dtype)
    _close(out, expected, dtype)
    assert bias_grad.dtype == dtype
    _close(bias_grad, b.double().sum(dim=0), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu(dtype: torch.dtype) -> None:
    a, b, expected = _operands("TN", dtype)
    bias = torch.randn(N).to(dtype)
    out, _, gelu_input, _ = _gemm(a, b, "TN", bias=bias, gelu=True)
    assert gelu_input.dtype == dtype
    _close(gelu_input, expected + bias.double(), dtype)
    torch.testing.assert_close(
        out.double(), F.gelu(expected + bias.double(), approximate="tanh"), rtol=ROUNDING[dtype], atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_gradient(dtype: torch.dtype) -> None:
    a, b, expected = _operands("NN", dtype)
    x = torch.randn(M, N).to(dtype)
    exact = x.double().requires_grad_()
    F.gelu(exact, approximate="tanh").backward(expected)
    assert exact.grad is not None
    out = _gemm(a, b, "NN", gelu=True, gelu_in=x, grad=True)[0]
    torch.testing.assert_close(out.double(), exact.grad, rtol=ROUNDING[dtype], atol=1e-4)


def test_accumulation_into_float32() -> None:
    a, b, expected = _operands("NT", torch.bfloat16)
    start = torch.randn(M, N)
    out = start.clone()
    result = _gemm(a, b, "NT", out=out, out_dtype=torch.float32, accumulate=True)[0]
    assert result is out
    _close(out, expected + start.double(), torch.float32)
    _gemm(a, b, "NT", out=out.copy_(start), accumulate=True, alpha=2.0, beta=0.5)
    _close(out, 2 * expected + 0.5 * start.double(), torch.float32)
    _gemm(a, b, "NT", out=out.fill_(float("nan")))
    _close(out, expected, torch.float32)


@pytest.mark.usefixtures("either_gpu")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2])
def test_fp8_operands(layout: str, out_dtype: torch.dtype, fp8: tex.DType) -> None:
    a, b, _ = _operands(layout, torch.float32)
    quantized_a, quantized_b = tex.quantize(a, _current()), tex.quantize(b * 1e-3, _current(fp8))
    _, _, expected = _product(quantized_a, quantized_b, layout)
    out = _gemm(quantized_a, quantized_b, layout, out_dtype=out_dtype)[0]
    assert out.dtype == out_dtype
    torch.testing.assert_close(out.double(), expected, rtol=ROUNDING[out_dtype], atol=1e-7)


def _product(a: Any, b: Any, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    transa, transb = LAYOUTS[layout]
    plain_a, plain_b = (tex.dequantize(tensor, tex.DType.kFloat32).double() for tensor in (a, b))
    return plain_a, plain_b, (plain_b.t() if transb else plain_b) @ (plain_a.t() if transa else plain_a)


@pytest.mark.usefixtures("either_gpu")
def test_fp8_sums_are_exact_where_float32_is() -> None:
    # Small integers: every product and every sum has a place in float32, so no order of summation matters.
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 9, (N, K), generator=generator).float()
    b = torch.randint(-8, 9, (M, K), generator=generator).float()
    out = _gemm(tex.quantize(a, _delayed()), tex.quantize(b, _delayed()), "TN", out_dtype=torch.float32)[0]
    assert torch.equal(out, b @ a.t())


@pytest.mark.usefixtures("either_gpu")
def test_output_in_fp8_straight_from_fp8() -> None:
    a, b, _ = _operands("TN", torch.float32)
    operands = tex.quantize(a, _current()), tex.quantize(b, _current())
    exact = _gemm(*operands, "TN", out_dtype=torch.float32)[0]
    quantizer = _delayed(7.0)
    out = _gemm(*operands, "TN", out_dtype=torch.bfloat16, quantizer=quantizer)[0]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out._data, tex.quantize(exact, _delayed(7.0))._data)
    assert quantizer.amax.item() == exact.abs().max().item()


def test_what_the_gpu_refuses_is_refused() -> None:
    a, b = torch.randn(N, K), torch.randn(M, K)
    with pytest.raises(ReferenceBackendError, match="do not fit"):
        _gemm(a, torch.randn(M, K + 1), "TN")
    with pytest.raises(ReferenceBackendError, match="both the same"):
        _gemm(a, b.bfloat16(), "TN")
    with pytest.raises(ReferenceBackendError, match=r"\(48, 32\) is needed"):
        _gemm(a, b, "TN", out=torch.empty(2, 2))
    with pytest.raises(ReferenceBackendError, match="asked for"):
        _gemm(a, b, "TN", out=torch.empty(M, N), out_dtype=torch.bfloat16)
    with pytest.raises(ReferenceBackendError, match="without accumulate"):
        _gemm(a, b, "TN", beta=1.0)
    with pytest.raises(ReferenceBackendError, match="gelu_in"):
        _gemm(a, b, "TN", gelu=True, grad=True)
    with pytest.raises(MissingFunctionError, match="userbuffers"):
        _gemm(a, b, "TN", comm_overlap=object())


def test_missing_columnwise_usage(either_gpu: tuple[int, int]) -> None:
    quantizer = _current()
    quantizer.set_usage(columnwise=False)
    quantized = tex.quantize(torch.randn(16, 16), quantizer)
    if either_gpu == (9, 0):
        with pytest.raises(ReferenceBackendError, match="operand A is missing column-wise usage"):
            _gemm(quantized, quantized, "NN", out_dtype=torch.float32)
    else:
        _gemm(quantized, quantized, "NN", out_dtype=torch.float32)


def _block(dim: int = 1, fp8: tex.DType = tex.DType.kFloat8E4M3, power_of_2: bool = True) -> Any:
    return Float8BlockQuantizer(
        fp8, rowwise=True, columnwise=True, block_scaling_dim=dim, amax_epsilon=0.0, force_pow_2_scales=power_of_2
    )


def _mxfp8(fp8: tex.DType = tex.DType.kFloat8E4M3, swizzled: bool = False) -> Any:
    quantizer = MXFP8Quantizer(fp8, rowwise=True, columnwise=True)
    quantizer.optimize_for_gemm = swizzled
    return quantizer


def _numbers(x: torch.Tensor, scaling: str, rowwise: bool) -> torch.Tensor:
    """What a quantized tensor stands for in one direction: float64, with numpy."""
    values = spec.matrix(x)
    if scaling == "mxfp8":
        block = (1, 32) if rowwise else (32, 1)
        codes, exponents = spec.mxfp8(values, block, spec.E4M3)
        scales = spec.power_of_two(exponents)
    else:
        values = values if rowwise else values.T
        block = (128 if scaling == "2d" else 1, 128)
        options = {"power_of_2": True, "epsilon": 0.0, "largest": spec.LARGEST[x.dtype]}
        codes, scales = spec.fp8_block(values, block, spec.E4M3, **options)
    numbers = torch.from_numpy(spec.E4M3.decode(codes).astype("float64") * spec.spread(scales, block, codes.shape))
    return numbers if rowwise or scaling == "mxfp8" else numbers.t()


BLOCKS: dict[str, tuple[str, str, Any, Any]] = {
    "1Dx1D": ("1d", "1d", _block, _block),
    "1Dx2D": ("1d", "2d", _block, lambda: _block(2)),
    "2Dx1D": ("2d", "1d", lambda: _block(2), _block),
    "MXFP8": ("mxfp8", "mxfp8", _mxfp8, _mxfp8),
    "MXFP8, swizzled": ("mxfp8", "mxfp8", lambda: _mxfp8(swizzled=True), lambda: _mxfp8(swizzled=True)),
    "MXFP8, one swizzled": ("mxfp8", "mxfp8", lambda: _mxfp8(swizzled=True), _mxfp8),
}


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [(_current, _current), (lambda: _block(2), _block), None], ids=["tensor", "block", ""])
def test_a_product_does_not_see_autocast(make: Any, autocast: torch.dtype) -> None:
    a, b, _ = _operands("TN", torch.float32)
    if make is not None:
        a, b = tex.quantize(a, make[0]()), tex.quantize(b, make[1]())
    expected = _gemm(a, b, "TN", out_dtype=torch.float32)[0]
    with torch.autocast("cpu", autocast):
        assert torch.equal(_gemm(a, b, "TN", out_dtype=torch.float32)[0], expected)
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("either_gpu")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("formats", BLOCKS)
def test_blocks_of_the_direction_that_is_multiplied(formats: str, layout: str) -> None:
    scaling_a, scaling_b, make_a, make_b = BLOCKS[formats]
    transa, transb = LAYOUTS[layout]
    m, n, k = 64, 160, 192
    # Numbers of very different sizes: what else is in a block decides what the small ones become.
    a, b = spec.example("spread", (n, k), torch.float32, 0), spec.example("spread", (m, k), torch.float32, 1)
    a, b = (a if transa else a.t().contiguous()), (b.t().contiguous() if transb else b)
    numbers_a, numbers_b = _numbers(a, scaling_a, transa), _numbers(b, scaling_b, not transb)
    expected = (numbers_b.t() if transb else numbers_b) @ (numbers_a.t() if transa else numbers_a)
    out = _gemm(tex.quantize(a, make_a()), tex.quantize(b, make_b()), layout, out_dtype=torch.float32)[0]
    bound = (numbers_b.t() if transb else numbers_b).abs() @ (numbers_a.t() if transa else numbers_a).abs()
    assert bool(((out.double() - expected).abs() <= 1e-6 * bound).all())
    if "2d" not in (scaling_a, scaling_b):
        other = _numbers(a, scaling_a, not transa)
        wrong = (numbers_b.t() if transb else numbers_b) @ (other.t() if transa else other)
        assert not bool(((out.double() - wrong).abs() <= 1e-6 * bound).all()), "the other direction's numbers differ"


def test_nvfp4_blocks_and_amaxes() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(32, 64).bfloat16() * 3, torch.randn(48, 64).bfloat16() * 1e-3
    quantizer = NVFP4Quantizer(rowwise=True, columnwise=False)
    operands = tex.quantize(a, quantizer), tex.quantize(b, quantizer)
    expected = (
        operands[1].dequantize(dtype=torch.float32).double() @ operands[0].dequantize(dtype=torch.float32).double().t()
    )
    for alpha in (1.0, 0.25):
        out = _gemm(*operands, "TN", out_dtype=torch.float32, alpha=alpha)[0]
        torch.testing.assert_close(out.double(), alpha * expected, rtol=1e-5, atol=1e-9)
    with pytest.raises(ReferenceBackendError, match="FP16 output"):
        _gemm(*operands, "TN", out_dtype=torch.float16)
    operands[0]._row_scaled_nvfp4 = True
    with pytest.raises(ReferenceBackendError, match="row-scaled"):
        _gemm(*operands, "TN", out_dtype=torch.float32)


@pytest.mark.usefixtures("either_gpu")
@pytest.mark.parametrize("make", [_block, _mxfp8])
def test_missing_direction_of_blocks(make: Any) -> None:
    x = torch.randn(32, 32)
    quantizer = make()
    quantizer.set_usage(columnwise=False)
    rowwise = tex.quantize(x, quantizer)
    quantizer.set_usage(rowwise=False, columnwise=True)
    columnwise = tex.quantize(x, quantizer)
    with pytest.raises(ReferenceBackendError, match="operand A is missing column-wise usage"):
        _gemm(rowwise, rowwise, "NN", out_dtype=torch.float32)
    with pytest.raises(ReferenceBackendError, match="operand B is missing row-wise usage"):
        _gemm(columnwise, columnwise, "NN", out_dtype=torch.float32)
    with pytest.raises(ReferenceBackendError, match="operand B is missing column-wise usage"):
        _gemm(columnwise, rowwise, "NT", out_dtype=torch.float32)


@pytest.mark.usefixtures("either_gpu")
def test_formats_that_do_not_go_together() -> None:
    x = torch.randn(32, 32)
    tensors = [x, *(tex.quantize(x, make()) for make in (_current, _block, _mxfp8))]
    for a in tensors:
        for b in tensors:
            if a is not b:
                with pytest.raises(ReferenceBackendError, match=r"incompatible scaling modes.*give both the same"):
                    _gemm(a, b, "TN", out_dtype=torch.float32)
    for make in (_mxfp8, _current, _block):
        e5m2 = tex.quantize(x, make(tex.DType.kFloat8E5M2) if make is not _block else _block(1, tex.DType.kFloat8E5M2))
        with pytest.raises(ReferenceBackendError, match=r"both E5M2.*CUBLAS_STATUS_NOT_SUPPORTED"):
            _gemm(e5m2, e5m2, "TN", out_dtype=torch.float32)


RECIPES = {"fp8_current_scaling": _current, "fp8_block_scaling": _block, "mxfp8": _mxfp8, "nvfp4": NVFP4Quantizer}


def _runs(recipe: str, gemm: str, tokens: int, in_features: int, out_features: int) -> bool:
    """Whether the operands of a layer's GEMM can be quantized and multiplied."""
    layout, shape_a, shape_b, shape = {
        "fprop": ("TN", (out_features, in_features), (tokens, in_features), (tokens, out_features)),
        "dgrad": ("NN", (out_features, in_features), (tokens, out_features), (tokens, in_features)),
        "wgrad": ("NT", (tokens, in_features), (tokens, out_features), (out_features, in_features)),
    }[gemm]
    try:
        a, b = (tex.quantize(torch.ones(shape).bfloat16(), RECIPES[recipe]()) for shape in (shape_a, shape_b))
        out = _gemm(a, b, layout, out_dtype=torch.bfloat16)[0]
    except ReferenceBackendError:
        return False
    assert out.shape == shape
    assert bool((out == {"fprop": in_features, "dgrad": out_features, "wgrad": tokens}[gemm]).all())
    return True


@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_of_the_table_run_and_others_do_not(either_gpu: tuple[int, int], recipe: str) -> None:
    """What a GEMM of the backend takes is what the table says, for each of a layer's three GEMMs."""
    for gemm in gemm_shapes.GEMMS:
        for index in range(3):
            for size in (16, 20, 24, 30, 32, 36, 48):
                sizes = [64, 64, 64]
                sizes[index] = size
                named = dict(zip(("tokens", "in_features", "out_features"), sizes, strict=True))
                refused = gemm_shapes.refusals(recipe, either_gpu, **named, gemms=[gemm], asserted=False)
                assert _runs(recipe, gemm, *sizes) == (not refused), (gemm, named)
                for refusal in refused:
                    assert _runs(recipe, gemm, *(named | {refusal.dimension: refusal.next_size}).values())


@pytest.mark.usefixtures("either_gpu")
@pytest.mark.parametrize("make", [_block, _mxfp8])
def test_grouped_blocks(make: Any) -> None:
    torch.manual_seed(0)
    rows = [64, 0, 32]
    x, grads = [torch.randn(count, 64) for count in rows], [torch.randn(count, 32) for count in rows]
    fp8 = [[tex.quantize(tensor, make()) for tensor in tensors] for tensors in (x, grads)]
    out = [torch.full((32, 64), 2.0) for _ in rows]
    _grouped(*fp8, "NT", out, accumulate=True)
    for index in (0, 2):
        alone = _gemm(fp8[0][index], fp8[1][index], "NT", out_dtype=torch.float32)[0]
        assert torch.equal(out[index], alone + 2.0)
    assert bool((out[1] == 2.0).all())


def _grouped(a: list[Any], b: list[Any], layout: str, out: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    transa, transb = LAYOUTS[layout]
    none = [torch.empty(0)] * len(a)
    return tex.te_general_grouped_gemm(
        a, transa, b, transb, out, KIND[out[0].dtype], options.get("m_splits", []), options.get("bias", none),
        tex.DType.kBFloat16, options.get("single_output", False), options.get("gelu", none),
        options.get("grad", False), [torch.empty(1)], 1, options.get("accumulate", False), True, 132,
    )  # fmt: skip


def test_grouped_forward_into_one_output() -> None:
    torch.manual_seed(0)
    rows = [5, 0, 11]
    weights, biases = [torch.randn(N, K) for _ in rows], [torch.randn(N) for _ in rows]
    x = torch.randn(sum(rows), K)
    out = torch.empty(sum(rows), N)
    parts = list(torch.split(x, rows))
    assert _grouped(weights, parts, "TN", [out], bias=biases, m_splits=rows, single_output=True) == biases
    expected = [F.linear(*group) for group in zip(parts, weights, biases, strict=True)]
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("either_gpu")
def test_grouped_backward() -> None:
    torch.manual_seed(0)
    rows = [16, 0, 32]
    x = [torch.randn(count, K) for count in rows]
    grads = [torch.randn(count, N) for count in rows]
    out = [torch.full((N, K), 2.0) for _ in rows]
    bias = [torch.full((N,), 9.0) for _ in rows]
    _grouped(x, grads, "NT", out, bias=bias, grad=True, accumulate=True)
    for index in range(3):
        torch.testing.assert_close(out[index], grads[index].t() @ x[index] + 2.0, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(bias[index], grads[index].sum(dim=0))
    # The rows are what is summed over, and FP8 wants a multiple of 16 of them.
    fp8 = [[tex.quantize(tensor, _current()) for tensor in tensors] for tensors in (x, grads)]
    _grouped(*fp8, "NT", out)
    for index in (0, 2):
        torch.testing.assert_close(out[index], grads[index].t() @ x[index], rtol=0.1, atol=1.0)
    assert not out[1].any()


def test_a_cpu_that_does_not_multiply_bfloat16_has_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SMALLEST", 0)
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    assert not products.takes(2, 3, 4, torch.device("cpu"))
