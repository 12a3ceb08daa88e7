"""Faults planted in the reference backend's kernels and quantizers while a GEMM is recorded."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformer_engine_torch as tex

from te_precision_callbacks.base.numerics import blocks
from te_precision_callbacks.base.numerics.formats import E8M0
from te_precision_callbacks.base.numerics.layouts import Stored, read_stored, unpack_fp4

SCALES = ("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv")


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


KERNEL: Mapping[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "tile zeroed": (
        lambda out: out[16:48, 32:64].zero_(),
        "rows 16 to 47, columns 32 to 63: 1,024 elements are wrong",
    ),
    "rows swapped": (_rows_swapped, "rows 3, 17: "),
    "columns swapped": (_columns_swapped, "columns 5, 100: "),
    "row uninitialised": (_row_uninitialised, "row 9: "),
    "tile transposed": (
        lambda out: out[32:64, 64:96].copy_(out[32:64, 64:96].t().clone()),
        "rows 32 to 63, columns 64 to 95: ",
    ),
    "0.1 % wrong": (_some_wrong, "elements are wrong (0."),
    "scale off by 2^-1": (lambda out: out.mul_(0.5), "the result is 0.5 of the product"),
    "scale off by 2^-7": (lambda out: out.mul_(2.0**-7), "the result is 0.00781 of the product"),
}
"""Fault of a kernel -> what it does to a result, [n, m], and what the replay says of it."""


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


def _scaled(factor: float) -> Callable[[Any, torch.Tensor], None]:
    def damage(tensor: Any, high: torch.Tensor) -> None:
        for part in _parts(tensor):
            scales = part.scale_memory.matrix
            if part.scale_format is None:
                scales.mul_(factor)
            elif part.scale_format == E8M0:
                scales.add_(round(math.log2(factor)))  # codes are exponents
            else:
                scales.copy_(part.scale_format.encode(part.scale_format.decode(scales) * factor))

    return damage


def _all_zero(tensor: Any, high: torch.Tensor) -> None:
    for part in _parts(tensor):
        part.codes.zero_()


def _always_down(tensor: Any, high: torch.Tensor) -> None:
    for part in _parts(tensor):
        exact = high.reshape(-1, high.shape[-1])
        exact = (exact.t() if part.transposed else exact).float()
        factors = part.factors()
        block = tuple(exact.shape) if factors.numel() == 1 else part.block
        y = exact / blocks.repeat_per_block(
            factors.reshape(1, 1) if factors.numel() == 1 else factors, block, tuple(exact.shape)
        )
        four = part.element_format.bits == 4
        codes = unpack_fp4(part.codes) if four else part.codes.clone()
        up = part.element_format.decode(codes).abs() > y.abs()
        codes = codes - (up & (codes & (7 if four else 127) != 0)).to(codes.dtype)
        part.codes.copy_(codes[:, ::2] | (codes[:, 1::2] << 4) if four else codes)


QUANTIZER: Mapping[str, Callable[[Any, torch.Tensor], None]] = {
    "scale off by 2^-1": _scaled(2.0**-1),
    "scale off by 2^-7": _scaled(2.0**-7),
    "all-zero codes": _all_zero,
    "rounding always down": _always_down,
}
"""Fault of a quantizer -> what it does to a quantized tensor, given the tensor before."""


def _parts(tensor: Any) -> list[Stored]:
    results = (read_stored(tensor, columnwise=columnwise) for columnwise in (False, True))
    return [part for part in results if part is not None and not part.hadamard]


@contextmanager
def quantizer(damage: Callable[[Any, torch.Tensor], None]) -> Iterator[None]:
    upstream = tex.quantize

    def quantize(tensor: torch.Tensor, quantizer: Any, *arguments: Any, **keywords: Any) -> Any:
        result = upstream(tensor, quantizer, *arguments, **keywords)
        damage(result, tensor)
        return result

    tex.quantize = quantize
    try:
        yield
    finally:
        tex.quantize = upstream
