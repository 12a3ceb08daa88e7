"""Matrix products with the extension's extras: bias, GELU, their gradients, accumulation, quantization.

The extension is column-major. In row-major terms, with the leading dimensions of A and B merged, the result is
``op(B) @ op(A)``. ``pytorch/csrc/extensions/gemm.cpp`` and ``common/gemm/cublaslt_gemm.cu`` (TE 2.20).

Operands are read in the same direction as on a GPU, as float32 times the scales of their blocks. Products and sums are
float32, and the scale of a tensor multiplies the sums, as in cuBLAS. If the CPU multiplies bfloat16 with float32 sums,
torch runs products of bfloat16 with a bfloat16 result, and ``products.py`` large products of FP8, FP4 and bfloat16. FP8
blocks on Hopper are summed block by block, and the scales multiply these sums, which are mostly exact
(``tests/pytorch/references/blockwise_fp8_gemm_reference.py`` of Transformer Engine's repository). The order of other
sums is torch's, so results are not bit-equal to a GPU's. Operands that cuBLAS rejects are rejected, if the operands
alone show it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, SupportsInt

import torch

from te_precision_callbacks.base.numerics import layouts
from te_precision_callbacks.base.numerics.formats import E2M1, E5M2
from te_precision_callbacks.reference.conversions import decode_blocks
from te_precision_callbacks.reference.errors import MissingFunctionError, ReferenceBackendError
from te_precision_callbacks.reference.extension.activation import GELU
from te_precision_callbacks.reference.extension.buffers import matrix_shape
from te_precision_callbacks.reference.extension.enums import torch_dtype
from te_precision_callbacks.reference.extension.exports import export
from te_precision_callbacks.reference.extension.operands import FP8_BLOCKS, Operand, logical_shape, operand
from te_precision_callbacks.reference.extension.products import multiplies_bfloat16, product, takes
from te_precision_callbacks.reference.extension.quantization import quantize_result, row_sum
from te_precision_callbacks.reference.target import capability
from te_precision_callbacks.te import gemm_shapes
from te_precision_callbacks.te.tensors import is_quantized

NOT_SUPPORTED = "cuBLAS has no such GEMM (CUBLAS_STATUS_NOT_SUPPORTED)"


@contextlib.contextmanager
def outside_of_autocast() -> Iterator[None]:
    """Prevent autocast from changing the dtype of products.

    In autocast torch multiplies float32 tensors as float16 or bfloat16. Decoded FP8 codes are float32 here: sums of
    their products overflow float16, and bfloat16 would round twice.
    """
    with contextlib.ExitStack() as stack:
        for name in ("cpu", "cuda"):
            if torch.is_autocast_enabled(name):
                stack.enter_context(torch.autocast(name, enabled=False))
        yield


@export
@outside_of_autocast()
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
    """``D = alpha * op(B) @ op(A) + beta * D``, with bias, GELU and quantization.

    Args:
        A, transA: plain or quantized; the rowwise data is read if transposed, else the columnwise data.
        B, transB: plain or quantized; the columnwise data is read if transposed, else the rowwise data.
        D: the result to write to; allocated if None.
        quantizer: for the result; None leaves it plain.
        output_dtype: dtype of the result, or nominal dtype if it is quantized; by default A's.
        bias: [columns of D]; added if not ``grad``, else only a request for the bias gradient.
        bias_type: dtype of the returned GELU input with FP8 operands.
        gelu: apply GELU to the result; with ``grad``, multiply the result by the gradient of GELU at ``gelu_in``.
        gelu_in: in the shape of D.
        grad: whether this is a backward product.
        accumulate: add to D, in place.
        use_split_accumulator: required for FP8 blocks on Hopper; sums are always float32.
        comm_overlap: must be None.
        extra_output: returned unchanged.
        alpha: multiplies the product.
        beta: multiplies D; 1 if None and ``accumulate``.
        others: no effect.

    Returns:
        D; the bias gradient or None; the input of GELU or None; ``extra_output``.

    Raises:
        ReferenceBackendError: shapes, dtypes or usages that the compiled extension also rejects.
    """
    if comm_overlap is not None:
        raise MissingFunctionError(
            "generic_gemm(comm_overlap=...): the reference backend does not support userbuffers."
        )
    beta = float(accumulate) if beta is None else beta
    if beta != 0.0 and not accumulate:
        raise ReferenceBackendError(f"beta={beta} without accumulate=True: beta needs accumulate=True.")

    a = operand(A, rowwise=transA, name="A")
    b = operand(B, rowwise=not transB, name="B")
    empty = 0 in a.matrix_shape or 0 in b.matrix_shape
    by_blocks = a.kind in FP8_BLOCKS and capability() < (10, 0)
    shape = _result_shape(a.shape, transA, b.shape, transB)
    dtype = _result_dtype(A, D, output_dtype)
    if D is not None and logical_shape(D) != shape:
        raise ReferenceBackendError(f"GEMM output has shape {logical_shape(D)}; {shape} is needed.")
    if bias is not None and not grad and bias.numel() not in (0, shape[-1]):
        raise ReferenceBackendError(f"GEMM bias has {bias.numel()} elements; the result has {shape[-1]} columns.")
    if not empty:
        _check_formats(a, b, dtype)
        _check_sizes(a, b, dtype)
        if by_blocks:
            _check_fp8_blocks(a, b, dtype, use_split_accumulator, bias is not None, gelu, grad)
    gelu_dtype = torch_dtype(bias_type) if a.kind in (layouts.PER_TENSOR, layouts.MXFP8, *FP8_BLOCKS) else dtype
    added_bias = bias if bias is not None and not grad and bias.numel() else None
    accumulates = accumulate and D is not None

    bias_grad = None
    gelu_input = None
    if empty:
        # Upstream launches no kernel: the result is 0, or unchanged, without bias and GELU.
        value = D.float() if accumulates else torch.zeros(shape, dtype=torch.float32, device=a.source.device)
        if gelu and not grad:
            gelu_input = torch.zeros_like(value, dtype=gelu_dtype)
    elif (
        {a.kind, b.kind, str(dtype)} == {"torch.bfloat16"}
        and (added_bias is None or added_bias.dtype == torch.bfloat16)
        and not (gelu or accumulate or alpha != 1.0 or a.source.device.type != "cpu")
        and multiplies_bfloat16()
    ):
        # Rounded once, with the bias, since oneDNN accumulates in float32.
        left_matrix = b.matrix(in_bfloat16=True)
        right = a.matrix(in_bfloat16=True).t()
        value = torch.mm(left_matrix, right) if added_bias is None else torch.addmm(added_bias, left_matrix, right)
        value = value.view(shape)
    else:
        value = (_product_by_blocks(a, b).mul_(alpha) if by_blocks else _product(a, b, alpha)).view(shape)
        # Products of FP8 blocks are rounded before they are added, as in that reference, but after a bias.
        if accumulates and (gelu or not by_blocks):
            value = (value.to(dtype).float() if by_blocks else value) + beta * D.float()
        if added_bias is not None:
            value += added_bias.float()
        if gelu and grad:
            if gelu_in is None:
                raise ReferenceBackendError("generic_gemm(gelu=True, grad=True) needs gelu_in.")
            value = GELU.gradient(value, gelu_in.float().view(shape))
        elif gelu:
            gelu_input = value.to(gelu_dtype)
            value = GELU.value(value)
        if accumulates and by_blocks and not gelu:
            value = value.to(dtype).float() + beta * D.float()
    if bias is not None and grad:
        bias_grad = (row_sum(value) if gelu and not empty else _column_sum(b)).to(dtype)
    per_tensor = layouts.PER_TENSOR in (a.kind, b.kind)
    # cuBLAS writes FP8 directly only from per-tensor FP8 with a known scale; others are rounded to `dtype` first.
    rounded = value if quantizer is None or per_tensor else value.to(dtype)
    return [quantize_result(rounded, dtype, quantizer, out=D), bias_grad, gelu_input, extra_output]


@export
def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[torch.Tensor],
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
    """Run :func:`generic_gemm` for each pair of A and B, with results in ``D``. Other arguments are the same.

    Args:
        D: a result for each pair, or with ``single_output`` one result with the rows of all pairs concatenated.
        bias: for each pair; an empty tensor means no bias. With ``grad``, the bias gradients are written here.
        pre_gelu_out: for each pair the input of GELU, written, or read with ``grad``; empty without GELU.
        m_splits, bias_type, math_sm_count: no effect.

    Returns:
        ``bias``.
    """
    shapes = [_result_shape(logical_shape(a), transa, logical_shape(b), transb) for a, b in zip(A, B, strict=True)]
    if single_output:
        D = torch.split(D[0].view(-1, D[0].shape[-1]), [matrix_shape(shape)[0] for shape in shapes])
    for a, b, shape, out, gemm_bias, pre_gelu in zip(A, B, shapes, D, bias, pre_gelu_out, strict=True):
        with_gelu = pre_gelu.numel() > 0
        _, bias_grad, gelu_input, _ = generic_gemm(
            a,
            transa,
            b,
            transb,
            out.view(shape) if out.numel() else None,
            None,
            D_type,
            gemm_bias if gemm_bias.numel() else None,
            bias_type,
            with_gelu,
            pre_gelu if with_gelu and grad else None,
            grad,
            None,
            0,
            accumulate and out.numel() > 0,
            use_split_accumulator,
        )
        if bias_grad is not None:
            gemm_bias.copy_(bias_grad)
        if gelu_input is not None:
            pre_gelu.copy_(gelu_input.view(pre_gelu.shape))
    return list(bias)


def _product(a: Operand, b: Operand, alpha: float) -> torch.Tensor:
    (rows, depth), columns = b.sides, a.sides[0]
    in_bfloat16 = a.is_exact_in_bfloat16 and b.is_exact_in_bfloat16 and takes(rows, columns, depth, a.source.device)
    left_matrix = b.matrix(in_bfloat16=in_bfloat16)
    right = a.matrix(in_bfloat16=in_bfloat16)
    value = product(left_matrix, right) if in_bfloat16 else None
    if value is None:
        value = torch.matmul(left_matrix.float(), right.float().t())
    if a.kind == layouts.NVFP4:
        return value.mul_(_nvfp4_alpha(a.part, b.part, alpha))
    # Multiplied separately, since the product of two small scales could underflow float32.
    for scale in (a.scale_inv, b.scale_inv):
        if scale is not None:
            value *= scale
    return value if alpha == 1.0 else value.mul_(alpha)


def _nvfp4_alpha(a: Any, b: Any, alpha: float) -> torch.Tensor:
    """The factor of a product of NVFP4 operands: float32, [1].

    It is a quotient, as in TE's pure-torch reference; TE's tests of modules require its bfloat16 results bit for bit.
    The GPU (``compute_nvfp4_per_tensor_scale_kernel`` of ``common/recipe/nvfp4.cu``) multiplies by the reciprocal,
    which differs by one unit in the last place of float32 for one in six pairs of amaxes.
    """
    both: torch.Tensor = alpha * (a.amax * b.amax)
    return both / torch.full_like(both, E2M1.max * E2M1.max * a.largest_scale * b.largest_scale)


def _product_by_blocks(a: Operand, b: Operand) -> torch.Tensor:
    """Multiply FP8 blocks as on Hopper: ``sum += (block's sum * scale) * other scale``, the scale of 1D blocks first.

    In every layout, the summed dimension is the last one in memory, in both operands.
    """
    (row_count, depth), column_count, length = a.part.matrix_shape, b.part.matrix_shape[0], a.part.block[1]
    scales_a, scales_b = (part.scales.repeat_interleave(part.block[0], 0) for part in (a.part, b.part))
    scales_a = scales_a[:row_count].t().unsqueeze(1)
    scales_b = scales_b[:column_count].t().unsqueeze(2)
    first, second = (scales_a, scales_b) if b.kind == layouts.BLOCK_2D else (scales_b, scales_a)
    in_bfloat16 = takes(column_count, row_count, depth, a.source.device)
    dtype = torch.bfloat16 if in_bfloat16 else torch.float32
    rows, columns = (
        decode_blocks(part.codes, part.element_format, None, part.block, dtype) for part in (a.part, b.part)
    )
    if in_bfloat16:
        factors = scales_b.squeeze(2), scales_a.squeeze(1)
        sums = product(columns, rows, block=length, factors=factors, rows_first=first is scales_b)
        if sums is not None:
            return sums
        rows = rows.float()
        columns = columns.float()
    total = rows.new_zeros(columns.shape[0], rows.shape[0])
    rounds_once = _are_exact_factors(first, second)
    for index in range(first.shape[0]):
        block = slice(index * length, (index + 1) * length)
        partial = torch.matmul(columns[:, block], rows[:, block].t()).mul_(first[index])
        # A fused multiply-add rounds once; float64 represents the product of two float32 numbers exactly.
        if rounds_once:
            total.addcmul_(partial, second[index])
        else:
            total = torch.addcmul(total.double(), partial.double(), second[index].double()).float()
    return total


def _are_exact_factors(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether ``(sum of a block * first) * second`` does not round the second product in float32.

    The second scale must be a power of two, as by default. Both must be in a range that keeps the result normal: sums
    of 128 products of FP8 values are multiples of 2^-32 below 2^39. On a GPU the check would wait for the device, and
    returns False.
    """
    if second.device.type != "cpu":
        return False
    within = [bool(scales.amin() > 2.0**-40) and bool(scales.amax() < 2.0**40) for scales in (first, second)]
    return all(within) and bool((torch.frexp(second).mantissa == 0.5).all())


def _column_sum(b: Operand) -> torch.Tensor:
    total = b.values.sum(dim=0)
    if b.scale_inv is None:
        return total
    return total * b.scale_inv


def _result_shape(a_shape: Sequence[int], transa: bool, b_shape: Sequence[int], transb: bool) -> tuple[int, ...]:
    rows_a, columns_a = matrix_shape(a_shape)
    rows_b, columns_b = matrix_shape(b_shape)
    if (columns_a if transa else rows_a) != (rows_b if transb else columns_b):
        raise ReferenceBackendError(
            f"GEMM operands do not fit: A {a_shape}, transposed: {transa}; B {b_shape}, transposed: {transb}."
        )
    leading = (columns_b,) if transb else b_shape[:-1]
    return (*leading, rows_a if transa else columns_a)


def _check_formats(a: Operand, b: Operand, dtype: torch.dtype) -> None:
    """Reject formats that no GPU supports: ``common/gemm/cublaslt_gemm.cu``, and cuBLAS's table of dtypes."""
    both_in_blocks = a.kind in FP8_BLOCKS and b.kind in FP8_BLOCKS
    if a.kind != b.kind and not both_in_blocks:
        what = "types" if a.part is b.part else "incompatible scaling modes,"
        raise ReferenceBackendError(f"GEMM operands have {what} {a.kind} and {b.kind}; give both the same.")
    if a.part is not None and a.part.element_format is b.part.element_format is E5M2:
        raise ReferenceBackendError(f"GEMM operands are both E5M2: {NOT_SUPPORTED}. One of them has to be E4M3.")
    if a.kind == layouts.NVFP4 and dtype == torch.float16:
        raise ReferenceBackendError("FP4 GEMM does not support FP16 output. Ask for bfloat16 or float32.")


def _check_sizes(a: Operand, b: Operand, dtype: torch.dtype) -> None:
    """Reject sizes that no GPU of this capability supports: :mod:`te_precision_callbacks.te.gemm_shapes`."""
    m, k = a.sides
    sizes = {"m": m, "n": b.sides[0], "k": k, "lda": a.leading_dimension, "ldb": b.leading_dimension}
    rules = gemm_shapes.rules(a.kind, capability(), result_bytes=dtype.itemsize, b_in_rows=b.kind != layouts.BLOCK_2D)
    for rule in rules:
        if sizes[rule.size] % rule.multiple:
            raise ReferenceBackendError(
                f"GEMM of A {a.shape}{', transposed,' if a.rowwise else ''} and B"
                f" {b.shape}{'' if b.rowwise else ', transposed,'} in {a.kind}: {rule.size} is {sizes[rule.size]}, but"
                f" must be a multiple of {rule.multiple} for {rule.asked_by}. Pad the operands."
            )


def _check_fp8_blocks(
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    use_split_accumulator: bool,
    with_bias: bool,
    gelu: bool,
    grad: bool,
) -> None:
    """Reject GEMMs of FP8 blocks that Hopper does not support. Blackwell runs them as MXFP8, without these limits."""
    if a.kind == b.kind == layouts.BLOCK_2D:
        raise ReferenceBackendError(
            "Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling GEMM is supported, but got 2D by 2D."
        )
    if (grad and with_bias) or (gelu and not grad):
        raise ReferenceBackendError(
            "Epilogue requested outside of the available and tested cuBLAS functionality for FP8 block scaled GEMM: it "
            "adds a bias or multiplies by GELU's gradient; compute a bias gradient, or GELU, separately."
        )
    if gelu and dtype == torch.float32:
        raise ReferenceBackendError(
            "GELU's gradient with FP8 blocks and a float32 result: cuBLAS says that an unsupported value or parameter "
            "was passed to the function. Ask for a bfloat16 result."
        )
    if not use_split_accumulator:
        # See test_split_accumulator_enforced of Transformer Engine's test_float8_blockwise_gemm_exact.py.
        raise ReferenceBackendError(
            f"FP8 block scaling without use_split_accumulator: {NOT_SUPPORTED}. te.ops.GroupedLinear asks for that "
            "where cuBLAS is older than 13.6, as the reference backend reports; use te.GroupedLinear."
        )


def _result_dtype(A: Any, out: Any, output_dtype: SupportsInt | None) -> torch.dtype:
    plain_out = isinstance(out, torch.Tensor) and not is_quantized(out)
    if output_dtype is None:
        if plain_out:
            plain: torch.dtype = out.dtype
            return plain
        nominal: torch.dtype = A.dtype if isinstance(A, torch.Tensor) else A._dtype
        return nominal
    dtype = torch_dtype(output_dtype)
    if plain_out and out.dtype != dtype:
        raise ReferenceBackendError(f"GEMM output has type {out.dtype}; {dtype} was asked for.")
    return dtype
