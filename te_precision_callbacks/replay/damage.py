"""Says where a result of a GEMM is wrong, and of which known kind the damage is.

damage_in_words(codes, result, bad, bad_rows, bad_columns)     # "rows 3 and 17 are swapped"
"""

from __future__ import annotations

import torch

_MOST_COMPARED = 32
_MOST_NAMED = 4
_ALIKE = 0.05
"""How far, relative to its norm, a row may be from the one that it is taken for: rounding is far less."""


def damage_in_words(
    codes: torch.Tensor,
    result: torch.Tensor,
    bad: torch.Tensor,
    bad_rows: torch.Tensor,
    bad_columns: torch.Tensor,
) -> str:
    """The damage of a result.

    Args:
        codes, result: the product of the codes, and what the kernel has made of it: float64, [n, m].
        bad: which elements are beyond their tolerance.
        bad_rows, bad_columns: which rows and columns are, as wholes.
    """
    rows = (bad.any(1) | bad_rows).nonzero().flatten()
    columns = (bad.any(0) | bad_columns).nonzero().flatten()
    number = int(bad.sum())
    if not number:
        if len(rows) or len(columns):
            places = _named("row", rows, bad.shape[0]), _named("column", columns, bad.shape[1])
            return f"{', '.join(places)}: off by more than rounding"
        return "the whole result is off by more than rounding"
    for what, where, one, other in (("rows", rows, codes, result), ("columns", columns, codes.t(), result.t())):
        swapped = _swapped(one, other, where)
        if swapped:
            return f"{what} {swapped}"
    height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
    tile = slice(int(rows[0]), int(rows[0]) + height), slice(int(columns[0]), int(columns[0]) + width)
    share = number / (height * width)
    whole = height * width == bad.numel()
    spans = (_span(what, part) for what, part in zip(("row", "column"), tile, strict=True))
    place = "the whole result" if whole else ", ".join(spans)
    if share > 0.5:
        kind = _kind_of(codes[tile], result[tile], bad[tile])
        return f"{place}: {kind}"
    if len(rows) <= _MOST_NAMED:
        return f"{_named('row', rows, bad.shape[0])}: {number} elements are wrong"
    if len(columns) <= _MOST_NAMED:
        return f"{_named('column', columns, bad.shape[1])}: {number} elements are wrong"
    return f"{number} of {bad.numel()} elements ({100 * number / bad.numel():.2g} %) are wrong, scattered over {place}"


def _span(what: str, part: slice) -> str:
    one = part.stop - part.start == 1
    return f"{what} {part.start}" if one else f"{what}s {part.start} to {part.stop - 1}"


def _kind_of(codes: torch.Tensor, result: torch.Tensor, bad: torch.Tensor) -> str:
    if not result[bad].abs().any():
        return "all zeros"
    if not result[bad].isfinite().all():
        return "inf or nan"
    if codes.shape[0] == codes.shape[1] and _is_alike(codes.t(), result):
        return "transposed"
    return f"{int(bad.sum())} elements are wrong"


def _named(what: str, where: torch.Tensor, of: int) -> str:
    if not len(where):
        return f"no {what}"
    if len(where) == of:
        return f"all {what}s"
    listed = ", ".join(map(str, where[:_MOST_NAMED].tolist()))
    more = f" and {len(where) - _MOST_NAMED} more" if len(where) > _MOST_NAMED else ""
    return f"{what}{'s' if len(where) > 1 else ''} {listed}{more}"


def _swapped(codes: torch.Tensor, result: torch.Tensor, where: torch.Tensor) -> str:
    """Rows that hold what belongs into other rows; empty if there are none."""
    if not 2 <= len(where) <= _MOST_COMPARED:
        return ""
    pairs = [
        (one, other)
        for one in where.tolist()
        for other in where.tolist()
        if one < other and _is_alike(codes[one], result[other]) and _is_alike(codes[other], result[one])
    ]
    if not pairs or 2 * len(pairs) < len(where):
        return ""
    return ", ".join(f"{one} and {other}" for one, other in pairs[:_MOST_NAMED]) + " are swapped"


def _is_alike(expected: torch.Tensor, found: torch.Tensor) -> bool:
    norm = float(expected.norm())
    return norm > 0 and float((expected - found).norm()) <= _ALIKE * norm
