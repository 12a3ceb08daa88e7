"""Reads the events in a look: the first overflow, and the frames of traced batches."""

from __future__ import annotations

import fnmatch
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.overflow import report as text
from te_precision_callbacks.overflow.detector_options import DetectorOptions
from te_precision_callbacks.overflow.errors import text_of
from te_precision_callbacks.overflow.extreme_slots import Measured, Slot, Slots, Values
from te_precision_callbacks.overflow.hooks import is_compiled, watched_modules
from te_precision_callbacks.overflow.interval import Event, ForwardCall, Gradient, History, Interval, Labelled, seen

logger = logging.getLogger(__name__)

_LISTED = 5
"""The maximum number of parameters that a message names."""


@dataclass(frozen=True)
class Find:
    """An overflow.

    Attributes:
        path, class_name, role, batch, evaluation, rank: as in ActivationOverflowError.
        sequence: the number of the event since the last look.
        headline: which tensor is bad.
        advice: what to do.
        report: the whole report.
        step: the training step, in words; empty if it is not known.
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
    """Reads the events of an interval, and judges them.

    Attributes:
        loss_scaled: as in :class:`~te_precision_callbacks.debug_utils.DebugActivationOverflow`.
        step: gives the training step that runs, in words; empty if it is not known.
    """

    def __init__(self, options: DetectorOptions) -> None:
        self.loss_scaled = False
        self.step: Callable[[], str] = str
        self._options = options
        self._history = History(options.max_frames)
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
    ) -> Find | None:
        """The first overflow; the other frames are kept for later reports, and traced.

        Args:
            interval: holds the events and the numbers.
            evaluation: whether the events are of an evaluation.
            traces: whether ``trace_batches`` counts their batches.
            may_be_skipped: whether a scaler that has scaled the loss can still skip the step.
            before: how many events there were since the last look of all ranks, before these.
        """
        events = interval.events
        if not events:
            return None
        values = interval.slots.read()
        batch = "evaluation batch" if evaluation else "batch"
        traced = self._traced if traces else frozenset[int]()
        if traced:
            self._trace(events, values, batch)
        judge = functools.partial(
            first_bad,
            events,
            values,
            allow_neg_inf=self._options.allow_neg_inf,
            excused=interval.excused,
            not_in=traced,
        )
        bad = judge(loss_scaled=self.loss_scaled)
        scale = None
        if bad is not None and isinstance(events[bad[0]], Gradient) and may_be_skipped:
            scale = interval.loss_scale()
            if scale is not None and not scale <= 1:  # the scaler makes the scale smaller, and skips the step
                bad = judge(loss_scaled=True)
        if bad is None:
            self._history.add(events, values)
            return None
        index, number = bad
        frames = [*self._history, *seen(events[: index + 1], values)]
        after = len(list(events[index].frames())) - 1 - number
        frames = frames[: len(frames) - after][-self._options.max_frames :]
        culprit = frames[-1]
        place = culprit.frame.place
        weights = {} if place is None or self._options.parameters else self._weights_of(place.module, place.path)
        step = "" if evaluation else self.step()
        return Find(
            path="" if place is None else place.path,
            class_name="" if place is None else place.class_name,
            role=culprit.frame.role,
            batch=culprit.batch,
            evaluation=evaluation,
            rank=own_rank(),
            sequence=before + index,
            headline=text.headline(culprit),
            advice=text.advice(culprit, events[index], loss_scale=scale, weights=weights),
            report=text.report(frames, abs_min=self._options.abs_min, step=step, weights=weights),
            step=step,
        )

    def _weights_of(self, module: torch.nn.Module, path: str) -> Mapping[str, float]:
        """The largest magnitudes of a module's own parameters; empty where they cannot be read.

        The host waits for the device.
        """
        slots = Slots(abs_min=False)
        try:
            named = module.named_parameters(recurse=is_compiled(module))
            measured = {name: slots.measure(parameter) for name, parameter in named}
            values = slots.read()
        except Exception as error:  # the overflow must be reported all the same
            logger.warning("Activation overflow: the parameters of %s could not be read (%s).", path, text_of(error))
            return {}
        return {name: text.amax(slot, values) for name, slot in measured.items() if isinstance(slot, Slot)}

    def forget(self) -> None:
        """Leave the frames so far out of later reports."""
        self._history = History(self._options.max_frames)

    def _trace(self, events: Sequence[Event], values: Values, batch: str) -> None:
        lines: list[str] = []
        for event in events:
            if event.batch in self._traced:
                if (title := f"*** {batch} {event.batch} ***") != self._traced_last:
                    self._traced_last = title
                    lines.append(title)
                lines += [text.line(frame, abs_min=self._options.abs_min) for frame in seen([event], values)]
        if lines:
            logger.warning("%s", "\n".join(lines))


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
        neg_inf_is_bad = not isinstance(event, Labelled)
        if isinstance(event, ForwardCall):
            entered = any(
                isinstance(measured, Slot) and measured in suspects and values.extremes(measured)[0] == -math.inf
                for _, measured in event.inputs
            )
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
            is_input = isinstance(event, ForwardCall) and frame.sign == ">"
            if low == -math.inf and neg_inf_is_bad and not is_input and frame.measured not in excused:
                return index, number
    return None


def broken_parameters(roots: Sequence[tuple[str, torch.nn.Module]], path: str) -> list[str]:
    """The parameters with an inf or nan, those of the module at ``path`` first: ``fc1.weight (nans)``.

    The host waits for the device.

    Args:
        roots: the models, each with the prefix of its paths.
        path: the path of a module.
    """
    slots = Slots(abs_min=False)
    names: dict[Slot, str] = {}
    seen: set[int] = set()
    for place, module in sorted(watched_modules(roots), key=lambda found: found[0] != path):
        for name, parameter in module.named_parameters(recurse=is_compiled(module)):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                measured = slots.measure(parameter)
                if isinstance(measured, Slot):
                    names[measured] = f"{place}.{name}".removeprefix(".")
    values = slots.read()
    bad = values.not_finite()
    return [f"{name} ({text.what(*values.extremes(slot))})" for slot, name in names.items() if slot in bad]


def advice_on_weights(broken: Sequence[str], steps: int, optimizer: str) -> str:
    """The advice if parameters are not finite themselves.

    Args:
        broken: the parameters, such as ``fc1.weight (nans)``.
        steps: how many steps of the model's optimizers the detector has seen.
        optimizer: the class of the optimizer that stepped last.
    """
    more = f" and {len(broken) - _LISTED} more" if len(broken) > _LISTED else ""
    origin = (
        f"The detector has seen {steps} {'steps' if steps > 1 else 'step'} of the model's optimizers, the last of"
        f" {optimizer}: that step, or code that ran after it, has broken the weights. Check the optimizer's learning"
        " rate, state and eps, and go back to an earlier checkpoint."
        if steps
        else "No optimizer has stepped since the detector was made: the weights were broken by the initialization, or"
        " in the checkpoint that was loaded."
    )
    return (
        f"The weights are already broken, so another precision does not help: {', '.join(broken[:_LISTED])}{more}."
        f" {origin}"
    )
