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
from te_precision_callbacks.engine.reading import TableReader
from te_precision_callbacks.engine.slots import Asked, SegmentKey, Segments, SlotRange
from te_precision_callbacks.statistics.series import SeriesTable
from te_precision_callbacks.statistics.table import Columns, Values

logger = logging.getLogger(__name__)

_Places = npt.NDArray[np.intp]


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
        self._layout_version = -1
        self._own_layout: _Layout | None = None
        self._own_version = -1
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
        self._note_optimizers(messages, layout, stamp)
        if self._is_undecided:
            return self._collect_own(slots)
        self.local = False
        return layout.unpack(self._series)

    def _collect_own(self, slots: Segments) -> list[tuple[TableReader, Columns]]:
        if self._own_layout is None or self._own_version != slots.version:
            self._own_layout = _Layout(map(_describe, slots.segments.values()), slots, include_all=True)
            self._own_version = slots.version
        layout = self._own_layout
        layout.pack(slots, NO_STAMP, changed=False, requests=Requests())
        return layout.unpack(self._series)

    def _reduce(self, messages: Messages, slots: Segments, stamp: Stamp) -> _Layout:
        why = f"to reduce the statistics of iteration {stamp.iteration}. A rank may have ended or skipped a step()"
        while True:
            is_current = self._layout is not None and self._layout_version == slots.version
            news = [] if is_current else self._new_segments(slots)
            if self._layout is not None:
                if not is_current and not news:
                    self._update_layout(slots)  # the segments are new on this rank only
                layout = self._layout
                layout.pack(slots, stamp, changed=bool(news), requests=messages.requests)
                messages.merge("statistics", why, layout.merged, layout.split)
                if not layout.has_one_stamp() or self._has_missed_a_step(layout, stamp):
                    self._leave_out_of_step(messages, stamp)
                if not layout.has_changed():
                    messages.requested = layout.requested()
                    if layout.has_one_optimizer_count():
                        self._agreements += 1
                        self._last_agreement = stamp.iteration
                    return layout
            for entry in messages.pool(news, "names of statistics", why, SegmentDescription):
                known = self._agreed.get(entry.key)
                outputs = dict.fromkeys([*(known.outputs if known else ()), *entry.outputs])
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

    def _note_optimizers(self, messages: Messages, layout: _Layout, stamp: Stamp) -> None:
        if layout.optimizer_step_difference() and not self.optimizers_differ and not self._is_undecided:
            self.optimizers_differ = True
            if messages.rank == 0:
                logger.warning(
                    "The ranks have different numbers of optimizer steps up to iteration %d. Unless the ranks have"
                    " different optimizers, a rank has missed a step(): call step() after each optimizer step on all"
                    " ranks.",
                    stamp.iteration,
                )

    def _new_segments(self, slots: Segments) -> list[SegmentDescription]:
        news: list[SegmentDescription] = []
        for described in map(_describe, slots.segments.values()):
            known = self._agreed.get(described.key)
            if known is None or not set(described.outputs) <= set(known.outputs):
                news.append(described)
        return news

    def _update_layout(self, slots: Segments) -> None:
        self._layout = _Layout(sorted(self._agreed.values(), key=_order), slots, include_all=False)
        self._layout_version = slots.version

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

    def values_by_rank(part: str) -> dict[int, int]:
        return {rank: getattr(stamp, part) for rank, stamp in stamps.items() if getattr(stamp, part) >= 0}

    local = "Statistics are not reduced"
    schedules = list(dict.fromkeys(values_by_rank("schedule").values()))
    if len(schedules) > 1:
        names = {rank: f"schedule {schedules.index(number) + 1}" for rank, number in values_by_rank("schedule").items()}
        return RanksDifferError(
            "The ranks have different configs that collect statistics in different iterations:"
            f" {format_by_rank(names)}. Give all ranks the same config. {local}: from now on rank 0 reports local"
            " values."
        )
    parts = [format_by_rank({rank: f"iteration {number}" for rank, number in values_by_rank("iteration").items()})]
    if len(set(values_by_rank("optimizer_steps").values())) > 1:
        done = {rank: f"{number} steps" for rank, number in values_by_rank("optimizer_steps").items()}
        parts.append(f"optimizer steps since the start: {format_by_rank(done)}")
    return RanksDifferError(
        f"The ranks are out of step: {'; '.join(parts)}. Call step() on all ranks after the same optimizer steps,"
        f" with the same start_step. {local} until the ranks are connected again."
    )


def _describe(segment: SlotRange) -> SegmentDescription:
    return SegmentDescription(segment.key, tuple(segment.outputs))


def _order(described: SegmentDescription) -> tuple[str, str, str, int]:
    layer, tensor, kind, shard = described.key
    return layer, tensor, kind, -1 if shard is None else shard


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
    """Offsets of all columns in the message and in this rank's vectors.

    The first part of the message is summed: a flag for each output of each segment, 1 if it is due on the rank, then
    the summed columns. The second part is merged by maximum: the maximum columns, all columns of replicas, the stamp
    and its negative, and the flags.

    Args:
        include_all: whether segments that do not contribute are included.

    Attributes:
        merged: the message on the host, reduced in place.
        split: number of elements in the summed part.
    """

    def __init__(self, described: Iterable[SegmentDescription], slots: Segments, *, include_all: bool) -> None:
        self._device = next((on for on, _, _ in slots.vectors()), torch.device("cpu"))
        entries = list(described)
        self._due = sum(len(entry.outputs) for entry in entries)
        self.split = self._due + sum(len(entry.key.columns[0]) for entry in entries if entry.key.shard is None)
        self._pieces: list[_Piece] = []
        self._tables: dict[bytes, list[_Table]] = {}
        moves: dict[tuple[torch.device, str], list[tuple[int, int, int]]] = {}
        added = self._due
        largest = self.split
        for entry in entries:
            segment = slots.segments.get(entry.key)
            if segment is not None and not (segment.contributes or include_all):
                segment = None
            replicated = entry.key.shard is not None
            sums, maxima = entry.key.columns
            sums_at = largest if replicated else added
            if replicated:
                largest += len(sums)
            else:
                added += len(sums)
            piece = _Piece(entry, segment, sums_at, largest)
            largest += len(maxima)
            self._pieces.append(piece)
            if segment is not None:
                for of, start, target, names in (
                    ("sums", segment.sum_start, sums_at, sums),
                    ("maxima", segment.maximum_start, piece.maxima_at, maxima),
                ):
                    moves.setdefault((segment.device, of), []).append((start, target, len(names)))
        self._note_asked([])
        self.merged = np.empty(largest + _TRAILER)
        self._host = torch.from_numpy(self.merged)
        self._moves: list[tuple[torch.device, str, torch.Tensor, torch.Tensor]] = []
        for (on, of), ranges in moves.items():
            sources, targets, widths = np.array(ranges).T
            if widths.any():
                to_read = _indices(sources, widths).to(on)
                self._moves.append((on, of, to_read, _indices(targets, widths).to(self._device)))

    def has_changed(self) -> bool:
        return bool(self.merged[_CHANGED] > 0)

    def requested(self) -> Requests:
        return Requests(*(self.merged[_CHANGED + 1 :] > 0).tolist())

    def has_one_stamp(self) -> bool:
        largest, smallest = self._stamps()[:, :_PARTS_COMPARED]
        return bool((largest == -smallest).all())

    def optimizer_step_difference(self) -> int:
        largest, smallest = self._stamps()[:, -1]
        if largest == NOTHING:
            return 0
        return int(largest + smallest)

    def has_one_optimizer_count(self) -> bool:
        return not self.optimizer_step_difference() and bool(self._stamps()[0, -1] > 0)

    def _stamps(self) -> Values:
        return self.merged[-_TRAILER:_CHANGED].reshape(2, -1)

    def pack(self, slots: Segments, stamp: Stamp, *, changed: bool, requests: Requests) -> None:
        """Pack this rank's message on its device, with neutral elements for absent values, and copy it to the host."""
        message = torch.full((len(self.merged) - _TRAILER,), NOTHING, dtype=torch.float64, device=self._device)
        message[: self.split] = 0.0
        if self._asked != slots.asked:
            self._note_asked(slots.asked)
        vectors = {on: {"sums": sums, "maxima": maxima} for on, sums, maxima in slots.vectors()}
        for on, of, source, target in self._moves:
            message.index_copy_(0, target, vectors[on][of].index_select(0, source).to(self._device))
        if len(self._resting):  # an empty sum is 0, and would beat another replica's negative sum
            message.index_fill_(0, self._resting, NOTHING)
        self._host[:-_TRAILER].copy_(message)
        self.merged[: self._due] = self._flags
        trailer = self.merged[-_TRAILER:]
        for place, part in enumerate(stamp):
            trailer[place] = part if part >= 0 else NOTHING
            trailer[_PARTS + place] = -part if part >= 0 else NOTHING
        trailer[_CHANGED] = changed
        trailer[_CHANGED + 1 :] = requests

    def _note_asked(self, asked: Sequence[Asked]) -> None:
        self._asked = list(asked)
        labels: dict[SegmentKey, set[str]] = {}
        measured: set[SegmentKey] = set()
        for asked_of, of_segment, is_measured in itertools.chain.from_iterable(asked):
            labels.setdefault(asked_of.key, set()).update(of_segment)
            if is_measured:
                measured.add(asked_of.key)
        due: list[bool] = []
        resting: list[int] = []
        for entry, segment, sums_at, _ in self._pieces:
            of_piece = labels.get(entry.key, ()) if segment is not None else ()
            due.extend(map(of_piece.__contains__, entry.outputs))
            if segment is not None and entry.key not in measured and entry.key.shard is not None:
                resting.extend(range(sums_at, sums_at + len(entry.key.columns[0])))
        self._flags = np.array(due, dtype=np.float64)
        self._resting = torch.tensor(resting, dtype=torch.int64).to(self._device, non_blocking=True)

    def unpack(self, series: SeriesTable) -> list[tuple[TableReader, Columns]]:
        """Return the columns of segments with an output that is due on any rank."""
        due = self.merged[: self._due] > 0
        pattern = due.tobytes()
        tables = self._tables.get(pattern)
        if tables is None:
            if len(self._tables) == _MAX_PATTERNS:
                self._tables.clear()
            tables = self._select(due.tolist(), series)
            self._tables[pattern] = tables
        return [(table.reader, table.columns(self.merged)) for table in tables]

    def _select(self, due: Sequence[bool], series: SeriesTable) -> list[_Table]:
        """Return a table for all segments with the same columns, with a row for each tensor and its shards."""
        by_columns: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[SegmentKey, _Row]] = {}
        flags = iter(due)
        for piece in self._pieces:
            entry = piece.entry
            labels = [label for label in entry.outputs if next(flags)]
            if labels:
                rows = by_columns.setdefault(entry.key.columns, {})
                row = rows.setdefault(entry.key._replace(shard=None), _Row({}, []))
                row.labels.update(dict.fromkeys(labels))
                row.shards.append(piece)
        tables: list[_Table] = []
        for (sums, maxima), rows in by_columns.items():
            reader = TableReader([(key, tuple(row.labels)) for key, row in rows.items()], series)
            shards = [(piece.sums_at, piece.maxima_at) for row in rows.values() for piece in row.shards]
            sums_at, maxima_at = np.array(shards, dtype=np.intp).T
            cells = [sums_at + np.arange(len(sums))[:, None], maxima_at + np.arange(len(maxima))[:, None]]
            counts = [len(row.shards) for row in rows.values()]
            tables.append(_Table(reader, sums, maxima, np.concatenate(cells), np.cumsum([0, *counts[:-1]])))
        return tables


class _Piece(NamedTuple):
    """Offsets of a segment in the message; ``segment`` is None if this rank has nothing to send for it."""

    entry: SegmentDescription
    segment: SlotRange | None
    sums_at: int
    maxima_at: int


class _Row(NamedTuple):
    """A tensor: labels of its due statistics, and its shards."""

    labels: dict[str, None]
    shards: list[_Piece]


_MAX_PATTERNS = 16
"""Maximum number of cached combinations of due segments; features with different ``freq`` cause several."""


class _Table(NamedTuple):
    """Due segments with the same columns.

    Attributes:
        sums, maxima: names of the columns.
        cells: [columns, segments]: offsets in the message; shards of a tensor are adjacent.
        begins: [rows]: the first segment of each tensor.
    """

    reader: TableReader
    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    cells: _Places
    begins: _Places

    def columns(self, values: Values) -> Columns:
        """Return the columns, with the shards of replicas added up."""
        cells = values[self.cells]
        added = cells[: len(self.sums)]
        largest = cells[len(self.sums) :]
        added[added == NOTHING] = 0.0  # no rank has measured this replica
        if len(self.begins) < cells.shape[1]:
            added = np.add.reduceat(added, self.begins, axis=1)
            largest = np.maximum.reduceat(largest, self.begins, axis=1)
        return dict(zip((*self.sums, *self.maxima), (*added, *largest), strict=True))


def _indices(starts: _Places, widths: _Places) -> torch.Tensor:
    before = np.cumsum(widths) - widths
    return torch.from_numpy(np.repeat(starts - before, widths) + np.arange(widths.sum()))
