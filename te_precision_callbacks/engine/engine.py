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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import QuantizationError
from te_precision_callbacks.base.failures import ObservationFailures, Report
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.numerics.formats import E5M2
from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.base.ranks.messages import Messages
from te_precision_callbacks.base.vocabulary import ELEMENT_FORMATS, IDENTITY_QUANTIZER, recipe_of
from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.kernels import eager_blocks
from te_precision_callbacks.engine.kernels.columns import (
    BlockScaledTensor,
    ColumnPlaces,
    Pending,
    Repeat,
)
from te_precision_callbacks.engine.kernels.eager import scale_columns
from te_precision_callbacks.engine.kernels.eager_blocks import PLACES, largest_range
from te_precision_callbacks.engine.quantization import (
    PerTensor,
    default_settings,
    read,
    settings_of,
    simulate,
)
from te_precision_callbacks.engine.reduction import NO_STAMP, Reduction, Stamp
from te_precision_callbacks.engine.simulation import SIMULATED, QuantizerSettings
from te_precision_callbacks.engine.slots import Asked, DeviceSlots, SegmentKey, Segments, SlotRange
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import OWN_RECIPE, Blocks, Request, no_blocks
from te_precision_callbacks.statistics.series import Measured, SeriesTable
from te_precision_callbacks.statistics.table import (
    BLOCK_SOURCES,
    SCALE_SOURCES,
    STATISTICS,
    StatisticSource,
)
from te_precision_callbacks.te.tensors import PER_TENSOR_PARTS, form_of, fp8_format, per_tensor_codes, quantizer_of

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
            is_replica = tensor == "activation" and not self.sequence_parallel
        elif self.mode == "row":
            is_replica = tensor == "gradient"
        else:
            is_replica = tensor != _WEIGHT and not self.sequence_parallel
        return self.first or not is_replica


class StatisticsEngine:
    """Collects statistics of tensors during a step.

    Args:
        on_failure: called with the failed operation, the tensor and the exception; by default, each kind of failure is
            logged once. The tensor's other statistics are still measured.

    Attributes:
        placements: layer -> its split. Without a placement, a layer counts as not split, except for its weight.
        series: the series of the run; None for a new table.
        iteration: the debug iteration of the last watched tensor.
        keep_operand: receives operands of GEMMs in high precision, by layer and tensor; None without a session.
        reports_quantized_only: whether a statistic that a tensor cannot have, since it exists only in quantized form,
            is a failure. With the default config, nobody has asked for it.
    """

    def __init__(self, series: SeriesTable | None = None, on_failure: Report | None = None) -> None:
        self._placements: Mapping[str, Placement] = {}
        self.on_failure = on_failure or ObservationFailures(strict=False, rank=0).report
        self.has_news = False
        self.iteration = 0
        self.series = SeriesTable() if series is None else series
        self._slots = Segments()
        self._reduction = Reduction(self.series, None, self.on_failure)
        self._noted: list[tuple[Watched, list[Sequence[Request]]]] = []
        self._launches: dict[tuple[object, ...], PreparedLaunch] = {}
        self._broken: set[tuple[str, str]] = set()  # (layer, tensor) with inf or nan so far
        self._weights_seen: set[SegmentKey] = set()
        self.notices = Notices()
        self.keep_operand: Callable[[str, str, torch.Tensor], None] | None = None
        self.reports_quantized_only = True

    def reduce_over(self, messages: Messages | None) -> None:
        if self._reduction.messages is not messages:
            self._reduction = Reduction(self.series, messages, self.on_failure)

    @property
    def optimizers_differ(self) -> bool:
        return self._reduction.optimizers_differ

    @property
    def placements(self) -> Mapping[str, Placement]:
        return self._placements

    @placements.setter
    def placements(self, placements: Mapping[str, Placement]) -> None:
        self._placements = placements
        self._slots.generation += 1

    def note(self, watched: Watched, requests: Sequence[Request]) -> None:
        """Queue a tensor's statistics for :meth:`measure`; the tensor must not change before then."""
        if self._noted:
            last, last_requests = self._noted[-1]
            if last.values is watched.values and (last.layer, last.tensor) == (watched.layer, watched.tensor):
                last_requests.append(requests)
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
            segment = self._slots.segment(SegmentKey(layer, tensor, source.name), sums.device, contributes=True)
            self._slots.merge(segment, sums, maxima)
            self._slots.request(segment, _requests_of(source))

    def measure(self) -> PreparedLaunch | None:
        """Measure all queued tensors, each in one pass; on a GPU, in one launch for all tensors.

        An exception is raised only after the other tensors were measured.

        Returns:
            How to :meth:`repeat` this for other tensors; None if the passes did not measure all requests.
        """
        if not self._noted:
            return _NOTHING
        noted = self._noted
        self._noted = []
        if is_capturing():  # the captured pass would add the values again in each replay
            if self.notices.first("captured"):
                logger.warning(
                    "%s %s is not measured, because a CUDA graph is being captured: capture after the steps that you"
                    " want to observe. Other tensors are not listed.",
                    noted[0][0].layer,
                    noted[0][0].tensor,
                )
            return None
        self.has_news = True
        self.iteration = noted[-1][0].iteration
        with _without_autograd():
            return self._measure(noted)

    def repeat(self, launch: PreparedLaunch, tensors: Sequence[Source], iteration: int) -> bool:
        """Measure tensors by an earlier launch of others like them.

        Returns:
            False if a tensor must be measured by :meth:`note` and :meth:`measure`; then none was measured.
        """
        if launch.generation != self._slots.generation:
            return False
        slots = launch.slots
        pending: list[Pending] = []
        for plan, (values, rowwise, columnwise) in zip(launch.tensors, tensors, strict=True):
            if values.device != slots.device or not values.numel():
                return False
            if plan.once and not plan.once.isdisjoint(self._weights_seen):
                if plan.once <= self._weights_seen:
                    continue
                return False
            if type(values) not in PLAIN:
                values = values.detach()
            for reading in plan.passes:
                tensor = _new(Pending)  # Pending() would call a Python function
                tensor.values = values
                tensor.places = reading.places
                if reading.form is not None:
                    quantized = columnwise if reading.form.columnwise else rowwise
                    if not reading.in_blocks:
                        codes, _, tensor.scale_inv, _ = PER_TENSOR_PARTS(quantized)
                        codes = per_tensor_codes(quantized) if codes is None else codes
                        if codes is None or codes.shape != values.shape:
                            return False
                        tensor.codes = codes
                        tensor.e5m2 = reading.e5m2
                    else:
                        try:
                            in_blocks = read(quantized, columnwise=reading.form.columnwise)
                        except QuantizationError:  # measure() reports it
                            return False
                        if not isinstance(in_blocks, BlockScaledTensor) or not in_blocks.fits(values):
                            return False
                        tensor.in_blocks = in_blocks
                pending.append(tensor)
        if pending:
            if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                return False
            if slots.device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
                return False
            vectors = slots.last
            if vectors is None or vectors.handle != slots.handle_now():
                vectors = slots.current()
            unmeasured: Sequence[Pending] = pending
            repeat = launch.repeats.get(len(pending))
            if repeat is not None:
                unmeasured = repeat(pending, vectors.sums, vectors.maxima, vectors.handle)
            if unmeasured:
                again = kernels.add(unmeasured, vectors.sums, vectors.maxima)
                launch.repeats[len(pending)] = again if unmeasured is pending else None
        self.has_news = True
        self.iteration = iteration
        self._slots.asked += launch.asked
        self._weights_seen |= launch.once
        return True

    def _measure(self, noted: Sequence[tuple[Watched, Sequence[Sequence[Request]]]]) -> PreparedLaunch | None:
        key = tuple(_key_of(watched) for watched, _ in noted)
        requests = [tensor_requests for _, tensor_requests in noted]
        launch = self._launches.get(key)
        if launch is not None and launch.requests == requests:
            sources = [
                (watched.values, watched.quantized(), watched.quantized(columnwise=True)) for watched, _ in noted
            ]
            if self.repeat(launch, sources, self.iteration):
                return launch
        plans: dict[torch.device, list[tuple[TensorPlan, Source]]] = {}
        is_complete = True
        failure: Exception | None = None
        for watched, tensor_requests in noted:
            try:
                planning = _Planning(self, watched, tensor_requests)
                plan = planning.run()
            except Exception as error:
                failure = failure or error
                continue
            is_complete &= planning.is_complete
            if plan is not None:
                source = planning.values, watched.quantized(), watched.quantized(columnwise=True)
                plans.setdefault(planning.values.device, []).append((plan, source))
        for device, planned in plans.items():
            tensors = [plan for plan, _ in planned]
            launch = PreparedLaunch(requests, tensors, self._slots.generation, self._slots.devices[device])
            self.repeat(launch, [source for _, source in planned], self.iteration)
        if failure is not None:
            raise failure
        if launch is None or not is_complete or len(plans) != 1:
            return None
        self._launches[key] = launch
        return launch

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
            for reader, columns in tables:
                for numbers, series_values in (reader.numbers(columns), reader.nonfinite_counts(columns, self._broken)):
                    series.append(numbers)
                    values.append(series_values)
                histograms.update(reader.histograms(columns))
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


_Wanted = Mapping[_SegmentKind, Sequence[Request]]
"""Kinds of a tensor to measure -> requested statistics."""


class _Pass(NamedTuple):
    """A pass over a tensor, alone or with a quantized form.

    Attributes:
        e5m2: whether the codes of per-tensor FP8 are E5M2.
        in_blocks: whether the form is block-scaled.
    """

    form: _QuantizedForm | None
    e5m2: bool
    in_blocks: bool
    places: ColumnPlaces


class TensorPlan(NamedTuple):
    """The passes over a tensor: one pass, or one per block-scaled form.

    Attributes:
        tensor: its name.
        asked: the segments, and the labels of their statistics.
        once: the segments of a weight, which is measured once in a step.
    """

    tensor: str
    passes: Sequence[_Pass]
    asked: Asked
    once: frozenset[SegmentKey]


Source: TypeAlias = tuple[Any, Any, Any]
"""A tensor in high precision, and the quantized tensors that its rowwise and its columnwise GEMM read."""


@dataclass(eq=False, slots=True)
class PreparedLaunch:
    """The passes over tensors that were measured together, for others like them. It holds no tensor.

    Attributes:
        requests: the requests of each tensor, as they were noted.
        generation: of the slots; another one invalidates the launch.
        asked, once: of all tensors; see :class:`TensorPlan`.
        repeats: number of passes, since a weight is measured only once in a step -> repeats the kernel's launches.
    """

    requests: Sequence[Sequence[Sequence[Request]]]
    tensors: Sequence[TensorPlan]
    generation: int
    slots: DeviceSlots
    asked: Sequence[Asked] = field(init=False)
    once: frozenset[SegmentKey] = field(init=False)
    repeats: dict[int, Repeat | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asked = [plan.asked for plan in self.tensors]
        self.once = frozenset().union(*(plan.once for plan in self.tensors))


_NOTHING: PreparedLaunch
_NOTHING = PreparedLaunch((), (), 0, DeviceSlots(torch.device("cpu")))
"""The launch of no tensors."""

_new = object.__new__


def _key_of(watched: Watched) -> tuple[object, ...]:
    """Return what determines the passes over a tensor besides its requests."""
    dtype = None if watched.values is None else watched.values.dtype
    key: tuple[object, ...] = watched.layer, watched.tensor, dtype, type(watched.quantizer)
    return (*key, form_of(watched.rowwise), form_of(watched.columnwise))


def _group_by_kind(requests: Iterable[Iterable[Request]], unquantized_as: str | None) -> _Wanted:
    groups: dict[_SegmentKind, list[Request]] = {}
    for request in itertools.chain.from_iterable(requests):
        if unquantized_as is not None and request.recipe == OWN_RECIPE:
            request = request.under(unquantized_as)
        form = None
        if request.recipe is not None:
            form = _QuantizedForm(request.recipe, request.columnwise, request.e5m2)
        groups.setdefault(_SegmentKind(request.statistic.source, form, request.blocks), []).append(request)
    return groups


_OF_CODES = frozenset({StatisticSource.QUANTIZED, StatisticSource.SCALES})

_Held = PerTensor | BlockScaledTensor | None
"""The quantized data that a GEMM reads; None if the form must be simulated."""


class _Planning:
    """Plans the passes over a tensor, and measures what no pass covers.

    Attributes:
        values: the tensor in high precision; dequantized if it exists only in quantized form.
        is_complete: whether the passes cover all requests.
    """

    def __init__(self, engine: StatisticsEngine, watched: Watched, requests: Sequence[Sequence[Request]]) -> None:
        self._engine = engine
        self._watched = watched
        quantized = watched.quantized()
        recipe = recipe_of(watched.quantizer)
        kind = type(watched.quantizer).__name__
        no_quantizer = watched.quantizer is None or kind == IDENTITY_QUANTIZER  # TE's quantizer without a recipe
        self._unknown_quantizer = None if no_quantizer or recipe is not None else kind
        if watched.values is not None:
            self.values = watched.values.detach()
        elif quantized is not None:
            self.values = quantized.dequantize().detach()
        else:
            self.values = torch.empty(0)
        placement = engine.placements.get(watched.layer)
        self._contributes = placement is None or placement.contributes(watched.tensor)
        self._shard: int | None = None
        if watched.tensor == _WEIGHT:
            shard = 0 if watched.tp_group is None else dist.get_rank(watched.tp_group)
            self._shard = shard if placement is None else placement.shard
        unquantized_as = None
        if quantized is None and self._unknown_quantizer is None:
            unquantized_as = recipe if recipe in SIMULATED else "fp8_current_scaling"
        self._requested = _group_by_kind(requests, unquantized_as)
        self._wanted: dict[_SegmentKind, Sequence[Request]] = {}
        self._held: dict[_QuantizedForm, _Held] = {}
        self.is_complete = False

    def run(self) -> TensorPlan | None:
        """Return the passes to launch, if any."""
        for kind, requests in self._requested.items():
            segment = self._segment(kind)
            if segment.key in self._engine._weights_seen or not self.values.numel():
                self._engine._slots.request(segment, requests, is_measured=False)
            else:
                self._wanted[kind] = requests
        for form in dict.fromkeys(kind.form for kind in self._wanted if kind.form is not None):
            try:
                self._held[form] = self._read_quantized(form)
            except Exception as error:
                self._report_failure(form, error)
        fused = [kind for kind in self._wanted if self._is_fusable(kind)]
        rest = [kind for kind in self._wanted if kind not in fused]
        plan = self._plan_passes(fused) if fused else None
        for kind in rest:
            if kind.blocks is not None:
                self._merge(kind, None, largest_range(self.values, kind.blocks))
        for form in self._held:
            sources = {kind.source for kind in rest if kind.form == form}
            if sources:
                self._compare(form, sources)
        has_values = self._watched.values is not None
        self.is_complete = has_values and not rest and len(self._wanted) == len(self._requested)
        return plan

    def _is_fusable(self, kind: _SegmentKind) -> bool:
        if kind.form is None:
            return kind.blocks is None
        held = self._held.get(kind.form)
        if self._watched.values is None or held is None:  # codes are compared with values
            return False
        if isinstance(held, PerTensor):
            return kind.source in _OF_CODES
        return held.fits(self.values)

    def _plan_passes(self, fused: Sequence[_SegmentKind]) -> TensorPlan:
        """Return one pass, or one per form. The first one also covers kinds without a form."""
        first = next((kind.form for kind in fused if kind.form is not None), None)
        offsets: dict[_QuantizedForm | None, dict[StatisticSource, tuple[int, int]]] = {}
        segment_requests: list[tuple[SlotRange, Set[str], bool]] = []
        for kind in fused:
            segment = self._segment(kind)
            if segment.device != self.values.device:
                raise QuantizationError("the layer moved to another device")
            columns_at = offsets.setdefault(first if kind.form is None else kind.form, {})
            columns_at[kind.source] = segment.sum_start, segment.maximum_start
            segment_requests.append((segment, self._engine._slots.labels(segment, self._wanted[kind]), True))
        passes: list[_Pass] = []
        for form, columns_at in offsets.items():
            held = None if form is None else self._held[form]
            e5m2 = isinstance(held, PerTensor) and held.e5m2
            passes.append(_Pass(form, e5m2, isinstance(held, BlockScaledTensor), eager_blocks.places_of(columns_at)))
        is_weight = self._watched.tensor == _WEIGHT
        once = frozenset(segment.key for segment, *_ in segment_requests if is_weight)
        return TensorPlan(self._watched.tensor, passes, segment_requests, once)

    def _read_quantized(self, form: _QuantizedForm) -> _Held:
        quantized = self._watched.quantized(columnwise=form.columnwise)
        if quantized is None and form.recipe == OWN_RECIPE and self._unknown_quantizer is not None:
            raise QuantizationError(
                f"the layer's quantizer, {self._unknown_quantizer}, does not belong to a known recipe"
            )
        if quantized is None:
            return None
        held_recipe = recipe_of(self._quantizer_of(quantized))
        if form.recipe not in (OWN_RECIPE, held_recipe) or form.e5m2 not in (None, fp8_format(quantized) is E5M2):
            return None
        try:
            held = read(quantized, columnwise=form.columnwise)
        except QuantizationError as error:
            if held_recipe is None:
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
        if isinstance(held, PerTensor) and self._watched.values is not None and held.codes.shape != self.values.shape:
            sizes = f"{tuple(held.codes.shape)}, the tensor before quantization {tuple(self.values.shape)}"
            raise QuantizationError(f"the quantized tensor has the shape {sizes}")
        return held

    def _compare(self, form: _QuantizedForm, sources: Set[StatisticSource]) -> None:
        """Measure a form that no pass covers: a simulated recipe, or scales without the tensor."""
        held = self._held[form]
        recipe = form.recipe or recipe_of(self._own_quantizer(form.columnwise)) or ""
        refused: dict[str, Set[StatisticSource]] = {}
        if self._watched.values is None:
            missing = sources - (SCALE_SOURCES if held else set())
            sources = sources - missing
            if self._engine.reports_quantized_only:
                refused["the tensor exists only in quantized form"] = missing
        if isinstance(held, PerTensor) or (held is None and recipe == "fp8_current_scaling"):
            refused[no_blocks(recipe or "the layer's quantizer")] = sources & BLOCK_SOURCES
            sources = sources - BLOCK_SOURCES
        columns: Mapping[str, torch.Tensor] = {}
        try:
            if sources and isinstance(held, PerTensor):
                columns = dict(zip(PLACES[StatisticSource.SCALES], scale_columns(held.scale_inv), strict=True))
            elif sources and isinstance(held, BlockScaledTensor):
                columns = eager_blocks.columns(held, self._watched.values, sources)
            elif sources:
                settings = self._settings(form, recipe)
                columns = simulate(recipe, self.values, sources, settings, columnwise=form.columnwise)
        except Exception as error:
            self._report_failure(form, error)
            return
        for source in sources:
            sums, maxima = map(columns.get, PLACES[source])
            if sums is not None:
                self._merge(_SegmentKind(source, form), sums, maxima)
        for reason, refused_sources in refused.items():
            if refused_sources:
                self._report_failure(form, QuantizationError(reason), refused_sources)

    def _settings(self, form: _QuantizedForm, recipe: str) -> QuantizerSettings:
        """Return the settings of the layer's quantizer if it has the recipe, else the recipe's defaults."""
        quantizer = self._own_quantizer(form.columnwise)
        if recipe != recipe_of(quantizer):
            return default_settings(recipe, self._watched.tensor, e5m2=form.e5m2)
        settings = settings_of(quantizer)
        if form.e5m2 is None:
            return settings
        return settings._replace(e5m2=form.e5m2)

    def _own_quantizer(self, columnwise: bool) -> Any:
        """Return the quantizer of the tensor that a GEMM reads, which a feature may have replaced; else the layer's."""
        return self._quantizer_of(self._watched.quantized(columnwise=columnwise))

    def _quantizer_of(self, quantized: Any) -> Any:
        quantizer = quantizer_of(quantized)
        if recipe_of(quantizer) is None:
            return self._watched.quantizer
        return quantizer

    def _segment(self, kind: _SegmentKind) -> SlotRange:
        key = SegmentKey(self._watched.layer, self._watched.tensor, _name_of(kind), self._shard)
        return self._engine._slots.segment(key, self.values.device, contributes=self._contributes)

    def _merge(self, kind: _SegmentKind, sums: torch.Tensor | None, maxima: torch.Tensor | None) -> None:
        segment = self._segment(kind)
        self._engine._slots.merge(segment, sums, maxima)
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
