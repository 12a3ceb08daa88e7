"""The levels of feature schemas.

Each mapping in a feature's options, the options themselves and the items of its lists, is a :class:`Level`. The options
for a tensor of a GEMM, with the keys of all levels around it (:class:`Nested`), are a
:class:`Target`, which features get with each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator
from typing_extensions import Self

from te_precision_callbacks.base.vocabulary import GEMMS, OPERANDS, RESULT, GemmName
from te_precision_callbacks.config.effects import Effect, Pair
from te_precision_callbacks.config.fields import ListOf, is_list, item_of, names
from te_precision_callbacks.config.problems import KeyPath
from te_precision_callbacks.statistics.schedule import EVERY_STEP, Schedule

TAKES_PART: Mapping[str, tuple[str, ...]] = {gemm: (*OPERANDS[gemm], RESULT[gemm]) for gemm in GEMMS}
"""GEMM -> its two operands and its result."""

NameT = TypeVar("NameT", bound=str)
TensorItemT = TypeVar("TensorItemT", bound="Level")
GemmItemT = TypeVar("GemmItemT", bound="Level")
HeldT_co = TypeVar("HeldT_co", bound="Level", covariant=True)


class Misfit(ValueError):
    """Keys that contradict each other, or an incomplete choice.

    Args:
        keys: the path of the key at fault, from the model that raises.
        text: the problem; continues a sentence that starts with the key.
    """

    def __init__(self, keys: KeyPath, text: str) -> None:
        super().__init__(text)
        self.keys = keys


_TENSORS = frozenset({"tensors", "tensors_struct"})


@dataclass(frozen=True)
class Nested:
    """The options for a tensor or a GEMM, with the levels around them; the only place where inner keys override outer
    ones.

        whole = Nested.of({"margin": 1, "gemms_struct": [{"gemm": "fprop", "tensors": ["weight"], "margin": 2}]})
        ((gemm, of_gemm),) = whole.chosen("gemm")      # "fprop"
        ((tensor, nested),) = of_gemm.chosen("tensor")  # "weight"
        nested.merged()["margin"]                       # 2
        nested.path("margin")                           # ("gemms_struct", 0, "margin")

    A feature's options are a mapping whose lists hold mappings: ``tensors_struct``, and ``gemms_struct``, which may
    hold ``tensors_struct`` again. Read from nvidia-dlfw-inspect 0.2.2, ``base.py``, and Transformer Engine 2.20.2,
    ``debug/features/api.py``.

    Attributes:
        levels: the path of each level in the feature's options, and the options there; outermost first.
    """

    levels: tuple[tuple[KeyPath, Mapping[str, Any]], ...]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Nested:
        """A feature's options as a whole."""
        return cls((((), options),))

    @property
    def here(self) -> KeyPath:
        """The path of the innermost level."""
        return self.levels[-1][0]

    def path(self, key: str) -> KeyPath:
        """The path of the effective value of a key; the path of the innermost level if no level has the key."""
        given = (path for path, level in reversed(self.levels) if key in level)
        return next(((*path, key) for path in given), self.here)

    def merged(self) -> dict[str, Any]:
        """The effective options: for each key the innermost value; a level that chooses tensors replaces an outer
        choice."""
        found: dict[str, Any] = {}
        for _, level in self.levels:
            outer = found if _TENSORS.isdisjoint(level) else {k: v for k, v in found.items() if k not in _TENSORS}
            found = {**outer, **level}
        return found

    def chosen(self, what: Literal["tensor", "gemm"]) -> Iterator[tuple[str | None, Nested]]:
        """Each name in ``<what>s`` or in the items of ``<what>s_struct``, of the innermost level that has either.

        If no level has either, the options apply to all names: yields one None.
        """
        for path, level in reversed(self.levels):
            names, items = level.get(f"{what}s"), level.get(f"{what}s_struct")
            for index, item in enumerate(items or ()):
                yield item.get(what), Nested((*self.levels, ((*path, f"{what}s_struct", index), item)))
            if items:
                return
            if names is not None:
                yield from ((name, self) for name in ([names] if isinstance(names, str) else names))
                return
        yield None, self


class Level(BaseModel):
    """A mapping in a config: a feature's options, or an item of one of its lists."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        """Refuse a list of names together with the list of items that says more of each."""
        for key in ("tensors", "gemms"):
            if getattr(self, key, None) and getattr(self, f"{key}_struct"):
                raise Misfit((f"{key}_struct",), f"is given together with {key!r}; keep one of the two.")
        return self

    @property
    def nested(self) -> Nested:
        """The keys that are given, in this level and in the items of its lists."""
        return Nested.of(_given(self))

    def check_target(self, nested: Nested) -> None:
        """Check the options for one tensor of one GEMM.

        Args:
            nested: the place of these values.

        Raises:
            Misfit: keys that do not fit together.
        """

    @classmethod
    def of(cls, nested: Nested, **named: str) -> Self:
        """The item for one tensor or GEMM, with the keys of all levels around it, which were checked.

        Args:
            nested: the place of these keys.
            **named: the tensor or the GEMM.
        """
        holds = {key: value for key, value in nested.merged().items() if key in cls.model_fields}
        return cls.model_construct(**{**holds, **named})

    @classmethod
    def listed(cls, written: Mapping[str, Any]) -> dict[str, Any]:
        """Options that were checked, as written, except that bare names are lists of one."""
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
class Target(Generic[HeldT_co]):
    """A tensor and a GEMM on which a feature acts, with the options there.

    Attributes:
        tensor, gemm: None for all.
        options: the options there: an item of the feature's list of tensors or GEMMs, completed by the keys around it,
            or the feature's options if it has no such list.
        nested: the place of these values.
    """

    tensor: str | None
    gemm: str | None
    options: HeldT_co
    nested: Nested


def holding(targets: Iterable[Target[HeldT_co]], tensor: str | None, gemm: str | None) -> list[HeldT_co]:
    """The options that hold for a call, one for each target of its tensor.

    Args:
        targets: the targets of a feature.
        tensor, gemm: those of the call; None if it has none.
    """
    found = [
        target.options
        for target in targets
        if target.tensor in (tensor, None) or tensor is None
        if target.gemm in (gemm, None) or gemm is None
    ]
    return found if tensor is not None else found[:1]


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
        """Check what depends on more than one key.

        Raises:
            Misfit: keys that do not fit together.
        """
        for target in self.every_target:
            target.options.check_target(target.nested)

    @property
    def every_target(self) -> tuple[Target[Level], ...]:
        """The targets, with those of a second kind, where a feature has such ones."""
        return self.targets

    @property
    def targets(self) -> tuple[Target[Level], ...]:
        """The targets of the feature, in the order of the config; one target for everything if the config chooses none.

        Raises:
            Misfit: no tensor or GEMM is chosen, or one twice.
        """
        return (Target(None, None, self, self.nested),)

    def effect(self) -> Effect:
        """The effect of the feature on the GEMMs of a layer."""
        return Effect()

    def schedules(self) -> dict[Pair, Schedule]:
        """GEMM and tensor of each target -> its steps, an empty name for all; empty if all act in every step."""
        found = {
            (target.gemm or "", target.tensor or ""): getattr(target.options, "schedule", EVERY_STEP)
            for target in self.targets
        }
        return {} if all(schedule == EVERY_STEP for schedule in found.values()) else found


def _refuse_twice(found: Sequence[tuple[str, Nested]], what: str) -> None:
    """Refuse a second item for one tensor or GEMM."""
    seen: set[str] = set()
    for name, nested in found:
        if what in nested.levels[-1][1]:
            if name in seen:
                raise Misfit(
                    (*nested.here, what), f"is {name!r} a second time; put all keys for {name!r} into one item."
                )
            seen.add(name)


def _chosen(nested: Nested, what: Literal["tensor", "gemm"]) -> list[tuple[str, Nested]]:
    """The tensors or GEMMs that a level chooses, each with its keys.

    Raises:
        Misfit: the level chooses none.
    """
    found = [(name, inner) for name, inner in nested.chosen(what) if name is not None]
    if not found:
        example = "gemms: [fprop]" if what == "gemm" else "tensors: [activation, weight]"
        raise Misfit(nested.here, f"has neither '{what}s' nor '{what}s_struct'. Write for example {example}.")
    return found


class TensorChoice(Level, Generic[NameT, TensorItemT]):
    """The choice of tensors."""

    tensors: ListOf[NameT] = Field(
        default_factory=list, description="Tensors that the feature acts on. One name needs no brackets."
    )
    tensors_struct: ListOf[TensorItemT] = Field(
        default_factory=list,
        description="Instead of `tensors`: an item for each tensor, with `tensor` and keys that apply to that tensor"
        " only.",
    )

    def target(self, gemm: str | None, tensor: str, nested: Nested) -> Target[TensorItemT]:
        """One of the tensors, with the keys of all levels around it."""
        item: Any = item_of(type(self).model_fields["tensors_struct"])
        return Target(tensor, gemm, item.of(nested, tensor=tensor), nested)


class GemmChoice(Level, Generic[GemmItemT]):
    """The choice of GEMMs."""

    gemms: ListOf[GemmName] = Field(
        default_factory=list, description="GEMMs that the feature acts on. One name needs no brackets."
    )
    gemms_struct: ListOf[GemmItemT] = Field(
        default_factory=list,
        description="Instead of `gemms`: an item for each GEMM, with `gemm` and keys that apply to that GEMM only.",
    )

    @cached_property
    def chosen_gemms(self) -> Mapping[str, Nested]:
        """Each GEMM, with its keys.

        Raises:
            Misfit: no GEMM is chosen, or one in two items.
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


class ObservingFeatureSchema(TensorChoice[NameT, TensorItemT], FeatureSchema, Generic[NameT, TensorItemT]):
    """A feature that looks at tensors on a schedule."""

    @cached_property
    def targets(self) -> tuple[Target[TensorItemT], ...]:
        """The listed tensors."""
        return tuple(self.target(None, tensor, nested) for tensor, nested in _chosen(self.nested, "tensor"))


class ModifyingFeatureSchema(
    TensorChoice[NameT, TensorItemT], GemmChoice[GemmItemT], FeatureSchema, Generic[NameT, TensorItemT, GemmItemT]
):
    """A feature that replaces tensors."""

    @cached_property
    def targets(self) -> tuple[Target[TensorItemT], ...]:
        """The listed tensors of the listed GEMMs."""
        return tuple(
            self.target(gemm, tensor, nested)
            for gemm, outer in self.chosen_gemms.items()
            for tensor, nested in _chosen(outer, "tensor")
        )

    def modifies(self) -> tuple[Pair, ...]:
        """The listed tensors that take part in the GEMM that they are listed for."""
        listed = ((str(target.gemm), str(target.tensor)) for target in self.targets)
        return tuple((gemm, tensor) for gemm, tensor in listed if tensor in TAKES_PART[gemm])

    def check(self) -> None:
        """Check the options for each tensor, and that some tensor is changed at all."""
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
