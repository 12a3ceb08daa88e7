"""Validation of features' options by their schemas, with readable errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from te_precision_callbacks.base.suggestions import meant_for, nearest, shown, suggestion
from te_precision_callbacks.base.vocabulary import GEMMS, RESULT
from te_precision_callbacks.config.fields import item_of, names, words
from te_precision_callbacks.config.levels import FeatureSchema, ObservingFeatureSchema, levels
from te_precision_callbacks.config.problems import ConfigError, KeyPath, Problems, Where
from te_precision_callbacks.config.schemas import FEATURES, schema_of

logger = logging.getLogger(__name__)


class ReadOptions(dict[str, Any]):
    """A feature's options as a mapping, as nvidia-dlfw-inspect passes them, and as a model.

    The mapping has the options as written, except that a bare name becomes a list.
    """

    def __init__(self, written: Mapping[str, Any], schema: FeatureSchema) -> None:
        super().__init__(schema.listed(written))
        self.schema = schema


def read_features(features: Mapping[str, Any], location: Where) -> dict[str, ReadOptions]:
    """Validate the enabled features of a section that have a schema.

    Custom features and disabled features are ignored. If ``enabled`` is invalid, which is reported elsewhere, the other
    keys are still validated.

    Raises:
        ConfigError: lists all problems.
    """
    read: dict[str, ReadOptions] = {}
    problems = Problems()
    for name, written in features.items():
        schema = schema_of(name)
        if schema is None or not isinstance(written, Mapping) or written.get("enabled") is False:
            continue
        written = dict(written)
        if "enabled" not in written:
            for key in nearest("enabled", map(str, written), most=1):
                written.pop(key, None)
        written["enabled"] = True
        written = _without_gemms(schema, name, written, location)
        with problems.collecting():
            read[name] = ReadOptions(written, read_options(schema, name, written, location))
    problems.raise_any()
    return read


def _without_gemms(
    schema: type[FeatureSchema], feature: str, written: Mapping[str, Any], location: Where
) -> Mapping[str, Any]:
    """Remove GEMMs from lists of tensors.

    Transformer Engine silently ignores them; existing configs list ``fprop`` next to ``dgrad`` and ``wgrad``, which are
    both GEMMs and tensors.
    """
    listed = written.get("tensors")
    if not issubclass(schema, ObservingFeatureSchema) or not isinstance(listed, list):
        return written
    tensors = names(schema.model_fields["tensors"])
    gemms = [entry for entry in listed if entry in GEMMS and entry not in tensors]
    kept_tensors = [entry for entry in listed if entry not in gemms]
    if not gemms or not kept_tensors:
        return written
    for gemm in gemms:
        result = RESULT[gemm]
        logger.warning(
            "%s: 'tensors' of %s has %r, which is a GEMM, not a tensor: it is ignored, as in Transformer Engine.%s",
            location(feature, "tensors"),
            shown(feature),
            gemm,
            f" Its result is {result!r}." if result in tensors else "",
        )
    return {**written, "tensors": kept_tensors}


def read_options(schema: type[FeatureSchema], name: str, options: Mapping[str, Any], location: Where) -> FeatureSchema:
    try:
        return schema.model_validate(dict(options))
    except ValidationError as error:
        problems = (_problem(schema, name, location, details) for details in error.errors(include_url=False))
        raise ConfigError(*problems) from None


def _problem(schema: type[FeatureSchema], feature: str, location: Where, details: Any) -> str:
    kind = details["type"]
    value = details["input"]
    cause = details.get("ctx", {}).get("error")
    keys: KeyPath = (*details["loc"], *getattr(cause, "keys", ()))
    if kind == "invalid_key":  # a key that is not a str; in `loc` it looks like a list index
        keys = (*keys[:-1], str(value))
    where = location(feature, *keys)
    if kind in ("extra_forbidden", "invalid_key"):
        text = f"{where}: {_subject(feature, keys[:-1])} has no key {shown(keys[-1])}"
        if kind == "extra_forbidden":
            text += f" (given: {shown(value)})"
        return f"{text}.{_elsewhere(schema, feature, keys)}"
    if kind == "value_error" and not keys:
        return f"{where}: {_subject(feature, keys)} {cause}"
    *around, last = _level(keys)
    field = levels(schema)[tuple(around)].model_fields[last]
    if kind == "missing":
        subject = _subject(feature, keys[:-1])
        return f"{where}: {subject} has no {keys[-1]!r}, {words(field)}.{meant_for(str(keys[-1]), value)}"
    in_list = isinstance(keys[-1], int)
    is_item = in_list and kind == "value_error" and item_of(field) is not None
    if in_list and not is_item:
        keys = keys[:-1]
    subject = _subject(feature, keys)
    if kind == "value_error":
        return f"{where}: {subject} {cause}"
    text = f"{where}: {subject} must be {words(field)}, not {shown(value)}."
    if in_list:
        text = f"{where}: {subject} must be {words(field)}; {shown(value)} is not in this list."
    if isinstance(value, str) and (near := nearest(value, names(field))):
        text += f" Did you mean {' or '.join(map(shown, near))}?"
    return text


def _elsewhere(schema: type[FeatureSchema], feature: str, keys: KeyPath) -> str:
    by_path = levels(schema)
    key = keys[-1]
    other_paths = [path for path, level in by_path.items() if key in level.model_fields]
    level_keys = by_path[_level(keys[:-1])].model_fields
    takers = [name for name, other in FEATURES.items() if key in other.model_fields]
    if takers and not other_paths:  # a key of another feature is not a typo
        return f" Its keys are: {', '.join(sorted(level_keys))}. {key!r} is a key of {', '.join(takers)}."
    near = suggestion(str(key), level_keys, known_as="Its keys are")
    if not other_paths:
        return near
    if not other_paths[0]:
        return f" It belongs to {feature!r} itself.{near}"
    return f" It belongs in the items of {other_paths[0][-1]!r}.{near}"


def _level(keys: KeyPath) -> tuple[str, ...]:
    return tuple(key for key in keys if isinstance(key, str))


def _subject(feature: str, keys: KeyPath) -> str:
    subject = shown(feature)
    for key in keys:
        if isinstance(key, int):
            subject = f"item {key + 1} of {subject}"
        elif subject.startswith("item"):
            subject = f"{shown(key)} in {subject}"
        else:
            subject = f"{shown(key)} of {subject}"
    return subject
