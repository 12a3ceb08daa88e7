"""The products of a step, with their recipes: of a recorded run or of a session, and the device that a run ran on.

step = step_of_run(open_run("logs"))
step = Step.of(session.coverage(), session.precision)
step.coverage, step.recipes, step.notes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import pyarrow.compute as pc

from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.coverage.gemm_precision import GemmPrecision
from te_precision_callbacks.coverage.recorded import other_steps_of_run, recorded_products
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.tables import at_the_end
from te_precision_callbacks.speed.devices import Device, device_named, device_reported
from te_precision_callbacks.speed.errors import DeviceError, SpeedError
from te_precision_callbacks.speed.memory.rows import MemoryRow


@dataclass(frozen=True)
class Step:
    """A step of a training: what its time is estimated from.

    Attributes:
        coverage: its products.
        recipes: layer -> the recipe under which it ran; or one for all.
        notes: what the reader of its times has to know.
    """

    coverage: Coverage
    recipes: Mapping[str, str] | str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, coverage: Coverage, precision: Iterable[GemmPrecision]) -> Step:
        """The step of a session: its coverage, and the recipes of its ``precision``."""
        return cls(coverage, {one.layer: one.recipe for one in precision if one.recipe})


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


def memory_of_step(run: RecordedRun) -> list[MemoryRow]:
    """What the layers of a rank keep and save for the backward, as it was last; empty where that was not recorded."""
    return [MemoryRow(**row) for row in run.memory.select([each.name for each in fields(MemoryRow)]).to_pylist()]


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
