"""The speed of a run for a report: expected times, and what was measured in its trace.

speed_facts(run)["kinds"][0]        # {"layers": 96, "name": "layers.{0-95}.fc1", "high_ms": ..., "low_ms": ..., ...}

Alike layers of a large model are one row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from te_precision_callbacks.base.counts import many, size
from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.layers.folding import folded
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.trace_files import own_traces
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.errors import DeviceError, SpeedError
from te_precision_callbacks.speed.estimate import Step, StepSpeed, estimate_step
from te_precision_callbacks.speed.expected import ProductTime, Total, alike, total
from te_precision_callbacks.speed.printing import reasons_in_words, recipes_in_words
from te_precision_callbacks.speed.recorded import device_of_run, measured_step, step_of_run
from te_precision_callbacks.speed.trace import MeasuredStep, TraceError
from te_precision_callbacks.views.speeds import in_short, without_gain

_MOST_KINDS = 200
"""The kinds of layers that a page has, those that take longest."""

_MOST_NAMES = 4

_MOST_TRACE_BYTES = 64_000_000
"""A larger trace is not read for a page: it takes minutes."""

_TIMED = ("gemm", "cast")
"""The kinds of kernels whose times stand beside expected ones."""


def speed_facts(run: RecordedRun, device: Device | None = None) -> dict[str, Any]:
    """The speed of the step at the end of a run.

    Args:
        run: the run.
        device: the device that times are expected for; None for the run's own GPU.

    Returns:
        ``summary``, the answer in a sentence; ``device``, null if it is not known; ``unknown``, why nothing is
        expected and what to do, empty if something is; ``trace``, what was measured; and
        if something is expected ``total``, ``kinds``, ``advice`` and ``notes``. Times are milliseconds of a step.
    """
    found: dict[str, Any] = {"device": None, "unknown": "", "trace": None}
    step, speed = None, None
    try:
        step = step_of_run(run)
        chosen = device_of_run(run, device)
        found["device"] = chosen.title
        speed = estimate_step(step, chosen)
    except DeviceError as error:
        found["unknown"] = f"{visible(str(error))} Make the report again with it: te-precision report RUN --device h200"
    except SpeedError as error:
        found["unknown"] = visible(str(error))
    found["trace"], measured = _trace(run, step, speed)
    if step is None or speed is None:
        return {**found, "summary": "The speed of this run is unknown"}
    return {
        **found,
        "summary": f"The matrix products of a step: {in_short(speed)}",
        "plan": speed.plan,
        "total": _json(speed.total.as_json()),
        "kinds": _kinds(speed, measured),
        "advice": [{key: _visible(value) for key, value in one.as_json().items()} for one in speed.advice],
        "notes": [visible(note) for note in speed.notes],
    }


def _visible(value: object) -> object:
    """A text of several lines with what can be seen; a number as JSON has it."""
    if isinstance(value, str):
        return "\n".join(map(visible, value.split("\n")))
    return _number(value)


def _number(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(value: Any) -> Any:
    """Without numbers that are not finite, which are unknown."""
    if isinstance(value, Mapping):
        return {key: _json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_json(each) for each in value]
    return _visible(value)


def _trace(
    run: RecordedRun, step: Step | None, speed: StepSpeed | None
) -> tuple[dict[str, Any] | None, Mapping[str, float]]:
    """What the last trace of a run says, None if the run has no trace; and the measured milliseconds of the GEMMs and
    casts of layers, where they are comparable with expected ones."""
    files = own_traces(run.path, run.run_id)
    if not files:
        return None, {}
    path = files[-1]
    told: dict[str, Any] = {"name": visible(path.name), "problem": "", "beside": "", "kinds": []}
    try:
        bytes_of_file = path.stat().st_size
        if bytes_of_file > _MOST_TRACE_BYTES:
            told["problem"] = f"It has {size(bytes_of_file)}, which takes too long to read for a page."
            return told, {}
        measured = measured_step(run, step, path)
    except (TraceError, OSError) as error:
        told["problem"] = visible(str(error))
        return told, {}
    told |= _trace_facts(measured)
    told["beside"] = _why_not_beside(measured, step, speed)
    sums: dict[str, float] = defaultdict(float)
    for row in measured.products:
        if row.layer and row.kind in _TIMED and not told["beside"]:
            sums[row.layer] += row.ms
    return told, sums


def _trace_facts(measured: MeasuredStep) -> dict[str, Any]:
    return {
        "device": visible(measured.device),
        "iterations": list(measured.iterations),
        "wall_ms": measured.wall_ms,
        "kinds": [
            {"kind": kind, "format": form, "ms": ms, "share": ms / measured.work_ms if measured.work_ms else None}
            for (kind, form), ms in measured.by_kind().items()
        ],
        "notes": [visible(note) for note in measured.notes],
    }


def _why_not_beside(measured: MeasuredStep, step: Step | None, speed: StepSpeed | None) -> str:
    """Why measured times do not stand beside expected ones; empty if they do."""
    if step is None or speed is None:
        return "Nothing is expected that measured times could be compared with."
    if not measured.on_device:
        return f"The trace is of a CPU. Its times are not comparable with those of {speed.device.title}."
    if not speed.device.is_called(measured.device):
        return (
            f"The trace is of {visible(measured.device)}. Its times are not comparable with those of"
            f" {speed.device.title}."
        )
    return ""


def _kinds(speed: StepSpeed, measured: Mapping[str, float]) -> dict[str, Any]:
    """Kinds of layers, those that take longest first; and what is left of them."""
    of_layers = [(layers, total(layers[0], speed.device)) for layers in alike(speed.times).values()]
    of_layers.sort(key=lambda found: -len(found[0]) * max(found[1].high_ms, _known(found[1].low_ms)))
    nothing = without_gain(speed)
    rows = [_kind(layers, whole, nothing, measured) for layers, whole in of_layers[:_MOST_KINDS]]
    left = of_layers[_MOST_KINDS:]
    count = sum(len(layers) for layers, _ in left)
    more = f"and {many(len(left), 'more kind')} with {many(count, 'layer')}" if left else ""
    return {"rows": rows, "more": more}


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _kind(
    layers: Sequence[Sequence[ProductTime]], whole: Total, nothing: set[str], measured: Mapping[str, float]
) -> dict[str, Any]:
    count, names = len(layers), [products[0].layer for products in layers]
    first, *others = folded(names)
    is_known = bool(whole.known)
    is_low = is_known and whole.is_low
    low_ms, cast_ms = whole.low_ms * count, whole.cast_ms * count
    low, high = whole.interval if is_low else (math.nan, math.nan)
    return {
        "name": visible(", ".join(folded(names, most=_MOST_NAMES))),
        "short": visible(first) + (f" and {len(others)} more" if others else ""),
        "first": names[0],
        "layers": count,
        "shapes": list(dict.fromkeys(one.sizes for one in layers[0])),
        "recipes": visible(recipes_in_words(layers[0])),
        "high_ms": whole.high_ms * count if is_known else None,
        "low_ms": low_ms if is_known else None,
        "cast_ms": cast_ms if is_known else None,
        "speedup": _number(whole.speedup) if is_low else None,
        "speedup_low": _number(low),
        "speedup_high": _number(high),
        "gains_nothing": names[0] in nothing,
        "verdict": whole.verdict if is_low else "" if is_known else "unknown",
        "unknown": whole.unknown * count,
        "why": [visible(why) for why in dict.fromkeys(reasons_in_words(layers[0]))],
        "measured_ms": sum(measured[name] for name in names) if all(name in measured for name in names) else None,
    }
