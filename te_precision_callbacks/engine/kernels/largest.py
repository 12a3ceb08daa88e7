"""The largest magnitude of a tensor as it is stored, and whether it has inf or nan: little enough for every step.

    add([(codes, E4M3, scale_inv, slot, order, MAGNITUDE)], row)       # nothing waits for the device

A row is int32, [slots, 3]. The first column has the bits of the largest magnitude as a float32, which are in the order
of the numbers, with inf above them and nan above inf; -1 if nothing was added. The second is the same for the scales of
blocks, and the third the least ``order`` of a tensor with inf or nan.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch

from te_precision_callbacks.engine.kernels import eager
from te_precision_callbacks.engine.kernels.columns import (
    AMAX,
    COLUMNS,
    E4M3,
    E5M2,
    E8M0,
    FIRST,
    FORMATS,
    INFINITE,
    NEVER,
    NOT_ADDED,
    RECIPROCAL,
    LargestOf,
)
from te_precision_callbacks.engine.kernels.native import ONE_PASS

_OF_CODES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def new_rows(rows: int, slots: int, device: torch.device) -> torch.Tensor:
    new = torch.empty((rows, slots, COLUMNS), dtype=torch.int32, device=device)
    reset(new)
    return new


def reset(rows: torch.Tensor) -> None:
    rows[..., :FIRST] = NOT_ADDED
    rows[..., FIRST] = NEVER


def add(tensors: Sequence[LargestOf], row: torch.Tensor) -> None:
    """Add tensors on one device to a row of :func:`new_rows` on this device."""
    if row.device.type == "cuda":
        _on_gpu(tensors, row)
        return
    if not ONE_PASS.functions and not ONE_PASS.is_compiled():
        _in_torch(tensors, row)
        return
    begin = row.data_ptr()
    numbers: tuple[int, ...] = ()
    copies = []  # until they have been read
    for tensor in tensors:
        values, number, scale, slot, order, column = tensor
        if number == E8M0:
            _in_torch([tensor], row)
            continue
        if number != AMAX and not values.is_contiguous():
            values = values.contiguous()
            copies.append(values)
        slot_address = begin + 4 * COLUMNS * slot
        factor = 0 if scale is None else scale.data_ptr()
        numbers += (
            values.data_ptr(),
            number,
            values.nbytes,
            factor,
            slot_address + 4 * column,
            slot_address + 4 * FIRST,
            order,
        )
    packed = array("q", numbers)  # faster than one of ctypes
    address, count = packed.buffer_info()
    ONE_PASS.functions["te_precision_largest"](address, count // 7, torch.get_num_threads())


def _with_triton(tensors: Sequence[LargestOf], row: torch.Tensor) -> None:
    """Add with Triton, or in plain torch once Triton is missing or the kernel has failed to compile."""
    global _on_gpu
    try:
        from te_precision_callbacks.engine.kernels.triton_largest import add as launch

        unread = launch(tensors, row)
        if unread:
            _in_torch(unread, row)
    except Exception as error:
        eager.replace_triton("The watch of every step", error)
        _on_gpu = _in_torch
        _in_torch(tensors, row)  # adding a tensor twice changes nothing


_on_gpu: Callable[[Sequence[LargestOf], torch.Tensor], None] = _with_triton


def _in_torch(tensors: Sequence[LargestOf], row: torch.Tensor) -> None:
    for values, number, scale, slot, order, column in tensors:
        if number == E8M0:
            largest = values.amax().float()
            magnitude = torch.exp2(largest - 127.0)
            magnitude = torch.where(largest >= 254.0, torch.inf, magnitude)  # an inf of the tensor, as TE stores it
            magnitude = torch.where(largest == 255.0, torch.nan, magnitude)
        else:
            values = values.reciprocal() if number == RECIPROCAL else values
            plain = values if values.dtype in FORMATS else values.view(_OF_CODES[number]).to(torch.bfloat16)
            magnitude = plain.abs().amax().float()
        if scale is not None:
            magnitude = magnitude * scale[0]
        bits = torch.where(magnitude.isnan(), torch.nan, magnitude).view(torch.int32) & 0x7FFFFFFF
        columns = row[slot]
        columns[column] = torch.maximum(columns[column], bits)
        first = torch.where(bits >= INFINITE, order, NEVER).to(torch.int32)
        columns[FIRST] = torch.minimum(columns[FIRST], first)
