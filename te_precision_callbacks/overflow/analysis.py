"""Evaluates the events since the last check: the first overflow, and the frames of traced batches."""

from __future__ import annotations

import fnmatch
import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from te_precision_callbacks.base.counts import some_of
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.overflow.extreme_slots import Measured, Slot, Slots, Values
from te_precision_callbacks.overflow.hooks import is_compiled, watched_modules
from te_precision_callbacks.overflow.journal import (
    DetectorOptions,
    FrameValues,
    Interval,
    TensorEvent,
    frames_with_values,
)

logger = logging.getLogger(__name__)

_LISTED = 5


@dataclass(frozen=True)
class DetectedOverflow:
    """A detected overflow; see :class:`ActivationOverflowError` for other attributes.

    Attributes:
        sequence: the index of the event since the last common check of the ranks.
        headline: the line that names the bad tensor.
        report: the complete report.
        step: the training step as text, if known.
    """

    path: str
    class_name: str
    role: str
    batch: int
    evaluation: bool
    rank: int
    sequence: int
    headline: str
    advice: str
    report: str
    step: str = ""


class Reader:
    """Finds the first overflow in the values of an interval.

    Attributes:
        loss_scaled: whether the loss of the gradients is scaled.
        step: returns the name of the step, for messages.
        history: the last frames.
    """

    def __init__(self, options: DetectorOptions) -> None:
        self.loss_scaled = False
        self.step: Callable[[], str] = str
        self._options = options
        self.history: deque[FrameValues] = deque(maxlen=options.max_frames)
        self._traced = frozenset(options.trace_batches)
        self._traced_last = ""

    def read(
        self,
        interval: Interval,
        *,
        evaluation: bool,
        traces: bool,
        may_be_skipped: bool,
        before: int,
    ) -> DetectedOverflow | None:
        """Return the first overflow; log traced frames, and keep frames for later reports.

        Args:
            traces: whether ``trace_batches`` refers to their batches.
            may_be_skipped: whether a GradScaler that has scaled the loss can still skip the step.
            before: the number of earlier events since the last common check of the ranks.
        """
        events = interval.events
        if not events:
            return None
        values = interval.slots.read()
        traced = self._traced if traces else frozenset[int]()
        if traced:
            self._trace(events, values, "evaluation batch" if evaluation else "batch")
        allowed = self._options.allow_neg_inf
        find = functools.partial(
            first_bad, events, values, allow_neg_inf=allowed, excused=interval.excused, not_in=traced
        )
        bad = find(loss_scaled=self.loss_scaled)
        scale = None
        if bad is not None and events[bad[0]].kind == "gradient" and may_be_skipped:
            scale = interval.loss_scale()
            if scale is not None and not scale <= 1:  # the scaler reduces the scale, and skips the step
                bad = find(loss_scaled=True)
        if bad is None:
            # An event has at least one frame.
            self.history.extend(frames_with_values(events[-self._options.max_frames :], values))
            return None
        index, number = bad
        frames = [*self.history, *frames_with_values(events[: index + 1], values)]
        after = len(events[index].frames) - 1 - number
        frames = frames[: len(frames) - after][-self._options.max_frames :]
        culprit = frames[-1]
        place = culprit.frame.place
        step = "" if evaluation else self.step()
        return DetectedOverflow(
            path="" if place is None else place.path,
            class_name="" if place is None else place.class_name,
            role=culprit.frame.role,
            batch=culprit.batch,
            evaluation=evaluation,
            rank=own_rank(),
            sequence=before + index,
            headline=_headline(culprit),
            advice=_advice(culprit, events[index], loss_scale=scale),
            report=_report(frames, abs_min=self._options.abs_min, step=step),
            step=step,
        )

    def _trace(self, events: Sequence[TensorEvent], values: Values, batch: str) -> None:
        lines: list[str] = []
        for event in events:
            if event.batch in self._traced:
                if (title := f"*** {batch} {event.batch} ***") != self._traced_last:
                    self._traced_last = title
                    lines.append(title)
                lines += [
                    _format_frame(frame, abs_min=self._options.abs_min) for frame in frames_with_values([event], values)
                ]
        if lines:
            logger.warning("%s", "\n".join(lines))


def first_bad(
    events: Sequence[TensorEvent],
    values: Values,
    *,
    allow_neg_inf: Sequence[str],
    excused: set[Measured],
    not_in: Collection[int],
    loss_scaled: bool,
) -> tuple[int, int] | None:
    """Return the index of the first bad event, and of its bad frame.

    A nan or +inf is bad in any tensor, a -inf only if a module produces it from inputs without -inf.

    Args:
        allow_neg_inf: patterns of the paths of modules that may produce -inf.
        excused: the slots that may have -inf, in any module; extended by this function.
        not_in: batches that are not checked.
        loss_scaled: whether gradients may be inf or nan, since a GradScaler handles them.
    """
    suspects = values.not_finite()
    if not suspects:
        return None
    for index, event in enumerate(events):
        if event.batch in not_in or (loss_scaled and event.kind == "gradient"):
            continue
        suspect = []
        for number, frame in enumerate(event.frames):
            slot = frame.measured
            if isinstance(slot, Slot) and slot in suspects:
                suspect.append((number, frame, *values.extremes(slot)))
        is_forward = event.kind == "forward"
        neg_inf_is_bad = event.kind != "label"
        if is_forward:
            entered = any(frame.sign == ">" and low == -math.inf for _, frame, low, _ in suspect)
            place = event.frames[0].place
            path = "" if place is None else place.path
            neg_inf_is_bad = not (entered or any(fnmatch.fnmatchcase(path, pattern) for pattern in allow_neg_inf))
            if not neg_inf_is_bad:  # outer modules return its output
                excused.update(frame.measured for frame in event.frames if frame.sign == "<")
        for number, frame, low, high in suspect:
            if math.isnan(high) or high == math.inf:
                return index, number
            is_input = is_forward and frame.sign == ">"
            if low == -math.inf and neg_inf_is_bad and not is_input and frame.measured not in excused:
                return index, number
    return None


def advice_on_parameters(roots: Sequence[tuple[str, torch.nn.Module]], path: str) -> str:
    """Name the parameters with inf or nan, first of the module at ``path``; empty if all are finite. The host waits."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for place, module in sorted(watched_modules(roots), key=lambda watched: watched[0] != path):
        for name, parameter in module.named_parameters(recurse=is_compiled(module)):
            named.setdefault(id(parameter), (f"{place}.{name}".removeprefix("."), parameter))
    slots = Slots(abs_min=False)
    measured = {slots.measure(parameter): name for name, parameter in named.values()}
    values = slots.read()
    broken = values.not_finite()
    names = []
    for slot, name in measured.items():
        if isinstance(slot, Slot) and slot in broken:
            value = _describe_value(*values.extremes(slot))
            names.append(f"{name} ({value})")
    if not names:
        return ""
    return (
        f"The weights already have inf or nan: {some_of(names, _LISTED)}. Check the initialization, the"
        " loaded checkpoint, code that writes weights, and the optimizer's learning rate, state and eps. Resume from"
        " an earlier checkpoint."
    )


def _headline(culprit: FrameValues) -> str:
    frame = culprit.frame
    kind = _describe_value(*culprit.values.extremes(frame.measured)) if isinstance(frame.measured, Slot) else ""
    return f"{_describe_place(culprit)} has {kind}"


def _advice(culprit: FrameValues, event: TensorEvent, *, loss_scale: float | None) -> str:
    frame = culprit.frame
    if event.kind == "gradient":
        scaler = (
            " If the loss is scaled without torch's GradScaler, set detector.loss_scaled = True."
            if loss_scale is None
            else f" The loss scale is only {loss_scale:g}, so it is not the cause; a GradScaler would skip every"
            " further step."
        )
        return f"The forward was finite: the gradient became inf or nan in the backward.{scaler}"
    if event.kind == "forward" and frame.sign == ">":
        return (
            "The value comes from outside the watched modules: from the data, or from code between modules, which"
            " detect_overflow() can check."
        )
    if isinstance(frame.measured, Slot) and culprit.values.extremes(frame.measured)[1] < math.inf:
        path = "" if frame.place is None else frame.place.path
        return f"The only such value is -inf: if it is intended, allow it with allow_neg_inf=[{path!r}]."
    return (
        "Find the frame where abs_max starts to grow, and run that part in higher precision, or reduce its values."
        " parameters=True also checks weights; detect_overflow() checks tensors inside a forward."
    )


def _report(frames: Sequence[FrameValues], *, abs_min: bool, step: str) -> str:
    culprit = frames[-1]
    lines = [_headline(culprit)]
    lines += [f"batch {culprit.batch} is in {step}"] if step else []
    lines += ["", "", f"last {len(frames)} frames:"]
    return "\n".join([*lines, *(_format_frame(frame, abs_min=abs_min) for frame in frames)])


def _format_frame(seen: FrameValues, *, abs_min: bool) -> str:
    """Format a frame: ``abs_max= 3.17e+03 < [0] encoder.block.1.layer.1.DenseReluDense.wo: Linear: output``."""
    frame = seen.frame
    values = seen.values
    columns = []
    if abs_min:
        least = f"{values.least(frame.measured):.2e}" if isinstance(frame.measured, Slot) else frame.measured.why
        columns.append(f"abs_min={least:>9}")
    largest = (
        f"{_amax(*values.extremes(frame.measured)):.2e}" if isinstance(frame.measured, Slot) else frame.measured.why
    )
    columns.append(f"abs_max={largest:>9}")
    return f"{' '.join(columns)} {_describe_place(seen)}"


def _describe_place(seen: FrameValues) -> str:
    frame = seen.frame
    names = [] if frame.place is None else [frame.place.path, frame.place.class_name]
    return f"{frame.sign} [{seen.batch}] {': '.join(name for name in [*names, frame.role] if name)}"


def _amax(low: float, high: float) -> float:
    if math.isnan(low) or math.isnan(high):
        return math.nan
    return max(abs(low), abs(high))


def _describe_value(low: float, high: float) -> str:
    if math.isnan(low) or math.isnan(high):
        return "nans"
    return "infs"
