"""Finds the first bad frame, and the frames close to the limit of their dtype."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterator, Sequence

from te_precision_callbacks.overflow.events import Call, Event, Gradient, Labelled
from te_precision_callbacks.overflow.extreme_slots import Measured, Slot, Values


def first_bad(
    events: Sequence[Event],
    values: Values,
    *,
    allow_neg_inf: Sequence[str],
    excused: set[Measured],
    not_in: Collection[int],
    loss_scaled: bool,
) -> tuple[int, int] | None:
    """The number of the first bad event, and of the frame in it.

    A nan or +inf is bad, in any tensor. A -inf is bad if a module makes it from inputs without one. A mask that enters
    with -inf is not bad, nor is -inf under a label: masks are made inside a forward.

    Args:
        events: the events, in order.
        values: the numbers of the events.
        allow_neg_inf: patterns of the paths of modules that may make -inf.
        excused: the slots that may hold -inf wherever they occur; extended here.
        not_in: batches that are not judged.
        loss_scaled: whether gradients may be inf or nan, since a GradScaler handles them.
    """
    suspects = values.not_finite()
    if not suspects:
        return None
    for index, event in enumerate(events):
        if event.batch in not_in or (loss_scaled and isinstance(event, Gradient)):
            continue
        neg_inf_is_bad = not isinstance(event, Labelled) or event.is_loss
        if isinstance(event, Call):
            entered = any(measured in suspects and _has_neg_inf(measured, values) for _, measured in event.inputs)
            path = event.place.path
            neg_inf_is_bad = not (entered or any(fnmatch.fnmatchcase(path, pattern) for pattern in allow_neg_inf))
            if not neg_inf_is_bad:  # the modules around it pass its output on
                excused.update(measured for _, measured in event.outputs)
        for number, frame in enumerate(event.frames()):
            if frame.measured not in suspects or not isinstance(frame.measured, Slot):
                continue
            low, high = values.extremes(frame.measured)
            if math.isnan(high) or high == math.inf:
                return index, number
            is_input = isinstance(event, Call) and frame.sign == ">"
            if low == -math.inf and neg_inf_is_bad and not is_input and frame.measured not in excused:
                return index, number
    return None


def _has_neg_inf(measured: Measured, values: Values) -> bool:
    return isinstance(measured, Slot) and values.extremes(measured)[0] == -math.inf


def near_limit(events: Sequence[Event], values: Values, share: float) -> Iterator[tuple[Call, str, Slot, float]]:
    """Outputs with a magnitude above a share of the largest number of their dtype: the call, which output it is, its
    slot, and its largest magnitude."""
    suspects = values.above(share)
    for event in events if suspects else ():
        if isinstance(event, Call):
            for role, measured in event.outputs:
                if isinstance(measured, Slot) and measured in suspects:
                    # Taken out: a container gives the same tensor again.
                    yield event, role, measured, suspects.pop(measured)


def what(low: float, high: float) -> str:
    """``nans`` or ``infs``."""
    return "nans" if math.isnan(low) or math.isnan(high) else "infs"
