"""Saves one tensor to one file.

Usage::

    save(layer.weight, "weight.safetensors", layer="decoder.fc1", tensor_name="weight")
    save(quantized, "input.safetensors", high_precision=x, iteration=100)  # both in one file
"""

from __future__ import annotations

import operator
import os
from typing import Any

import torch

from te_precision_callbacks.dumps.contents import Dump, dump_of
from te_precision_callbacks.dumps.dump_files import SAFETENSORS, TORCH, write
from te_precision_callbacks.dumps.errors import DumpError


def save(
    tensor: Any,
    path: str | os.PathLike[str],
    *,
    high_precision: torch.Tensor | None = None,
    layer: str = "",
    tensor_name: str = "",
    iteration: int | None = None,
    micro_batch: int = 0,
    rank: int = 0,
    recipe: Any = None,
    internals: bool = True,
    file_format: str = SAFETENSORS,
    fsync: bool = False,
) -> Dump:
    """Write a tensor to a file, which appears only when it is complete.

    Args:
        tensor: a quantized tensor of Transformer Engine, or its storage class, with scales in any layout, swizzled too;
            or a plain tensor.
        path: the file. Its folder is created if missing; an existing file is replaced.
        high_precision: ``tensor`` before quantization, to be saved in the same file.
        layer: the layer that the tensor is from, for the header.
        tensor_name: ``activation``, ``weight`` or another name, for the header.
        iteration: the debug iteration, for the header.
        micro_batch: the micro-batch of the iteration, for the header.
        rank: the rank, for the header.
        recipe: the recipe, as an object or text.
        internals: add tensors decoded from the data and scales: FP4 numbers one by one, scales as float32.
        file_format: ``"safetensors"`` or ``"torch"``, a pickle.
        fsync: wait until the file is on the disk.

    Returns:
        The dump that was written; it shares the tensor's memory.

    Raises:
        DumpError: the kind of the tensor is unknown, ``high_precision`` has another shape, a name is not text, a number
            is not whole, or the file cannot be written.
        LayoutError: the tensor's buffers do not match each other.
    """
    for name, text in {"layer": layer, "tensor_name": tensor_name}.items():
        if not isinstance(text, str):
            raise DumpError(f"{name}= must be a name, as text, not {text!r}.")
    dump = dump_of(
        tensor if high_precision is None else high_precision,
        None if high_precision is None else tensor,
        internals=internals,
        layer=layer,
        tensor=tensor_name,
        iteration=None if iteration is None else _whole("iteration", iteration),
        micro_batch=_whole("micro_batch", micro_batch),
        rank=_whole("rank", rank),
        recipe=recipe,
        keep_quantized=file_format == TORCH,
    )
    before, after = dump.header.high_precision, dump.header.quantized
    if before is not None and after is not None and before.shape != after.shape:
        raise DumpError(
            f"high_precision has the shape {before.shape}, and the tensor {after.shape}: they are not one tensor before"
            " and after quantization. Save them to two files."
        )
    write(dump, path, file_format, fsync=fsync)
    return dump


def _whole(name: str, number: Any) -> int:
    """The number as an int; also accepts a tensor or an array with one number."""
    try:
        return operator.index(number)
    except TypeError as error:
        raise DumpError(f"{name}= must be a whole number, not {number!r}.") from error
