"""Shared by the tests of modules in each recipe: a step, inputs, and the products of a linear layer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

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


def recorded(monkeypatch: pytest.MonkeyPatch, kind: Callable[..., Any], *castings: type) -> list[Any]:
    writes: list[Any] = []
    for casting in castings:

        def recording(
            self: Any, quantizer: Any, source: Any, out: Any, *rest: Any, write: Any = casting.write, **keywords: Any
        ) -> None:
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
    rows, columns = x.shape
    if isinstance(module, te.GroupedLinear):
        return module(x, [rows // 2, rows // 2], **keywords)
    in_sequence = isinstance(module, te.TransformerLayer | te.MultiheadAttention)
    return module(x.view(rows // 2, 2, columns) if in_sequence else x, **keywords)


def inputs(steps: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Inputs whose blocks are of very different sizes."""
    for index in range(steps):
        torch.manual_seed(index)
        sizes = 2.0 ** torch.randint(-8, 3, (ROWS, 1))
        yield (torch.randn(ROWS, 64) * sizes).to(dtype).requires_grad_()


def check_linear(recipe: Any, dtype: torch.dtype, writes: Sequence[Any], tolerance: float) -> None:
    """A linear layer multiplies what was quantized, up to the order of float32 sums and the rounding of the result.

    Args:
        recipe, dtype: of the layer.
        writes: receives what is quantized: input, weight and gradient, with ``source`` and ``numbers(columnwise)``,
            float64, the matrix or its transpose.
        tolerance: the error of sums, relative to the sum of magnitudes.
    """
    torch.manual_seed(0)
    module = te.Linear(64, 96, params_dtype=dtype)
    (x,) = inputs(1, dtype)
    with te.autocast(enabled=True, recipe=recipe):
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
