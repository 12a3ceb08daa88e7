"""Pads each expert's rows to the multiple that FP8 requires, and removes the padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_precision_callbacks.reference.extension.exports import export


@export
def fused_multi_row_padding(
    input: torch.Tensor,
    output: torch.Tensor,
    input_row_list: Sequence[int],
    padded_input_row_list: Sequence[int],
) -> None:
    """Copy groups of rows, with zeros as padding after each group.

    The lists have the rows of each group without and with padding. An empty group is not written, as upstream.
    """
    groups = zip(
        torch.split(input, list(input_row_list)), torch.split(output, list(padded_input_row_list)), strict=True
    )
    for rows, padded in groups:
        if len(rows):
            padded[: len(rows)] = rows
            padded[len(rows) :] = 0


@export
def fused_multi_row_unpadding(
    input: torch.Tensor,
    output: torch.Tensor,
    input_row_list: Sequence[int],
    unpadded_input_row_list: Sequence[int],
) -> None:
    """Copy groups of rows without their padding. The lists have the rows of each group with and without padding."""
    groups = zip(
        torch.split(input, list(input_row_list)), torch.split(output, list(unpadded_input_row_list)), strict=True
    )
    for padded, rows in groups:
        rows.copy_(padded[: len(rows)])
