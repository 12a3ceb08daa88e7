"""Reference of features, read from their schemas.

    features()                       # all features
    (feature,) = find("FakeQuant")   # in any case
    feature.keys[0].name             # "enabled"

docs/features.md and ``te-precision features`` are made from it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.suggestions import suggestion
from te_precision_callbacks.config.effects import BASE, NAMESPACE
from te_precision_callbacks.config.fields import names, words
from te_precision_callbacks.config.levels import FeatureSchema, levels
from te_precision_callbacks.config.schemas import UPSTREAM_FEATURE, is_upstream_test, known_features, schema_of


class UnknownFeatureError(PrecisionDebugError, LookupError):
    """A feature with this name does not exist."""


@dataclass(frozen=True)
class Key:
    """A key of a feature. ``where``: the paths of levels that accept it; ``default``: None without a default."""

    name: str
    where: tuple[tuple[str, ...], ...]
    values: str
    required: bool
    default: Any
    meaning: str

    @property
    def places(self) -> str:
        return ", ".join(dict.fromkeys(f"items of `{path[-1]}`" if path else "feature" for path in self.where))


@dataclass(frozen=True)
class FeatureEntry:
    """A feature.

    Attributes:
        name: as registered; configs may write it in any case.
        namespace: the key of a section that contains it; :data:`BASE` for the section itself.
        paragraphs: its description; the first paragraph is a summary.
        tensors, gemms: the tensors and GEMMs it can act on; empty for a feature of whole GEMMs, or of whole tensors.
        keys: its keys, with the keys of its items; empty if they are not validated.
        example: a section of a config, as YAML; may be empty.
    """

    name: str
    namespace: str
    paragraphs: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    gemms: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    example: str = ""

    @property
    def place(self) -> str:
        if self.namespace == BASE:
            return "the section"
        return f"{self.namespace}:"


def features() -> tuple[FeatureEntry, ...]:
    """All features, this project's first; without custom features and upstream features that no layer calls."""
    entries: list[FeatureEntry] = []
    for namespace, registered in known_features().items():
        names = [name for name in registered if not is_upstream_test(name)]
        if namespace == BASE:
            names.remove(UPSTREAM_FEATURE)
        entries += [_feature(name, namespace) for name in names]
    return tuple(entries)


def find(name: str) -> tuple[FeatureEntry, ...]:
    """Find the features with a name, ignoring case; raises UnknownFeatureError."""
    listed = features()
    entries = tuple(feature for feature in listed if feature.name.casefold() == name.casefold())
    if not entries:
        hint = suggestion(name, dict.fromkeys(feature.name for feature in listed), known_as="The features are")
        raise UnknownFeatureError(f"There is no feature {name!r}.{hint}")
    return entries


def keys_of(model: type[FeatureSchema]) -> tuple[Key, ...]:
    keys: dict[str, Key] = {}
    for path, level in levels(model).items():
        for name, field in level.model_fields.items():
            is_required = field.is_required()
            default = None if is_required else field.get_default(call_default_factory=True)
            default = None if default == [] else default
            new = Key(name, (), words(field), is_required, default, field.description or "")
            feature_key = keys.get(name, new)
            keys[name] = replace(feature_key, where=(*feature_key.where, path))
    return tuple(keys.values())


def _feature(name: str, namespace: str) -> FeatureEntry:
    model = schema_of(name) if namespace == NAMESPACE else None
    if model is None:
        return FeatureEntry(name, namespace, ("Not a feature of te-precision-callbacks: its keys are not checked.",))
    texts = (inspect.getdoc(model) or "").split("\n\n")
    fields = model.model_fields
    return FeatureEntry(
        model.__name__,
        NAMESPACE,
        tuple(" ".join(text.split()) for text in texts),
        names(fields["tensors"]) if "tensors" in fields else (),
        # Without a choice of GEMMs, it acts on the layer's GEMMs.
        names(fields["gemms"]) if "gemms" in fields else model.model_construct(enabled=True).effect().high_precision,
        keys_of(model),
        model.example.strip(),
    )
