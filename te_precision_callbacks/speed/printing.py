"""Prints expected times: tables for the terminal, and objects for JSON.

show_times(times, device, plan)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import many
from te_precision_callbacks.layers.folding import folded
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.expected import CallPlan, ProductTime, total

_MOST_ROWS = 60
_MOST_NAMES = 4


def milliseconds(value: float) -> str:
    """A time in milliseconds with three digits."""
    return "unknown" if math.isnan(value) else f"{value:.3f}" if value < 100 else f"{value:,.0f}"


def times_faster(speedup: float, interval: tuple[float, float]) -> str:
    """A speed-up with its interval: ``1.47 (1.20 to 1.80)``."""
    if math.isnan(speedup):
        return "unknown"
    return f"{speedup:.2f}" + ("" if math.isnan(interval[0]) else f" ({interval[0]:.2f} to {interval[1]:.2f})")


def show_times(times: Sequence[ProductTime], device: Device, plan: CallPlan) -> None:
    """Print a row for each kind of product: alike products of several layers are one row."""
    terminal.show_text(f"{device.title}, plan {plan}. Times are expected ones, in milliseconds of a step.")
    table = terminal.table(
        "layer", "GEMM", "MxKxN", "recipe", "BF16", "as it runs", "casts", "times as fast", "verdict"
    )
    alike: dict[object, list[ProductTime]] = defaultdict(list)
    for one in times:
        alike[one.gemm, one.backward, one.shape, one.calls, one.recipe, one.interval, one.source].append(one)
    rows = list(alike.values())
    for row in rows[:_MOST_ROWS]:
        one = row[0]
        names = folded([each.layer for each in row], most=_MOST_NAMES)
        table.add_row(
            terminal.cell_lines(names),
            terminal.cell(one.gemm),
            terminal.cell(one.shape),
            terminal.cell(one.recipe or "none"),
            terminal.cell(milliseconds(sum(each.high_ms for each in row))),
            terminal.cell(milliseconds(sum(each.low_ms for each in row))),
            terminal.cell(milliseconds(sum(each.cast_ms for each in row)) if one.cost is not None else ""),
            terminal.cell(times_faster(one.speedup, one.interval) if one.recipe else ""),
            terminal.cell(one.verdict or one.why),
        )
    terminal.show(table)
    if rows[_MOST_ROWS:]:
        left = sum(len(row) for row in rows[_MOST_ROWS:])
        terminal.show_text(f"and {many(len(rows) - _MOST_ROWS, 'more row')} with {left} products, which --json has.")
    whole = total(times, device)
    terminal.show_text(
        f"All products: {milliseconds(whole.high_ms)} ms in BF16, {milliseconds(whole.low_ms)} ms as they run:"
        f" {times_faster(whole.speedup, whole.interval)} times as fast, {whole.verdict or 'unknown'}."
    )


def as_json(times: Sequence[ProductTime], device: Device, plan: CallPlan) -> dict[str, Any]:
    """Expected times as an object for JSON."""
    return {
        "device": device.title,
        "plan": plan,
        "products": [one.as_json() for one in times],
        "total": total(times, device).as_json(),
    }


def notes_of(times: Sequence[ProductTime], device: Device) -> list[str]:
    """What the reader of the times has to know about their source."""
    notes = []
    fitted = device.fitted
    recipes = sorted({one.recipe for one in times if one.cost is not None and one.source == "model"})
    if not device.is_measured and recipes:
        notes.append(
            f"The constants were measured on {fitted.measured_on}, not on {device.title}: the intervals are wider."
            " --calibrate measures them on the GPU."
        )
        alone = [recipe for recipe in recipes if recipe not in ("fp8_current_scaling", "fp8_delayed_scaling")]
        if alone:
            notes.append(
                f"{' and '.join(alone)}: published times are of one device alone ({fitted.measured_on}). Whether they"
                " hold on others has not been tested."
            )
    unknown = sum(1 for one in times if one.recipe and one.cost is None)
    if unknown:
        notes.append(
            f"The cost of {many(unknown, 'product')} in low precision is unknown: attention and products without a"
            " weight, or FP8 of a recipe that is not known. They are in no total."
        )
    return notes
