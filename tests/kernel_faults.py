"""Faults planted in the reference backend's GEMMs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformer_engine_torch as tex


def _rows_swapped(out: torch.Tensor) -> None:
    out[[3, 17]] = out[[17, 3]]


def _columns_swapped(out: torch.Tensor) -> None:
    out[:, [5, 100]] = out[:, [100, 5]]


def _row_uninitialised(out: torch.Tensor) -> None:
    out[9] = torch.full_like(out[9], 1e-3).view(torch.int16).add(torch.arange(out.shape[1]).short()).view(out.dtype)


def _some_wrong(out: torch.Tensor) -> None:
    flat = out.view(-1)
    where = torch.randperm(len(flat), generator=torch.Generator().manual_seed(3))[: len(flat) // 1000]
    flat[where] = flat[where] * 1.5 + out.std()


KERNEL: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "tile zeroed": lambda out: out[16:48, 32:64].zero_(),
    "rows swapped": _rows_swapped,
    "columns swapped": _columns_swapped,
    "row uninitialised": _row_uninitialised,
    "tile transposed": lambda out: out[32:64, 64:96].copy_(out[32:64, 64:96].t().clone()),
    "0.1 % wrong": _some_wrong,
    "scale off by 2^-1": lambda out: out.mul_(0.5),
    "scale off by 2^-7": lambda out: out.mul_(2.0**-7),
}
"""Fault of a kernel -> what it does to a result, [n, m]."""


@contextmanager
def kernel(damage: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    upstream = tex.generic_gemm

    def generic_gemm(*arguments: Any, **keywords: Any) -> Any:
        result = upstream(*arguments, **keywords)
        damage(result[0].view(-1, result[0].shape[-1]))
        return result

    tex.generic_gemm = generic_gemm
    try:
        yield
    finally:
        tex.generic_gemm = upstream
