"""Speed of a recorded run: expected and measured times.

They are shown side by side, never mixed. The model's errors are largely the same in BF16 and in low precision, and
cancel in an expected speed-up, but not in a ratio of an expected and a measured time.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.coverage.other_steps import other_steps_of_run, recorded_products
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.run_files import own_traces
from te_precision_callbacks.runs.tables import facts_at_end
from te_precision_callbacks.speed.calibration import CalibrationError
from te_precision_callbacks.speed.devices import Device, DeviceError, SpeedError, device_named, device_reported
from te_precision_callbacks.speed.estimate import Step, StepSpeed
from te_precision_callbacks.speed.trace import MeasuredStep, TraceError, measure, read_trace


def step_of_run(run: RecordedRun) -> Step:
    """Return the last step of a run; raises SpeedError for a run without products."""
    products = []
    scopes = set()
    recipes = {}
    for row, product in recorded_products(facts_at_end(run.gemms), facts_at_end(run.operands)):
        products.append(product)
        if row["macs"]:
            scopes.add(row["scope"] or "")
        if row["recipe"]:
            recipes[product.layer] = row["recipe"]
    if not scopes:
        why = "Sessions record them from the first step on; logs of nvidia-dlfw-inspect do not have them."
        if run.unread:
            why = "A part of the run cannot be read."
        raise SpeedError(f"The run {run.run_id} has no matrix products with sizes, so nothing can be estimated. {why}")
    ends = run.events.filter(pc.equal(run.events["kind"], "segment_ended"))["iteration"].to_pylist()
    last = max([*run.steps["iteration"].to_pylist()[-1:], *ends], default=None)
    note = "The times are for the last step of the run."
    if last is not None:
        note = f"The times are for the last step of the run, iteration {last}."
    if others := other_steps_of_run(run):
        note += f" Other steps ran in another precision and take other times. {'. '.join(others)}."
    notes = [note]
    if len(scopes) > 1:
        notes.append(
            f"The run has layers of {len(scopes)} scopes, such as pipeline stages, on different ranks. The total is"
            " their sum, not the time of a step."
        )
    return Step(Coverage(products), recipes, tuple(notes))


def device_of_run(run: RecordedRun) -> Device:
    """Return the device of a run; raises DeviceError if it names no GPU, an unknown one, or several."""
    names = list(dict.fromkeys(str(segment.facts.get("gpu") or "") for segment in run.segments))
    if len(names) > 1:
        listed = ", ".join(gpu or "no GPU" for gpu in names)
        raise DeviceError(f"The run {run.run_id} ran on several devices: {listed}. Choose one with --device.")
    if not names or not names[0]:
        raise DeviceError(f"The run {run.run_id} ran without a GPU. Pass --device, for example --device h200.")
    device = device_reported(names[0])
    if device is None:
        raise DeviceError(
            f"The speed of {names[0]!r}, the GPU of the run {run.run_id}, is unknown. Choose a known device, such as"
            " --device h200, or describe yours in a file (docs/speed.md)."
        )
    return device


@dataclass(frozen=True)
class RunSpeed:
    """Speed of a run.

    Attributes:
        why_not: the reason if there are no expected times.
        measured: the times of a step in a trace; None without one.
        notes: unknown facts with their reasons; unreadable parts of the run come first.
    """

    expected: StepSpeed | None = None
    why_not: SpeedError | None = None
    measured: MeasuredStep | None = None
    notes: tuple[str, ...] = ()

    @property
    def not_compared(self) -> str:
        if self.expected is None or self.measured is None:
            return "There are no expected times to compare with measured ones."
        if not self.expected.device.is_called(self.measured.device):
            return (
                f"The trace was recorded on {visible(self.measured.device)}. Its times are not comparable with times"
                f" of {self.expected.device.title}."
            )
        if {time.layer for time in self.expected.times}.isdisjoint(row.layer for row in self.measured.products):
            return "The trace has none of the run's layers, so it is from another model."
        return ""

    @functools.cached_property
    def measured_layers(self) -> dict[str, float]:
        """Layer -> measured milliseconds of its GEMMs and casts without recomputation; empty if not compared."""
        sums: dict[str, float] = defaultdict(float)
        if self.measured is None or self.not_compared:
            return sums
        for row in self.measured.products:
            if row.layer and row.kind in ("gemm", "cast") and row.of_pass != "recompute":
                sums[row.layer] += row.ms
        return dict(sums)

    def as_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"device": None, "products": [], "total": None, "advice": [], "notes": []}
        if self.expected is not None:
            facts = self.expected.as_json()
        return {**facts, "notes": [*facts["notes"], *self.notes], "measured": self.measured}


def run_speed(
    run: RecordedRun,
    expect: Callable[[Step, Device], StepSpeed],
    *,
    device: Device | str | None = None,
    trace: Path | None = None,
) -> RunSpeed:
    """Return the speed of a run.

    Args:
        expect: estimates a step for a device.
        device: the device for expected times; None for the run's own GPU.
        trace: a trace of the run; None for the last one recorded with ``profile=``.

    Raises:
        DeviceError, CalibrationError, TraceError: the given device, measured times or trace cannot be used.
    """
    expected = None
    why_not = None
    if isinstance(device, str):
        device = device_named(device)
    try:
        expected = expect(step_of_run(run), device or device_of_run(run))
    except CalibrationError:
        raise
    except SpeedError as error:
        why_not = error
    notes = list(run.unread)
    measured = None
    if trace is not None:
        measured = measure(read_trace(trace))
    else:
        notes += run.events.filter(pc.equal(run.events["kind"], "profile"))["text"].to_pylist()
        if own := own_traces(run.path, run.run_id):
            try:
                measured = measure(read_trace(own[-1]))
            except TraceError as error:
                notes.append(f"The run's own trace is not used: {error}")
    speed = RunSpeed(expected, why_not, measured)
    if why_not is not None:
        notes.append(f"No times are expected: {why_not}")
    elif measured is not None and speed.not_compared:
        notes.append(speed.not_compared)
    return replace(speed, notes=tuple(notes))
