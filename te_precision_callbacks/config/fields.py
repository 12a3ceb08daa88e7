"""Types of config values for the schemas, with descriptions.

Messages of validation errors continue a sentence that starts with the key: "has the pair [5, 2], which ends before it
starts."
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    PlainValidator,
    Strict,
    TypeAdapter,
)
from pydantic.fields import FieldInfo

from te_precision_callbacks.base.suggestions import nearest, shorten, shown, suggestion
from te_precision_callbacks.base.vocabulary import ELEMENT_FORMATS, RECIPES, WITH_ELEMENT_FORMAT
from te_precision_callbacks.statistics.names import (
    OWN_RECIPE,
    Request,
    UnknownStatisticError,
    is_quantized_name,
    quantized_names,
    quantized_request,
    tensor_request,
)
from te_precision_callbacks.statistics.table import BLOCKWISE, QUANTIZED_STATISTICS, TENSOR_STATISTICS

SIZE_PATTERN = r"^\s*(?!0+(?:\.0*)?(?!\.?\d))\d+(?:\.\d+)?\s*(?:[bB]|[kKmMgGtT](?:[iI]?[bB])?)?\s*$"
"""A pattern of sizes, without their range. pydantic also accepts bits and suffixes."""

LARGEST_SIZE = (1 << 63) - 1

_BYTES = TypeAdapter(ByteSize)


def size_in_bytes(size: object) -> int:
    """Parse a size: a number of bytes, or a text with a unit (kB, MB, GB, TB; KiB, MiB, GiB, TiB).

    Raises:
        ValueError: not a size, or below one byte; the message continues a sentence that starts with the key.
    """
    is_size = (type(size) is int and size > 0) or (isinstance(size, str) and re.match(SIZE_PATTERN, size))
    try:
        count = int(_BYTES.validate_python(size)) if is_size else 0
    except ValueError:  # too many digits
        count = LARGEST_SIZE + 1
    if count < 1:
        raise ValueError(
            "must be a number of bytes >= 1, or a text such as '10MB' (10 * 1000^2) or '2GiB' (2 * 1024^3), not"
            f" {size!r}."
        )
    if count > LARGEST_SIZE:
        raise ValueError(f"must be a number of bytes up to 2^63 - 1, not {size!r}.")
    return count


QuantFormat = Literal["FP8E4M3", "FP8E5M2", "MXFP8E4M3", "MXFP8E5M2"]

T = TypeVar("T")


def as_list(value: Any) -> Any:
    """Convert a bare name to a list; upstream would match single letters or substrings of the name."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, tuple):
        return list(value)
    return value


ListOf = Annotated[
    list[T],
    Strict(),
    BeforeValidator(as_list),
    Field(min_length=1),
]


def _error_for(
    entry: object,
    error: UnknownStatisticError,
    names: Sequence[str],
    known_statistics: Sequence[str],
    *,
    other_feature: str,
) -> ValueError:
    reason = shorten(str(error).removeprefix(f"{entry!r}: "))
    if other_feature:
        return ValueError(f"has {shown(entry)}: {reason}. Move it to {other_feature}.")
    if isinstance(entry, Mapping):
        return ValueError(f"has {shown(entry)}: {reason}.")
    near = isinstance(entry, str) and nearest(entry, names)
    hint = suggestion(str(entry), names if near else known_statistics, known_as="The statistics are")
    return ValueError(f"has {shown(entry)}: {reason}.{hint}")


def _tensor_statistic(entry: Any) -> Request:
    try:
        return tensor_request(entry)
    except UnknownStatisticError as error:
        tensor_statistics = (*TENSOR_STATISTICS, BLOCKWISE)
        other = "LogFp8TensorStats" if is_quantized_name(entry) else ""
        raise _error_for(entry, error, tensor_statistics, tensor_statistics, other_feature=other) from error


def _quantized_statistic(entry: Any, *, default_recipe: str = OWN_RECIPE) -> Request:
    try:
        return quantized_request(entry, default_recipe)
    except UnknownStatisticError as error:
        recipes = (default_recipe,) if default_recipe else RECIPES
        other = "LogTensorStats" if isinstance(entry, str) and entry in TENSOR_STATISTICS else ""
        raise _error_for(entry, error, quantized_names(recipes), QUANTIZED_STATISTICS, other_feature=other) from error


def _nvfp4_statistic(entry: Any) -> Request:
    request = _quantized_statistic(entry, default_recipe="nvfp4")
    if request.recipe != "nvfp4":
        raise ValueError(
            f"has {shown(entry)}, a statistic of {request.recipe}; this feature has only nvfp4 statistics. Use"
            " LogFp8TensorStats."
        )
    return request


_QUANTIZED = f"STATISTIC being one of {', '.join(QUANTIZED_STATISTICS)}"
TensorStatistic = Annotated[
    Request,
    PlainValidator(_tensor_statistic),
    f"statistics: {', '.join(TENSOR_STATISTICS)}, {{{BLOCKWISE}: {{block_size: 32, dims: 1}}}}",
]
Fp8Statistic = Annotated[
    Request,
    PlainValidator(_quantized_statistic),
    (
        f"[RECIPE_[FORMAT_]]STATISTIC[_columnwise], {_QUANTIZED}, RECIPE one of {', '.join(RECIPES)}, and FORMAT, after"
        f" {', '.join(WITH_ELEMENT_FORMAT)}, one of {', '.join(ELEMENT_FORMATS)}"
    ),
]
Nvfp4Statistic = Annotated[
    Request,
    PlainValidator(_nvfp4_statistic),
    f"[nvfp4_]STATISTIC[_columnwise], {_QUANTIZED}",
]
Size = Annotated[
    int,
    PlainValidator(size_in_bytes),
    "a number of bytes, or a text such as `10MB` (10^7) or `2GiB` (2 * 2^30)",
]


def _is_step(value: object, lowest: int = 0) -> bool:
    return type(value) is int and value >= lowest


def _intervals(pairs: list[Any]) -> list[Any]:
    for pair in pairs:
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and _is_step(pair[0]) and _is_step(pair[1], -1)):
            raise ValueError(
                f"has {shown(pair)}, which is not a [start, end] pair of steps >= 0. Write for example"
                " start_end_list: [[0, 20], [80, -1]], where -1 means no end."
            )
        if -1 < pair[1] < pair[0]:
            raise ValueError(f"has the pair {shown(list(pair))}, which ends before it starts.")
    for first, second in pairwise(pairs):
        if first[1] == -1 or second[0] <= first[1]:
            raise ValueError(
                f"has {shown(list(second))} after {shown(list(first))}. Give ranges in ascending order that do not"
                " overlap."
            )
    return list(map(list, pairs))


Intervals = Annotated[ListOf[Any], AfterValidator(_intervals), "a list of [start, end] pairs of steps"]


def is_list(field: FieldInfo) -> bool:
    return get_origin(_plain(field.annotation)[0]) is list


def names(field: FieldInfo) -> tuple[str, ...]:
    kind = _type_of_entry(field)
    return get_args(kind) if get_origin(kind) is Literal else ()


def item_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = _type_of_entry(field)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def words(field: FieldInfo) -> str:
    kind, metadata = _plain(field.annotation)
    metadata += field.metadata
    if text := _find_words(metadata):
        return text
    if is_list(field):
        entries = _find_words(_plain(get_args(kind)[0])[1]) or ", ".join(names(field))
        if item := item_of(field):
            required = next(key for key, item_field in item.model_fields.items() if item_field.is_required())
            entries = f"mappings with {required!r}"
        return f"a list of {entries}"
    if choices := names(field):
        return f"one of {', '.join(choices)}"
    if kind is bool:
        return "True or False"
    low = next(entry.ge for entry in metadata if hasattr(entry, "ge"))
    high = next((entry.le for entry in metadata if hasattr(entry, "le")), None)
    return f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"


def _find_words(metadata: Sequence[Any]) -> str:
    return next((entry for entry in metadata if isinstance(entry, str)), "")


def _plain(annotation: Any) -> tuple[Any, list[Any]]:
    """Return a type without None, and its metadata; a text among them describes the values."""
    if type(None) in get_args(annotation):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        return kind, metadata
    return annotation, []


def _type_of_entry(field: FieldInfo) -> Any:
    kind = _plain(field.annotation)[0]
    return get_args(kind)[0] if get_origin(kind) is list else kind
