"""Print expected times."""

from __future__ import annotations

import math
from collections.abc import Mapping

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import many
from te_precision_callbacks.layers.folding import fold_names
from te_precision_callbacks.speed.estimate import StepSpeed, layer_rows
from te_precision_callbacks.speed.expected import Interval, Total, layers_without_gain
from te_precision_callbacks.speed.recorded import RunSpeed
from te_precision_callbacks.speed.trace import show as show_measured

_MOST_ROWS = 60
_MOST_NAMES = 4


def milliseconds(value: float) -> str:
    if math.isnan(value):
        return "unknown"
    if value < 100:
        return f"{value:.3f}"
    return f"{value:,.0f}"


def times_faster(speedup: float, interval: Interval) -> str:
    if math.isnan(speedup):
        return "unknown"
    if math.isnan(interval[0]):
        return f"{speedup:.2f}"
    return f"{speedup:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


def compare_with_bf16(total: Total) -> str:
    if total.speedup < 1:
        return (
            f"{times_faster(1 / total.speedup, (1 / total.interval[1], 1 / total.interval[0]))} times slower than BF16"
        )
    return f"{times_faster(total.speedup, total.interval)} times as fast as BF16"


def summarize_speed(speed: StepSpeed) -> str:
    total = speed.total
    device = speed.device.title
    if not total.is_low:
        why = "no matrix product"
        if total.unknown:
            why = "no product with a known cost"
        return f"no speed-up expected on {device}: {why} runs in low precision"
    text = f"expected {compare_with_bf16(total)} on {device}"
    count = len(layers_without_gain(speed.times))
    if count == 1:
        return f"{text}; 1 layer gains nothing"
    if count:
        return f"{text}; {many(count, 'layer')} gain nothing"
    return text


def show_times(speed: StepSpeed, measured: Mapping[str, float] | None = None) -> None:
    terminal.show_text(f"{speed.device.title}. Expected times, in milliseconds per step.")
    columns = ["layer", "tokens x in x out", "recipe", "BF16", "as run", "casts"]
    if measured:
        columns.append("measured")
    table = terminal.table(*columns, "times as fast", "result, or reason")
    table.columns[columns.index("recipe")].no_wrap = True
    rows = layer_rows(speed, measured)
    for row in rows[:_MOST_ROWS]:
        times = row.times
        low_ms = "unknown"
        cast_ms = ""
        measured_ms = ""
        faster = ""
        why = list(row.why)
        if times.known:
            low_ms = milliseconds(times.low_ms)
        if times.is_low:
            cast_ms = milliseconds(times.cast_ms)
            faster = times_faster(times.speedup, times.interval)
            why.insert(0, times.verdict)
        if row.measured_ms is not None:
            measured_ms = milliseconds(row.measured_ms)
        cells = [", ".join(row.shapes), row.recipes, milliseconds(times.high_ms), low_ms, cast_ms]
        if measured:
            cells.append(measured_ms)
        table.add_row(
            terminal.cell_lines(fold_names(row.layers, most=_MOST_NAMES)),
            *map(terminal.cell, [*cells, faster]),
            terminal.cell_lines(why),
        )
    terminal.show(table, optional=("casts", "tokens x in x out", "recipe"))
    if rows[_MOST_ROWS:]:
        left = sum(len(row.layers) for row in rows[_MOST_ROWS:])
        terminal.show_text(
            f"and {many(len(rows) - _MOST_ROWS, 'more row')} with {many(left, 'layer')}; --json lists all."
        )
    whole = speed.total
    text = (
        f"All products: {milliseconds(whole.high_ms)} ms in BF16, {milliseconds(whole.low_ms)} ms as run:"
        f" {compare_with_bf16(whole)}"
    )
    if not whole.is_low:
        text += ", because none runs in low precision"
    elif whole.verdict == "not resolved":
        text += ", not resolved"
    terminal.show_text(f"{text}.")


def show_step(speed: StepSpeed, measured: Mapping[str, float] | None = None) -> None:
    show_times(speed, measured)
    terminal.show_text("")
    if not speed.advice:
        terminal.show_text("No advice: no change was found that saves time.")
    for advice in speed.advice:
        saves, low, high = map(milliseconds, (advice.saves_ms, *advice.interval))
        terminal.show_text(
            f"{advice.text}: saves about {saves} ms per step ({low} to {high}).{advice.note and f' {advice.note}.'}",
            hanging=2,
        )
        terminal.show_as_it_is(advice.patch, indent=4)
    terminal.show_notes(speed.notes)


def show_run(known: RunSpeed) -> None:
    if known.expected is not None:
        show_step(known.expected, known.measured_layers)
    if known.measured is not None:
        terminal.show_text("")
        terminal.show_text("Measured in the trace")
        show_measured(known.measured)
    terminal.show_notes(known.notes)
