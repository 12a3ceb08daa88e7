"""What is kept of a GEMM, merged over ranks, as the statistics read it."""

from __future__ import annotations

import numpy as np
import torch

from te_precision_callbacks.gemm_error.judging import KERNEL_MAXIMA, KERNEL_SUMS, Judged, kernel_columns
from te_precision_callbacks.statistics.table import STATISTICS


def on_rank(rank: int, rows: list[float], error: float) -> tuple[torch.Tensor, torch.Tensor]:
    ratios = torch.tensor(rows, dtype=torch.float64)
    first = torch.ones((), dtype=torch.float64)
    result = Judged(first * error, first, first, ratios.amax(), ratios, torch.zeros(4, dtype=torch.float64), first)
    return kernel_columns(result, rank)


def merged(*ranks: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    sums = torch.stack([sums for sums, _ in ranks]).sum(0)
    maxima = torch.stack([maxima for _, maxima in ranks]).amax(0)
    pairs = (*zip(KERNEL_SUMS, sums, strict=True), *zip(KERNEL_MAXIMA, maxima, strict=True))
    columns = {name: np.array([value.item()]) for name, value in pairs}
    rows = {name: row for name, row in STATISTICS.items() if row.of.name == "GEMM" and row.value is not None}
    return {name: float(row.value(columns)[0]) for name, row in rows.items() if row.value is not None}


def test_one_bad_device_is_not_averaged_away() -> None:
    healthy = [on_rank(rank, [0.3, 0.4, 0.2], 1e-6) for rank in range(7)]
    result = merged(*healthy, on_rank(7, [0.2, 5.0, 1.5], 1e-2))
    assert result["gemm_kernel_ratio"] == 5
    assert result["gemm_kernel_ratio_rank"] == 7
    assert (result["gemm_kernel_rank_first"], result["gemm_kernel_rank_last"]) == (7, 7)
    assert (result["gemm_kernel_row_first"], result["gemm_kernel_row_last"], result["gemm_kernel_rows"]) == (1, 2, 2)
    assert (result["gemm_kernel_column_first"], result["gemm_kernel_columns"]) == (-1, 0)
    assert result["gemm_kernel_error"] == np.sqrt((7e-6 + 1e-2) / 8)
    both = merged(*healthy, on_rank(7, [0.2, 5.0, 1.5], 1e-2), on_rank(9, [8.0], 1e-2))
    assert (both["gemm_kernel_ratio_rank"], both["gemm_kernel_rank_first"], both["gemm_kernel_rank_last"]) == (9, 7, 9)


def test_nothing_divided_by_nothing() -> None:
    """A product of zeros that is zero has no error; one that is not has an infinite one, and is a finding."""
    zero = torch.zeros((), dtype=torch.float64)
    healthy = Judged(zero, zero, zero, zero, torch.zeros(3), torch.zeros(3), zero + 1)
    result = merged(kernel_columns(healthy, 0))
    assert (result["gemm_kernel_error"], result["gemm_gain"], result["gemm_kernel_ratio"]) == (0, 1, 0)
    result = merged(kernel_columns(healthy._replace(error_square=zero + 1), 0))
    assert (result["gemm_kernel_error"], result["gemm_gain"]) == (np.inf, np.inf)
