"""The statistics engine: measures tensors during a step and returns their statistics at its end.

    engine = StatisticsEngine()
    engine.note(Watched(...), requests)       # the statistics a feature requests
    engine.measure()                          # one pass for all notes of a tensor; nothing waits for the device
    measurements = engine.flush(reduce=True)  # at the end of the step, on all ranks

The engine depends neither on trainers nor on the registry of features.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import QuantizationError
from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.numerics.formats import E5M2
from te_precision_callbacks.base.numerics.layouts import PLAIN, fp8_format, per_tensor_codes
from te_precision_callbacks.base.numerics.recipes import RECIPES, QuantizerSettings
from te_precision_callbacks.base.ranks.messages import Messages
from te_precision_callbacks.base.vocabulary import ELEMENT_FORMATS, IDENTITY_QUANTIZER, recipe_of
from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.gemm_operands import GemmOperands
from te_precision_callbacks.engine.kernels import eager_blocks
from te_precision_callbacks.engine.kernels.columns import (
    COMPARISON_SUMS,
    LIMIT_SUMS,
    LOSS_MAXIMA,
    LOSS_SUMS,
    MAXIMA,
    MOMENT_SUMS,
    RANGE_MAXIMA,
    RANGE_SUMS,
    SCALE_MAXIMA,
    SCALE_SUMS,
    Again,
    BlockPlaces,
    BlockScaledTensor,
    ColumnPlaces,
    Pending,
)
from te_precision_callbacks.engine.kernels.eager import scale_columns
from te_precision_callbacks.engine.kernels.eager_blocks import SumsAndMaxima, largest_range
from te_precision_callbacks.engine.quantization import (
    PerTensor,
    default_settings,
    read,
    settings_of,
    simulate,
)
from te_precision_callbacks.engine.reduction import NO_STAMP, Reduction, Rows, Stamp, Table
from te_precision_callbacks.engine.slots import Asked, DeviceSlots, SegmentKey, Segments, SlotRange
from te_precision_callbacks.gemm_error import FORMAT_SUMS, KERNEL_MAXIMA, KERNEL_SUMS
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import OWN_RECIPE, Blocks, Request, UnknownStatisticError, no_blocks
from te_precision_callbacks.statistics.series import Measured, SeriesTable
from te_precision_callbacks.statistics.table import (
    BLOCK_SOURCES,
    EXPONENT_COLUMNS,
    SCALE_SOURCES,
    STATISTICS,
    StatisticSource,
    Values,
)

logger = logging.getLogger(__name__)

_WEIGHT = "weight"


class Placement(NamedTuple):
    """A layer's split over its tensor-parallel group, and the part of each tensor that features get from TE.

    Read from TE 2.20.2 (``pytorch/module/{linear,layernorm_linear,layernorm_mlp,base}.py`` and ``distributed.py:
    gather_along_first_dim``). *Parts*: each rank has a different part, and all count. *Alike*: each rank has the whole
    tensor, and only the first rank counts. *Terms*: each rank has a partial sum of full size, which TE reduces later.
    All terms count, so the statistics are not the statistics of the sum. In addition, each data-parallel rank and each
    micro-batch has its own term of wgrad.

    =================  ==================  =====================  =======================
    tensor             column-parallel     row-parallel           neither (all is copied)
    =================  ==================  =====================  =======================
    activation         alike, ``s`` parts  parts                  alike, ``s`` parts
    weight             parts               parts                  alike
    output             parts               terms                  alike, ``s`` parts
    gradient           parts               alike, also with ``s``  alike, ``s`` parts
    wgrad              parts               parts                  alike, ``s`` terms
    dgrad              terms               parts                  alike, ``s`` parts
    =================  ==================  =====================  =======================

    ``s``: with sequence parallelism. Features then get the input of a column-parallel layer before it is gathered, and
    the output gradient of a row-parallel layer after it was gathered. With ``return_layernorm_output_gathered`` they
    get the input before and after gathering: each element counts once more per rank.

    Attributes:
        first: whether this is the lowest rank of the group among the ranks that reduce together.
        mode: ``column``, ``row`` or None, as Transformer Engine's ``parallel_mode``.
        sequence_parallel: whether activations are split along the sequence outside of the GEMMs.
    """

    rank: int
    first: bool
    mode: str | None
    sequence_parallel: bool

    @property
    def shard(self) -> int:
        """Index of this rank's part of the weight."""
        if self.mode is None:
            return 0
        return self.rank

    def contributes(self, tensor: str) -> bool:
        """Return whether this rank's part of a tensor counts; False if the first rank has the same part."""
        if self.mode == "column":
            alike = tensor == "activation" and not self.sequence_parallel
        elif self.mode == "row":
            alike = tensor == "gradient"
        else:
            alike = tensor != _WEIGHT and not self.sequence_parallel
        return self.first or not alike


class StatisticsEngine:
    """Collects statistics of tensors during a step.

    Args:
        on_failure: called with the failed operation, the tensor and the exception; by default, each operation is logged
            once. The tensor's other statistics are still measured.

    Attributes:
        placements: layer -> its split. Without a placement, a layer counts as not split, except for its weight.
        series: the series of the run; None for a new table.
        iteration: the debug iteration of the last watched tensor.
        gemm_operands: receives operands of GEMMs in high precision; None without a session.
        reports_quantized_only: whether a statistic that a tensor cannot have, since it exists only in quantized form,
            is a failure. With the default config, nobody has asked for it.
    """

    def __init__(self, series: SeriesTable | None = None, on_failure: Report | None = None) -> None:
        self._placements: Mapping[str, Placement] = {}
        self.on_failure = _log_failure_once() if on_failure is None else on_failure
        self.has_news = False
        self.iteration = 0
        self.series = SeriesTable() if series is None else series
        self._readings: WeakKeyDictionary[Rows, _TableReader] = WeakKeyDictionary()
        self._slots = Segments()
        self._reduction = Reduction(None, self._report)
        self._noted: list[tuple[Watched, list[Sequence[Request]]]] = []
        self._plans: dict[tuple[tuple[int, ...], str | None], _Plan] = {}
        self._broken: set[tuple[str, str]] = set()  # (layer, tensor) with inf or nan so far
        self._weights_seen: set[SegmentKey] = set()
        self.notices = Notices()
        self.gemm_operands: GemmOperands | None = None
        self.reports_quantized_only = True

    def _report(self, operation: str, subject: str, error: Exception) -> None:
        self.on_failure(operation, subject, error)

    def reduce_over(self, messages: Messages | None) -> None:
        if self._reduction.messages is not messages:
            self._reduction = Reduction(messages, self._report)

    @property
    def optimizers_differ(self) -> bool:
        return self._reduction.optimizers_differ

    @property
    def placements(self) -> Mapping[str, Placement]:
        return self._placements

    @placements.setter
    def placements(self, placements: Mapping[str, Placement]) -> None:
        self._placements = placements
        self._plans.clear()

    def note(self, watched: Watched, requests: Sequence[Request]) -> None:
        """Queue a tensor's statistics for :meth:`measure`; the tensor must not change before then."""
        if self._noted:
            last, asked = self._noted[-1]
            if last.values is watched.values and (last.layer, last.tensor) == (watched.layer, watched.tensor):
                asked.append(requests)
                return
        self._noted.append((watched, [requests]))

    def add(
        self,
        layer: str,
        tensor: str,
        iteration: int,
        source: StatisticSource,
        sums: torch.Tensor,
        maxima: torch.Tensor | None = None,
    ) -> None:
        """Add columns measured elsewhere, and request all their statistics.

        Args:
            source: the source of the columns.
            sums, maxima: float64, the columns of ``source``.
        """
        self.has_news = True
        self.iteration = iteration
        with _without_autograd():
            segment = self._slots.segment(
                SegmentKey(layer, tensor, source.name), *_COLUMNS[source], sums.device, contributes=True
            )
            self._slots.merge(segment, sums, maxima)
            self._slots.request(segment, _requests_of(source))

    def measure(self) -> None:
        """Measure all queued tensors, each in one pass; on a GPU, in one launch for all tensors.

        An exception is raised only after the other tensors were measured.
        """
        if self._noted:
            noted = self._noted
            self._noted = []
            if is_capturing():  # the captured pass would add the values again in each replay
                self._warn_captured(noted[0][0])
                return
            self.has_news = True
            self.iteration = noted[-1][0].iteration
            with _without_autograd():
                self._measure(noted)

    def prepare(self, watched: Watched, asked: Sequence[Sequence[Request]]) -> Prepared | None:
        """Return how a tensor was measured, for :meth:`measure_again`; None if one pass did not measure all requests.

        Args:
            asked: the requests of each feature, as they were noted.
        """
        if watched.values is None:
            return None
        measuring = _Measurement(self, watched)
        ready = self._plan(asked, measuring.unquantized_as).ready.get(measuring.key)
        if ready is None:
            return None
        passes = [_PreparedPass(pass_, fp8_format(watched.rowwise) is E5M2) for pass_ in ready.passes]
        return Prepared(passes, measuring._values.dtype, ready)

    def prepare_gemm(self, tensors: Sequence[tuple[int, Prepared]]) -> PreparedGemm:
        """Return how the tensors of a GEMM were measured; each with its place among the arguments of measure_again."""
        on = [self._slots.devices[prepared.ready.device] for _, prepared in tensors]
        asked = [prepared.ready.asked for _, prepared in tensors]
        once = frozenset[SegmentKey]().union(*(prepared.ready.once for _, prepared in tensors))
        return PreparedGemm(tensors, self._slots.moves, self._placements, next(iter(on), None), asked, once)

    def measure_again(
        self, prepared: PreparedGemm, all_values: Sequence[Any], operands: Sequence[Any], iteration: int
    ) -> None:
        """Measure the tensors of a GEMM with the passes of an earlier one; a failure of the pass is reported.

        Args:
            all_values: the operands and the result, in high precision.
            operands: the operands as the GEMM reads them.

        Raises:
            Differs: a tensor must be measured by :meth:`note` and :meth:`measure`; none was measured.
        """
        if prepared.moves != self._slots.moves or prepared.placements is not self._placements:
            raise Differs("placement")
        on = prepared.on
        pending: list[Pending] = []
        for place, (passes, dtype, ready) in prepared.tensors:
            values = all_values[place]
            if values.dtype is not dtype:
                raise Differs("dtype")
            if values.device != ready.device:
                raise Differs("device")
            if not values.numel():
                raise Differs("empty")
            if ready.once and not ready.once.isdisjoint(self._weights_seen):
                if ready.once <= self._weights_seen:
                    continue
                raise Differs("weight")
            if type(values) not in PLAIN:
                values = values.detach()
            for (form, places, of_blocks), e5m2 in passes:
                one: tuple[object, ...]
                if form is None:
                    one = values, None, None, False, places, None, _NO_BLOCKS
                elif of_blocks is None:
                    given = operands[place]
                    codes = given._data
                    codes = per_tensor_codes(given) if codes is None else codes
                    if codes is None or codes.shape != values.shape:
                        raise Differs("shape")
                    one = values, codes, given._scale_inv, e5m2, places, None, _NO_BLOCKS
                else:
                    held = read(operands[place], columnwise=form.columnwise)
                    if not isinstance(held, BlockScaledTensor) or not held.fits(values):
                        raise Differs("shape")
                    one = values, None, None, False, places, held, of_blocks
                pending.append(tuple.__new__(Pending, one))  # Pending() would call a Python function
        if pending and on is not None:
            if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                raise Differs("autograd")
            if on.device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
                raise Differs("capture")
            try:
                vectors = on.last
                if vectors is None or vectors.handle != on.handle_now():
                    vectors = on.current()
                left: Sequence[Pending] = pending
                again = prepared.again.get(len(pending))
                if again is not None:
                    left = again(pending, vectors.sums, vectors.maxima, vectors.handle)
                if left:
                    kernels.add(left, vectors.sums, vectors.maxima)
                    prepared.again[len(pending)] = kernels.again(pending)
            except Exception as error:
                key = prepared.asked[0][0][0].key
                self.on_failure("observing", f"{key.layer} {key.tensor}", error)
                return
        self.has_news = True
        self.iteration = iteration
        self._slots.asked += prepared.asked
        self._weights_seen |= prepared.once

    def _warn_captured(self, watched: Watched) -> None:
        if self.notices.first("captured"):
            logger.warning(
                "%s %s is not measured, because a CUDA graph is being captured: capture after the steps that you"
                " want to observe. Other tensors are not listed.",
                watched.layer,
                watched.tensor,
            )

    def _measure(self, noted: Iterable[tuple[Watched, Sequence[Sequence[Request]]]]) -> None:
        left: dict[torch.device, list[tuple[_Measurement, _CachedPasses, Sequence[Pending]]]] = {}
        failure: Exception | None = None
        for watched, asked in noted:
            try:
                measuring = _Measurement(self, watched)
                passes = measuring.run(self._plan(asked, measuring.unquantized_as))
            except Exception as error:
                failure = failure or error
                continue
            if passes is not None:
                left.setdefault(passes[0].device, []).append((measuring, *passes))
        for device, together in left.items():
            vectors = self._slots.devices[device].current()
            pending: list[Pending] = []
            for _, _, of_tensor in together:
                pending += of_tensor
            kernels.add(pending, vectors.sums, vectors.maxima)
            for measuring, ready, _ in together:
                measuring.end(ready)
        if failure is not None:
            raise failure

    def _plan(self, asked: Sequence[Sequence[Request]], unquantized_as: str | None) -> _Plan:
        """Return the plan for requests, cached by identity: features pass the same tuples in each step."""
        key = tuple(map(id, asked)), unquantized_as
        plan = self._plans.get(key)
        if plan is None:
            plan = _Plan(asked, _group_by_kind(asked, unquantized_as), {}, {})
            if all(type(requests) is tuple for requests in asked):
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                self._plans[key] = plan
        return plan

    def flush(self, *, reduce: bool, stamp: Stamp = NO_STAMP) -> Measured:
        measurements = self.collect(reduce=reduce, stamp=stamp)
        self.forget()
        return measurements

    def collect(self, *, reduce: bool, stamp: Stamp = NO_STAMP) -> Measured:
        with _outside_of_inference():
            tables = self._reduction.collect(self._slots, reduce=reduce, stamp=stamp)
        series = [np.empty(0, np.int32)]
        values = [np.empty(0)]
        histograms: dict[int, tuple[float, ...]] = {}
        with np.errstate(all="ignore"):
            for table in tables:
                reading = self._readings.get(table.rows)
                if reading is None:
                    reading = _TableReader(table.rows, self.series)
                    self._readings[table.rows] = reading
                for numbers, of_numbers in (reading.numbers(table), reading.nonfinite_counts(table, self._broken)):
                    series.append(numbers)
                    values.append(of_numbers)
                histograms.update(reading.histograms(table))
        local = self._reduction.local
        return Measured(self.series, np.concatenate(series), np.concatenate(values), histograms, local=local)

    def forget(self) -> None:
        with _outside_of_inference():
            self._slots.reset()
        self.has_news = False
        self._weights_seen.clear()


@functools.cache
def _requests_of(source: StatisticSource) -> Sequence[Request]:
    return tuple(Request(name, row) for name, row in STATISTICS.items() if row.source is source)


_NO_CONTEXT = contextlib.nullcontext()


@contextlib.contextmanager
def _disable_autograd() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def _without_autograd() -> AbstractContextManager[None]:
    """Disable gradients and inference mode: tensors created in inference mode cannot be changed later."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _disable_autograd()
    return _NO_CONTEXT


def _outside_of_inference() -> AbstractContextManager[object]:
    """Like :func:`_without_autograd`, for tensors that never require gradients."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return _NO_CONTEXT


def _log_failure_once() -> Report:
    notices = Notices()

    def log(operation: str, subject: str, error: Exception) -> None:
        if notices.first(operation):
            logger.warning(
                "%s %s: %s: %s. Training continues without it.", operation, subject, type(error).__name__, error
            )

    return log


_SeriesValues = tuple[npt.NDArray[np.int32], Values]

_NONFINITE = "nonfinite_num"


class _TableReader:
    """Computes the values of a table's rows; cached for all steps with the same statistics."""

    def __init__(self, rows: Rows, table: SeriesTable) -> None:
        self._table = table
        self._uncounted: list[tuple[str, str]] = []  # tensors with moments, but without a request for nonfinite_num
        uncounted_rows: list[int] = []
        numbers: list[int] = []
        places: dict[str, list[tuple[int, int]]] = {}  # statistic -> (row, place) pairs
        histograms: dict[StatisticSource, list[tuple[int, int]]] = {}  # kind -> (row, series) pairs
        for row, (key, labels) in enumerate(zip(rows.keys, rows.outputs, strict=True)):
            if key.kind == StatisticSource.TENSOR.name and _NONFINITE not in labels:
                self._uncounted.append((key.layer, key.tensor))
                uncounted_rows.append(row)
            for label in labels:
                number = table.intern(key.layer, key.tensor, label)
                request = table[number].family.request
                if request is None:
                    raise UnknownStatisticError(f"another rank has a statistic {label!r} that is unknown on this rank")
                if request.statistic.value is None:
                    histograms.setdefault(request.statistic.source, []).append((row, number))
                else:
                    places.setdefault(request.statistic.name, []).append((row, len(numbers)))
                    numbers.append(number)
        self._uncounted_rows = np.array(uncounted_rows, dtype=np.intp)
        self._series = np.array(numbers, dtype=np.int32)
        self._formulas = [
            (STATISTICS[name].value, *np.array(pairs, dtype=np.intp).T.copy()) for name, pairs in places.items()
        ]
        self._histograms = [(_COLUMNS[source][0], *zip(*pairs, strict=True)) for source, pairs in histograms.items()]

    def numbers(self, table: Table) -> _SeriesValues:
        values = np.empty(len(self._series))
        for formula, rows, places in self._formulas:
            if formula is not None:
                values[places] = formula(table.columns)[rows]
        return self._series, values

    def nonfinite_counts(self, table: Table, broken: set[tuple[str, str]]) -> _SeriesValues:
        """Return ``nonfinite_num`` of tensors that do not request it, after a first inf or nan; extends ``broken``."""
        counts = table.columns["nonfinite"][self._uncounted_rows] if self._uncounted else np.empty(0)
        broken.update(self._uncounted[place] for place in counts.nonzero()[0].tolist())
        places = [place for place, key in enumerate(self._uncounted) if key in broken] if broken else []
        series = [self._table.intern(*self._uncounted[place], _NONFINITE) for place in places]
        return np.array(series, dtype=np.int32), counts[places]

    def histograms(self, table: Table) -> Iterator[tuple[int, tuple[float, ...]]]:
        for bins, rows, numbers in self._histograms:
            counts = np.stack([table.columns[name][list(rows)] for name in bins], axis=-1).tolist()
            yield from zip(numbers, map(tuple, counts), strict=True)


_COLUMNS: Mapping[StatisticSource, tuple[tuple[str, ...], tuple[str, ...]]] = {
    StatisticSource.TENSOR: (MOMENT_SUMS, MAXIMA),
    StatisticSource.EXPONENTS: (EXPONENT_COLUMNS, ()),
    StatisticSource.BLOCKS: ((), ("block_range",)),
    StatisticSource.QUANTIZED: (COMPARISON_SUMS, ()),
    StatisticSource.SCALES: (SCALE_SUMS, SCALE_MAXIMA),
    StatisticSource.SCALE_LIMITS: (LIMIT_SUMS, ()),
    StatisticSource.LOSSES: (LOSS_SUMS, LOSS_MAXIMA),
    StatisticSource.RANGES: (RANGE_SUMS, RANGE_MAXIMA),
    StatisticSource.GEMM: (KERNEL_SUMS, KERNEL_MAXIMA),
    StatisticSource.GEMM_FORMAT: (FORMAT_SUMS, ()),
}
"""Source of a statistic -> the summed columns, and the maximum columns."""


class _QuantizedForm(NamedTuple):
    """A quantized form of a tensor; see :class:`Request`."""

    recipe: str
    columnwise: bool
    e5m2: bool | None


class _SegmentKind(NamedTuple):
    """Source of statistics; requests of one kind share a segment."""

    source: StatisticSource
    form: _QuantizedForm | None = None
    blocks: Blocks | None = None

    @classmethod
    def of_request(cls, request: Request) -> _SegmentKind:
        form = None if request.recipe is None else _QuantizedForm(request.recipe, request.columnwise, request.e5m2)
        return cls(request.statistic.source, form, request.blocks)


@functools.cache
def _name_of(kind: _SegmentKind) -> str:
    """Equal on every rank."""
    parts = [kind.source.name]
    if kind.form is not None:
        parts += [kind.form.recipe or "OWN", "columnwise" if kind.form.columnwise else "rowwise"]
        parts += [] if kind.form.e5m2 is None else [ELEMENT_FORMATS[kind.form.e5m2]]
    if kind.blocks is not None:
        parts += [str(kind.blocks.size), str(kind.blocks.dims), str(kind.blocks.both)]
    return " ".join(parts)


_Key = tuple[str, str, int | None]

_Wanted = Mapping[_SegmentKind, Sequence[Request]]
"""Kinds of a tensor to measure -> requested statistics."""

_MAX_PLANS = 256


class _Plan(NamedTuple):
    """Kinds to measure for a set of requests, with their slots.

    Attributes:
        asked: the requests, kept alive because the cache uses their ids.
        segments: (layer, tensor, shard) -> the segment of each kind, until placements change.
        ready: (layer, tensor, shard) -> the passes that covered all requests last time.
    """

    asked: Sequence[Sequence[Request]]
    wanted: _Wanted
    segments: dict[_Key, dict[_SegmentKind, SlotRange]]
    ready: dict[_Key, _CachedPasses]


class _Pass(NamedTuple):
    form: _QuantizedForm | None
    places: ColumnPlaces
    of_blocks: BlockPlaces | None = None


class _CachedPasses(NamedTuple):
    """Cached passes that cover all requests for a tensor: one pass, or one per block-scaled form.

    Attributes:
        moves: the slots' count of moves when cached; another count invalidates the passes.
        once: the segments of a weight, which is measured once in a step.
    """

    moves: int
    device: torch.device
    passes: Sequence[_Pass]
    asked: Asked
    once: frozenset[SegmentKey]


_NO_BLOCKS = BlockPlaces()


class _PreparedPass(NamedTuple):
    pass_: _Pass
    e5m2: bool


class Prepared(NamedTuple):
    """The passes over a tensor, its dtype in high precision, and its slots."""

    passes: Sequence[_PreparedPass]
    dtype: torch.dtype
    ready: _CachedPasses


@dataclass(slots=True)
class PreparedGemm:
    """The passes over the tensors of a GEMM.

    Attributes:
        moves, placements: if they differ, the slots do too.
        asked, once: of all tensors; see :class:`_CachedPasses`.
        again: number of tensors, without a weight that was measured -> how to measure them by the last ones' launches.
    """

    tensors: Sequence[tuple[int, Prepared]]
    moves: int
    placements: Mapping[str, Placement]
    on: DeviceSlots | None
    asked: Sequence[Asked]
    once: frozenset[SegmentKey]
    again: dict[int, Again | None] = field(default_factory=dict)


class Differs(Exception):
    """A tensor cannot be measured like an earlier one."""


def _group_by_kind(asked: Iterable[Iterable[Request]], unquantized_as: str | None) -> _Wanted:
    wanted: dict[_SegmentKind, list[Request]] = {}
    for request in itertools.chain.from_iterable(asked):
        of_layer = unquantized_as is not None and request.recipe == OWN_RECIPE
        resolved = request.under(str(unquantized_as)) if of_layer else request
        wanted.setdefault(_SegmentKind.of_request(resolved), []).append(resolved)
    return wanted


_OF_CODES = frozenset({StatisticSource.QUANTIZED, StatisticSource.SCALES})

_Held = PerTensor | BlockScaledTensor | None
"""The quantized data that a GEMM reads; None if the form must be simulated."""


class _Measurement:
    def __init__(self, engine: StatisticsEngine, watched: Watched) -> None:
        self._engine = engine
        self._watched = watched
        self._quantized = watched.quantized()
        self._recipe = recipe_of(watched.quantizer)
        kind = type(watched.quantizer).__name__
        no_quantizer = watched.quantizer is None or kind == IDENTITY_QUANTIZER  # TE's quantizer without a recipe
        self._unknown_quantizer = None if no_quantizer or self._recipe is not None else kind
        if watched.values is None and self._quantized is not None:
            self._values = self._quantized.dequantize().detach()
        else:
            self._values = _plain(watched.values)
        placement = engine.placements.get(watched.layer)
        self._contributes = placement is None or placement.contributes(watched.tensor)
        self._shard: int | None = None
        if watched.tensor == _WEIGHT:
            own_shard = 0 if watched.tp_group is None else dist.get_rank(watched.tp_group)
            self._shard = own_shard if placement is None else placement.shard
        self._wanted: dict[_SegmentKind, Sequence[Request]] = {}
        self._segments: dict[_SegmentKind, SlotRange] = {}

    @property
    def unquantized_as(self) -> str | None:
        """Recipe that is simulated for a tensor that is not quantized: its quantizer's, else current scaling.

        None if the tensor is quantized, or its quantizer is unknown.
        """
        if self._quantized is not None or self._unknown_quantizer is not None:
            return None
        if self._recipe in RECIPES:
            return self._recipe
        return "fp8_current_scaling"

    @property
    def key(self) -> _Key:
        return self._watched.layer, self._watched.tensor, self._shard

    def run(self, plan: _Plan) -> tuple[_CachedPasses, Sequence[Pending]] | None:
        """Measure the requested kinds.

        Returns:
            Passes to launch before :meth:`end`; None if nothing is left to do.
        """
        slots = self._engine._slots
        seen = self._engine._weights_seen
        key = self.key
        ready = plan.ready.get(key)
        if ready is not None and ready.moves == slots.moves and ready.device == self._values.device:
            again = self._reuse_passes(ready)
            if again is not None:
                return ready, again
        self._segments = plan.segments.setdefault(key, {})
        for kind, requests in plan.wanted.items():
            segment = self._segment(kind)
            if segment.key in seen or not self._values.numel():
                slots.request(segment, requests, is_measured=False)
            else:
                self._wanted[kind] = requests
        if not self._wanted:
            return None
        held: dict[_QuantizedForm, _Held] = {}
        for form in dict.fromkeys(kind.form for kind in self._wanted if kind.form is not None):
            try:
                held[form] = self._read_quantized(form)
            except Exception as error:
                self._report_failure(form, error)
        ready, rest = self._plan_passes(held)
        self._measure_separately(rest, held)
        if ready is None:
            return None
        if not rest and len(self._wanted) == len(plan.wanted):
            plan.ready[key] = ready
        pending: list[Pending] = []
        for pass_ in ready.passes:
            data = None if pass_.form is None else held[pass_.form]
            pending.append(self._pending(pass_, data))
        return ready, pending

    def end(self, ready: _CachedPasses) -> None:
        self._engine._slots.asked.append(ready.asked)
        self._engine._weights_seen |= ready.once

    def _reuse_passes(self, ready: _CachedPasses) -> Sequence[Pending] | None:
        if not self._values.numel() or self._watched.values is None:
            return None
        if not ready.once.isdisjoint(self._engine._weights_seen):
            return None
        pending: list[Pending] = []
        for pass_ in ready.passes:
            try:
                held = None if pass_.form is None else self._read_quantized(pass_.form)
            except Exception:  # the retry reports it
                return None
            if pass_.form is not None and not self._can_reuse(pass_, held):
                return None
            pending.append(self._pending(pass_, held))
        return pending

    def _can_reuse(self, pass_: _Pass, held: _Held) -> bool:
        if pass_.of_blocks is None:
            return isinstance(held, PerTensor)
        return isinstance(held, BlockScaledTensor) and held.fits(self._values)

    def _pending(self, pass_: _Pass, held: _Held) -> Pending:
        if isinstance(held, PerTensor):
            return Pending(self._values, held.codes, held.scale_inv, held.e5m2, pass_.places)
        if held is not None and pass_.of_blocks is not None:
            return Pending(self._values, None, None, False, pass_.places, held, pass_.of_blocks)
        return Pending(self._values, None, None, False, pass_.places)

    def _plan_passes(self, held: Mapping[_QuantizedForm, _Held]) -> tuple[_CachedPasses | None, Sequence[_SegmentKind]]:
        """Return the passes (one, or one per form), and the kinds that they do not cover."""
        fused = [kind for kind in self._wanted if self._is_fusable(kind, held)]
        rest = [kind for kind in self._wanted if kind not in fused]
        if not fused:
            return None, rest
        segments: dict[_QuantizedForm | None, dict[StatisticSource, SlotRange]]
        segments = {kind.form: {} for kind in fused if kind.form is not None} or {None: {}}
        first = next(iter(segments))  # its pass also covers kinds without a form
        slots = self._engine._slots
        device = self._values.device
        for kind in fused:
            segment = self._segment(kind)
            if segment.device != device:
                raise QuantizationError("the layer moved to another device within a step")
            segments[first if kind.form is None else kind.form][kind.source] = segment
        passes = []
        for form, by_source in segments.items():
            in_blocks = form is not None and isinstance(held[form], BlockScaledTensor)
            passes.append(_pass(form, by_source, in_blocks=in_blocks))
        asked = [(self._segment(kind), slots.labels(self._segment(kind), self._wanted[kind]), True) for kind in fused]
        once = [segment.key for segment, *_ in asked if segment.key.tensor == _WEIGHT]
        return _CachedPasses(slots.moves, device, passes, asked, frozenset(once)), rest

    def _is_fusable(self, kind: _SegmentKind, held: Mapping[_QuantizedForm, _Held]) -> bool:
        if kind.form is None:
            return kind.blocks is None
        data = held.get(kind.form)
        if self._watched.values is None or data is None:  # codes are compared with values
            return False
        if isinstance(data, PerTensor):
            return kind.source in _OF_CODES
        return data.fits(self._values)

    def _measure_separately(self, kinds: Sequence[_SegmentKind], held: Mapping[_QuantizedForm, _Held]) -> None:
        """Measure kinds that no pass covers: ranges of blocks, simulated recipes, scales without the tensor."""
        for kind in kinds:
            if kind.blocks is not None:
                self._merge(kind, (None, largest_range(self._values, kind.blocks)))
        for form, data in held.items():
            wanted = {kind.source for kind in kinds if kind.form == form}
            if wanted:
                self._compare(form, data, wanted)

    def _read_quantized(self, form: _QuantizedForm) -> _Held:
        quantized = self._watched.quantized(columnwise=form.columnwise)
        if quantized is None and form.recipe == OWN_RECIPE and self._unknown_quantizer is not None:
            raise QuantizationError(
                f"the layer's quantizer, {self._unknown_quantizer}, does not belong to a known recipe"
            )
        if quantized is None:
            return None
        its_recipe = recipe_of(self._quantizer_of(quantized))
        if form.recipe not in (OWN_RECIPE, its_recipe) or form.e5m2 not in (None, fp8_format(quantized) is E5M2):
            return None
        try:
            held = read(quantized, columnwise=form.columnwise)
        except QuantizationError as error:
            if its_recipe is None:
                raise
            if self._engine.notices.first(str(error)):
                logger.warning(
                    "%s of %s %sis simulated from the high-precision tensor with the settings of the layer's quantizer,"
                    " because %s. Other tensors are not listed.",
                    self._labels(form),
                    self._watched.layer,
                    self._watched.tensor,
                    error,
                )
            return None
        if isinstance(held, PerTensor) and self._watched.values is not None and held.codes.shape != self._values.shape:
            sizes = f"{tuple(held.codes.shape)}, the tensor before quantization {tuple(self._values.shape)}"
            raise QuantizationError(f"the quantized tensor has the shape {sizes}")
        return held

    def _compare(self, form: _QuantizedForm, held: _Held, wanted: Set[StatisticSource]) -> None:
        its_recipe = form.recipe or recipe_of(self._quantizer(form.columnwise)) or ""
        refused: dict[str, Set[StatisticSource]] = {}
        if self._watched.values is None:
            missing = wanted - (SCALE_SOURCES if held else set())
            wanted = wanted - missing
            if self._engine.reports_quantized_only:
                refused["the tensor exists only in quantized form"] = missing
        if isinstance(held, PerTensor) or (held is None and its_recipe == "fp8_current_scaling"):
            refused[no_blocks(its_recipe or "the layer's quantizer")] = wanted & BLOCK_SOURCES
        wanted = wanted - set().union(*refused.values())
        try:
            columns = self._columns(form._replace(recipe=its_recipe), held, wanted) if wanted else {}
        except Exception as error:
            self._report_failure(form, error)
            return
        for source in wanted & columns.keys():
            self._merge(_SegmentKind(source, form), columns[source])
        for reason, kinds in refused.items():
            if kinds:
                self._report_failure(form, QuantizationError(reason), kinds)

    def _columns(
        self, form: _QuantizedForm, held: _Held, wanted: Set[StatisticSource]
    ) -> Mapping[StatisticSource, SumsAndMaxima]:
        if isinstance(held, PerTensor):
            return {StatisticSource.SCALES: scale_columns(held.scale_inv)}
        if isinstance(held, BlockScaledTensor):
            return eager_blocks.columns(held, self._watched.values, wanted)
        finite = torch.where(self._values.isfinite(), self._values.abs(), 0.0)
        settings = self._settings(form)
        return simulate(form.recipe, self._values, finite.amax().double(), wanted, settings, columnwise=form.columnwise)

    def _settings(self, form: _QuantizedForm) -> QuantizerSettings:
        """Return the settings of the layer's quantizer if it has the recipe, else the recipe's defaults."""
        own = self._quantizer(form.columnwise)
        if form.recipe != recipe_of(own):
            return default_settings(form.recipe, self._watched.tensor, e5m2=form.e5m2)
        settings = settings_of(own)
        if form.e5m2 is None:
            return settings
        return settings._replace(e5m2=form.e5m2)

    def _quantizer(self, columnwise: bool) -> Any:
        """Return the quantizer of the tensor that a GEMM reads, which a feature may have replaced; else the layer's."""
        return self._quantizer_of(self._watched.quantized(columnwise=columnwise))

    def _quantizer_of(self, quantized: Any) -> Any:
        its = getattr(quantized, "_quantizer", None)
        if recipe_of(its) is None:
            return self._watched.quantizer
        return its

    def _segment(self, kind: _SegmentKind) -> SlotRange:
        segment = self._segments.get(kind)
        device = self._values.device
        if segment is None or segment.device != device:
            key = SegmentKey(self._watched.layer, self._watched.tensor, _name_of(kind), self._shard)
            segment = self._engine._slots.segment(key, *_COLUMNS[kind.source], device, contributes=self._contributes)
            self._segments[kind] = segment
        return segment

    def _merge(self, kind: _SegmentKind, columns: SumsAndMaxima) -> None:
        segment = self._segment(kind)
        self._engine._slots.merge(segment, *columns)
        self._engine._slots.request(segment, self._wanted[kind])
        if self._watched.tensor == _WEIGHT:  # a step's micro-batches share the weight
            self._engine._weights_seen.add(segment.key)

    def _report_failure(
        self, form: _QuantizedForm, error: Exception, sources: Collection[StatisticSource] = frozenset(StatisticSource)
    ) -> None:
        self._engine.on_failure(self._labels(form, sources), f"of {self._watched.layer} {self._watched.tensor}", error)

    def _labels(self, form: _QuantizedForm, sources: Collection[StatisticSource] = frozenset(StatisticSource)) -> str:
        labels: list[str] = []
        for kind, requests in self._wanted.items():
            if kind.form == form and kind.source in sources:
                labels += [request.label for request in requests]
        return ", ".join(labels)


def _pass(form: _QuantizedForm | None, segments: Mapping[StatisticSource, SlotRange], *, in_blocks: bool) -> _Pass:

    def at(source: StatisticSource) -> tuple[int, int]:
        segment = segments.get(source)
        if segment is None:
            return (-1, -1)
        return (segment.sum_start, segment.maximum_start)

    moments = at(StatisticSource.TENSOR)
    scales = at(StatisticSource.SCALES)
    places = ColumnPlaces(
        moments=moments[0],
        maxima=moments[1],
        compared=at(StatisticSource.QUANTIZED)[0],
        scales=scales[0],
        scale_maxima=scales[1],
        exponents=at(StatisticSource.EXPONENTS)[0],
    )
    return _Pass(form, places, eager_blocks.places_of(at) if in_blocks else None)


def _plain(values: torch.Tensor | None) -> torch.Tensor:
    if values is None:
        return torch.empty(0)
    # Avoid a torch operation between GEMMs: for a small tensor it costs as much as the rest.
    if type(values) is torch.Tensor:
        return values
    return values.detach()
