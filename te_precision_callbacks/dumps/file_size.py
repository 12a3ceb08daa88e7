"""An upper bound of the size of a dump's file, before it is written.

most_bytes(dump, "safetensors")         # at most some hundred bytes more than the file will have
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from te_precision_callbacks.base.numerics.layouts import MXFP8, NVFP4
from te_precision_callbacks.dumps.contents import Dump
from te_precision_callbacks.dumps.dump_files import METADATA_KEY, SAFETENSORS

_DECODED: Mapping[str, int] = {MXFP8: 1, NVFP4: 3}
"""Scaling mode -> the tensors of a direction that are decoded only when the file is written."""

_DECODED_NAME = "columnwise_block_scale_inv_values"
"""The longest name of these."""

# In the zip archive that torch.save writes: the records of every archive; for each tensor its entry in the pickle,
# the headers of its record, and their alignment; and what a tensor of Transformer Engine adds to the pickle, with its
# buffers and its quantizer. This is some 6,000 bytes too many in a file with such a tensor, and 2,000 in one without.
# Besides, a Float8Tensor leaves its transpose out of the pickle, which is counted here.
_ARCHIVE = 2_500
_RECORD = 400
_ORIGINAL = 2_500 + 8 * _RECORD


def most_bytes(dump: Dump, file_format: str) -> int:
    """An upper bound of the size of a dump's file, in bytes.

    Args:
        dump: what will be written.
        file_format: "safetensors" or "torch".
    """
    end = dump.file_bytes
    header = dump.header.to_json()
    decoded = list(_decoded_shapes(dump))
    if file_format != SAFETENSORS:
        records = (len(dump.tensors) + len(decoded)) * _RECORD
        original = 0 if dump.original is None else _ORIGINAL
        return end + len(header.encode("utf-8", "replace")) + _ARCHIVE + records + original
    shapes = [(name, tensor.shape) for name, tensor in dump.tensors.items()]
    table = {name: _longest_entry(shape, end) for name, shape in shapes}
    table |= {f"{_DECODED_NAME}{number}": _longest_entry(shape, end) for number, shape in enumerate(decoded)}
    layout = {"__metadata__": {"format": "pt", METADATA_KEY: header}, **table}
    # The length in front has 8 bytes, and what follows is padded to a multiple of 8.
    return end + 8 + 7 + len(json.dumps(layout, separators=(",", ":")).encode())


def _decoded_shapes(dump: Dump) -> Iterator[Sequence[int]]:
    """A shape with at least as many digits as that of any tensor decoded later: two dimensions more than the data."""
    quantized = dump.header.quantized
    for direction in (quantized.rowwise, quantized.columnwise) if quantized is not None and dump.internals else ():
        if direction is not None:
            yield from [(*direction.shape, 1, 1)] * _DECODED.get(direction.scaling_mode, 0)


def _longest_entry(shape: Sequence[int], end: int) -> dict[str, object]:
    """A tensor in the header of a safetensors file, in which the tensors together have ``end`` bytes."""
    return {"dtype": "F8_E4M3", "shape": list(shape), "data_offsets": [end, end]}
