"""The speed of a run for a report: expected times, and measured times of its trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.terminal import plain
from te_precision_callbacks.layers.folding import folded
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.errors import DeviceError
from te_precision_callbacks.speed.estimate import LayerRow, StepSpeed, estimate_step, layer_rows
from te_precision_callbacks.speed.printing import in_short
from te_precision_callbacks.speed.recorded import RunSpeed, run_speed

_MOST_KINDS = 200
"""The kinds of layers that a page has, those that take longest."""

_MOST_NAMES = 4

_MOST_TRACE_BYTES = 64_000_000
"""A larger trace is not read for a page: it takes minutes."""


def speed_facts(run: RecordedRun, device: Device | None = None) -> dict[str, Any]:
    """Return the speed of the step at the end of a run, in milliseconds.

    Returns:
        ``summary``, the answer in a sentence; ``device``, null if unknown; ``unknown``, why no times are expected and
        the remedy, may be empty; ``trace``, the measured times; and if times are expected ``total``, ``kinds``,
        ``advice`` and ``notes``.
    """
    known = run_speed(run, estimate_step, device=device, most_trace_bytes=_MOST_TRACE_BYTES)
    speed = known.expected
    facts: dict[str, Any] = {
        "summary": "The speed of this run is unknown",
        "device": None,
        "unknown": "",
        "trace": _trace(known),
    }
    if speed is None:
        facts["unknown"] = str(known.why_not)
        if isinstance(known.why_not, DeviceError):
            facts["unknown"] += " Make the report again with it: te-precision report RUN --device h200"
    else:
        json = speed.as_json()
        facts |= {
            "summary": f"The matrix products of a step: {in_short(speed)}",
            "device": speed.device.title,
            "kinds": _kinds(speed, known.measured_layers),
            **{key: plain(json[key]) for key in ("total", "advice", "notes")},
        }
    return facts


def _trace(known: RunSpeed) -> dict[str, Any] | None:
    if known.trace is None:
        return None
    facts: dict[str, Any] = {"name": known.trace.name, "problem": known.trace_problem, "beside": "", "kinds": []}
    measured = known.measured
    if measured is None:
        return facts
    kinds = [
        {"kind": kind, "format": form, "ms": ms, "share": ms / measured.work_ms if measured.work_ms else None}
        for (kind, form), ms in measured.by_kind().items()
    ]
    names = ("device", "iterations", "wall_ms", "notes")
    return {**facts, "beside": known.not_compared, "kinds": kinds, **{name: getattr(measured, name) for name in names}}


def _kinds(speed: StepSpeed, measured: Mapping[str, float]) -> dict[str, Any]:
    rows = layer_rows(speed, measured)
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
        "measured_ms": row.measured_ms,
    }
