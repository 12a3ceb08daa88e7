"""All that is known of a recorded run's speed: expected times and measured ones.

    step = step_of_run(open_run("logs"))
    known = run_speed(open_run("logs"), estimate_step, device="h200")
    known.expected, known.measured, known.notes

Expected and measured times stand beside each other and are not mixed: the errors of the model are largely the same in
BF16 and in low precision, so they cancel in an expected speed-up, and would not in one of which one side is measured.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from te_precision_callbacks.base.counts import size
from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.coverage.recorded import other_steps_of_run, recorded_products
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.tables import at_the_end
from te_precision_callbacks.runs.trace_files import own_traces
from te_precision_callbacks.speed.devices import Device, device_named, device_reported
from te_precision_callbacks.speed.errors import CalibrationError, DeviceError, SpeedError
from te_precision_callbacks.speed.estimate import Step, StepSpeed
from te_precision_callbacks.speed.trace import MeasuredStep, TraceError, measure, read_trace


def step_of_run(run: RecordedRun) -> Step:
    """The step at the end of a run.

    Raises:
        SpeedError: the run has no products.
    """
    found = list(recorded_products(at_the_end(run.gemms), at_the_end(run.operands)))
    products = [product for _, product in found]
    scopes = {row["scope"] or "" for row, _ in found if row["macs"]}
    recipes = {product.layer: row["recipe"] for row, product in found if row["recipe"]}
    if not any(product.macs for product in products):
        why = (
            "A part of the run cannot be read."
            if run.unread
            else "They are recorded with a session's own coverage, from the first step on; a log of nvidia-dlfw-inspect"
            " has none."
        )
        raise SpeedError(f"The run {run.run_id} has no matrix products with sizes, so nothing can be estimated. {why}")
    notes = [_which_step(run)]
    if len(scopes) > 1:
        notes.append(
            f"The run has layers of {len(scopes)} scopes, such as pipeline stages, which run on different ranks. The"
            " total is the sum over all of them, and not the time of a step."
        )
    return Step(Coverage(products), recipes, tuple(notes))


def _which_step(run: RecordedRun) -> str:
    """Which iteration the step at the end of a run is, and what ran otherwise in others."""
    ends = run.events.filter(pc.equal(run.events["kind"], "segment_ended"))["iteration"].to_pylist()
    last = max([*run.steps["iteration"].to_pylist()[-1:], *ends], default=None)
    told = f"Times are expected for the last step of the run{'' if last is None else f', iteration {last}'}."
    others = [f"{line}." for line in other_steps_of_run(run)]
    changed = "Other steps ran in another precision, and take other times."
    return " ".join([told, changed, *others] if others else [told])


def device_of_run(run: RecordedRun, given: Device | None) -> Device:
    """Return the device that times are expected for: the given one, or that of the run.

    Raises:
        DeviceError: the run names no GPU, one that is not known, or several.
    """
    if given is not None:
        return given
    found = list(dict.fromkeys(segment.facts.get("gpu") for segment in run.segments))
    if len(found) > 1:
        names = ", ".join(str(gpu or "no GPU") for gpu in found)
        raise DeviceError(f"The run {run.run_id} ran on several devices: {names}. Choose one with --device.")
    reported = found[0] if found else None
    if not reported:
        raise DeviceError(
            f"The run {run.run_id} ran without a GPU. Choose the device that times are expected for, such as"
            " --device h200."
        )
    device = device_reported(str(reported))
    if device is None:
        raise DeviceError(
            f"Nothing is known of the speed of {reported!r}, on which the run {run.run_id} ran. Describe it in a file"
            " for --device, as docs/speed.md shows, or choose a known device, such as --device h200."
        )
    return device


@dataclass(frozen=True)
class RunSpeed:
    """The speed of a run.

    Attributes:
        expected: expected times; None if there are none.
        why_not: the reason why there are none.
        measured: the times of a step in a trace; None without one.
        trace: the trace.
        trace_problem: why the run's own trace gives no times; empty if it does.
        notes: what else is not known, and why; what cannot be read of the run comes first.
    """

    expected: StepSpeed | None = None
    why_not: SpeedError | None = None
    measured: MeasuredStep | None = None
    trace: Path | None = None
    trace_problem: str = ""
    notes: tuple[str, ...] = ()

    @property
    def not_compared(self) -> str:
        """Why measured times do not stand beside expected ones; empty if they do."""
        if self.expected is None or self.measured is None:
            return "There are no expected times to compare with measured ones."
        if self.expected.device.is_called(self.measured.device):
            return ""
        return (
            f"The trace is of {visible(self.measured.device)}. Its times are not comparable with those of"
            f" {self.expected.device.title}."
        )

    @functools.cached_property
    def measured_layers(self) -> dict[str, float]:
        """Layer -> the measured milliseconds of its GEMMs and casts; empty if they are not compared with expected ones.
        What an activation checkpoint computes again is in neither."""
        sums: dict[str, float] = defaultdict(float)
        for row in () if self.measured is None or self.not_compared else self.measured.products:
            if row.layer and row.kind in ("gemm", "convolution", "cast") and row.of_pass != "recompute":
                sums[row.layer] += row.ms
        return dict(sums)

    def as_json(self) -> dict[str, Any]:
        """Return the object that ``te-precision speed RUN --json`` prints."""
        found: dict[str, Any] = {"device": None, "products": [], "total": None, "advice": [], "notes": []}
        if self.expected is not None:
            found = self.expected.as_json()
        return {**found, "notes": [*found["notes"], *self.notes], "measured": self.measured}


def run_speed(
    run: RecordedRun,
    expect: Callable[[Step, Device], StepSpeed],
    *,
    device: Device | str | None = None,
    trace: Path | None = None,
    most_trace_bytes: float = math.inf,
) -> RunSpeed:
    """Return the speed of a run.

    Args:
        run: the run.
        expect: estimates a step for a device.
        device: the device that times are expected for; None for the run's own GPU.
        trace: a trace of the run; None for the last one that the run has made itself with ``profile=``.
        most_trace_bytes: the largest trace of its own that is read.

    Raises:
        DeviceError: the given device is not known.
        CalibrationError: measured times cannot be used.
        TraceError: the given trace cannot be read, or is of another run.
    """
    step, expected, why_not = None, None, None
    chosen = device_named(device) if isinstance(device, str) else device
    try:
        step = step_of_run(run)
        expected = expect(step, device_of_run(run, chosen))
    except CalibrationError:
        raise
    except SpeedError as error:
        why_not = error
    own = [] if trace is not None else own_traces(run.path, run.run_id)
    notes = [*run.unread, *(_said_of_profile(run, has_trace=bool(own)) if trace is None else [])]
    path, measured, problem = trace or (own[-1] if own else None), None, ""
    # Layers of several scopes have other names in a step than in the trace of one of its ranks.
    products = step.coverage if step is not None and len(run.gemms["scope"].unique()) == 1 else ()
    if path is not None:
        try:
            if own and path.stat().st_size > most_trace_bytes:
                raise TraceError(f"{path} has {size(path.stat().st_size)}, which takes too long to read.")
            measured = measure(read_trace(path), products)
        except TraceError as error:
            if trace is not None:
                raise
            problem = str(error)
            notes.append(f"The run's own trace is left out: {problem}")
    known = RunSpeed(expected, why_not, measured, path, problem)
    if why_not is not None:
        notes.append(f"No times are expected: {why_not}")
    elif measured is not None and known.not_compared:
        notes.append(known.not_compared)
    return replace(known, notes=tuple(notes))


def _said_of_profile(run: RecordedRun, *, has_trace: bool) -> list[str]:
    """What the session has warned of its last ``profile=``, or that there is no trace of it."""
    asked = [segment for segment in run.segments if segment.facts.get("profile") is not None]
    if not asked:
        return []
    last = asked[-1]
    warned = pc.and_(pc.equal(run.events["kind"], "profile"), pc.equal(run.events["segment"], last.number))
    said: list[str] = run.events.filter(warned)["text"].to_pylist()
    if said or has_trace:
        return said
    steps = run.steps["iteration"].to_pylist()
    reached = f"the last iteration with statistics is {steps[-1]}" if steps else "no iteration has statistics"
    asked_for = f"profile={last.facts['profile']!r} asked for a trace, and there is none"
    return [f"{asked_for}. The status of the run is {last.status!r}, and {reached}."]
