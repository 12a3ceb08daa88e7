"""Tensors with more elements than 32 bits count, in one pass, against the pass in float64 piece by piece.

The tensor is bfloat16, of 4 GiB and more. It has a few special elements at its end, which an index that wraps would
miss or count twice. On a CPU, and on a GPU without the memory, a small tensor takes its place.
"""

from __future__ import annotations

import math

import torch

from gpu_parts.kernels import SUMS_AND_MAXIMA, compared, measured_tensor
from gpu_parts.rows import CannotRunHereError, Rows, Settings
from te_precision_callbacks.engine.kernels.columns import MOMENT_SUMS

ELEMENTS = 2**31 + 2**20
_COLUMNS = 2**12
_BYTES_NEEDED = 8 * ELEMENTS  # the tensor, its codes, and as much again for what torch takes to make them
_SPECIAL = (1000.0, -3000.0, math.inf, math.nan, 0.0)
_PIECE = 2**24
_BOUNDS = dict.fromkeys(("sum", "abs_sum", "square_sum"), 36 * 2.0**-24)  # the largest of kernels.py


def _made(settings: Settings) -> torch.Tensor:
    """[rows, columns]: -2, -1, 1 and 2 in turn, and the special ones at the end."""
    rows, columns = (ELEMENTS // _COLUMNS, _COLUMNS) if settings.on_gpu else (257, 64)
    if settings.on_gpu and (free := torch.cuda.mem_get_info(settings.device)[0]) < _BYTES_NEEDED:
        raise CannotRunHereError(f"{free / 2**30:.0f} GiB are free, and {_BYTES_NEEDED / 2**30:.0f} are needed")
    values = torch.empty(rows * columns, dtype=torch.bfloat16, device=settings.device)
    for at, number in enumerate((-2.0, -1.0, 1.0, 2.0)):
        values[at::4] = number
    values[-len(_SPECIAL) :] = torch.tensor(_SPECIAL, dtype=torch.bfloat16, device=settings.device)
    return values.view(rows, columns)


def _expected(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and maxima by pieces, in float64."""
    parts = [measured_tensor(piece.double()) for piece in torch.split(values.view(-1), _PIECE)]
    sums, maxima = (torch.stack(vectors) for vectors in zip(*parts, strict=True))
    return sums.sum(0), maxima.amax(0)


def check(settings: Settings, rows: Rows) -> None:
    with rows.of("a large tensor"):
        values = _made(settings)
        size = f"{values.numel():,} elements"
        names = [name for part in SUMS_AND_MAXIMA[False] for name in part]
        ways = {"": values, ", transposed": values.t(), ", behind the first": values[1:]}
        for way, measured in ways.items():
            right = _expected(values[1:] if way == ", behind the first" else values)
            sums, maxima = measured_tensor(measured, histogram=not way)
            _, wrong = compared((sums[: len(MOMENT_SUMS)], maxima), right, names, _BOUNDS)
            rows.equal(f"{size}{way}", len(wrong), 0, "columns wrong", "; ".join(wrong))
        codes = torch.full_like(values, 0x38, dtype=torch.uint8)  # 1.0 in E4M3
        scale_inv = torch.ones(1, device=settings.device)
        sums, _ = measured_tensor(values, codes, scale_inv, e5m2=False)
        for name, number in (("underflows", 0), ("overflows", 2), ("compared", values.numel() - 2)):
            rows.equal(f"{size}, with codes: {name}", sums[SUMS_AND_MAXIMA[True][0].index(name)].item(), number)
        if settings.on_gpu:
            rows.measured("memory, at most", torch.cuda.max_memory_allocated() / 2**30, "GiB")
