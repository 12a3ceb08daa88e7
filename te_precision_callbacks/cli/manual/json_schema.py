"""The JSON Schema of configs, with which an editor completes keys and marks what is misspelt or of a wrong type.

    schema = config_schema()                       # draft 2020-12, as data for json.dumps
    schema = config_schema(own=["ClipOutliers"])   # a user's own feature is known too, with any keys

It refuses nothing that :func:`te_precision_callbacks.config.load_config` accepts, with the same ``features=``. Only
``load_config`` finds what one key alone does not show (schedules without a step, tensors that take no part in a GEMM, a
tensor without statistics, features that exclude each other), ranges that end before they start, and regular expressions
that are none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from te_precision_callbacks.base.vocabulary import LayerNames
from te_precision_callbacks.cli.manual.features import Feature, default_of
from te_precision_callbacks.config.effects import NAMESPACE
from te_precision_callbacks.config.fields import JsonSchema, item_of, shape
from te_precision_callbacks.config.known import known_features
from te_precision_callbacks.config.levels import FeatureSchema, GemmChoice, ObservingFeature, levels
from te_precision_callbacks.config.loading import LAYER_NAMES
from te_precision_callbacks.config.planning import BASE
from te_precision_callbacks.config.schemas import schema_of
from te_precision_callbacks.config.selection import (
    EXACT,
    LARGEST_NUMBER,
    LONGEST_PATTERN,
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


def config_schema(own: Iterable[str] = ()) -> JsonSchema:
    """The schema of a config file.

    Args:
        own: the names of a user's own features, whose keys are not checked.
    """
    known = known_features(own)
    models = [model for name in known[NAMESPACE] if (model := schema_of(name)) is not None]
    items = {level.__name__: level for model in models for path, level in levels(model).items() if path}
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
            **{model.__name__: _feature(model) for model in models},
            **{name: _mapping(level) for name, level in items.items()},
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
        PATTERN: {"type": "string", "maxLength": LONGEST_PATTERN},
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


def _feature(model: type[FeatureSchema]) -> JsonSchema:
    return _unless_off({"description": "\n\n".join(Feature.of_schema(model).paragraphs), **_mapping(model)})


def _mapping(model: type[BaseModel]) -> JsonSchema:
    """The options of a feature, or an item of one of its lists."""
    fields = model.model_fields
    properties: dict[str, JsonSchema] = {}
    for key, field in fields.items():
        item, default = item_of(field), default_of(field)
        takes = shape(field, None if item is None else _ref(item.__name__))
        properties[key] = {"description": field.description, **takes}
        if default is not None:
            properties[key]["default"] = default
    choices = [_choice(model, key) for key in _CHOSEN_BY if key in fields]
    return {
        "type": "object",
        "required": [key for key, field in fields.items() if field.is_required()],
        "properties": properties,
        "additionalProperties": False,
        **({"allOf": choices} if choices else {}),
    }


_CHOSEN_BY: Mapping[str, type[BaseModel]] = {"tensors": ObservingFeature, "gemms": GemmChoice}
"""Key -> the kind of feature that must have the key or its struct; others may have one of the two."""


def _choice(model: type[BaseModel], key: str) -> JsonSchema:
    both = [key, f"{key}_struct"]
    if issubclass(model, _CHOSEN_BY[key]):
        return {"oneOf": [{"required": [one]} for one in both]}
    return {"not": {"required": both}}


def _unless_off(read: JsonSchema) -> JsonSchema:
    return {"if": _OFF, "then": {}, "else": read}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}
