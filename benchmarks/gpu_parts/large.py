"""Tensors with more elements than 32 bits count, in one pass, against sums in float64 piece by piece.

The tensor is bfloat16, of 4 GiB and more. It has a few special elements at its end, which an index that wraps would
miss or count twice. On a CPU, and on a GPU without the memory, a small tensor takes its place.
"""

from __future__ import annotations

import math

import torch
from measuring import measured_tensor

from gpu_parts.rows import CannotRunHereError, Rows, Settings, run_part
from te_precision_callbacks.engine.kernels.columns import MAXIMA, MOMENT_SUMS

ELEMENTS = 2**31 + 2**20
_COLUMNS = 2**12
_BYTES_NEEDED = 8 * ELEMENTS
"""The tensor, its codes, and as much again for what torch takes to make them."""
_SPECIAL = (1000.0, -3000.0, math.inf, math.nan, 0.0)
_PIECE = 2**24
_BOUND = 36 * 2.0**-24
"""Of a sum of magnitudes or squares: that of ``kernels.py``."""


def _made(settings: Settings) -> torch.Tensor:
    """[rows, columns]: -2, -1, 1 and 2 in turn, and the special ones at the end."""
    rows = 257 if settings.small else ELEMENTS // _COLUMNS
    columns = 64 if settings.small else _COLUMNS
    if settings.on_gpu and not settings.small:
        free = torch.cuda.mem_get_info(settings.device)[0]
        if free < _BYTES_NEEDED:
            raise CannotRunHereError(f"{free / 2**30:.0f} GiB are free, and {_BYTES_NEEDED / 2**30:.0f} are needed")
    values = torch.empty(rows * columns, dtype=torch.bfloat16, device=settings.device)
    for at, number in enumerate((-2.0, -1.0, 1.0, 2.0)):
        values[at::4] = number
    values[-len(_SPECIAL) :] = torch.tensor(_SPECIAL, dtype=torch.bfloat16, device=settings.device)
    return values.view(rows, columns)


def _expected(values: torch.Tensor) -> dict[str, float]:
    """By pieces, in float64."""
    flat = values.view(-1)
    results = dict.fromkeys(MOMENT_SUMS, 0.0)
    for begin in range(0, flat.numel(), _PIECE):
        piece = flat[begin : begin + _PIECE].double()
        finite = piece[piece.isfinite()]
        results["finite"] += finite.numel()
        results["nonfinite"] += piece.numel() - finite.numel()
        results["zeros"] += int((finite == 0).sum())
        results["sum"] += float(finite.sum())
        results["square_sum"] += float(finite.square().sum())
        results["abs_sum"] += float(finite.abs().sum())
    return results | {"max": 1000.0, "negated_min": 3008.0, "negated_min_nonzero": -1.0}  # -3000 in bfloat16 is -3008


def _judge(name: str, measured: tuple[torch.Tensor, torch.Tensor], expected: dict[str, float], rows: Rows) -> None:
    sums, maxima = measured
    results = dict(zip(MOMENT_SUMS, sums.tolist(), strict=False)) | dict(zip(MAXIMA, maxima.tolist(), strict=False))
    wrong = [
        f"{column} is {results[column]}, not {right}"
        for column, right in expected.items()
        if abs(results[column] - right)
        > (_BOUND * (expected["abs_sum"] if column == "sum" else abs(right)) if column.endswith("sum") else 0)
    ]
    rows.add(name, len(wrong), "columns wrong", 0, not wrong, "; ".join(wrong)[:400])


def check(settings: Settings, rows: Rows) -> None:
    with rows.of("a large tensor"):
        values = _made(settings)
        size = f"{values.numel():,} elements"
        expected = _expected(values)
        _judge(f"{size}", measured_tensor(values, histogram=True), expected, rows)
        _judge(f"{size}, transposed", measured_tensor(values.t()), expected, rows)
        _judge(f"{size}, behind the first", measured_tensor(values[1:]), _expected(values[1:]), rows)
        codes = torch.full_like(values, 0x38, dtype=torch.uint8)  # 1.0 in E4M3
        scale_inv = torch.ones(1, device=settings.device)
        sums, _ = measured_tensor(values, codes, scale_inv, e5m2=False)
        underflows, overflows = sums[len(MOMENT_SUMS) + 1].item(), sums[len(MOMENT_SUMS) + 2].item()
        rows.equal(f"{size}, with codes: underflows", underflows, 0)
        rows.equal(f"{size}, with codes: overflows", overflows, 2)
        rows.equal(f"{size}, with codes: compared", sums[len(MOMENT_SUMS)].item(), expected["finite"])
        if settings.on_gpu:
            rows.measured("memory, at most", torch.cuda.max_memory_allocated() / 2**30, "GiB")


if __name__ == "__main__":
    run_part("large", check)
