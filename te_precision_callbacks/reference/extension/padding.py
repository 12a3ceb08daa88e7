"""Pads each expert's rows to the multiple that FP8 requires, and removes the padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.no_grad()
def fused_multi_row_padding(
    input: torch.Tensor,
    output: torch.Tensor,
    input_row_list: Sequence[int],
    padded_input_row_list: Sequence[int],
) -> None:
    """Copy groups of rows, with zeros as padding after each group.

    The lists have the rows of each group without and with padding. An empty group is not written, as upstream.
    """
    source = 0
    target = 0
    for rows, padded in zip(input_row_list, padded_input_row_list, strict=True):
        if rows:
            output[target : target + rows] = input[source : source + rows]
            output[target + rows : target + padded] = 0
        source = source + rows
        target = target + padded


@torch.no_grad()
def fused_multi_row_unpadding(
    input: torch.Tensor,
    output: torch.Tensor,
    input_row_list: Sequence[int],
    unpadded_input_row_list: Sequence[int],
) -> None:
    """Copy groups of rows without their padding. The lists have the rows of each group with and without padding."""
    source = 0
    target = 0
    for padded, rows in zip(input_row_list, unpadded_input_row_list, strict=True):
        output[target : target + rows] = input[source : source + rows]
        source = source + padded
        target = target + rows
