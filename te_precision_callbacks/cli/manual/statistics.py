"""Reference of statistics, read from their table, the grammar of names and the schemas.

statistics()                                # one for each row of the table
find("mxfp8_mse_columnwise").recipe.name    # "mxfp8"
find("mxfp8_mse_columnwise").example        # "stats: [mxfp8_mse_columnwise]"
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from te_precision_callbacks.base.vocabulary import (
    COLUMNWISE,
    ELEMENT_FORMATS,
    ONE_SCALE,
    RECIPES,
    RESULT,
    ROWWISE,
)
from te_precision_callbacks.config.fields import names
from te_precision_callbacks.config.levels import FeatureSchema
from te_precision_callbacks.config.problems import nearest, suggestion
from te_precision_callbacks.config.schemas import FEATURES
from te_precision_callbacks.statistics.names import (
    OWN_RECIPE,
    Request,
    UnknownStatisticError,
    named_request,
    quantized_names,
)
from te_precision_callbacks.statistics.table import BLOCKWISE, GEMM_STATISTICS, OF_GEMMS, STATISTICS, TENSOR_STATISTICS


@dataclass(frozen=True)
class RecipeEntry:
    """The quantization of a recipe, in words.

    Attributes:
        name: as in statistics' names.
        shares: the elements that share a factor.
        factor: the factors from codes to values.
        elements: the default format of the elements.
        formats: the formats that a name can contain.
        is_simulated: whether layers with other recipes have its statistics too, as a simulation.
    """

    name: str
    shares: str
    factor: str
    elements: str
    formats: tuple[str, ...]
    is_simulated: bool


_RECIPES = {
    row.name: RecipeEntry(
        row.name,
        row.shares,
        row.factor,
        row.elements,
        formats=() if row.fixed else ELEMENT_FORMATS,
        is_simulated=row.name != "fp8_delayed_scaling",  # whose factor comes from earlier steps
    )
    for row in RECIPES.values()
}


def recipes_table() -> str:
    """The table of recipes of docs/statistics.md, in Markdown."""
    lines = [
        "| recipe | elements that share a factor | factor | elements by default | element format in a name |",
        "|---|---|---|---|---|",
    ]
    for recipe in _RECIPES.values():
        formats = ", ".join(f"`{name}`" for name in recipe.formats)
        lines.append(f"| `{recipe.name}` | {recipe.shares} | {recipe.factor} | {recipe.elements} | {formats} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Explained:
    """A statistic, under a name as in a config or in logs. The attributes are keys of ``--json``.

    Attributes:
        name: the name.
        statistic: its name in the table, without recipe, element format, direction and parameters.
        formula, unit: as in the table; :data:`te_precision_callbacks.statistics.table.SYMBOLS` defines x, y and n.
        of: the data that it is computed from.
        merged: how micro-batches and ranks are merged.
        worse: the direction that is worse; empty for neither.
        is_upstream: whether Transformer Engine 2.20 has the statistic.
        is_histogram: whether its value is a histogram.
        collected_by: feature -> tensors.
        is_of_own_recipe: whether it is of the layer's recipe.
        recipe: the recipe in the name; may be None.
        element_format: the format in the name; may be None.
        direction: ``rowwise`` or ``columnwise`` for quantized data that differ by direction, else None.
        read_by: tensor -> the GEMM that reads its data of this direction.
        block_size, dims: the blocks of :data:`BLOCKWISE`.
        example: a line for the options of such a feature.
    """

    name: str
    statistic: str
    formula: str
    unit: str
    of: str
    merged: str
    worse: str
    is_upstream: bool
    is_histogram: bool
    collected_by: dict[str, tuple[str, ...]]
    is_of_own_recipe: bool
    recipe: RecipeEntry | None
    element_format: str | None
    direction: str | None
    read_by: dict[str, str]
    block_size: int | None
    dims: int | None
    example: str


def statistics() -> tuple[Explained, ...]:
    """All statistics, under their plain names, in the order of the table."""
    return tuple(find(name) for name in STATISTICS)


def find(name: str) -> Explained:
    """The statistic of a name.

    Raises:
        UnknownStatisticError: there is no such statistic; the text names the nearest ones.
    """
    try:
        request = named_request(name)
    except UnknownStatisticError as error:
        known = [*TENSOR_STATISTICS, BLOCKWISE, *quantized_names(), *GEMM_STATISTICS]
        hint = suggestion(name, known if nearest(name, known) else STATISTICS, known_as="The statistics are")
        raise UnknownStatisticError(f"{error}.{hint}") from None
    return _explained(name, request)


def _explained(name: str, request: Request) -> Explained:
    row, blocks, direction = request.statistic, request.blocks, _direction(request)
    entry: Any = name
    if blocks is not None:
        entry = {BLOCKWISE: {"block_size": blocks.size, "dims": blocks.dims}}
    return Explained(
        name=name,
        statistic=row.name,
        formula=row.formula,
        unit=row.unit,
        of=row.of.value,
        merged=row.merge,
        worse=row.worse.value,
        is_upstream=row.upstream,
        is_histogram=row.bins is not None,
        collected_by={"LogGemmError": tuple(RESULT.values())}
        if row.of in OF_GEMMS
        else {
            feature: names(model.model_fields["tensors"])
            for feature, model in FEATURES.items()
            if "stats" in model.model_fields and _takes(model, entry)
        },
        is_of_own_recipe=request.recipe == OWN_RECIPE,
        recipe=_RECIPES.get(request.recipe or ""),
        element_format=None if request.e5m2 is None else ELEMENT_FORMATS[request.e5m2],
        direction=direction,
        read_by={} if direction is None else dict(COLUMNWISE if request.columnwise else ROWWISE),
        block_size=None if blocks is None else blocks.size,
        dims=None if blocks is None else blocks.dims,
        example="gemms: [fprop, dgrad, wgrad]" if row.of in OF_GEMMS else f"stats: [{_in_yaml(request)}]",
    )


def _takes(model: type[FeatureSchema], entry: Any) -> bool:
    """Return whether a feature takes an entry of its ``stats``."""
    try:
        _stats_of(model).validate_python([entry])
    except ValidationError:
        return False
    return True


@functools.cache
def _stats_of(model: type[FeatureSchema]) -> TypeAdapter[Any]:
    return TypeAdapter(model.model_fields["stats"].rebuild_annotation())


def _direction(request: Request) -> str | None:
    if request.recipe is None or request.recipe in ONE_SCALE:
        return None
    return "columnwise" if request.columnwise else "rowwise"


def _in_yaml(request: Request) -> str:
    if request.blocks is None:
        return request.spelled_out
    return f"{BLOCKWISE}: {{block_size: {request.blocks.size}, dims: {request.blocks.dims}}}"
