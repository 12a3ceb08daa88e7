"""Matrix products with all that the extension hangs on them: bias, GELU, their gradients, accumulation, quantization.

Usage::

    # y = x @ w.T + bias, the forward of a linear layer (layout "TN")
    y, _, _, _ = generic_gemm(w, True, x, False, None, None, DType.kBFloat16, bias, DType.kBFloat16, False, None, False,
                              workspace, workspace.shape[0], False, False)

The extension is column-major: in row-major terms, and with A and B as matrices whose leading dimensions are one, the
result is ``op(B) @ op(A)``. ``pytorch/csrc/extensions/gemm.cpp`` and ``common/gemm/cublaslt_gemm.cu`` (TE 2.20).

Operands become float32, products and sums are float32, and scales multiply the sums, as cuBLAS does it. The order of
the sums is torch's, so a result is not bit-equal to a GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsInt

import torch

from te_precision_callbacks.reference.errors import MissingFunctionError, ReferenceBackendError
from te_precision_callbacks.reference.extension.activation import GELU
from te_precision_callbacks.reference.extension.dtypes import torch_dtype
from te_precision_callbacks.reference.extension.float8 import DelayedScaling
from te_precision_callbacks.reference.extension.operands import Operand, logical_shape, operand
from te_precision_callbacks.reference.extension.quantization import row_sum
from te_precision_callbacks.reference.extension.quantizers import casting_for

# cuBLAS wants the leading dimension of an FP8 matrix to be a multiple of 16 bytes.
FP8_ALIGNMENT = 16


@torch.no_grad()
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: SupportsInt | None,
    bias: torch.Tensor | None,
    bias_type: SupportsInt,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor | None,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """``D = alpha * op(B) @ op(A) + beta * D``, and what comes with it.

    Args:
        A: plain or quantized; the rowwise data is read if ``transA``, else the columnwise data.
        transA: whether A is transposed.
        B: plain or quantized; the columnwise data is read if ``transB``, else the rowwise data.
        transB: whether B is transposed.
        D: result to write to; a new one if None.
        quantizer: for the result; None leaves it plain.
        output_dtype: type of the result, or its nominal type if it is quantized; None takes that of A.
        bias: [columns of D]; added if not ``grad``, else only a request for the bias gradient.
        bias_type: type of the GELU input that comes back from FP8 operands.
        gelu: apply GELU to the result; with ``grad``, multiply the result by the gradient of GELU at ``gelu_in``.
        gelu_in: shape of D.
        grad: whether this is a backward product.
        workspace: has no effect.
        workspace_size: has no effect.
        accumulate: add to D, in place.
        use_split_accumulator: has no effect: sums are float32 either way.
        comm_overlap: must be None.
        comm_type: has no effect.
        extra_output: comes back as it is.
        bulk_overlap: has no effect.
        alpha: multiplies the product.
        beta: multiplies D; 1 if None and ``accumulate``.

    Returns:
        D; the bias gradient or None; the input of GELU or None; ``extra_output``.

    Raises:
        ReferenceBackendError: shapes, types or usages that the compiled extension refuses too.
    """
    if comm_overlap is not None:
        raise MissingFunctionError("generic_gemm(comm_overlap=...): userbuffers are not in the reference backend.")
    beta = (1.0 if accumulate else 0.0) if beta is None else beta
    if beta != 0.0 and not accumulate:
        raise ReferenceBackendError(f"beta={beta} without accumulate=True: there is nothing that it would apply to.")

    a = operand(A, rowwise=transA, name="A")
    b = operand(B, rowwise=not transB, name="B")
    shape = _result_shape(a, transA, b, transB)
    dtype = _result_dtype(A, a, D, output_dtype)
    if D is not None and logical_shape(D) != shape:
        raise ReferenceBackendError(f"GEMM output has shape {logical_shape(D)}; {shape} is needed.")
    low_precision = a.is_fp8 or b.is_fp8
    gelu_dtype = torch_dtype(bias_type) if low_precision else dtype
    empty = a.values.numel() == 0 or b.values.numel() == 0

    bias_grad = gelu_input = None
    if empty:
        # Upstream launches nothing: the result is 0, or what it was; no bias, no GELU.
        value = torch.zeros(shape, dtype=torch.float32, device=a.values.device)
        if accumulate and D is not None:
            value = D.float()
        if bias is not None and grad:
            bias_grad = torch.zeros(b.shape[-1], dtype=dtype, device=a.values.device)
        if gelu and not grad:
            gelu_input = torch.zeros(shape, dtype=gelu_dtype, device=a.values.device)
    else:
        value = _product(a, transA, b, transB, alpha).view(shape)
        if accumulate and D is not None:
            value += beta * D.float()
        if grad:
            if gelu:
                value = GELU.gradient(value, _needed(gelu_in).float().view(shape))
            if bias is not None:
                bias_grad = (row_sum(value) if gelu else _column_sum(b)).to(dtype)
        else:
            if bias is not None and bias.numel():
                value += bias.float()
            if gelu:
                gelu_input = value.to(gelu_dtype)
                value = GELU.value(value)
    return [_store(value, dtype, quantizer, D, low_precision), bias_grad, gelu_input, extra_output]


@torch.no_grad()
def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[torch.Tensor] | None,
    D_type: SupportsInt,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: SupportsInt,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Sequence[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int = 0,
) -> list[torch.Tensor]:
    """:func:`generic_gemm` for each pair of A and B, with results in ``D``.

    Args:
        A: operands, as of :func:`generic_gemm`.
        transa: whether each A is transposed.
        B: operands, as of :func:`generic_gemm`.
        transb: whether each B is transposed.
        D: a result for each pair, or one for all, their rows one after the other (``single_output``).
        D_type: type of the results.
        m_splits: rows of each pair.
        bias: for each pair; a tensor without elements for none. With ``grad``, the bias gradients are written here.
        bias_type: has no effect.
        single_output: whether ``D[0]`` holds all results.
        pre_gelu_out: for each pair the input of GELU, written, or read with ``grad``; without elements for no GELU.
        grad: whether these are backward products.
        workspace: has no effect.
        workspace_size: has no effect.
        accumulate: add to D.
        use_split_accumulator: has no effect.
        math_sm_count: has no effect.

    Returns:
        ``bias``.
    """
    if D is None:
        raise ReferenceBackendError("te_general_grouped_gemm: the results have to be allocated by the caller.")
    first_row = 0
    for index, (a, b) in enumerate(zip(A, B, strict=True)):
        if single_output:
            rows = logical_shape(b)[-1] if transb else _rows(logical_shape(b))
            out = D[0].view(-1, D[0].shape[-1])[first_row : first_row + rows]
            first_row += rows
        else:
            out = D[index]
        with_bias, with_gelu = bias[index].numel() > 0, pre_gelu_out[index].numel() > 0
        _, bias_grad, gelu_input, _ = generic_gemm(
            a,
            transa,
            b,
            transb,
            out.view(_result_shape_of(a, transa, b, transb)) if out.numel() else None,
            None,
            D_type,
            bias[index] if with_bias else None,
            bias_type,
            with_gelu,
            pre_gelu_out[index] if with_gelu and grad else None,
            grad,
            None,
            0,
            accumulate and out.numel() > 0,
            use_split_accumulator,
        )
        if bias_grad is not None:
            bias[index].copy_(bias_grad)
        if gelu_input is not None:
            pre_gelu_out[index].copy_(gelu_input.view(pre_gelu_out[index].shape))
    return list(bias)


def _product(a: Operand, transa: bool, b: Operand, transb: bool, alpha: float) -> torch.Tensor:
    value = torch.matmul(b.values.t() if transb else b.values, a.values.t() if transa else a.values)
    # One after the other: the product of two small scales could fall below float32's range.
    for scale in (a.scale_inv, b.scale_inv):
        if scale is not None:
            value *= scale
    return value.mul_(alpha) if alpha != 1.0 else value


def _column_sum(b: Operand) -> torch.Tensor:
    total = b.values.sum(dim=0)
    return total if b.scale_inv is None else total * b.scale_inv


def _store(value: torch.Tensor, dtype: torch.dtype, quantizer: Any, out: Any, low_precision: bool) -> Any:
    if quantizer is None:
        return value.to(dtype) if out is None else out.copy_(value)
    casting = casting_for(quantizer)
    if out is None:
        out = casting.create(quantizer, value.shape, dtype, value.device)
    # cuBLAS itself writes FP8 only from FP8 and with a known scale; all else is rounded to `dtype` first.
    straight = low_precision and isinstance(casting, DelayedScaling)
    casting.write(quantizer, value if straight else value.to(dtype), out)
    return out


def _rows(shape: Sequence[int]) -> int:
    return int(torch.Size(shape[:-1]).numel())


def _result_shape_of(A: Any, transa: bool, B: Any, transb: bool) -> tuple[int, ...]:
    a, b = logical_shape(A), logical_shape(B)
    leading = (b[-1],) if transb else b[:-1]
    return (*leading, _rows(a) if transa else a[-1])


def _result_shape(a: Operand, transa: bool, b: Operand, transb: bool) -> tuple[int, ...]:
    if not a.shape or not b.shape:
        raise ReferenceBackendError("GEMM operands need at least 1 dimension.")
    inner_a = a.shape[-1] if transa else _rows(a.shape)
    inner_b = _rows(b.shape) if transb else b.shape[-1]
    if inner_a != inner_b:
        raise ReferenceBackendError(
            f"GEMM operands do not fit: A {a.shape}, transposed: {transa}; B {b.shape}, transposed: {transb}."
        )
    if a.is_fp8 != b.is_fp8 or (not a.is_fp8 and a.dtype != b.dtype):
        raise ReferenceBackendError(
            f"GEMM operands have types {_type_name(a)} and {_type_name(b)}; give both the same."
        )
    if a.is_fp8 and inner_a % FP8_ALIGNMENT and a.values.numel() and b.values.numel():
        raise ReferenceBackendError(
            f"GEMM of FP8 operands over {inner_a} products each: the GPU needs a multiple of {FP8_ALIGNMENT}. Pad A "
            f"{a.shape} and B {b.shape}."
        )
    leading = (b.shape[-1],) if transb else b.shape[:-1]
    return (*leading, _rows(a.shape) if transa else a.shape[-1])


def _result_dtype(A: Any, a: Operand, out: Any, output_dtype: SupportsInt | None) -> torch.dtype:
    plain_out = isinstance(out, torch.Tensor) and not hasattr(out, "_fp8_dtype")
    if output_dtype is None:
        if plain_out:
            plain: torch.dtype = out.dtype
            return plain
        nominal: torch.dtype = A._dtype if a.is_fp8 and not isinstance(A, torch.Tensor) else A.dtype
        return nominal
    dtype = torch_dtype(output_dtype)
    if plain_out and out.dtype != dtype:
        raise ReferenceBackendError(f"GEMM output has type {out.dtype}; {dtype} was asked for.")
    return dtype


def _needed(gelu_in: torch.Tensor | None) -> torch.Tensor:
    if gelu_in is None:
        raise ReferenceBackendError("generic_gemm(gelu=True, grad=True) needs gelu_in.")
    return gelu_in


def _type_name(matrix: Operand) -> str:
    return "FP8" if matrix.is_fp8 else str(matrix.dtype)
