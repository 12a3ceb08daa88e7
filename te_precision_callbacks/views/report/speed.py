"""The expected speed of a run for a report."""

from __future__ import annotations

from typing import Any

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.terminal import plain
from te_precision_callbacks.layers.folding import folded
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.errors import DeviceError, SpeedError
from te_precision_callbacks.speed.estimate import LayerRow, StepSpeed, estimate_step, layer_rows
from te_precision_callbacks.speed.printing import in_short
from te_precision_callbacks.speed.recorded import device_of_run, step_of_run

_MOST_KINDS = 200
"""The kinds of layers that a page has, those that take longest."""

_MOST_NAMES = 4


def speed_facts(run: RecordedRun, device: Device | None = None) -> dict[str, Any]:
    """Return the speed of the step at the end of a run, in milliseconds.

    Returns:
        ``summary``, the answer in a sentence; ``device``, null if unknown; ``unknown``, why no times are expected and
        the remedy, may be empty; and if times are expected ``total``, ``kinds``, ``advice`` and ``notes``.
    """
    try:
        speed = estimate_step(step_of_run(run), device_of_run(run) if device is None else device)
    except SpeedError as error:
        remedy = " Make the report again with it: te-precision report RUN --device h200"
        unknown = f"{error}{remedy if isinstance(error, DeviceError) else ''}"
        return {"summary": "The speed of this run is unknown", "device": None, "unknown": unknown}
    json = speed.as_json()
    return {
        "summary": f"The matrix products of a step: {in_short(speed)}",
        "device": speed.device.title,
        "unknown": "",
        "kinds": _kinds(speed),
        **{key: plain(json[key]) for key in ("total", "advice", "notes")},
    }


def _kinds(speed: StepSpeed) -> dict[str, Any]:
    rows = layer_rows(speed)
    left = rows[_MOST_KINDS:]
    count = sum(len(row.layers) for row in left)
    more = f"and {many(len(left), 'more kind')} with {many(count, 'layer')}" if left else ""
    return {"rows": [_kind(row) for row in rows[:_MOST_KINDS]], "more": more}


def _kind(row: LayerRow) -> dict[str, Any]:
    first, *others = folded(row.layers)
    times = row.times
    figures = times.figures()
    if not times.known:
        figures |= {"high_ms": None, "low_ms": None, "cast_ms": None}
    if not times.is_low:
        figures |= {"speedup": None, "speedup_low": None, "speedup_high": None}
    return {
        **figures,
        "name": ", ".join(folded(row.layers, most=_MOST_NAMES)),
        "short": first + (f" and {len(others)} more" if others else ""),
        "first": row.layers[0],
        "layers": len(row.layers),
        "shapes": row.shapes,
        "recipes": row.recipes,
        "gains_nothing": row.gains_nothing,
        "verdict": times.verdict if times.is_low else "" if times.known else "unknown",
        "unknown": times.unknown,
        "why": row.why,
    }
