"""Compares two dumps, or a quantized tensor with the tensor before quantization; summarizes the tensors of a dump."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from te_precision_callbacks.base.numerics.layouts import Stored, unpack
from te_precision_callbacks.dumps.contents import Dump, dequantize, require_dump
from te_precision_callbacks.dumps.errors import DifferentShapesError, NothingToCompareError
from te_precision_callbacks.dumps.header import HIGH_PRECISION, QUANTIZED, Header, dtype_name, is_merged_shape

_PIECE = 1 << 16
"""The number of elements read at once, in float64: small enough for a cache."""


@dataclass(frozen=True)
class Internals:
    """The differences of codes and scales of two quantized tensors in one format.

    Attributes:
        scales_differing: the number of blocks with different factors; NVFP4's amax is part of a factor.
    """

    blocks: int
    codes_differing: int
    scales_differing: int


@dataclass(frozen=True)
class Difference:
    """The difference of two tensors.

    Elements are compared in float64, which rounds integers beyond 2^53. Errors are computed over the elements that are
    finite in both tensors.

    Attributes:
        what: "high_precision", "rowwise", "columnwise" (both dequantized), or a pair, "high_precision / rowwise".
        differing: the number of different elements; NaN equals NaN, and -0 equals 0.
        max_abs_error: the largest ``|a - b|``; 0 if nothing is finite in both.
        max_at: the first index in ``shape`` with the largest error, unless it is 0.
        mean_abs_error: the mean of ``|a - b|``.
        sqnr_db: ``10 log10(sum a^2 / sum (a - b)^2)``; inf without an error, nan if nothing is finite.
        nan, inf: the counts in a and b.
        internals: the difference of codes and scales of two quantized tensors in one format, direction and layout.
    """

    what: str
    shape: tuple[int, ...]
    differing: int
    max_abs_error: float
    max_at: tuple[int, ...] | None
    mean_abs_error: float
    sqnr_db: float
    nan: tuple[int, int]
    inf: tuple[int, int]
    internals: Internals | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def share(self) -> float:
        if self.elements:
            return self.differing / self.elements
        return 0.0

    @property
    def equal(self) -> bool:
        inside = self.internals
        return self.differing == 0 and (inside is None or inside.codes_differing + inside.scales_differing == 0)


@dataclass(frozen=True)
class DumpComparison:
    """The result of :func:`compare`; ``not_compared`` are parts in only one dump, or in different forms."""

    a: Header
    b: Header
    differences: tuple[Difference, ...]
    not_compared: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.not_compared and all(difference.equal for difference in self.differences)


def compare(a: Dump, b: Dump | None = None) -> DumpComparison:
    """Compare two dumps: the high-precision tensors, and each direction of the quantized tensors.

    A dump with only columnwise NVFP4 data may be a matrix; leading dimensions of the other tensor are then merged. If
    one dump has only a high-precision tensor and the other only a quantized tensor, these two are compared.

    Args:
        a: the reference: the signal of the SQNR.
        b: the other dump; None compares a's quantized tensor with a's high-precision tensor.

    Raises:
        DifferentShapesError: the shapes differ.
        NothingToCompareError: the dumps have nothing in common.
        DumpError: an argument is not a dump.
    """
    a = require_dump(a)
    if b is None:
        result = _compare_with_quantized(a, a)
        missing = "high-precision tensor with a comparable quantized form in the dump"
    else:
        result = _compare_parts(a, require_dump(b))
        if not result.differences:
            across = _compare_with_quantized(a, b)
            back = _compare_with_quantized(b, a)
            differences = across.differences + back.differences
            not_compared = across.not_compared + back.not_compared
            if not differences:
                not_compared = (*result.not_compared, *not_compared)
            result = DumpComparison(a.header, b.header, differences, not_compared)
        missing = "comparable tensor in both dumps"
    if result.not_compared:
        missing += f" ({'; '.join(result.not_compared)})"
    if not result.differences:
        raise NothingToCompareError(f"There is no {missing}.")
    return result


def _compare_parts(a: Dump, b: Dump) -> DumpComparison:
    differences: list[Difference] = []
    not_compared: list[str] = []
    for name in (HIGH_PRECISION, QUANTIZED):
        ours = a.tensors.get(name)
        theirs = b.tensors.get(name)
        if ours is not None and theirs is not None:
            differences.append(_difference(name, ours, theirs))
        else:
            not_compared += _in_one_dump(name, ours, theirs)
    for columnwise, name in ((False, "rowwise"), (True, "columnwise")):
        part = a.part(columnwise=columnwise)
        other = b.part(columnwise=columnwise)
        if part is None or other is None:
            not_compared += _in_one_dump(name, part, other)
        elif part.hadamard is not other.hadamard:
            transformed = {part.hadamard: "a", other.hadamard: "b"}[True]
            not_compared.append(f"{name}: only {transformed} has a Hadamard transform of the tensor")
        else:
            numbers = [dequantize(dump, columnwise, dtype=torch.float32) for dump in (a, b)]
            internals = None
            if _grid(part) == _grid(other):
                internals = _internals(part, other)
            else:
                not_compared.append(
                    f"{name}: codes and scales, which are {_layout_text(part)} in a and {_layout_text(other)} in b"
                )
            differences.append(_difference(name, *_reshape_to_match(*numbers), internals=internals))
    return DumpComparison(a.header, b.header, tuple(differences), tuple(not_compared))


def _in_one_dump(name: str, a: object, b: object) -> list[str]:
    return [f"{name}: only in {dump}" for dump, part in (("a", a), ("b", b)) if part is not None]


def _compare_with_quantized(high: Dump, quantized: Dump) -> DumpComparison:
    differences: list[Difference] = []
    not_compared: list[str] = []
    tensor = high.tensors.get(HIGH_PRECISION)
    if tensor is not None and QUANTIZED in quantized.tensors:
        differences.append(_difference(f"{HIGH_PRECISION} / {QUANTIZED}", tensor, quantized.tensors[QUANTIZED]))
    for columnwise, name in ((False, "rowwise"), (True, "columnwise")):
        part = quantized.part(columnwise=columnwise)
        if tensor is None or part is None:
            continue
        if part.hadamard:
            not_compared.append(f"{name}: a Hadamard transform of the tensor")
        else:
            numbers = dequantize(quantized, columnwise, dtype=torch.float32)
            differences.append(_difference(f"{HIGH_PRECISION} / {name}", *_reshape_to_match(tensor, numbers)))
    return DumpComparison(high.header, quantized.header, tuple(differences), tuple(not_compared))


def _reshape_to_match(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if is_merged_shape(tuple(a.shape), tuple(b.shape)):
        return a, b.reshape(a.shape)
    if is_merged_shape(tuple(b.shape), tuple(a.shape)):
        return a.reshape(b.shape), b
    return a, b


def _difference(what: str, a: torch.Tensor, b: torch.Tensor, *, internals: Internals | None = None) -> Difference:
    if a.shape != b.shape:
        raise DifferentShapesError(
            f"{what}: a has the shape {tuple(a.shape)} and b {tuple(b.shape)}. Only equal shapes can be compared."
        )
    ours = a.reshape(-1)
    theirs = b.reshape(-1)
    differing = 0
    finite = 0
    largest = 0.0
    largest_at = -1
    signal = 0.0
    noise = 0.0
    total = 0.0
    nan = [0, 0]
    inf = [0, 0]
    for start in range(0, len(ours), _PIECE):
        x, y = (_wide(flat[start : start + _PIECE]) for flat in (ours, theirs))
        differing += int(((x != y) & ~(x.isnan() & y.isnan())).sum())
        for side, values in enumerate((x, y)):
            nan[side] += int(values.isnan().sum())
            inf[side] += int(values.isinf().sum())
        both = x.isfinite() & y.isfinite()
        x, error = x.where(both, 0), (x - y).abs().where(both, 0)
        finite += int(both.sum())
        signal += float(x.abs().square().sum())
        noise += float(error.square().sum())
        total += float(error.sum())
        place = int(error.argmax())
        if float(error[place]) > largest:
            largest = float(error[place])
            largest_at = start + place
    max_at = None
    if largest_at >= 0:
        max_at = tuple(map(int, np.unravel_index(largest_at, a.shape)))
    sqnr_db = math.nan
    if finite:
        sqnr_db = _decibels(signal, noise)
    return Difference(
        what=what,
        shape=tuple(a.shape),
        differing=differing,
        max_abs_error=largest,
        max_at=max_at,
        mean_abs_error=total / max(finite, 1),
        sqnr_db=sqnr_db,
        nan=(nan[0], nan[1]),
        inf=(inf[0], inf[1]),
        internals=internals,
    )


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if signal > 0:
        return 10 * (math.log10(signal) - math.log10(noise))
    return -math.inf


def _grid(part: Stored) -> tuple[object, ...]:
    return (part.element_format, part.scale_format, part.transposed, part.block, part.matrix_shape)


def _layout_text(part: Stored) -> str:
    return f"{part.element_format.name} in blocks of {part.block[0]} x {part.block[1]}"


def _internals(a: Stored, b: Stored) -> Internals:
    codes_differ = unpack(a.codes, a.element_format) != unpack(b.codes, b.element_format)
    # Compared as bits, so that NaN equals NaN.
    factors_differ = a.factors().contiguous().view(torch.int32) != b.factors().contiguous().view(torch.int32)
    return Internals(factors_differ.numel(), int(codes_differ.sum()), int(factors_differ.sum()))


def tensor_numbers(dump: Dump) -> list[dict[str, Any]]:
    """Summarize each tensor of the dump. Extremes and mean are of finite elements, and nan without any. Packed FP4
    codes and E8M0 scales are summarized as bytes.
    """
    return [_tensor(name, tensor) for name, tensor in sorted(dump.tensors.items())]


def _tensor(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    flat = tensor.reshape(-1)
    low = math.inf
    high = -math.inf
    total = 0.0
    finite = 0
    nan = 0
    inf = 0
    zeros = 0
    for start in range(0, flat.numel(), _PIECE):
        values = _wide(flat[start : start + _PIECE])
        nan += int(values.isnan().sum())
        inf += int(values.isinf().sum())
        zeros += int((values == 0).sum())
        values = values[values.isfinite()]
        if values.numel():
            finite += values.numel()
            total += float(values.sum())
            low = min(low, float(values.min()))
            high = max(high, float(values.max()))
    if not finite:
        low = high = total = math.nan
    return {
        "name": name,
        "dtype": dtype_name(tensor.dtype),
        "shape": tuple(tensor.shape),
        "nbytes": tensor.nbytes,
        "minimum": low,
        "maximum": high,
        "mean": total / max(finite, 1),
        "nan": nan,
        "inf": inf,
        "zeros": zeros,
    }


def _wide(values: torch.Tensor) -> torch.Tensor:
    if values.element_size() == 1:  # on some devices float8 can be converted to float64 only through float32
        values = values.float()
    return values.double()
