"""Reads the events in a look: the first overflow, frames of traced batches, and outputs close to an overflow."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.overflow import report as text
from te_precision_callbacks.overflow.agreement import Find
from te_precision_callbacks.overflow.detector_options import Options
from te_precision_callbacks.overflow.errors import text_of
from te_precision_callbacks.overflow.events import Event, Gradient
from te_precision_callbacks.overflow.extreme_slots import Values
from te_precision_callbacks.overflow.interval import History, Interval, seen
from te_precision_callbacks.overflow.verdict import first_bad, near_limit
from te_precision_callbacks.overflow.weights import amax_of_parameters

logger = logging.getLogger(__name__)


class Reader:
    """Reads the events of an interval, and judges them.

    Attributes:
        loss_scaled: as in :class:`~te_precision_callbacks.debug_utils.DebugActivationOverflow`.
        step: gives the training step that runs, in words; empty if it is not known.
    """

    def __init__(self, options: Options, notices: Notices, roots: Sequence[tuple[str, torch.nn.Module]]) -> None:
        self.loss_scaled = False
        self.step: Callable[[], str] = str
        self._roots = roots
        self._options = options
        self._history = History(options.max_frames)
        self._traced = frozenset(options.trace_batches)
        self._traced_last = ""
        self._notices = notices

    def read(
        self,
        interval: Interval,
        events: Sequence[Event],
        *,
        evaluation: bool,
        traces: bool,
        may_be_skipped: bool,
        before: int,
    ) -> Find | None:
        """The first overflow; the other frames are kept for later reports, traced, and compared with the limits.

        Args:
            interval: holds the numbers.
            events: events of the interval.
            evaluation: whether they are of an evaluation.
            traces: whether ``trace_batches`` counts their batches.
            may_be_skipped: whether a scaler that has scaled the loss can still skip the step.
            before: how many events there were since the last look of all ranks, before these.
        """
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
        if self._options.warn_above is not None:
            self._warn_of(events[: None if bad is None else bad[0]], values, self._options.warn_above, batch)
        if bad is None:
            self._history.add(events, values)
            return None
        index, number = bad
        frames = [*self._history, *seen(events[: index + 1], values)]
        after = len(list(events[index].frames())) - 1 - number
        frames = frames[: len(frames) - after][-self._options.max_frames :]
        culprit = frames[-1]
        place = culprit.frame.place
        weights = {} if place is None or self._options.parameters else self._weights_of(place.path)
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

    def _weights_of(self, path: str) -> Mapping[str, float]:
        """The largest magnitudes of a module's parameters; empty where they cannot be read."""
        try:
            return amax_of_parameters(self._roots, path)
        except Exception as error:  # the overflow must be reported all the same
            logger.warning("Activation overflow: the parameters of %s could not be read (%s).", path, text_of(error))
            return {}

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

    def _warn_of(self, events: Sequence[Event], values: Values, share: float, batch: str) -> None:
        for call, role, slot, amax in near_limit(events, values, share):
            if self._notices.first(("near its limit", call.place.path)):
                limit = torch.finfo(slot.store.dtype).max
                logger.warning(
                    "%s: %s: %s is close to an overflow in %s %d: abs_max=%.2e is %.0f%% of the maximum of %s"
                    " (%.2e). This is logged once for each module.",
                    call.place.path or "The model",
                    call.place.class_name,
                    role,
                    batch,
                    call.batch,
                    amax,
                    100 * amax / limit,
                    str(slot.store.dtype).removeprefix("torch."),
                    limit,
                )
