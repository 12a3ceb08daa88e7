"""What the schemas of features are put together from: their levels, and the keys that several features share.

A feature's options are a mapping whose lists hold mappings: ``tensors_struct``, and ``gemms_struct``, which may hold
``tensors_struct`` again. Each such mapping is a :class:`Level`; a key of an inner level wins over that of an outer one.
Read from nvidia-dlfw-inspect 0.2.2, ``base.py``, and Transformer Engine 2.20.2, ``debug/features/api.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator
from typing_extensions import Self

from te_precision_callbacks.config.dumping import ConditionText, Size, in_words
from te_precision_callbacks.config.effects import Effect, Pair
from te_precision_callbacks.config.fields import (
    Fp8Statistic,
    Intervals,
    ListOf,
    Nvfp4Statistic,
    QuantFormat,
    TensorStatistic,
    item_of,
    names,
    words,
)
from te_precision_callbacks.config.problems import KeyPath
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


@dataclass(frozen=True)
class Scope:
    """One item of a feature with the levels around it, outermost first; an inner value wins.

    Attributes:
        levels: the path of each level in the feature's options, and the level.
    """

    levels: tuple[tuple[KeyPath, Level], ...]

    def inside(self, keys: KeyPath, level: Level) -> Scope:
        """The scope of an item at ``keys`` of the innermost level."""
        return replace(self, levels=(*self.levels, ((*self.here, *keys), level)))

    @property
    def here(self) -> KeyPath:
        """The path of the innermost level."""
        return self.levels[-1][0]

    def get(self, key: str) -> Any:
        """What holds here: the innermost value, else the default."""
        having = [level for _, level in reversed(self.levels) if hasattr(level, key)]
        given = [level for level in having if key in level.model_fields_set]
        return getattr((given or having)[0], key)

    def path(self, key: str) -> KeyPath:
        """Where the value that holds here stands; the innermost level where it stands nowhere."""
        given = (path for path, level in reversed(self.levels) if key in level.model_fields_set)
        return next(((*path, key) for path in given), self.here)


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

    def effect(self) -> Effect:
        """What the feature does to the GEMMs of a layer."""
        return Effect()


def _refuse_both(level: Level, key: str) -> None:
    if getattr(level, key) and getattr(level, f"{key}_struct"):
        raise Misfit((f"{key}_struct",), f"stands beside {key!r}; keep one of the two.")


def _refuse_twice(path: KeyPath, items: Sequence[Level], key: str) -> None:
    """Refuse a second item for one name.

    Args:
        path: where the items stand.
        items: they.
        key: which of their keys holds the name.
    """
    seen: set[str] = set()
    for index, item in enumerate(items):
        name = getattr(item, key)
        if name in seen:
            raise Misfit((*path, index, key), f"is {name!r} a second time; put what is meant for it into one item.")
        seen.add(name)


class TensorChoice(Level, Generic[NameT, TensorItemT]):
    """Which tensors."""

    tensors: ListOf[NameT] = Field(
        default_factory=list, description="Tensors that the feature acts on. One name needs no brackets."
    )
    tensors_struct: ListOf[TensorItemT] = Field(
        default_factory=list,
        description="Instead of `tensors`: an item for each tensor, with `tensor` and keys that hold for it alone.",
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
        description="Instead of `gemms`: an item for each GEMM, with `gemm` and keys that hold for it alone.",
    )

    @model_validator(mode="after")
    def _one_way_for_gemms(self) -> Self:
        _refuse_both(self, "gemms")
        return self

    def gemm_scopes(self) -> Iterator[tuple[str, Scope]]:
        """Each GEMM with its scope.

        Raises:
            Misfit: no GEMM at all, or one in two items.
        """
        whole = Scope((((), self),))
        if not self.gemms and not self.gemms_struct:
            raise Misfit((), "has neither 'gemms' nor 'gemms_struct'. Write for example gemms: [fprop].")
        _refuse_twice(("gemms_struct",), self.gemms_struct, "gemm")
        yield from ((gemm, whole) for gemm in self.gemms)
        for index, item in enumerate(self.gemms_struct):
            yield item.gemm, whole.inside(("gemms_struct", index), item)  # type: ignore[attr-defined]


def _tensor_scopes(scope: Scope) -> Iterator[tuple[str, Scope]]:
    """Each tensor with its scope, from the innermost level that chooses tensors."""
    for path, level in reversed(scope.levels):
        if isinstance(level, TensorChoice) and (level.tensors or level.tensors_struct):
            yield from ((name, scope) for name in level.tensors)
            for index, item in enumerate(level.tensors_struct):
                yield item.tensor, Scope((*scope.levels, ((*path, "tensors_struct", index), item)))
            return
    raise Misfit(
        scope.here, "has neither 'tensors' nor 'tensors_struct'. Write for example tensors: [activation, weight]."
    )


class OneTensor(Level, Generic[NameT]):
    """An item of ``tensors_struct``."""

    tensor: NameT = Field(description="The tensor that the item is for.")


class OneGemm(Level):
    """An item of ``gemms_struct``."""

    gemm: GemmName = Field(description="The GEMM that the item is for.")


class Scheduled(Level):
    """In which steps."""

    freq: StrictInt = Field(
        1,
        ge=1,
        description="The feature acts in steps that are multiples of it: with `freq: 10` and `start_step: 5` in the"
        " steps 10, 20, ...",
    )
    start_step: StrictInt | None = Field(0, ge=0, description="The first step, counted from 0.")
    end_step: StrictInt | None = Field(-1, ge=-1, description="The last step, itself included. -1: no end.")
    start_end_list: Intervals | None = Field(
        None,
        description="Several ranges of steps, ends included, such as `[[0, 20], [80, 100]]`; `start_step` and"
        " `end_step` are then ignored. An end of -1, in the last pair only: no end.",
    )


_SCHEDULE_KEYS = ("freq", "start_step", "end_step", "start_end_list")


def _check_schedule(scope: Scope) -> None:
    """Refuse a schedule in which no step is."""
    start, end = scope.get("start_step") or 0, scope.get("end_step")
    if not scope.get("start_end_list") and end is not None and -1 < end < start:
        raise Misfit(scope.path("end_step"), f"is {end}, which is before 'start_step', {start}. -1 is no end.")
    schedule = Schedule.of({key: scope.get(key) for key in _SCHEDULE_KEYS})
    if schedule.at(-1)[1] is None:
        raise Misfit(scope.path("freq"), f"leaves no step to act in: there are no {in_words(schedule)}.")


class TensorStatistics(Level):
    """The statistics of a tensor itself."""

    stats: ListOf[TensorStatistic] = Field(
        default_factory=list,
        description="What is computed; needed here or in each item. Formulas and units:"
        " [statistics.md](statistics.md).",
    )


class Fp8Statistics(Level):
    """The statistics of a quantized tensor."""

    stats: ListOf[Fp8Statistic] = Field(
        default_factory=list,
        description="What is computed; needed here or in each item. Without a recipe: of the recipe that the layer"
        " runs. With another one: what that recipe would give, in the element format of its default or in FORMAT."
        " `_columnwise`: of the transposed data, where the recipe scales blocks. Formulas and units:"
        " [statistics.md](statistics.md).",
    )
    only_quantized: StrictBool = Field(
        False,
        description="Leave statistics without a recipe out where the tensor is not quantized, rather than log what a"
        " recipe would give.",
    )


class Nvfp4Statistics(Level):
    """The statistics of a tensor in NVFP4."""

    stats: ListOf[Nvfp4Statistic] = Field(
        default_factory=list,
        description="What is computed; needed here or in each item. `_columnwise`: of the transposed data. Formulas and"
        " units: [statistics.md](statistics.md).",
    )


class Dumped(Level):
    """What is written of a tensor."""

    high_precision_tensor: StrictBool = Field(False, description="Write the tensor as it is before quantization.")
    quantized_tensor: StrictBool = Field(False, description="Write the quantized tensor, where there is one.")
    dump_quantized_internals: StrictBool = Field(
        True,
        description="With `quantized_tensor`: write also what it consists of, decoded: codes as numbers, scales, amax,"
        " row- and columnwise, in plain layouts.",
    )
    when: ListOf[ConditionText] = Field(
        default_factory=list,
        description="Write the tensor only in steps in which one of these holds: it has an inf or nan; a statistic of"
        " the same layer and tensor, which LogTensorStats, LogFp8TensorStats or LogNvfp4TensorStats collects in that"
        ' step, is above or below a number; activation overflow detection (`debug="activation_overflow"`) stops the'
        " run in it. One needs no brackets. Without it: in every step of the schedule.",
    )


class DumpLimits(Level):
    """How tensors are written, and how much of it, in a run."""

    file_format: Literal["safetensors", "torch"] = Field(
        _NOT_GIVEN,
        description="`safetensors`: loads without Transformer Engine and without unpickling. `torch`: Transformer"
        " Engine's path, name and keys, a pickle. Without it: safetensors in a session of this project, torch under"
        " plain nvidia-dlfw-inspect.",
    )
    max_bytes: Size = Field(
        "10GiB",
        description="Budget on disk, of each rank: dumping stops, with one message, before the files in its folder are"
        " larger than this together. Files of earlier runs in the same folder count.",
    )
    max_files: StrictInt = Field(10_000, ge=1, description="Budget of each rank in files.")
    max_memory: Size = Field(
        "1GiB",
        description="Memory of each rank for tensors that wait to be written; when it is full, training waits for the"
        " disk. As much again holds the tensors of a step until its end tells whether `when` holds; one that does not"
        " fit there is not written, which is said once.",
    )


class Margin(Level):
    """Room above amax."""

    margin: StrictInt = Field(
        0,
        ge=-126,
        le=127,
        description="The scale is made for amax * 2^margin: 1 leaves one power of two above amax unused, -1 saturates"
        " what is above half of amax.",
    )


class Quantization(Margin):
    """A format to quantize to."""

    quant_format: QuantFormat | None = Field(
        None,
        description="The format to quantize to; needed for every tensor, here or in an item. FP8 formats: one scale"
        " from the tensor's own amax. MXFP8 formats: one scale for each block of 32, and no `margin`.",
    )


class ObservingFeature(TensorChoice[NameT, TensorItemT], FeatureSchema, Generic[NameT, TensorItemT]):
    """A feature that looks at tensors on a schedule."""

    def check(self) -> None:
        """Check each tensor's schedule, and what is wanted of it."""
        for _, scope in _tensor_scopes(Scope((((), self),))):
            _check_schedule(scope)
            self.check_tensor(scope)

    def check_tensor(self, scope: Scope) -> None:
        """Check what is wanted of one tensor."""
        if not scope.get("stats"):
            raise Misfit(scope.here, f"has no 'stats', {words(type(self).model_fields['stats'])}.")


class ModifyingFeature(
    TensorChoice[NameT, TensorItemT], GemmChoice[GemmItemT], FeatureSchema, Generic[NameT, TensorItemT, GemmItemT]
):
    """A feature that puts another tensor in a tensor's place."""

    def targets(self) -> Iterator[tuple[str, str, Scope]]:
        """GEMM, tensor, and what holds for them, of all that are listed."""
        for gemm, outer in self.gemm_scopes():
            for tensor, scope in _tensor_scopes(outer):
                yield gemm, tensor, scope

    def modifies(self) -> tuple[Pair, ...]:
        """The listed tensors that take part in the GEMM that they are listed for."""
        return tuple((gemm, tensor) for gemm, tensor, _ in self.targets() if tensor in TAKES_PART[gemm])

    def check(self) -> None:
        """Check what holds for each tensor, and that some tensor is changed at all."""
        for _, outer in self.gemm_scopes():
            for path, level in outer.levels:
                items = level.tensors_struct if isinstance(level, TensorChoice) else ()
                _refuse_twice((*path, "tensors_struct"), items, "tensor")
        for _, _, scope in self.targets():
            self.check_target(scope)
        if not self.modifies():
            raise Misfit((), f"can never act: {self._idle()}.")

    def check_target(self, scope: Scope) -> None:
        """Check what holds for one tensor of one GEMM."""

    def _idle(self) -> str:
        """Why no tensor is changed."""
        listed = dict.fromkeys(repr(tensor) for _, tensor, _ in self.targets())
        possible = names(type(self).model_fields["tensors"])
        has = {
            gemm: ", ".join(repr(tensor) for tensor in TAKES_PART[gemm] if tensor in possible)
            for gemm, _, _ in self.targets()
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
