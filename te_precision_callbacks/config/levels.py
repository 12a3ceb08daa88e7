"""The parts of feature schemas: their levels, and the keys that several features share.

Each mapping in a feature's options, the options themselves and the items of its lists, is a :class:`Level`. What holds
for a tensor of a GEMM, with the keys of all levels around it (:mod:`te_precision_callbacks.config.nesting`), is a
:class:`Target`: the features get it with each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator
from typing_extensions import Self

from te_precision_callbacks.config.effects import Effect, Pair
from te_precision_callbacks.config.fields import (
    Fp8Statistic,
    Intervals,
    ListOf,
    Nvfp4Statistic,
    QuantFormat,
    Size,
    TensorStatistic,
    When,
    is_list,
    item_of,
    names,
    words,
)
from te_precision_callbacks.config.nesting import Nested
from te_precision_callbacks.config.problems import KeyPath
from te_precision_callbacks.statistics.names import Request
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.vocabulary import GEMMS, OPERANDS, RESULT, GemmName

TAKES_PART: Mapping[str, tuple[str, ...]] = {gemm: (*OPERANDS[gemm], RESULT[gemm]) for gemm in GEMMS}
"""GEMM -> its two operands and its result."""

_NOT_GIVEN: Any = None
"""The default of a key that is left out, and does not take null."""

NameT = TypeVar("NameT", bound=str)
TensorItemT = TypeVar("TensorItemT", bound="Level")
GemmItemT = TypeVar("GemmItemT", bound="Level")


class Misfit(ValueError):
    """Keys that do not fit together.

    Args:
        keys: the key to blame, from the model that raises.
        text: what is wrong with it; continues a sentence that starts with the key.
    """

    def __init__(self, keys: KeyPath, text: str) -> None:
        super().__init__(text)
        self.keys = keys


class Level(BaseModel):
    """A mapping in a config: a feature's options, or an item of one of its lists."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def nested(self) -> Nested:
        """What is given, in this level and in the items of its lists."""
        return Nested.of(_given(self))

    @classmethod
    def listed(cls, written: Mapping[str, Any]) -> dict[str, Any]:
        """Options that were checked, as written, but for bare names, which are lists of one."""
        found = dict(written)
        for key, field in cls.model_fields.items():
            if is_list(field) and found.get(key) is not None:
                item: Any = item_of(field)
                entries = [found[key]] if isinstance(found[key], str) else list(found[key])
                found[key] = entries if item is None else [item.listed(entry) for entry in entries]
        return found


def _given(value: Any) -> Any:
    if isinstance(value, Level):
        fields = (key for key in type(value).model_fields if key in value.model_fields_set)
        return {key: _given(getattr(value, key)) for key in fields}
    return [_given(entry) for entry in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Target:
    """What a feature acts on.

    Attributes:
        tensor, gemm: None for all.
        options: what holds there: an item of the feature's list of tensors or GEMMs, complete with what stands around
            it, or the feature's options where it has no such list.
        nested: where these values stand.
    """

    tensor: str | None
    gemm: str | None
    options: Any
    nested: Nested


class FeatureSchema(Level):
    """A feature's options.

    Attributes:
        example: a section of a config that uses the feature, as YAML.
    """

    example: ClassVar[str]

    enabled: StrictBool = Field(description="Whether the feature acts.")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Check what more than one key decides.

        Raises:
            Misfit: keys that do not fit together.
        """
        for target in self.targets:
            self.check_target(target)

    def check_target(self, target: Target) -> None:
        """Check what holds for one tensor of one GEMM.

        Raises:
            Misfit: keys that do not fit together.
        """

    @property
    def targets(self) -> tuple[Target, ...]:
        """What the feature acts on, in the order in which it stands in the config; all, if nothing else is said.

        Raises:
            Misfit: no tensor or GEMM is chosen, or one twice.
        """
        return (Target(None, None, self, self.nested),)

    def holding(self, tensor: str | None, gemm: str | None) -> list[Any]:
        """The options that hold for a call, one for each item that names its tensor.

        Args:
            tensor, gemm: of the call; None where it has none.
        """
        found = [
            target.options
            for target in self.targets
            if target.tensor in (tensor, None) or tensor is None
            if target.gemm in (gemm, None) or gemm is None
        ]
        return found if tensor is not None else found[:1]

    def effect(self) -> Effect:
        """What the feature does to the GEMMs of a layer."""
        return Effect()


def _refuse_both(level: Level, key: str) -> None:
    if getattr(level, key) and getattr(level, f"{key}_struct"):
        raise Misfit((f"{key}_struct",), f"stands beside {key!r}; keep one of the two.")


def _refuse_twice(found: Sequence[tuple[str, Nested]], what: str) -> None:
    """Refuse a second item for one tensor or GEMM."""
    seen: set[str] = set()
    for name, nested in found:
        if what in nested.levels[-1][1]:
            if name in seen:
                raise Misfit(
                    (*nested.here, what), f"is {name!r} a second time; put what is meant for it into one item."
                )
            seen.add(name)


def _chosen(nested: Nested, what: Literal["tensor", "gemm"]) -> list[tuple[str, Nested]]:
    """The tensors or GEMMs that a level chooses, each with what is given for it.

    Raises:
        Misfit: none.
    """
    found = [(name, inner) for name, inner in nested.chosen(what) if name is not None]
    if not found:
        example = "gemms: [fprop]" if what == "gemm" else "tensors: [activation, weight]"
        raise Misfit(nested.here, f"has neither '{what}s' nor '{what}s_struct'. Write for example {example}.")
    return found


class TensorChoice(Level, Generic[NameT, TensorItemT]):
    """Which tensors."""

    tensors: ListOf[NameT] = Field(
        default_factory=list, description="Tensors that the feature acts on. One name needs no brackets."
    )
    tensors_struct: ListOf[TensorItemT] = Field(
        default_factory=list,
        description="Instead of `tensors`: an item for each tensor, with `tensor` and keys that apply to that tensor"
        " only.",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        _refuse_both(self, "tensors")
        return self


class GemmChoice(Level, Generic[GemmItemT]):
    """Which GEMMs."""

    gemms: ListOf[GemmName] = Field(
        default_factory=list, description="GEMMs that the feature acts on. One name needs no brackets."
    )
    gemms_struct: ListOf[GemmItemT] = Field(
        default_factory=list,
        description="Instead of `gemms`: an item for each GEMM, with `gemm` and keys that apply to that GEMM only.",
    )

    @model_validator(mode="after")
    def _one_way_for_gemms(self) -> Self:
        _refuse_both(self, "gemms")
        return self

    @cached_property
    def chosen_gemms(self) -> Mapping[str, Nested]:
        """Each GEMM, with what is given for it.

        Raises:
            Misfit: no GEMM at all, or one in two items.
        """
        found = _chosen(self.nested, "gemm")
        _refuse_twice(found, "gemm")
        return dict(found)


class OneTensor(Level, Generic[NameT]):
    """An item of ``tensors_struct``."""

    tensor: NameT = Field(description="The tensor that the item is for.")


class OneGemm(Level):
    """An item of ``gemms_struct``."""

    gemm: GemmName = Field(description="The GEMM that the item is for.")


def _target(schema: FeatureSchema, gemm: str | None, tensor: str, nested: Nested) -> Target:
    """A tensor that a feature acts on."""
    item: Any = item_of(type(schema).model_fields["tensors_struct"])
    holds = {key: value for key, value in nested.merged().items() if key in item.model_fields}
    return Target(tensor, gemm, item.model_construct(**{**holds, "tensor": tensor}), nested)


class Scheduled(Level):
    """In which steps."""

    freq: StrictInt = Field(
        1,
        ge=1,
        description="The feature acts in steps that are multiples of this number: with `freq: 10` and `start_step: 5`"
        " in the steps 10, 20, ...",
    )
    start_step: StrictInt | None = Field(0, ge=0, description="The first step, counted from 0.")
    end_step: StrictInt | None = Field(-1, ge=-1, description="The last step, inclusive. -1: no end.")
    start_end_list: Intervals | None = Field(
        None,
        description="Several ranges of steps, ends included, such as `[[0, 20], [80, 100]]`; `start_step` and"
        " `end_step` are then ignored. An end of -1, in the last pair only: no end.",
    )

    @cached_property
    def schedule(self) -> Schedule:
        """The steps."""
        return Schedule.of(self.freq, self.start_step, self.end_step, self.start_end_list)

    def check_schedule(self, nested: Nested) -> None:
        """Refuse a schedule in which no step is.

        Raises:
            Misfit: it is one.
        """
        start, end = self.start_step or 0, self.end_step
        if not self.start_end_list and end is not None and -1 < end < start:
            raise Misfit(nested.path("end_step"), f"is {end}, which is before 'start_step', {start}. -1 is no end.")
        if self.schedule.at(-1)[1] is None:
            raise Misfit(nested.path("freq"), f"leaves no step to act in: there are no {self.schedule}.")


class TensorStatistics(Level):
    """The statistics of a tensor itself."""

    stats: ListOf[TensorStatistic] = Field(
        default_factory=list,
        description="Statistics to compute; required here or in each item. Formulas and units:"
        " [statistics.md](statistics.md).",
    )


class Fp8Statistics(Level):
    """The statistics of a quantized tensor."""

    stats: ListOf[Fp8Statistic] = Field(
        default_factory=list,
        description="Statistics to compute; required here or in each item. Without a recipe in the name: for the"
        " recipe that the layer runs. With another recipe: what that recipe would give, in its default element format"
        " or in FORMAT. `_columnwise`: for the transposed data, if the recipe scales blocks. Formulas and units:"
        " [statistics.md](statistics.md).",
    )
    only_quantized: StrictBool = Field(
        False,
        description="Leave out statistics without a recipe in the name if the tensor is not quantized, instead of"
        " logging what a recipe would give.",
    )


class Nvfp4Statistics(Level):
    """The statistics of a tensor in NVFP4."""

    stats: ListOf[Nvfp4Statistic] = Field(
        default_factory=list,
        description="Statistics to compute; required here or in each item. `_columnwise`: for the transposed data."
        " Formulas and units: [statistics.md](statistics.md).",
    )


class Dumped(Level):
    """What is written of a tensor."""

    high_precision_tensor: StrictBool = Field(False, description="Write the tensor as it is before quantization.")
    quantized_tensor: StrictBool = Field(False, description="Write the quantized tensor, if there is one.")
    dump_quantized_internals: StrictBool = Field(
        True,
        description="With `quantized_tensor`: also write its decoded parts: codes as numbers, scales, amax, row- and"
        " columnwise, in plain layouts.",
    )
    when: ListOf[When] = Field(
        default_factory=list,
        description="Write the tensor only in steps in which one of these conditions holds: the tensor has an inf or"
        " nan; a statistic of the same layer and tensor, which LogTensorStats, LogFp8TensorStats or"
        " LogNvfp4TensorStats collects in that step, is above or below a number; activation overflow detection"
        ' (`debug="activation_overflow"`) stops the run in that step. One condition needs no brackets. Without'
        " `when`: in every step of the schedule.",
    )


class DumpLimits(Level):
    """How tensors are written, and how much of it, in a run."""

    file_format: Literal["safetensors", "torch"] = Field(
        _NOT_GIVEN,
        description="`safetensors`: loads without Transformer Engine and without unpickling. `torch`: Transformer"
        " Engine's path, name and keys, a pickle. Default: safetensors in a session of this project, torch under"
        " plain nvidia-dlfw-inspect.",
    )
    max_bytes: Size = Field(
        "10GiB",
        validate_default=True,
        description="Disk budget of each rank: dumping stops, with one message, before the files in the rank's folder"
        " together exceed this size. Files of earlier runs in the same folder count.",
    )
    max_files: StrictInt = Field(10_000, ge=1, description="The maximum number of files of each rank.")
    max_memory: Size = Field(
        "1GiB",
        validate_default=True,
        description="Memory of each rank for tensors that wait to be written; when it is full, training waits for the"
        " disk. The same amount again holds the tensors of a step until its end decides whether `when` holds; a"
        " tensor that does not fit is not written, which is logged once.",
    )


class Margin(Level):
    """Room above amax."""

    margin: StrictInt = Field(
        0,
        ge=-126,
        le=127,
        description="The scale is computed for amax * 2^margin: 1 leaves one power of two above amax unused, -1"
        " saturates elements above half of amax.",
    )


class Quantization(Margin):
    """A format to quantize to."""

    quant_format: QuantFormat | None = Field(
        None,
        description="The format to quantize to; required for every tensor, here or in an item. FP8 formats: one scale"
        " from the tensor's own amax. MXFP8 formats: one scale for each block of 32, and no `margin`.",
    )


class ObservingFeature(TensorChoice[NameT, TensorItemT], FeatureSchema, Generic[NameT, TensorItemT]):
    """A feature that looks at tensors on a schedule."""

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """The listed tensors."""
        return tuple(_target(self, None, tensor, nested) for tensor, nested in _chosen(self.nested, "tensor"))

    def check_target(self, target: Target) -> None:
        """Check a tensor's schedule."""
        target.options.check_schedule(target.nested)


class LoggedTensor(Scheduled, OneTensor[NameT], Generic[NameT]):
    """A tensor of which statistics are logged."""

    if TYPE_CHECKING:
        stats: list[Request]

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        """The statistics, as they are asked of this tensor."""
        return tuple(request.of(self.tensor) for request in self.stats)

    def requests_for(self, *, is_quantized: bool) -> tuple[Request, ...]:
        """The statistics that are wanted of the tensor in a step.

        Args:
            is_quantized: whether it is quantized there.
        """
        return self.requests


class LoggingFeature(ObservingFeature[NameT, TensorItemT], Generic[NameT, TensorItemT]):
    """A feature that logs statistics of tensors."""

    def check_target(self, target: Target) -> None:
        """Check a tensor's schedule, and that something is wanted of it."""
        super().check_target(target)
        if not target.options.stats:
            raise Misfit(target.nested.here, f"has no 'stats', {words(type(self).model_fields['stats'])}.")


class ModifyingFeature(
    TensorChoice[NameT, TensorItemT], GemmChoice[GemmItemT], FeatureSchema, Generic[NameT, TensorItemT, GemmItemT]
):
    """A feature that puts another tensor in a tensor's place."""

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """The listed tensors of the listed GEMMs."""
        return tuple(
            _target(self, gemm, tensor, nested)
            for gemm, outer in self.chosen_gemms.items()
            for tensor, nested in _chosen(outer, "tensor")
        )

    def modifies(self) -> tuple[Pair, ...]:
        """The listed tensors that take part in the GEMM that they are listed for."""
        listed = ((str(target.gemm), str(target.tensor)) for target in self.targets)
        return tuple((gemm, tensor) for gemm, tensor in listed if tensor in TAKES_PART[gemm])

    def check(self) -> None:
        """Check what holds for each tensor, and that some tensor is changed at all."""
        for outer in self.chosen_gemms.values():
            _refuse_twice(_chosen(outer, "tensor"), "tensor")
        super().check()
        if not self.modifies():
            raise Misfit((), f"can never act: {self._idle()}.")

    def _idle(self) -> str:
        """Why no tensor is changed."""
        listed = dict.fromkeys(repr(target.tensor) for target in self.targets)
        possible = names(type(self).model_fields["tensors"])
        has = {
            gemm: ", ".join(repr(tensor) for tensor in TAKES_PART[gemm] if tensor in possible)
            for gemm in self.chosen_gemms
        }
        gemms = "; ".join(f"{gemm!r} has {tensors}" for gemm, tensors in has.items())
        return f"none of its tensors ({', '.join(listed)}) takes part in its GEMMs. {gemms}"


def levels(model: type[BaseModel], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], type[BaseModel]]:
    """Each mapping that a feature's options have: ``()`` is the feature itself, ``("tensors_struct",)`` an item."""
    found = {path: model}
    for key, field in model.model_fields.items():
        item = item_of(field)
        if item is not None:
            found.update(levels(item, (*path, key)))
    return found
