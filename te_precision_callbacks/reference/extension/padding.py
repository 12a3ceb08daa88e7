"""Pads each expert's rows to the multiple that FP8 requires, and removes the padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_precision_callbacks.reference.extension.exports import export


def _copy_groups(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], output_row_list: Sequence[int]
) -> None:
    """Copy groups of rows, cut or padded with zeros to the rows that each has in ``output``.

    The lists have the rows of each group. An empty group is not written, as upstream.
    """
    groups = zip(torch.split(input, list(input_row_list)), torch.split(output, list(output_row_list)), strict=True)
    for source, target in groups:
        if len(source):
            rows = source[: len(target)]
            target[: len(rows)] = rows
            target[len(rows) :] = 0


export(_copy_groups, "fused_multi_row_padding")
export(_copy_groups, "fused_multi_row_unpadding")
