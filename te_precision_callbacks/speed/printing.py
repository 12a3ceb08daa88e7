"""Prints expected times: tables for the terminal.

show_step(speed)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import many
from te_precision_callbacks.layers.folding import folded
from te_precision_callbacks.speed.advice import Advice
from te_precision_callbacks.speed.costs import CallPlan
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.estimate import StepSpeed
from te_precision_callbacks.speed.expected import ProductTime, Total, alike, total
from te_precision_callbacks.speed.recorded import RunSpeed
from te_precision_callbacks.speed.trace import show as show_measured

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


def show_times(times: Sequence[ProductTime], whole: Total, device: Device, plan: CallPlan) -> None:
    """Print a row for each layer: alike layers are one row, and the GEMMs of a layer share its casts."""
    terminal.show_text(f"{device.title}, plan {plan}. Expected times, in milliseconds per step.")
    table = terminal.table(
        "layer",
        "tokens x in x out",
        "recipe",
        "BF16",
        "as it runs",
        "of it casts",
        "times as fast",
        "verdict, or why not low",
    )
    rows = list(alike(times, by_name=True).values())
    for layers in rows[:_MOST_ROWS]:
        one = total(layers[0], device)
        table.add_row(
            terminal.cell_lines(folded([each[0].layer for each in layers], most=_MOST_NAMES)),
            terminal.cell(layers[0][0].sizes),
            terminal.cell(recipes_in_words(layers[0])),
            terminal.cell(milliseconds(one.high_ms * len(layers))),
            terminal.cell(milliseconds(one.low_ms * len(layers)) if one.known else "unknown"),
            terminal.cell(milliseconds(one.cast_ms * len(layers)) if one.is_low else ""),
            terminal.cell(times_faster(one.speedup, one.interval) if one.is_low else ""),
            terminal.cell_lines(dict.fromkeys([*([one.verdict] if one.is_low else []), *reasons_in_words(layers[0])])),
        )
    terminal.show(table)
    if rows[_MOST_ROWS:]:
        left = sum(len(layers) for layers in rows[_MOST_ROWS:])
        terminal.show_text(
            f"and {many(len(rows) - _MOST_ROWS, 'more row')} with {many(left, 'layer')}, which --json has."
        )
    terminal.show_text(
        f"All products: {milliseconds(whole.high_ms)} ms in BF16, {milliseconds(whole.low_ms)} ms as they run:"
        f" {times_faster(whole.speedup, whole.interval)} times as fast"
        + (f", {whole.verdict}." if whole.is_low else ", since none runs in low precision.")
    )


def recipes_in_words(products: Sequence[ProductTime]) -> str:
    """The recipe of a layer, or those of its GEMMs."""
    found = {product.recipe or "none" for product in products}
    if len(found) == 1:
        return found.pop()
    return ", ".join(f"{product.gemm} {product.recipe or 'none'}" for product in products)


def reasons_in_words(products: Sequence[ProductTime]) -> list[str]:
    """Why products of a layer are not in low precision, one for each of them."""
    found = [product.why for product in products if not product.recipe and product.why]
    return [*found, *dict.fromkeys(filter(None, map(_mask_in_words, products)))]


def _mask_in_words(product: ProductTime) -> str:
    """How the mask of attention counts; empty for what has none."""
    if product.family != "attention" or product.mask_share == 1:
        return ""
    if product.mask_share is None:
        return "counted in full: mask unknown"
    return f"counted at {100 * product.mask_share:.1f} %: causal mask"


def show_step(speed: StepSpeed) -> None:
    """Print what is expected of a step: its products, advice and notes."""
    show_times(speed.times, speed.total, speed.device, speed.plan)
    _show_advice(speed.advice)
    terminal.show_notes(speed.notes)


def show_run(known: RunSpeed) -> None:
    """Print what is known of a run: expected times, and measured ones beside them."""
    if known.expected is not None:
        show_step(known.expected)
        if known.is_comparable:
            terminal.show_text("")
            _show_beside(known, known.expected.times)
    if known.measured is not None:
        terminal.show_text("")
        terminal.show_text("Measured in the trace")
        show_measured(known.measured)
    terminal.show_notes(known.notes)


def _show_beside(known: RunSpeed, times: Sequence[ProductTime]) -> None:
    """Print what GEMMs are expected to take, and what they took; alike layers are one row."""
    table = terminal.table("layer", "GEMM", "expected", "measured", "ratio")
    for layers in list(alike(times, by_name=True).values())[:_MOST_ROWS]:
        for same in zip(*layers, strict=True):
            measured = [known.gemm_ms(one) for one in same]
            took = sum(ms for ms in measured if ms is not None)
            expected = sum(_gemm_ms(one) for one, ms in zip(same, measured, strict=True) if ms is not None)
            seen = any(ms is not None for ms in measured)
            table.add_row(
                terminal.cell_lines(folded([one.layer for one in same], most=_MOST_NAMES)),
                terminal.cell(same[0].gemm),
                terminal.cell(milliseconds(expected if seen else sum(map(_gemm_ms, same)))),
                terminal.cell(milliseconds(took) if seen else "not in the trace"),
                terminal.cell(f"{took / expected:.2f}" if seen and expected > 0 else ""),
            )
    terminal.show(table)


def _gemm_ms(one: ProductTime) -> float:
    """What the GEMM alone of a product is expected to take."""
    return one.low_ms - one.cast_ms


def _show_advice(advice: Sequence[Advice]) -> None:
    terminal.show_text("")
    if not advice:
        terminal.show_text("No change that saves time was found.")
    for one in advice:
        low, high = one.interval
        around = (
            f"{milliseconds(low)} to {milliseconds(high)}" if math.isfinite(low) else f"at most {milliseconds(high)}"
        )
        note = f"; {one.note}" if one.note else ""
        terminal.show_text(f"{one.text}; saves {milliseconds(one.saves_ms)} ms per step ({around}){note}", hanging=2)
        terminal.show_as_it_is(one.patch, indent=4)
