"""Grouped tensors, which only a GPU's cuBLAS has: stand-ins for the functions of the compiled extension.

Grouped tensors are matrices of one width in one buffer, such as the rows of all experts: ``group_quantize`` and its kin
of ``pytorch/csrc/extensions/cast.cpp``, the last functions of ``gemm.cpp``, and the offsets of ``misc.cpp`` (TE 2.20).
Each matrix is quantized and multiplied as it would be alone.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.triton import grouped_dbias_dscales

from te_precision_callbacks.base.numerics.scaling import amax_of, fp8_scale
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.enums import DType, fp8_format
from te_precision_callbacks.reference.extension.gemm import _result_shape, generic_gemm
from te_precision_callbacks.reference.extension.operands import logical_shape
from te_precision_callbacks.reference.extension.quantization import quantize, row_sum

_BUFFERS = {
    "data": ("_rowwise_data", "_data"),
    "columnwise_data": ("_columnwise_data", "_transpose"),
    "scale_inv": ("_rowwise_scale_inv", "_scale_inv"),
    "columnwise_scale_inv": ("_columnwise_scale_inv", "_scale_inv"),
    "amax": ("_amax_rowwise",),
    "columnwise_amax": ("_amax_columnwise",),
}
"""A buffer of a grouped tensor -> the buffers of its matrices that lie in it, by the class of the matrices."""

_ATTRIBUTES = {"data": "rowwise_data"}
"""A buffer -> the name of its attribute, where that is another."""


def splits_to_offsets(first_dims: torch.Tensor, logical_last_dim: int) -> torch.Tensor:
    """The first element of each matrix, and the number of all: int64, [matrices + 1], from the rows of each and their
    columns."""
    return _offsets(first_dims, logical_last_dim, leading_zero=True).to(torch.int64)


def splits_to_offsets_multi(
    split_sizes: torch.Tensor,
    device: Any,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The rows of each matrix as int64, and for each stride, leading zero and dtype their running sums times the
    stride.

    ``bulk_allocate`` has no effect, since each result has its own memory here.
    """
    sizes = split_sizes.to(device=device, dtype=torch.int64)
    wanted = zip(strides, include_leading_zero, dtypes, strict=True)
    return sizes, [_offsets(sizes, stride, leading_zero=zero).to(dtype) for stride, zero, dtype in wanted]


def _offsets(sizes: torch.Tensor, stride: int, *, leading_zero: bool) -> torch.Tensor:
    sums = torch.cumsum(sizes * stride, 0)
    return torch.cat([sums.new_zeros(1), sums]) if leading_zero else sums


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """Bytes of a workspace, which the reference backend does not use."""
    return 0


@torch.no_grad()
def group_quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
    noop_flag: torch.Tensor | None = None,
    output: Any = None,
) -> Any:
    """Quantize the concatenated matrices in a tensor of two dimensions, each with its own scales, into a grouped
    tensor.

    Args:
        tensor: the matrices; the rest is not read.
        num_tensors: how many they are.
        first_dims, last_dims: the rows and the columns of each, int64; None where all have the same.
        tensor_offsets: the first element of each; kept in the result.
        noop_flag: float32, [1]; 1 leaves the data of ``output`` as they are.
        output: a grouped tensor to write to.

    Raises:
        ReferenceBackendError: a tensor of other dimensions, or an ``output`` of another quantizer or number.
    """
    if tensor.dim() != 2:
        raise ReferenceBackendError(f"A grouped tensor is made of 2 dimensions; {tuple(tensor.shape)} was given.")
    if output is not None:
        if first_dims is not None or output.quantizer is not quantizer or output.num_tensors != num_tensors:
            raise ReferenceBackendError(
                "group_quantize: an output that is written again needs matrices of one shape, their number, and the"
                " quantizer that has made it."
            )
        if noop_flag is not None and noop_flag.item() == 1:
            return output
    buffers = _quantized(tensor, _parts(tensor, num_tensors, first_dims, last_dims), quantizer)
    if output is not None:
        for name, buffer in buffers.items():
            if buffer is not None:
                getattr(output, _ATTRIBUTES.get(name, name)).copy_(buffer)
        return output
    return _grouped(tensor, num_tensors, first_dims, last_dims, tensor_offsets, quantizer, buffers)


@torch.no_grad()
def bgrad_group_quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """:func:`group_quantize`, and for each matrix the sum over its rows: [matrices, columns], of the type of
    ``tensor``."""
    grouped = group_quantize(tensor, quantizer, num_tensors, first_dims, last_dims, tensor_offsets)
    parts = _parts(tensor, num_tensors, first_dims, last_dims)
    return grouped, torch.stack([row_sum(part).to(tensor.dtype) for part in parts])


def _parts(
    tensor: torch.Tensor, num_tensors: int, first_dims: torch.Tensor | None, last_dims: torch.Tensor | None
) -> list[torch.Tensor]:
    rows, columns = tensor.shape
    if first_dims is None and last_dims is None:
        rows = rows // num_tensors
    shapes = list(zip(_dims(first_dims, rows, num_tensors), _dims(last_dims, columns, num_tensors), strict=True))
    sizes = [first * last for first, last in shapes]
    pieces = torch.split(tensor.reshape(-1)[: sum(sizes)], sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _dims(dims: torch.Tensor | None, common: int, count: int) -> list[int]:
    return [common] * count if dims is None else [int(size) for size in dims.tolist()]


def _quantized(tensor: torch.Tensor, parts: Sequence[torch.Tensor], quantizer: Any) -> dict[str, torch.Tensor | None]:
    current_scaling = "Float8CurrentScalingQuantizer" in class_names(quantizer)
    if current_scaling and not quantizer.rowwise_usage:
        # Unlike the kernel of one tensor, the grouped one writes the columnwise direction alone too.
        writing = quantizer.copy()
        writing.set_usage(rowwise=True)
    else:
        writing = quantizer
    quantized = [quantize(part, writing) for part in parts]
    if writing is not quantizer:
        for matrix in quantized:
            matrix.update_usage(rowwise_usage=False)
    buffers = {name: _packed(quantized, names) for name, names in _BUFFERS.items()}
    for data, scale_inv in (("data", "scale_inv"), ("columnwise_data", "columnwise_scale_inv")):
        codes = buffers[data]
        if codes is None:
            buffers[scale_inv] = None
        else:  # as long as the tensor, also where the matrices do not fill it
            left = tensor.numel() - sum(part.numel() for part in parts)
            left = left * codes.numel() // max(1, tensor.numel() - left)
            buffers[data] = torch.nn.functional.pad(codes, (0, left))
    if current_scaling:
        zero = torch.zeros(1, device=tensor.device)
        amax = torch.cat([amax_of(part).view(1) if part.numel() else zero for part in parts])
        settings = {"power_of_two": quantizer.force_pow_2_scales, "epsilon": quantizer.amax_epsilon}
        scale = fp8_scale(amax, fp8_format(quantizer.dtype).max, **settings)
        buffers |= {"amax": amax, "scale": scale}
        for name in ("scale_inv", "columnwise_scale_inv"):  # also the address of a matrix without elements
            buffers[name] = None if buffers[name] is None else torch.reciprocal(scale)
    return buffers


def _packed(parts: Sequence[Any], names: Iterable[str]) -> torch.Tensor | None:
    for name in names:
        pieces = [piece for part in parts if (piece := getattr(part, name, None)) is not None]
        if pieces:
            return torch.cat([piece.reshape(-1) for piece in pieces])
    return None


def _grouped(
    tensor: torch.Tensor,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None,
    tensor_offsets: torch.Tensor | None,
    quantizer: Any,
    buffers: dict[str, Any],
) -> Any:
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

    rows, columns = tensor.shape
    internal = quantizer is not None and quantizer.internal
    if tensor_offsets is None and (first_dims is not None or last_dims is not None):
        sizes = (rows if first_dims is None else first_dims) * (columns if last_dims is None else last_dims)
        tensor_offsets = splits_to_offsets(torch.as_tensor(sizes), 1)
    return (GroupedTensorStorage if internal else GroupedTensor)(
        shape=(rows, columns),
        stride=[columns, 1],
        dtype=tensor.dtype,
        num_tensors=num_tensors,
        quantizer=quantizer,
        first_dims=first_dims,
        last_dims=last_dims,
        tensor_offsets=tensor_offsets,
        with_gemm_swizzled_scales=quantizer is not None and quantizer.optimize_for_gemm,
        **buffers,
    )


# --- GEMMs -----------------------------------------------------------------------------------------------------------


def te_general_grouped_gemm_for_grouped_tensor(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    bias: Any,
    bias_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    workspace_setup: torch.Tensor,
    workspace_cublas: torch.Tensor,
    use_split_accumulator: bool,
    math_sm_count: int = 0,
) -> Any:
    """``D = alpha * A * B + beta * D``, and a bias, for each matrix of grouped tensors.

    Args:
        A, B: grouped tensors, or a list of matrices.
        D: takes the results: a grouped tensor in high precision, or a list of tensors.
        bias, bias_scale: a grouped tensor of rows, or None, and a factor for each row of D, or None.
        alpha, beta: float32, a number for each matrix, or one for all.
        workspace_setup, workspace_cublas, math_sm_count: have no effect.

    Returns:
        ``D``.

    Raises:
        ReferenceBackendError: operands of different numbers or mismatched sizes.
    """
    operands = [_matrices(operand) for operand in (A, B, D)]
    if len({len(matrices) for matrices in operands}) != 1:
        counts = ", ".join(str(len(matrices)) for matrices in operands)
        raise ReferenceBackendError(f"Grouped GEMM needs equally many matrices in A, B and D; they have {counts}.")
    alphas, betas = (factor.expand(len(operands[0])).tolist() for factor in (alpha, beta))
    for a, b, out, factor, of_old in zip(*operands, alphas, betas, strict=True):
        _product_into(out, a, transa, b, transb, factor, of_old, use_split_accumulator)
    if bias is not None:
        _add_bias(operands[2], _matrices(bias), bias_scale)
    return D


def _product_into(
    out: torch.Tensor,
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    alpha: float,
    beta: float,
    use_split_accumulator: bool,
) -> None:
    """``out = alpha * op(B) @ op(A) + beta * out``, for an ``out`` of as many elements in any shape."""
    if not out.numel():
        return
    shaped, added = out.view(_result_shape(logical_shape(a), transa, logical_shape(b), transb)), beta != 0.0
    of_result = (shaped, None, None, None, DType.kBFloat16, False, None, False, None, 0, added, use_split_accumulator)
    generic_gemm(a, transa, b, transb, *of_result, alpha=alpha, beta=beta)


def _add_bias(results: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], scale: torch.Tensor | None) -> None:
    first = 0
    for result, row in zip(results, rows, strict=True):
        added = row.float().view(1, -1)
        if scale is not None:
            added = added * scale[first : first + result.shape[0]].float().view(-1, 1)
        first += result.shape[0]
        result.copy_(result.float() + added)


def _matrices(operand: Any) -> list[Any]:
    return list(operand) if isinstance(operand, (list, tuple)) else operand.copy().split_into_quantized_tensors()


def _add_bias_gradients(
    dy: torch.Tensor,
    offsets: torch.Tensor,
    dbias: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    dscales: torch.Tensor | None,
) -> None:
    """Replaces Transformer Engine's function of this name: adds the sum over the rows of each group to ``dbias``, the
    rows times ``scales`` where there are any, and to ``dscales`` each row times the ``bias`` of its group.
    """
    for group, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
        rows = dy[first:end].float()
        if scales is None or bias is None or dscales is None:
            dbias[group] += rows.sum(0)
            continue
        dbias[group] += (rows * scales[first:end].float().unsqueeze(1)).sum(0)
        dscales[first:end] += rows @ bias[group].float()


def provide_grouped_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Transformer Engine these functions, and a version of cuBLAS that makes it call them."""
    monkeypatch.setattr(tex, "get_cublasLt_version", lambda: 130600)
    for function in (
        bgrad_group_quantize,
        get_grouped_gemm_setup_workspace_size,
        group_quantize,
        splits_to_offsets,
        splits_to_offsets_multi,
    ):
        monkeypatch.setattr(tex, function.__name__, function)
    for operands in ("discrete_in", "discrete_out", "grouped_tensor"):
        name = f"te_general_grouped_gemm_for_{operands}"
        monkeypatch.setattr(tex, name, te_general_grouped_gemm_for_grouped_tensor)
    monkeypatch.setattr(grouped_dbias_dscales, "_launch_grouped_dbias", _add_bias_gradients)
