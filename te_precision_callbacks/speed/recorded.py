"""All that is known of a recorded run's speed: expected times and measured ones.

    step = step_of_run(open_run("logs"))
    known = run_speed(open_run("logs"), estimate_step, device="h200")
    known.expected, known.measured, known.notes

Expected and measured times stand beside each other and are not mixed: the errors of the model are largely the same in
BF16 and in low precision, so they cancel in an expected speed-up, and would not in one of which one side is measured.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.coverage.recorded import other_steps_of_run, recorded_products
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.tables import at_the_end
from te_precision_callbacks.runs.trace_files import own_traces
from te_precision_callbacks.speed.devices import Device, device_named, device_reported
from te_precision_callbacks.speed.errors import DeviceError, SpeedError
from te_precision_callbacks.speed.estimate import Step, StepSpeed
from te_precision_callbacks.speed.expected import ProductTime
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


def device_of_run(run: RecordedRun, given: Device | str | None) -> Device:
    """The device that times are expected for: the given one, or that of this name, or that of the run.

    Raises:
        DeviceError: the run names no GPU, one that is not known, or several.
    """
    if given is not None:
        return device_named(given) if isinstance(given, str) else given
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


_GEMMS = ("gemm", "convolution")

Expect = Callable[[Step, Device], StepSpeed]


@dataclass(frozen=True)
class RunSpeed:
    """What is known of a run's speed.

    Attributes:
        expected: expected times; None for a run without a GPU, if no device was named.
        measured: what a step took in a trace; None without one.
        notes: what is not known, and why; what cannot be read of the run comes first.
    """

    expected: StepSpeed | None
    measured: MeasuredStep | None
    notes: tuple[str, ...]

    @property
    def is_comparable(self) -> bool:
        """Whether the measured times are of the device that times are expected for."""
        return (
            self.expected is not None
            and self.measured is not None
            and self.expected.device.is_called(self.measured.device)
        )

    def gemm_ms(self, one: ProductTime) -> float | None:
        """What the kernels of a product's GEMM took, in milliseconds of a step; None if that was not measured, or not
        on the device that times are expected for."""
        return self._measured_gemms.get((one.layer, one.gemm, one.backward)) if self.is_comparable else None

    def as_json(self) -> dict[str, Any]:
        """As ``te-precision speed RUN --json`` has it."""
        found: dict[str, Any] = {"device": None, "plan": None, "products": [], "total": None}
        found |= {"advice": [], "notes": []}
        if self.expected is not None:
            found = self.expected.as_json()
            gemms = [self.gemm_ms(one) for one in self.expected.times]
            found["products"] = [
                {**row, "measured_gemm_ms": ms} for row, ms in zip(found["products"], gemms, strict=True)
            ]
        found["notes"] = [*found["notes"], *self.notes]
        found["measured"] = self.measured
        return found

    @functools.cached_property
    def _measured_gemms(self) -> dict[tuple[str, str, bool], float]:
        sums: dict[tuple[str, str, bool], float] = defaultdict(float)
        for row in () if self.measured is None else self.measured.products:
            if row.kind in _GEMMS and row.of_pass != "recompute":
                sums[row.layer, row.gemm, row.of_pass == "backward"] += row.ms
        return sums


def run_speed(run: RecordedRun, expect: Expect, *, device: str | None = None, trace: Path | None = None) -> RunSpeed:
    """What is known of a run's speed.

    Args:
        run: the run.
        expect: estimates a step for a device.
        device: the device that times are expected for; None for the run's own GPU.
        trace: a trace of the run; None for the last one that the run has made itself with ``profile=``.

    Raises:
        SpeedError: the run has no products, and no trace either; or the device does not run a recipe.
        DeviceError: the device is not known; or the run has no GPU, and no trace either.
        TraceError: the given trace cannot be read, or is of another run.
    """
    step, chosen, why_not = _step_and_device(run, device)
    measured, notes = _measured(run, step, trace)
    notes = [*run.unread, *notes]
    if why_not is not None:
        if measured is None:
            raise type(why_not)(" ".join([str(why_not), *notes]))
        notes.append(f"No times are expected: {why_not}")
    expected = None if step is None or chosen is None else expect(step, chosen)
    found = RunSpeed(
        expected,
        measured,
        tuple(notes),
    )
    if expected is None or measured is None or found.is_comparable:
        return found
    note = (
        f"The trace is of {measured.device}, and times are expected for {expected.device.title}: they are not compared."
    )
    return RunSpeed(expected, measured, (*notes, note))


def _step_and_device(run: RecordedRun, device: str | None) -> tuple[Step | None, Device | None, SpeedError | None]:
    """The step of a run and the device that its times are expected for, or why one of them is not known.

    Raises:
        DeviceError: the named device is not known.
    """
    chosen = None if device is None else device_named(device)
    try:
        step = step_of_run(run)
    except SpeedError as error:
        return None, None, error
    try:
        return step, device_of_run(run, chosen), None
    except DeviceError as error:
        return step, None, error


def measured_step(run: RecordedRun, step: Step | None, trace: Path) -> MeasuredStep:
    """What a step of a run took in a trace: by layer and GEMM where the layers of a step have the names of the trace.

    Args:
        run, step: the run and its step; None if the run has no products.
        trace: the trace.

    Raises:
        TraceError: the trace cannot be read, or is of another run.
    """
    # Layers of several scopes have other names in a step than in the trace of one of its ranks.
    is_of_one = len(run.gemms["scope"].unique()) == 1
    return measure(read_trace(trace), step.coverage if step is not None and is_of_one else ())


def _measured(run: RecordedRun, step: Step | None, trace: Path | None) -> tuple[MeasuredStep | None, list[str]]:
    """What a trace says of a step, and what is wrong with the run's own one."""
    if trace is not None:
        return measured_step(run, step, trace), []
    own = own_traces(run.path, run.run_id)
    notes = _said_of_profile(run, has_trace=bool(own))
    if not own:
        return None, notes
    try:
        return measured_step(run, step, own[-1]), notes
    except TraceError as error:
        return None, [*notes, f"The run's own trace is left out: {error}"]


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
