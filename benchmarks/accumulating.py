"""Sums of products as a tensor core computes them: the models of te_precision_callbacks.gemm_error.kernel_check."""

from __future__ import annotations

import torch

from te_precision_callbacks.gemm_error.kernel_check import Accumulator


def accumulated(left: torch.Tensor, right: torch.Tensor, accumulator: Accumulator) -> torch.Tensor:
    """Compute ``left @ right^T`` of small [n, k] and [m, k] with a model of an accumulator: float64, [n, m]."""
    left, right = left.double(), right.double()
    k = left.shape[1]
    interval = accumulator.interval or max(1, k)
    total = left.new_zeros(left.shape[0], right.shape[0])
    for begin in range(0, k, interval):
        end = min(begin + interval, k)
        part = torch.zeros_like(total)
        for first in range(begin, end, accumulator.group):
            group = slice(first, min(first + accumulator.group, end))
            products = left[:, None, group] * right[None, :, group]
            aligned = torch.cat([products, part.unsqueeze(-1)], -1)
            exponent = torch.frexp(aligned.abs().amax(-1, keepdim=True)).exponent
            last = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 1 - accumulator.fraction_bits)
            part = (torch.trunc(aligned / last) * last).sum(-1)
            # The sum may need a bit more; it is truncated when it is aligned again.
        total = part if accumulator.interval is None else (total + part).float().double()
    return total
