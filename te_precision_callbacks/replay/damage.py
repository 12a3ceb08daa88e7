from __future__ import annotations

import torch

_MOST_NAMED = 4


def describe_damage(bad: torch.Tensor, bad_rows: torch.Tensor, bad_columns: torch.Tensor) -> str:
    """Describe the wrong elements: ``rows 16 to 47, columns 32 to 63: 1,024 elements are wrong``.

    The arguments have the elements, [n, m], the rows and the columns beyond their tolerance.
    """
    rows = (bad.any(1) | bad_rows).nonzero().flatten().tolist()
    columns = (bad.any(0) | bad_columns).nonzero().flatten().tolist()
    number = int(bad.sum())
    if not number:
        places = [_place("row", rows), _place("column", columns)] if rows or columns else ["the whole result"]
        return f"{', '.join(filter(None, places))}: off by more than rounding"
    if len(rows) == bad.shape[0] and len(columns) == bad.shape[1]:
        place = "the whole result"
    elif min(len(rows), len(columns)) <= _MOST_NAMED:
        place = _place("row", rows) if len(rows) <= len(columns) else _place("column", columns)
    else:
        place = f"{_place('row', rows)}, {_place('column', columns)}"
    verb = "element is" if number == 1 else "elements are"
    return f"{place}: {number:,} {verb} wrong ({100 * number / bad.numel():.2g} % of the result)"


def _place(name: str, indices: list[int]) -> str:
    if not indices:
        return ""
    plural = "" if len(indices) == 1 else "s"
    if len(indices) <= _MOST_NAMED:
        return f"{name}{plural} {', '.join(map(str, indices))}"
    is_span = indices[-1] - indices[0] + 1 == len(indices)
    return f"{name}s {indices[0]} to {indices[-1]}" if is_span else f"{len(indices)} {name}s"
