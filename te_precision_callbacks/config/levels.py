"""The nesting of feature schemas.

Each mapping in a feature's options is a :class:`Level`: the options themselves, and the items of their lists. The
effective options for a tensor of a GEMM, merged from all enclosing levels (:class:`Nested`), are a :class:`Target`,
which features receive with each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator
from typing_extensions import Self

from te_precision_callbacks.base.vocabulary import GEMMS, OPERANDS, RESULT, GemmName
from te_precision_callbacks.config.effects import Effect, Pair
from te_precision_callbacks.config.fields import ListOf, as_list, is_list, item_of, names
from te_precision_callbacks.config.problems import KeyPath
from te_precision_callbacks.statistics.schedule import EVERY_STEP, Schedule

TAKES_PART: Mapping[str, tuple[str, ...]] = {gemm: (*OPERANDS[gemm], RESULT[gemm]) for gemm in GEMMS}
"""GEMM -> its two operands and its result."""

NameT = TypeVar("NameT", bound=str)
TensorItemT = TypeVar("TensorItemT", bound="Level")
GemmItemT = TypeVar("GemmItemT", bound="Level")
HeldT_co = TypeVar("HeldT_co", bound="Level", covariant=True)


class Misfit(ValueError):
    """Contradicting keys, or an incomplete choice. The message continues a sentence that starts with the key."""

    def __init__(self, keys: KeyPath, text: str) -> None:
        super().__init__(text)
        self.keys = keys


_TENSORS = frozenset({"tensors", "tensors_struct"})


@dataclass(frozen=True)
class Nested:
    """The options for a tensor or a GEMM, with the enclosing levels, outermost first; inner keys override outer ones.

        whole = Nested.of({"margin": 1, "gemms_struct": [{"gemm": "fprop", "tensors": ["weight"], "margin": 2}]})
        ((gemm, of_gemm),) = whole.choose("gemm")      # "fprop"
        of_gemm.merge()["margin"]                      # 2
        of_gemm.path("margin")                          # ("gemms_struct", 0, "margin")

    Read from nvidia-dlfw-inspect 0.2.2, ``base.py``, and Transformer Engine 2.20.2, ``debug/features/api.py``.
    """

    levels: tuple[tuple[KeyPath, Mapping[str, Any]], ...]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Nested:
        return cls((((), options),))

    @property
    def here(self) -> KeyPath:
        return self.levels[-1][0]

    def path(self, key: str) -> KeyPath:
        for path, level in reversed(self.levels):
            if key in level:
                return (*path, key)
        return self.here

    def merge(self) -> dict[str, Any]:
        effective: dict[str, Any] = {}
        for _, level in self.levels:
            if not _TENSORS.isdisjoint(level):
                for key in _TENSORS:
                    effective.pop(key, None)
            effective |= level
        return effective

    def choose(self, what: Literal["tensor", "gemm"]) -> Iterator[tuple[str | None, Nested]]:
        """Yield each name, with its options, from ``<what>s`` or ``<what>s_struct`` of the innermost level that has
        either key; a single None if no level has.
        """
        for path, level in reversed(self.levels):
            names = level.get(f"{what}s")
            items = level.get(f"{what}s_struct")
            for index, item in enumerate(items or ()):
                yield item.get(what), Nested((*self.levels, ((*path, f"{what}s_struct", index), item)))
            if items:
                return
            if isinstance(names, str):
                names = [names]
            if names is not None:
                for name in names:
                    yield name, self
                return
        yield None, self


class Level(BaseModel):
    """A mapping in a config: a feature's options, or an item of one of its lists."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        for key in ("tensors", "gemms"):
            if getattr(self, key, None) and getattr(self, f"{key}_struct"):
                raise Misfit((f"{key}_struct",), f"is given together with {key!r}; keep one of the two.")
        return self

    @property
    def nested(self) -> Nested:
        return Nested.of(_given(self))

    def check_target(self, nested: Nested) -> None:
        """Check the options for a tensor of a GEMM; raises Misfit."""

    @classmethod
    def of(cls, nested: Nested, feature: Level, **named: str) -> Self:
        """Build the item for a tensor or GEMM from validated keys of all levels, and defaults of the feature."""
        written = nested.merge()
        options: dict[str, Any] = {}
        for key in cls.model_fields:
            if key in written:
                options[key] = written[key]
            elif key in type(feature).model_fields:
                options[key] = getattr(feature, key)
        return cls.model_construct(**options | named)

    @classmethod
    def listed(cls, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return validated options as written, with bare names as lists."""
        options = dict(written)
        for key, field in cls.model_fields.items():
            if is_list(field) and options.get(key) is not None:
                item: Any = item_of(field)
                options[key] = list(as_list(options[key]))
                if item is not None:
                    options[key] = list(map(item.listed, options[key]))
        return options


def _given(value: Any) -> Any:
    if isinstance(value, Level):
        return {key: _given(part) for key, part in value if key in value.model_fields_set}
    if isinstance(value, list):
        return list(map(_given, value))
    return value


@dataclass(frozen=True)
class Target(Generic[HeldT_co]):
    """The options for a tensor and a GEMM (None for all): an item of the feature's list, with enclosing keys."""

    tensor: str | None
    gemm: str | None
    options: HeldT_co
    nested: Nested


def options_for(targets: Iterable[Target[HeldT_co]], tensor: str | None, gemm: str | None) -> list[HeldT_co]:
    """Return the options for a call, one per target of its tensor; without a tensor, only the first."""
    gemm_targets = (target for target in targets if gemm is None or target.gemm in (gemm, None))
    if tensor is None:
        return [target.options for target in gemm_targets][:1]
    return [target.options for target in gemm_targets if target.tensor in (tensor, None)]


class FeatureSchema(Level):
    """A feature's options.

    Attributes:
        example: a section of a config that uses the feature, as YAML.
    """

    example: ClassVar[str]

    enabled: StrictBool = Field(description="Turns the feature on.")

    @model_validator(mode="after")
    def _check_all(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        for target in self.every_target:
            target.options.check_target(target.nested)

    @property
    def every_target(self) -> tuple[Target[Level], ...]:
        return self.targets

    @cached_property
    def targets(self) -> tuple[Target[Any], ...]:
        """A target for each chosen tensor of each chosen GEMM; a single target if the feature chooses neither."""
        targets = []
        for gemm, outer in self.choices("gemm", self.nested):
            for tensor, nested in self.choices("tensor", outer):
                targets.append(self.target(gemm, tensor, nested))
        return tuple(targets)

    def choices(self, what: Literal["tensor", "gemm"], nested: Nested) -> Iterable[tuple[str | None, Nested]]:
        """Return each chosen tensor or GEMM with its options; a single None for a feature without this choice."""
        if f"{what}s" not in type(self).model_fields:
            return [(None, nested)]
        choices = [(name, inner) for name, inner in nested.choose(what) if name is not None]
        if not choices:
            example = {"gemm": "gemms: [fprop]", "tensor": "tensors: [activation, weight]"}[what]
            raise Misfit(nested.here, f"has neither '{what}s' nor '{what}s_struct'. Write for example {example}.")
        return choices

    def target(self, gemm: str | None, tensor: str | None, nested: Nested) -> Target[Any]:
        fields = type(self).model_fields
        if tensor is not None:
            item: Any = item_of(fields["tensors_struct"])
            return Target(tensor, gemm, item.of(nested, self, tensor=tensor), nested)
        if gemm is not None:
            item = item_of(fields["gemms_struct"])
            return Target(None, gemm, item.of(nested, self, gemm=gemm), nested)
        return Target(None, None, self, nested)

    def effect(self) -> Effect:
        return Effect()

    def schedules(self) -> dict[Pair, Schedule]:
        """Map GEMM and tensor of each target (empty for all) to its steps; empty if all act in every step."""
        by_target: dict[Pair, Schedule] = {}
        for target in self.targets:
            pair = target.gemm or "", target.tensor or ""
            by_target[pair] = getattr(target.options, "schedule", EVERY_STEP)
        if set(by_target.values()) <= {EVERY_STEP}:
            return {}
        return by_target


class TensorChoice(Level, Generic[NameT, TensorItemT]):
    tensors: ListOf[NameT] = Field(
        default_factory=list,
        description="Tensors that the feature acts on. A single name may be written without brackets.",
    )
    tensors_struct: ListOf[TensorItemT] = Field(
        default_factory=list,
        description="Instead of `tensors`: an item for each tensor, with `tensor` and keys that apply to that tensor"
        " only.",
    )


class GemmChoice(Level, Generic[GemmItemT]):
    gemms: ListOf[GemmName] = Field(
        default_factory=list,
        description="GEMMs that the feature acts on. A single name may be written without brackets.",
    )
    gemms_struct: ListOf[GemmItemT] = Field(
        default_factory=list,
        description="Instead of `gemms`: an item for each GEMM, with `gemm` and keys that apply to that GEMM only.",
    )


class OneTensor(Level, Generic[NameT]):
    tensor: NameT = Field(description="The tensor that the item is for.")


class OneGemm(Level):
    gemm: GemmName = Field(description="The GEMM that the item is for.")


class ObservingFeatureSchema(TensorChoice[NameT, TensorItemT], FeatureSchema, Generic[NameT, TensorItemT]):
    """A feature that observes tensors without changing them."""


class ModifyingFeatureSchema(
    TensorChoice[NameT, TensorItemT], GemmChoice[GemmItemT], FeatureSchema, Generic[NameT, TensorItemT, GemmItemT]
):
    def modifies(self) -> tuple[Pair, ...]:
        pairs = []
        for target in self.targets:
            gemm = str(target.gemm)
            if target.tensor in TAKES_PART[gemm]:
                pairs.append((gemm, str(target.tensor)))
        return tuple(pairs)

    def check(self) -> None:
        super().check()
        if self.modifies():
            return
        listed = dict.fromkeys(repr(target.tensor) for target in self.targets)
        possible = names(type(self).model_fields["tensors"])
        gemms = []
        for gemm in dict.fromkeys(target.gemm for target in self.targets):
            tensors = filter(possible.__contains__, TAKES_PART[str(gemm)])
            gemms.append(f"{gemm!r} has {', '.join(map(repr, tensors))}")
        text = f"can never act: none of its tensors ({', '.join(listed)}) takes part in its GEMMs. {'; '.join(gemms)}."
        raise Misfit((), text)


def levels(model: type[BaseModel], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], type[BaseModel]]:
    """Return the model of each mapping in a feature's options: ``()`` is the feature, others are items."""
    by_path = {path: model}
    for key, field in model.model_fields.items():
        item = item_of(field)
        if item is not None:
            by_path.update(levels(item, (*path, key)))
    return by_path
