"""The JSON Schema of configs, for completion and checks in editors.

    schema = config_schema()                       # draft 2020-12, as data for json.dumps
    schema = config_schema(own=["ClipOutliers"])   # accepts a user's own feature, with any keys

It accepts every config that :func:`te_precision_callbacks.config.load_config` accepts, with the same ``features=``.
Only ``load_config`` finds contradictions between keys (schedules without a step, tensors that take no part in a GEMM, a
tensor without statistics, features that exclude each other), ranges that end before they start, and invalid regular
expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from te_precision_callbacks.base.vocabulary import LayerNames
from te_precision_callbacks.config.effects import BASE, NAMESPACE
from te_precision_callbacks.config.fields import JsonSchema
from te_precision_callbacks.config.known import known_features
from te_precision_callbacks.config.levels import GemmChoice, ObservingFeatureSchema, levels
from te_precision_callbacks.config.loading import LAYER_NAMES
from te_precision_callbacks.config.schemas import schema_of
from te_precision_callbacks.config.selection import (
    EXACT,
    LARGEST_NUMBER,
    NUMBERS,
    PATTERN,
    SELECTORS,
    SPAN,
    TYPES,
)

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_OFF: JsonSchema = {"type": "object", "required": ["enabled"], "properties": {"enabled": {"const": False}}}
"""What is not enabled; nothing else in it is read."""

_UNCHECKED: JsonSchema = {"type": "object", "required": ["enabled"], "properties": {"enabled": {"type": "boolean"}}}
"""The options of a feature without a schema."""


class _WithoutTitles(GenerateJsonSchema):
    """pydantic's JSON Schema, without titles that repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def config_schema(own: Iterable[str] = ()) -> JsonSchema:
    """The schema of a config file.

    Args:
        own: the names of a user's own features; their keys are not checked.
    """
    known = known_features(own)
    models = [model for name in known[NAMESPACE] if (model := schema_of(name)) is not None]
    _, made = models_json_schema([(model, "validation") for model in models], schema_generator=_WithoutTitles)
    for level in (level for model in models for level in levels(model).values()):
        choices = [_choice(level, key) for key in _CHOSEN_BY if key in level.model_fields]
        made["$defs"][level.__name__] |= {"allOf": choices} if choices else {}
    return {
        "$schema": DIALECT,
        "title": "A config of te-precision-callbacks",
        "type": "object",
        "properties": {
            LAYER_NAMES: {
                "description": "Which names the selectors of layers use.",
                "anyOf": [{"enum": list(get_args(LayerNames))}, _ref("section")],
            }
        },
        "additionalProperties": _ref("section"),
        "$defs": {
            "section": _section(known),
            "layers": _layers(),
            **made["$defs"],
            **{model.__name__: _unless_off(made["$defs"][model.__name__]) for model in models},
        },
    }


def _section(known: Mapping[str, Iterable[str]]) -> JsonSchema:
    namespaces = {
        namespace: {
            "type": "object",
            "description": f"The features of the namespace {namespace}.",
            **_named(names, _options if namespace == NAMESPACE else _unchecked),
        }
        for namespace, names in known.items()
    }
    beside = _named(known[BASE], _unchecked)
    keys = {
        "enabled": {"type": "boolean", "description": "Whether the section is read at all."},
        "layers": _ref("layers"),
    }
    return _unless_off(
        {
            "type": "object",
            "description": "Layers, and the features that act on them.",
            "required": ["enabled", "layers"],
            **beside,
            "properties": {**keys, **namespaces, **beside["properties"]},
        }
    )


def _layers() -> JsonSchema:
    names = _one_or_list({"type": "string", "minLength": 1})
    span = {"type": "string", "pattern": f"^(?:all|{SPAN.pattern})$"}
    shapes: dict[str, JsonSchema] = {
        EXACT: names,
        PATTERN: {"type": "string"},
        NUMBERS: _one_or_list({"anyOf": [{"type": "integer", "minimum": 0, "maximum": LARGEST_NUMBER}, span]}),
        TYPES: names,
    }
    return {
        "type": "object",
        "description": "Selects layers.",
        "minProperties": 1,
        "properties": {key: {"description": f"Selects {meaning}", **shapes[key]} for key, meaning in SELECTORS.items()},
        "additionalProperties": False,
    }


def _one_or_list(entry: JsonSchema) -> JsonSchema:
    return {"anyOf": [entry, {"type": "array", "items": entry, "minItems": 1}]}


def _named(names: Iterable[str], options: Callable[[str], JsonSchema]) -> JsonSchema:
    """A mapping of features: an editor offers the names as they are registered, any case is accepted."""
    known = list(names)
    return {
        "properties": {name: options(name) for name in known},
        "patternProperties": {f"^(?!{re.escape(name)}$){_in_any_case(name)}$": options(name) for name in known},
        "additionalProperties": False,
    }


def _options(name: str) -> JsonSchema:
    model = schema_of(name)
    return _UNCHECKED if model is None else _ref(model.__name__)


def _unchecked(name: str) -> JsonSchema:
    return _UNCHECKED


def _in_any_case(name: str) -> str:
    return re.sub("[a-zA-Z]", lambda letter: f"[{letter[0].upper()}{letter[0].lower()}]", re.escape(name))


_CHOSEN_BY: Mapping[str, type[BaseModel]] = {"tensors": ObservingFeatureSchema, "gemms": GemmChoice}
"""Key -> the kind of feature that must have the key or its struct; others may have one of the two."""


def _choice(model: type[BaseModel], key: str) -> JsonSchema:
    chosen = [name for name, kind in _CHOSEN_BY.items() if issubclass(model, kind)]
    if chosen == [key]:
        return {"oneOf": [{"required": [one]} for one in (key, f"{key}_struct")]}
    not_both: JsonSchema = {"not": {"required": [key, f"{key}_struct"]}}
    if key not in chosen:
        return not_both
    either = [{"required": [f"{name}{suffix}"]} for name in chosen for suffix in ("", "_struct")]
    return {**not_both, "anyOf": either}


def _unless_off(read: JsonSchema) -> JsonSchema:
    return {"if": _OFF, "then": {}, "else": read}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}
