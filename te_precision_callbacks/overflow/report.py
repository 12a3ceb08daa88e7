"""The text of a report: the culprit, and the frames before it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from te_precision_callbacks.overflow.extreme_slots import Slot
from te_precision_callbacks.overflow.interval import Seen, TensorEvent

_LARGE = 2.0**8
"""A parameter is too large above this magnitude, and above everything that enters the module."""


def headline(culprit: Seen) -> str:
    frame = culprit.frame
    kind = what(*culprit.values.extremes(frame.measured)) if isinstance(frame.measured, Slot) else ""
    return f"{_where(culprit)} has {kind}"


def advice(culprit: Seen, event: TensorEvent, *, loss_scale: float | None, weights: Mapping[str, float]) -> str:
    """Return the advice about an overflow; ``weights`` are the largest magnitudes of the module's parameters."""
    frame = culprit.frame
    if event.kind == "gradient":
        scaler = (
            " If something other than torch's GradScaler scales the loss, set loss_scaled of the detector to True."
            if loss_scale is None
            else f" The loss was scaled by only {loss_scale:g}, so the scale is not the cause, and a GradScaler would"
            " skip every step from here on."
        )
        return f"The forward was finite: the gradient became inf or nan on its way back.{scaler}"
    if event.kind == "forward" and frame.sign == ">":
        return (
            "It entered the module from outside the watched modules: from the data, or from code between modules,"
            " which detect_overflow() can check."
        )
    if event.kind == "forward" and weights:
        inputs = [frame.measured for frame in event.frames if frame.sign == ">"]
        entered = max((amax(*culprit.values.extremes(slot)) for slot in inputs if isinstance(slot, Slot)), default=0.0)
        name, largest = max(weights.items(), key=lambda item: item[1])
        if max(entered, _LARGE) < largest < math.inf:
            return (
                f"The parameter {name} of the module has an abs_max of {largest:.2e}, and its inputs only"
                f" {entered:.2e}: the weight is too large. Check its initialization, the loaded checkpoint, and the"
                " optimizer's last steps."
            )
    if isinstance(frame.measured, Slot) and culprit.values.extremes(frame.measured)[1] < math.inf:
        path = "" if frame.place is None else frame.place.path
        return f"There is only -inf: if the module makes -inf on purpose, allow it with allow_neg_inf=[{path!r}]."
    return (
        "Go up from the last frame to where abs_max began to grow, and run that part in a higher precision, or make its"
        " values smaller. detect_overflow() can check tensors inside a forward."
    )


def report(frames: Sequence[Seen], *, abs_min: bool, step: str, weights: Mapping[str, float]) -> str:
    culprit = frames[-1]
    lines = [headline(culprit)]
    lines += [f"batch {culprit.batch} is in {step}"] if step else []
    if weights:
        amaxes = ", ".join(f"{name} abs_max={largest:.2e}" for name, largest in weights.items())
        lines.append(f"parameters of the module: {amaxes}")
    lines += ["", "", f"last {len(frames)} frames:"]
    return "\n".join([*lines, *(line(frame, abs_min=abs_min) for frame in frames)])


def line(seen: Seen, *, abs_min: bool) -> str:
    """Format a frame: ``abs_max= 3.17e+03 < [0] encoder.block.1.layer.1.DenseReluDense.wo: Linear: output``."""
    frame, values = seen.frame, seen.values
    columns = []
    if abs_min:
        least = f"{values.least(frame.measured):.2e}" if isinstance(frame.measured, Slot) else frame.measured.why
        columns.append(f"abs_min={least:>9}")
    largest = (
        f"{amax(*values.extremes(frame.measured)):.2e}" if isinstance(frame.measured, Slot) else frame.measured.why
    )
    columns.append(f"abs_max={largest:>9}")
    return f"{' '.join(columns)} {_where(seen)}"


def _where(seen: Seen) -> str:
    frame = seen.frame
    names = [] if frame.place is None else [frame.place.path, frame.place.class_name]
    return f"{frame.sign} [{seen.batch}] {': '.join(name for name in [*names, frame.role] if name)}"


def amax(low: float, high: float) -> float:
    return math.nan if math.isnan(low) or math.isnan(high) else max(abs(low), abs(high))


def what(low: float, high: float) -> str:
    return "nans" if math.isnan(low) or math.isnan(high) else "infs"
