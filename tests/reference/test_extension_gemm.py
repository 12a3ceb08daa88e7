"""Matrix products of the reference extension, against float64."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference.errors import MissingFunctionError, ReferenceBackendError
from te_precision_callbacks.reference.extension import products
from te_precision_callbacks.te import gemm_shapes
from tests.capability import extension_of
from tests.quantizers import quantizer
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
    return tex.generic_gemm(
        a,
        transa,
        b,
        transb,
        options.pop("out", None),
        options.pop("quantizer", None),
        KIND.get(options.pop("out_dtype", None)),
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
    return a, b, (b.double().t() if transb else b.double()) @ (a.double().t() if transa else a.double())


def _close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, atol: float = 2e-5) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[dtype], atol=atol)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gemm_in_every_layout_equals_float64(layout: str) -> None:
    for dtype in ROUNDING:
        a, b, expected = _operands(layout, dtype)
        for out_dtype, options in ((dtype, {}), (torch.float32, {"out_dtype": torch.float32})):
            out, *others = _gemm(a, b, layout, **options)
            assert out.dtype == out_dtype
            _close(out, expected, out_dtype)
            assert others == [None] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_and_gelu(dtype: torch.dtype) -> None:
    a, b, expected = _operands("TN", dtype)
    bias = torch.randn(N).to(dtype)
    expected = expected + bias.double()
    _close(_gemm(a, b, "TN", bias=bias)[0], expected, dtype)
    out, _, gelu_input, _ = _gemm(a, b, "TN", bias=bias, gelu=True)
    assert gelu_input.dtype == dtype
    _close(gelu_input, expected, dtype)
    _close(out, F.gelu(expected, approximate="tanh"), dtype, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_bias_and_gelu(dtype: torch.dtype) -> None:
    a, b, expected = _operands("NT", dtype)
    out, bias_grad, _, _ = _gemm(a, b, "NT", bias=torch.empty(M, dtype=dtype), grad=True, out_dtype=dtype)
    _close(out, expected, dtype)
    assert bias_grad.dtype == dtype
    _close(bias_grad, b.double().sum(dim=0), dtype)
    a, b, expected = _operands("NN", dtype)
    x = torch.randn(M, N).to(dtype)
    exact = x.double().requires_grad_()
    F.gelu(exact, approximate="tanh").backward(expected)
    _close(_gemm(a, b, "NN", gelu=True, gelu_in=x, grad=True)[0], exact.grad, dtype, atol=1e-4)


def test_bfloat16_is_rounded_once() -> None:
    """With or without the CPU's instructions for it. The product and a bias that is much larger are one sum."""
    for layout in LAYOUTS:
        for with_bias in [False, True]:
            a, b, expected = _operands(layout, torch.bfloat16)
            bias = 100.0 * torch.randn(expected.shape[-1]).bfloat16() if with_bias else None
            result, *_ = _gemm(a, b, layout, bias=bias)
            exact = expected.double() + (0.0 if bias is None else bias.double())
            _, exponent = torch.frexp(exact)
            half_a_unit = torch.ldexp(torch.full_like(exact, 2.0**-9), exponent)
            assert result.dtype == torch.bfloat16
            assert bool(((result.double() - exact).abs() <= half_a_unit + 1e-5).all())


def test_accumulation_into_float32() -> None:
    a, b, expected = _operands("NT", torch.bfloat16)
    start = torch.randn(M, N)
    out = start.clone()
    assert _gemm(a, b, "NT", out=out, out_dtype=torch.float32, accumulate=True)[0] is out
    _close(out, expected + start.double(), torch.float32)
    _gemm(a, b, "NT", out=out.copy_(start), accumulate=True, alpha=2.0, beta=0.5)
    _close(out, 2 * expected + 0.5 * start.double(), torch.float32)
    _gemm(a, b, "NT", out=out.fill_(float("nan")))
    _close(out, expected, torch.float32)


# --- quantized operands -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("either_gpu")
def test_fp8_sums_are_exact_where_float32_is() -> None:
    # Small integers: every product and every sum has a place in float32, so no order of summation matters.
    a, b = torch.randint(-8, 9, (N, K)).float(), torch.randint(-8, 9, (M, K)).float()
    out = _gemm(*(quantizer("fp8_delayed_scaling")(x) for x in (a, b)), "TN", out_dtype=torch.float32)[0]
    assert torch.equal(out, b @ a.t())


@pytest.mark.usefixtures("either_gpu")
def test_output_in_fp8_straight_from_fp8() -> None:
    operands = [quantizer("fp8_current_scaling")(x) for x in _operands("TN", torch.float32)[:2]]
    exact = _gemm(*operands, "TN", out_dtype=torch.float32)[0]
    its = quantizer("fp8_delayed_scaling", scale=7.0)
    out = _gemm(*operands, "TN", out_dtype=torch.bfloat16, quantizer=its)[0]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out._data, quantizer("fp8_delayed_scaling", scale=7.0)(exact)._data)
    assert its.amax.item() == exact.abs().max().item()


# A recipe, and the options of its quantizer.
Made = tuple[str, dict[str, Any]]
PIECES: Made = ("fp8_block_scaling", {})
SQUARES: Made = ("fp8_block_scaling", {"weight": True})
PER_TENSOR: Made = ("fp8_current_scaling", {})
MXFP8: Made = ("mxfp8", {})
SWIZZLED: Made = ("mxfp8", {"optimize_for_gemm": True})
OPERANDS: dict[str, tuple[Made, Made]] = {
    "per tensor": (PER_TENSOR, PER_TENSOR),
    "per tensor, E5M2": (PER_TENSOR, ("fp8_current_scaling", {"e5m2": True})),
    "1Dx1D": (PIECES, PIECES),
    "1Dx2D": (PIECES, SQUARES),
    "2Dx1D": (SQUARES, PIECES),
    "MXFP8": (MXFP8, MXFP8),
    "MXFP8, swizzled": (SWIZZLED, SWIZZLED),
    "MXFP8, one swizzled": (SWIZZLED, MXFP8),
}


def _quantized(x: torch.Tensor, made: Made) -> Any:
    return quantizer(made[0], **made[1])(x)


def _numbers(x: torch.Tensor, made: Made, rowwise: bool) -> torch.Tensor:
    """Values of a quantized tensor in one direction: float64, with numpy."""
    recipe, options = made
    fmt = spec.E5M2 if options.get("e5m2") else spec.E4M3
    quantized = spec.quantized(x, not rowwise, recipe, fmt, weight=options.get("weight", False))
    numbers = torch.from_numpy(spec.decoded(*quantized, fmt))
    return numbers if rowwise or recipe == "mxfp8" else numbers.t()


@pytest.mark.usefixtures("either_gpu")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_operands_in_the_direction_that_is_multiplied(layout: str) -> None:
    transa, transb = LAYOUTS[layout]
    m, n, k = 64, 160, 192
    # Numbers of very different sizes: the rest of a block decides the codes of the small ones.
    a, b = spec.example("spread", (n, k), torch.float32, 0), spec.example("spread", (m, k), torch.float32, 1)
    a, b = (a if transa else a.t().contiguous()), (b.t().contiguous() if transb else b)

    def product(numbers_a: torch.Tensor, numbers_b: torch.Tensor) -> torch.Tensor:
        return (numbers_b.t() if transb else numbers_b) @ (numbers_a.t() if transa else numbers_a)

    for formats, (made_a, made_b) in OPERANDS.items():
        numbers_a, numbers_b = _numbers(a, made_a, transa), _numbers(b, made_b, not transb)
        operands = _quantized(a, made_a), _quantized(b, made_b)
        out = _gemm(*operands, layout, out_dtype=torch.float32)[0]
        bound = 1e-6 * product(numbers_a.abs(), numbers_b.abs())
        assert bool(((out.double() - product(numbers_a, numbers_b)).abs() <= bound).all()), formats
        if made_a in (PIECES, MXFP8, SWIZZLED) and SQUARES not in (made_a, made_b):
            wrong = product(_numbers(a, made_a, not transa), numbers_b)
            assert not bool(((out.double() - wrong).abs() <= bound).all()), "the other direction's numbers differ"
        rounded = _gemm(*operands, layout, out_dtype=torch.bfloat16)[0]
        assert rounded.dtype == torch.bfloat16
        _close(rounded, product(numbers_a, numbers_b), torch.bfloat16, atol=float(bound.max()))


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("made", [(PER_TENSOR, PER_TENSOR), (SQUARES, PIECES), None], ids=["tensor", "block", ""])
def test_a_product_does_not_see_autocast(made: Any, autocast: torch.dtype) -> None:
    a, b, _ = _operands("TN", torch.float32)
    if made is not None:
        a, b = _quantized(a, made[0]), _quantized(b, made[1])
    expected = _gemm(a, b, "TN", out_dtype=torch.float32)[0]
    with torch.autocast("cpu", autocast):
        assert torch.equal(_gemm(a, b, "TN", out_dtype=torch.float32)[0], expected)
        assert torch.is_autocast_enabled("cpu")


def test_nvfp4_blocks_and_amaxes() -> None:
    a, b = torch.randn(32, 64).bfloat16() * 3, torch.randn(48, 64).bfloat16() * 1e-3
    operands = [quantizer("nvfp4", columnwise=False)(x) for x in (a, b)]
    plain_a, plain_b = (operand.dequantize(dtype=torch.float32).double() for operand in operands)
    for alpha in (1.0, 0.25):
        out = _gemm(*operands, "TN", out_dtype=torch.float32, alpha=alpha)[0]
        _close(out, alpha * plain_b @ plain_a.t(), torch.float32, atol=1e-9)
    with pytest.raises(ReferenceBackendError, match="FP16 output"):
        _gemm(*operands, "TN", out_dtype=torch.float16)
    operands[0]._row_scaled_nvfp4 = True
    with pytest.raises(ReferenceBackendError, match="row-scaled"):
        _gemm(*operands, "TN", out_dtype=torch.float32)


# --- refusals ---------------------------------------------------------------------------------------------------------

A, B = torch.ones(N, K), torch.ones(M, K)


@pytest.mark.parametrize(
    ("b", "options", "error", "message"),
    [
        (torch.ones(M, K + 1), {}, ReferenceBackendError, "do not fit"),
        (B.bfloat16(), {}, ReferenceBackendError, "both the same"),
        (B, {"out": torch.empty(2, 2)}, ReferenceBackendError, r"\(48, 32\) is needed"),
        (B, {"out": torch.empty(M, N), "out_dtype": torch.bfloat16}, ReferenceBackendError, "asked for"),
        (B, {"beta": 1.0}, ReferenceBackendError, "without accumulate"),
        (B, {"gelu": True, "grad": True}, ReferenceBackendError, "gelu_in"),
        (B, {"comm_overlap": object()}, MissingFunctionError, "userbuffers"),
    ],
)
def test_what_the_gpu_refuses_is_refused(
    b: torch.Tensor, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _gemm(A, b, "TN", **options)


@pytest.mark.parametrize("recipe", ["fp8_current_scaling", "fp8_block_scaling", "mxfp8"])
def test_a_missing_direction(either_gpu: tuple[int, int], recipe: str) -> None:
    x, its = torch.randn(32, 32), quantizer(recipe)
    its.set_usage(columnwise=False)
    rowwise = its(x)
    if recipe == "fp8_current_scaling" and either_gpu == (10, 0):
        _gemm(rowwise, rowwise, "NN", out_dtype=torch.float32)  # which multiplies in any layout
        return
    with pytest.raises(ReferenceBackendError, match="operand A is missing column-wise usage"):
        _gemm(rowwise, rowwise, "NN", out_dtype=torch.float32)
    if recipe != "fp8_current_scaling":
        its.set_usage(rowwise=False, columnwise=True)
        columnwise = its(x)
        with pytest.raises(ReferenceBackendError, match="operand B is missing row-wise usage"):
            _gemm(columnwise, columnwise, "NN", out_dtype=torch.float32)
        with pytest.raises(ReferenceBackendError, match="operand B is missing column-wise usage"):
            _gemm(columnwise, rowwise, "NT", out_dtype=torch.float32)


@pytest.mark.usefixtures("either_gpu")
def test_formats_that_do_not_go_together() -> None:
    x, recipes = torch.randn(32, 32), ("fp8_current_scaling", "fp8_block_scaling", "mxfp8")
    for a, b in itertools.permutations([x, *(quantizer(recipe)(x) for recipe in recipes)], 2):
        with pytest.raises(ReferenceBackendError, match=r"incompatible scaling modes.*give both the same"):
            _gemm(a, b, "TN", out_dtype=torch.float32)
    for recipe in recipes:
        e5m2 = quantizer(recipe, e5m2=True)(x)
        with pytest.raises(ReferenceBackendError, match=r"both E5M2.*CUBLAS_STATUS_NOT_SUPPORTED"):
            _gemm(e5m2, e5m2, "TN", out_dtype=torch.float32)


def _runs(recipe: str, gemm: str, tokens: int, in_features: int, out_features: int) -> bool:
    layout, shape_a, shape_b, shape = {
        "fprop": ("TN", (out_features, in_features), (tokens, in_features), (tokens, out_features)),
        "dgrad": ("NN", (out_features, in_features), (tokens, out_features), (tokens, in_features)),
        "wgrad": ("NT", (tokens, in_features), (tokens, out_features), (out_features, in_features)),
    }[gemm]
    try:
        a, b = (quantizer(recipe)(torch.ones(shape).bfloat16()) for shape in (shape_a, shape_b))
        out = _gemm(a, b, layout, out_dtype=torch.bfloat16)[0]
    except ReferenceBackendError:
        return False
    assert out.shape == shape
    assert bool((out == {"fprop": in_features, "dgrad": out_features, "wgrad": tokens}[gemm]).all())
    return True


@pytest.mark.few
@pytest.mark.parametrize("recipe", ["fp8_current_scaling", "fp8_block_scaling", "mxfp8", "nvfp4"])
def test_sizes_of_the_table_run_and_others_do_not(either_gpu: tuple[int, int], recipe: str) -> None:
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


# --- groups -----------------------------------------------------------------------------------------------------------


def _grouped(a: list[Any], b: list[Any], layout: str, out: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    transa, transb = LAYOUTS[layout]
    none = [torch.empty(0)] * len(a)
    return tex.te_general_grouped_gemm(
        a, transa, b, transb, out, KIND[out[0].dtype], options.get("m_splits", []), options.get("bias", none),
        tex.DType.kBFloat16, options.get("single_output", False), options.get("gelu", none),
        options.get("grad", False), [torch.empty(1)], 1, options.get("accumulate", False), True, 132,
    )  # fmt: skip


@pytest.mark.usefixtures("either_gpu")
@pytest.mark.parametrize("recipe", ["fp8_current_scaling", "fp8_block_scaling", "mxfp8"])
def test_grouped_backward_of_quantized_tensors(recipe: str) -> None:
    for accumulate in [False, True]:
        torch.manual_seed(0)
        rows = [64, 0, 32]
        fp8 = [[quantizer(recipe)(torch.randn(count, columns)) for count in rows] for columns in (64, 32)]
        out = [torch.full((32, 64), 2.0) for _ in rows]
        _grouped(*fp8, "NT", out, accumulate=accumulate)
        for index in (0, 2):
            alone = _gemm(fp8[0][index], fp8[1][index], "NT", out_dtype=torch.float32)[0]
            assert torch.equal(out[index], alone + 2.0 * accumulate)
        assert bool((out[1] == 2.0 * accumulate).all())


def test_grouped_backward() -> None:
    rows = [16, 0, 32]
    x, grads = ([torch.randn(count, columns) for count in rows] for columns in (K, N))
    out = [torch.full((N, K), 2.0) for _ in rows]
    bias = [torch.full((N,), 9.0) for _ in rows]
    _grouped(x, grads, "NT", out, bias=bias, grad=True, accumulate=True)
    expected = [grad.t() @ of_group + 2.0 for grad, of_group in zip(grads, x, strict=True)]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias, [grad.sum(dim=0) for grad in grads])


def test_grouped_forward_into_one_output() -> None:
    rows = [5, 0, 11]
    weights, biases = [torch.randn(N, K) for _ in rows], [torch.randn(N) for _ in rows]
    x = torch.randn(sum(rows), K)
    out = torch.empty(sum(rows), N)
    parts = list(torch.split(x, rows))
    assert _grouped(weights, parts, "TN", [out], bias=biases, m_splits=rows, single_output=True) == biases
    expected = [F.linear(*group) for group in zip(parts, weights, biases, strict=True)]
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_a_cpu_that_does_not_multiply_bfloat16_has_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SMALLEST", 0)
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    assert not products.takes(2, 3, 4, torch.device("cpu"))
