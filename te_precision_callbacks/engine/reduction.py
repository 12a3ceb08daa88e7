"""Copies a step's measurements to the host, reduced over ranks, with one copy and one message.

Segments are matched by name, so ranks may hold different layers, and a layer may rest on some ranks for a step. Names
are exchanged only when a rank has a segment outside the common layout, which a flag in the vector of maxima signals
without an extra message.

The maxima also carry each rank's :class:`Stamp` and its negative. If the largest and the smallest stamp differ, the
ranks are in different iterations, and the merged values are dropped. They are also dropped if the ranks' counts of
optimizer steps begin to differ after they were equal: a rank has missed a step(). Counts that differ from the start, as
with different optimizers, are only reported. If they were equal only once, the next steps decide which case it is;
until then, values are not merged.

Parts of a tensor on different ranks are added. Replicas (weights of a data-parallel group) are merged by maximum, even
if some ranks did not run the layer. Tensor-parallel shards stay separate in the message, and are added on the host.
Different tensors with the same name would be mixed: use separate process groups for them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from te_precision_callbacks.base.errors import ReductionError
from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.base.ranks import format_by_rank
from te_precision_callbacks.base.ranks.messages import Messages, RanksLostError, Requests
from te_precision_callbacks.engine.kernels.columns import NOTHING
from te_precision_callbacks.engine.reading import Row, TableReader
from te_precision_callbacks.engine.slots import Asked, ColumnNames, DeviceSlots, SegmentKey, Segments, SlotRange
from te_precision_callbacks.statistics.series import SeriesTable
from te_precision_callbacks.statistics.table import Columns, Values

logger = logging.getLogger(__name__)

_Positions = npt.NDArray[np.intp]


class RanksDifferError(ReductionError):
    """Ranks would have merged statistics of different iterations or schedules."""


class Stamp(NamedTuple):
    """Values that must be equal on all ranks that reduce together; integers below 2**53, exact in float64.

    Attributes:
        schedule: hash of the schedules.
        optimizer_steps: number of the rank's optimizer steps, which is higher than on other ranks if it skipped a
            step(). May differ from the start. Negative if unknown; then it is not compared.
    """

    iteration: int
    schedule: int
    optimizer_steps: int


NO_STAMP = Stamp(0, 0, -1)
"""Placeholder for a caller without a stamp."""


class SegmentDescription(NamedTuple):
    """Description of a segment, exchanged between ranks; ``outputs`` are labels of statistics."""

    key: SegmentKey
    outputs: tuple[str, ...]


class Reduction:
    """Collects :class:`Segments` over ranks.

    Args:
        messages: the channel to other ranks; None for a single rank.

    Attributes:
        local: whether the last values are local although a reduction was requested.
        optimizers_differ: whether the ranks had different numbers of optimizer steps in an iteration.
    """

    def __init__(self, series: SeriesTable, messages: Messages | None, on_failure: Report) -> None:
        self.messages = messages
        self._series = series
        self.local = False
        self.optimizers_differ = False
        self._on_failure = on_failure
        self._agreed: dict[SegmentKey, SegmentDescription] = {}
        self._layout: _Layout | None = None
        self._own_layout: _Layout | None = None
        self._meeting = 0
        self._agreements = 0
        self._last_agreement = 0
        self._is_undecided = False

    def collect(self, slots: Segments, *, reduce: bool, stamp: Stamp = NO_STAMP) -> list[tuple[TableReader, Columns]]:
        """Return the measurements since the last call. With ``reduce``, all ranks of the group must call this.

        If the reduction fails, the measurements are local (:attr:`local`).
        """
        messages = self.messages
        self.local = reduce and messages is not None
        if not reduce or messages is None or not messages.is_open:
            return self._collect_own(slots)
        if self._meeting != messages.meetings:
            self._meeting = messages.meetings
            self._agreed = {}
            self._layout = None
            self._agreements = 0
        try:
            layout = self._reduce(messages, slots, stamp)
        except (RanksLostError, RanksDifferError) as error:
            self._on_failure("reducing the statistics of", f"iteration {stamp.iteration}", error)
            return self._collect_own(slots)
        except BaseException as error:
            messages.leave(error)
            raise
        if self._is_undecided:
            return self._collect_own(slots)
        if layout.optimizer_step_difference() and not self.optimizers_differ:
            self.optimizers_differ = True
            if messages.rank == 0:
                logger.warning(
                    "The ranks have different numbers of optimizer steps up to iteration %d. Unless the ranks have"
                    " different optimizers, a rank has missed a step(): call step() after each optimizer step on all"
                    " ranks.",
                    stamp.iteration,
                )
        self.local = False
        return layout.unpack(self._series)

    def _collect_own(self, slots: Segments) -> list[tuple[TableReader, Columns]]:
        layout = self._own_layout
        if layout is None or layout.version != slots.version:
            layout = _Layout(map(_describe, slots.segments.values()), slots, include_all=True)
            self._own_layout = layout
        layout.pack(slots, NO_STAMP, changed=False, requests=Requests())
        return layout.unpack(self._series)

    def _reduce(self, messages: Messages, slots: Segments, stamp: Stamp) -> _Layout:
        why = f"to reduce the statistics of iteration {stamp.iteration}. A rank may have ended or skipped a step()"
        while True:
            is_current = self._layout is not None and self._layout.version == slots.version
            news = [] if is_current else self._new_segments(slots)
            if self._layout is not None:
                if not is_current and not news:
                    self._update_layout(slots)  # the segments are new on this rank only
                layout = self._layout
                layout.pack(slots, stamp, changed=bool(news), requests=messages.requests)
                messages.merge("statistics", why, layout.message, layout.split)
                if not layout.has_one_stamp() or self._has_missed_a_step(layout, stamp):
                    self._leave_out_of_step(messages, stamp)
                if not layout.has_changed():
                    messages.requested = layout.requested()
                    if layout.has_one_optimizer_count():
                        self._agreements += 1
                        self._last_agreement = stamp.iteration
                    return layout
            for entry in messages.pool(news, "names of statistics", why, SegmentDescription):
                agreed = self._agreed.get(entry.key)
                outputs = dict.fromkeys([*(agreed.outputs if agreed else ()), *entry.outputs])
                self._agreed[entry.key] = entry._replace(outputs=tuple(outputs))
            self._update_layout(slots)

    def _has_missed_a_step(self, layout: _Layout, stamp: Stamp) -> bool:
        self._is_undecided = False
        difference = layout.optimizer_step_difference()
        if not difference or not self._agreements or self.optimizers_differ:
            return False
        since = stamp.iteration - self._last_agreement
        self._is_undecided = self._agreements == 1 and since < _DECISIVE
        return not self._is_undecided and (self._agreements > 1 or 2 * difference < since)

    def _new_segments(self, slots: Segments) -> list[SegmentDescription]:
        news: list[SegmentDescription] = []
        for described in map(_describe, slots.segments.values()):
            agreed = self._agreed.get(described.key)
            if agreed is None or not set(described.outputs) <= set(agreed.outputs):
                news.append(described)
        return news

    def _update_layout(self, slots: Segments) -> None:
        self._layout = _Layout(
            sorted(self._agreed.values(), key=lambda entry: str(entry.key)), slots, include_all=False
        )

    def _leave_out_of_step(self, messages: Messages, stamp: Stamp) -> None:
        """End the messages after a stamp mismatch.

        Raises:
            RanksDifferError: always.
        """
        stamps = messages.by_rank(stamp, "stamps", "to find the ranks that are out of step")
        error = _out_of_step_error({rank: Stamp(*row) for rank, row in stamps.items()})
        messages.part("the ranks are out of step", for_good=len({row[1] for row in stamps.values()}) > 1)
        raise error


def _out_of_step_error(stamps: Mapping[int, Stamp]) -> RanksDifferError:
    """Return the error for a mismatch: global rank -> stamp."""

    local = "Statistics are not reduced"
    schedules = list(dict.fromkeys(stamp.schedule for stamp in stamps.values()))
    if len(schedules) > 1:
        names = {rank: f"schedule {schedules.index(stamp.schedule) + 1}" for rank, stamp in stamps.items()}
        return RanksDifferError(
            "The ranks have different configs that collect statistics in different iterations:"
            f" {format_by_rank(names)}. Give all ranks the same config. {local}: from now on rank 0 reports local"
            " values."
        )
    parts = [format_by_rank({rank: f"iteration {stamp.iteration}" for rank, stamp in stamps.items()})]
    done = {rank: f"{stamp.optimizer_steps} steps" for rank, stamp in stamps.items() if stamp.optimizer_steps >= 0}
    if len(set(done.values())) > 1:
        parts.append(f"optimizer steps since the start: {format_by_rank(done)}")
    return RanksDifferError(
        f"The ranks are out of step: {'; '.join(parts)}. Call step() on all ranks after the same optimizer steps,"
        f" with the same start_step. {local} until the ranks are connected again."
    )


def _describe(segment: SlotRange) -> SegmentDescription:
    return SegmentDescription(segment.key, tuple(segment.outputs))


_PARTS = len(Stamp._fields)
_REQUESTS = len(Requests._fields)
_TRAILER = 2 * _PARTS + 1 + _REQUESTS
"""Elements after the maxima: a stamp, its negative, a flag for segments outside the layout, and the requests."""
_CHANGED = -1 - _REQUESTS
_DECISIVE = 3
"""Iterations after which a missed step() can be distinguished from an optimizer that steps less often."""
_PARTS_COMPARED = Stamp._fields.index("optimizer_steps")
"""Parts of a stamp before this index must be equal."""


class _Layout:
    """Positions of all columns in the message and in this rank's vectors.

    The first part of the message is summed: a flag for each output of each segment, 1 if it is due on the rank, then
    the summed columns. The second part is merged by maximum: the maximum columns, all columns of replicas, the stamp
    and its negative, and the flags.

    Args:
        include_all: whether segments that do not contribute are included.

    Attributes:
        version: of the slots; another one invalidates the layout.
        message: reduced in place.
        split: number of elements in the summed part.
    """

    def __init__(self, described: Iterable[SegmentDescription], slots: Segments, *, include_all: bool) -> None:
        entries = list(described)
        self.version = slots.version
        self.message = np.empty(0)
        self._due = sum(len(entry.outputs) for entry in entries)
        self.split = self._due + sum(len(entry.key.columns[0]) for entry in entries if entry.key.shard is None)
        self._pieces: list[_Piece] = []
        self._tables: dict[bytes, list[TableReader]] = {}
        copies: dict[torch.device, list[tuple[int, int, int]]] = {}  # source, target and number of columns
        summed_end = self._due
        end = self.split
        for entry in entries:
            segment = slots.segments.get(entry.key)
            if segment is not None and not (segment.contributes or include_all):
                segment = None
            sums, maxima = map(len, entry.key.columns)
            if entry.key.shard is None:
                sums_at = summed_end
                summed_end += sums
            else:
                sums_at = end
                end += sums
            self._pieces.append(_Piece(entry, segment, sums_at, end))
            if segment is not None:
                maxima_source = slots.devices[segment.device].used[0] + segment.maximum_start
                copies.setdefault(segment.device, []).extend(
                    [(segment.sum_start, sums_at, sums), (maxima_source, end, maxima)]
                )
            end += maxima
        self._size = end + _TRAILER
        self._copies: list[tuple[DeviceSlots, _Positions, _Positions]] = []
        for device, ranges in copies.items():
            sources, targets, widths = np.array(ranges).T
            self._copies.append((slots.devices[device], _expand(sources, widths), _expand(targets, widths)))
        self._note_asked([])

    def has_changed(self) -> bool:
        return bool(self.message[_CHANGED] > 0)

    def requested(self) -> Requests:
        return Requests(*(self.message[_CHANGED + 1 :] > 0).tolist())

    def has_one_stamp(self) -> bool:
        largest, smallest = self._stamps()[:, :_PARTS_COMPARED]
        return bool((largest == -smallest).all())

    def optimizer_step_difference(self) -> int:
        largest, smallest = self._stamps()[:, -1]
        if largest == NOTHING:
            return 0
        return int(largest + smallest)

    def has_one_optimizer_count(self) -> bool:
        return not self.optimizer_step_difference() and self._stamps()[0, -1].item() > 0

    def _stamps(self) -> Values:
        return self.message[-_TRAILER:_CHANGED].reshape(2, -1)

    def pack(self, slots: Segments, stamp: Stamp, *, changed: bool, requests: Requests) -> None:
        """Pack this rank's message, with neutral elements for absent values: one copy to the host for each device."""
        if self._asked != slots.asked:
            self._note_asked(slots.asked)
        self.message = np.full(self._size, NOTHING)
        self.message[: self._due] = self._flags
        self.message[self._due : self.split] = 0.0
        for device_slots, sources, targets in self._copies:
            self.message[targets] = torch.cat(device_slots.read()).numpy(force=True)[sources]
        self.message[self._resting] = NOTHING  # an empty sum is 0, and would beat another replica's negative sum
        trailer = self.message[-_TRAILER:]
        for index, part in enumerate(stamp):
            if part >= 0:
                trailer[index] = part
                trailer[_PARTS + index] = -part
        trailer[_CHANGED] = changed
        trailer[_CHANGED + 1 :] = requests

    def _note_asked(self, requests: Sequence[Asked]) -> None:
        self._asked = list(requests)
        labels: dict[SegmentKey, set[str]] = {}
        measured: set[SegmentKey] = set()
        for segment, segment_labels, is_measured in itertools.chain.from_iterable(requests):
            labels.setdefault(segment.key, set()).update(segment_labels)
            if is_measured:
                measured.add(segment.key)
        due: list[bool] = []
        resting: list[int] = []
        for entry, segment_number, sums_at, maxima_at in self._pieces:
            due_labels = () if segment_number is None else labels.get(entry.key, ())
            due.extend(output in due_labels for output in entry.outputs)
            if entry.key.shard is not None and entry.key not in measured:
                resting.extend(range(sums_at, maxima_at))
        self._flags = np.array(due, dtype=np.float64)
        self._resting = np.array(resting, dtype=np.intp)

    def unpack(self, series: SeriesTable) -> list[tuple[TableReader, Columns]]:
        """Return the columns of segments with an output that is due on any rank."""
        due = self.message[: self._due] > 0
        pattern = due.tobytes()
        if pattern not in self._tables:
            if len(self._tables) == _MAX_PATTERNS:
                self._tables.clear()
            self._tables[pattern] = self._select(due.tolist(), series)
        return [(table, table.columns(self.message)) for table in self._tables[pattern]]

    def _select(self, due: Sequence[bool], series: SeriesTable) -> list[TableReader]:
        """Return a table for all segments with the same columns, with a row for each tensor and its shards."""
        by_columns: dict[ColumnNames, dict[SegmentKey, Row]] = {}
        flags = iter(due)
        for entry, _, sums_at, maxima_at in self._pieces:
            labels = [label for label in entry.outputs if next(flags)]
            if labels:
                rows = by_columns.setdefault(entry.key.columns, {})
                row = rows.setdefault(entry.key._replace(shard=None), Row({}, []))
                row.labels.update(dict.fromkeys(labels))
                row.shards.append((sums_at, maxima_at))
        return [TableReader(names, rows, series) for names, rows in by_columns.items()]


class _Piece(NamedTuple):
    """Positions of a segment in the message; ``segment`` is None if this rank has nothing to send for it."""

    entry: SegmentDescription
    segment: SlotRange | None
    sums_at: int
    maxima_at: int


_MAX_PATTERNS = 16
"""Maximum number of cached combinations of due segments; features with different ``freq`` cause several."""


def _expand(starts: _Positions, widths: _Positions) -> _Positions:
    """Return the positions of all elements of ranges."""
    previous_widths = np.cumsum(widths) - widths
    return np.repeat(starts - previous_widths, widths) + np.arange(widths.sum())
