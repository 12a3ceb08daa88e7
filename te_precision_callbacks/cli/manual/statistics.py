"""Reference of statistics, read from their table, the grammar of names and the schemas."""

from __future__ import annotations

import functools
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
    UnknownStatisticError,
    named_request,
    quantized_names,
)
from te_precision_callbacks.statistics.table import BLOCKWISE, GEMM_STATISTICS, OF_GEMMS, STATISTICS, TENSOR_STATISTICS

Explained = dict[str, Any]
"""A statistic as JSON values, under a name as in a config or in logs:

- ``name``, and ``statistic``: the name in the table, without recipe, element format, direction and parameters;
- ``formula``, ``unit``; :data:`te_precision_callbacks.statistics.table.SYMBOLS` defines x, y and n;
- ``of``: the data that it is computed from; ``merged``: how micro-batches and ranks are merged;
- ``worse``: the direction that is worse, empty for neither; ``is_upstream``: whether Transformer Engine 2.20 has it;
- ``is_histogram``; ``collected_by``: feature -> tensors; ``is_of_own_recipe``: whether it is of the layer's recipe;
- ``recipe``: the recipe in the name, or null; ``is_simulated``: whether layers with other recipes have its statistics
  too; ``element_format``: the format in the name, or null;
- ``direction``: ``rowwise`` or ``columnwise`` for quantized data that differ by direction, or null; ``read_by``:
  tensor -> the GEMM that reads its data of this direction;
- ``block_size``, ``dims``: the blocks of :data:`BLOCKWISE`, or null; ``example``: a line for the options.
"""


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
    row, blocks, recipe = request.statistic, request.blocks, RECIPES.get(request.recipe or "")
    has_direction = request.recipe is not None and request.recipe not in ONE_SCALE
    entry: Any = name if blocks is None else {BLOCKWISE: {"block_size": blocks.size, "dims": blocks.dims}}
    collected_by = {
        feature: names(model.model_fields["tensors"])
        for feature, model in FEATURES.items()
        if "stats" in model.model_fields and _takes(model, entry)
    }
    example = f"stats: [{request.spelled_out}]"
    if blocks is not None:
        example = f"stats: [{BLOCKWISE}: {{block_size: {blocks.size}, dims: {blocks.dims}}}]"
    if row.of in OF_GEMMS:
        collected_by, example = {"LogGemmError": tuple(RESULT.values())}, "gemms: [fprop, dgrad, wgrad]"
    return {
        "name": name,
        "statistic": row.name,
        "formula": row.formula,
        "unit": row.unit,
        "of": row.of.value,
        "merged": row.merge,
        "worse": row.worse.value,
        "is_upstream": row.upstream,
        "is_histogram": row.is_histogram,
        "collected_by": collected_by,
        "is_of_own_recipe": request.recipe == OWN_RECIPE,
        "recipe": recipe
        and {
            **{key: getattr(recipe, key) for key in ("name", "shares", "factor", "elements")},
            "formats": () if recipe.fixed else ELEMENT_FORMATS,
            "is_simulated": recipe.name != "fp8_delayed_scaling",  # whose factor comes from earlier steps
        },
        "element_format": None if request.e5m2 is None else ELEMENT_FORMATS[request.e5m2],
        "direction": ("columnwise" if request.columnwise else "rowwise") if has_direction else None,
        "read_by": dict(COLUMNWISE if request.columnwise else ROWWISE) if has_direction else {},
        "block_size": blocks and blocks.size,
        "dims": blocks and blocks.dims,
        "example": example,
    }


def _takes(model: type[FeatureSchema], entry: Any) -> bool:
    try:
        _stats_of(model).validate_python([entry])
    except ValidationError:
        return False
    return True


@functools.cache
def _stats_of(model: type[FeatureSchema]) -> TypeAdapter[Any]:
    return TypeAdapter(model.model_fields["stats"].rebuild_annotation())
