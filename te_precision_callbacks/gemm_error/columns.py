"""The columns in which a GEMM's error is kept over a step: sums, and numbers of which the maximum counts.

    sums, maxima = kernel_columns(found, rank=3)      # float64 vectors, in the order of KERNEL_SUMS and KERNEL_MAXIMA

Micro-batches and ranks are merged by adding the sums and taking the maxima.
"""

from __future__ import annotations

import math

import torch

from te_precision_callbacks.gemm_error.codes import CodeCheck
from te_precision_callbacks.gemm_error.judging import FormatError, Judged

KERNEL_SUMS = ("kernel_error_square", "expected_square", "gain_dot", "judged", "unjudged")
KERNEL_MAXIMA = (
    "kernel_ratio",
    "ranked_ratio",
    "bad_rows",
    "bad_columns",
    "bad_row_last",
    "negated_bad_row_first",
    "bad_column_last",
    "negated_bad_column_first",
    "bad_rank_last",
    "negated_bad_rank_first",
)
FORMAT_SUMS = (
    "output_error_square",
    "format_error_square",
    "high_square",
    "a_error_square",
    "a_square",
    "b_error_square",
    "b_square",
)
CODE_SUMS = ("codes", "wrong", "rounded", "rounding_bias", "rounded_to_0", "expected_0", "scales", "wrong_scales")


def kernel_columns(found: Judged, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of what a kernel did; places are -inf where nothing is beyond its tolerance.

    Args:
        found: what was found.
        rank: that of this process.
    """
    sums = torch.stack([found.error_square, found.expected_square, found.gain_dot, found.counts, 1.0 - found.counts])
    places: list[torch.Tensor] = []
    for ratios in (found.rows, found.columns):
        index = torch.arange(len(ratios), device=ratios.device, dtype=torch.float64)
        places += [torch.where(ratios > 1, sign * index, -math.inf).amax() for sign in (1, -1)]
    of_rank = torch.where(found.ratio > 1, torch.full_like(found.ratio, rank), -math.inf)
    # A float32 as a float64 has 29 bits that are 0: there is room for the rank.
    ranked = (found.ratio.float().double().view(torch.int64) | rank).view(torch.float64)
    counts = [(ratios > 1).double().sum() for ratios in (found.rows, found.columns)]
    negated = torch.where(found.ratio > 1, torch.full_like(found.ratio, -rank), -math.inf)
    return sums, torch.stack([found.ratio, ranked, *counts, *places, of_rank, negated])


def format_columns(output_error_square: torch.Tensor, found: FormatError) -> torch.Tensor:
    """The columns of what the format did to a product."""
    return torch.stack([output_error_square, *found])


def code_columns(found: CodeCheck) -> torch.Tensor:
    """The columns of a check of codes."""
    return torch.stack(list(found))
