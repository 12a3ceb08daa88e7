"""Finds recipe arguments that Transformer Engine accepts and ignores, and how amaxes are reduced.

ignored_arguments([recipe])
[{"recipe": "MXFP8BlockScaling", "argument": "margin", "value": "2", "why": ..., "instead": ...}]

Read from Transformer Engine 2.20.2, at the places above the rows of :data:`IGNORED`. Unknown arguments, such as
``interval`` of earlier versions or a typo, cannot be found: the recipes are pydantic dataclasses, which drop them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from te_precision_callbacks.base.ranks import is_initialized, own_rank
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.layers.naming import Named
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.state import FORWARD, delayed_state, metas_in_use

Row = dict[str, Any]

_QUANTIZERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


@dataclass(frozen=True)
class Ignored:
    """An argument of a recipe that has no effect in some cases.

    Attributes:
        recipe: the name of the recipe's class.
        argument: the name of the argument, also of the recipe's attribute.
        applies_to: whether a recipe sets the argument without effect.
    """

    recipe: str
    argument: str
    applies_to: Callable[[Any], bool]
    why: str
    instead: str


def _is_set(recipe: Any, argument: str) -> bool:
    """Return whether an argument differs from its default, which TE reads from the environment."""
    return bool(getattr(recipe, argument) != getattr(type(recipe), argument))


def _scales(recipe: Any) -> set[bool]:
    return {getattr(recipe, name).power_2_scale for name in _QUANTIZERS}


_AT_IMPORT = (
    "the layers read power_2_scale of fp8_quant_fwd_inp, fp8_quant_fwd_weight and fp8_quant_bwd_grad, which are set"
    " when Transformer Engine is imported"
)

IGNORED: Sequence[Ignored] = (
    # pytorch.quantization:MXFP8BlockScalingRecipeState.make_quantizers
    Ignored(
        "MXFP8BlockScaling",
        "margin",
        lambda recipe: recipe.margin != 0,
        "only DelayedScaling has a margin: the scale of an MXFP8 block depends only on its largest element",
        "Remove the argument",
    ),
    # pytorch.module.linear:Linear._customize_quantizers_float8_current_scaling
    Ignored(
        "Float8CurrentScaling",
        "use_power_2_scales",
        lambda recipe: _is_set(recipe, "use_power_2_scales") and _scales(recipe) == {not recipe.use_power_2_scales},
        _AT_IMPORT,
        "Set NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1 before the import, or assign these three attributes of the"
        " recipe, such as recipe.fp8_quant_fwd_inp = QParams(power_2_scale=True)",
    ),
    # pytorch.quantization:Float8BlockScalingRecipeState.make_quantizers
    Ignored(
        "Float8BlockScaling",
        "use_f32_scales",
        lambda recipe: _is_set(recipe, "use_f32_scales") and _scales(recipe) == {recipe.use_f32_scales},
        _AT_IMPORT,
        "Set NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 before the import, or assign these three attributes of the recipe,"
        " such as recipe.fp8_quant_fwd_inp = QParams(power_2_scale=False)",
    ),
)


def ignored_arguments(recipes: Iterable[Any]) -> list[Row]:
    """Return ignored arguments, deduplicated, as rows with ``recipe``, ``argument``, ``value``, ``why`` and
    ``instead``.
    """
    rows: list[Row] = []
    for recipe in recipes:
        for ignored in IGNORED:
            if ignored.recipe in class_names(recipe) and ignored.applies_to(recipe):
                row = {
                    "recipe": ignored.recipe,
                    "argument": ignored.argument,
                    "value": str(getattr(recipe, ignored.argument)),
                    "why": ignored.why,
                    "instead": ignored.instead,
                }
                if row not in rows:
                    rows.append(row)
    return rows


def margins(recipes: Iterable[Any]) -> list[float]:
    """Return the margins of delayed scaling that are not 0, without duplicates."""
    margins = (float(recipe.margin) for recipe in recipes if "DelayedScaling" in class_names(recipe))
    return sorted(set(filter(None, margins)))


# ---------------------------------------------------------------------- the state of modules


def recipes_of(modules: Iterable[Named]) -> list[Any]:
    recipes: dict[int, Any] = {}
    for named in modules:
        for meta in metas_in_use(named.module):
            recipe = meta.get("recipe")
            if recipe is not None:
                recipes[id(recipe)] = recipe
    return list(recipes.values())


def computes_in_float16(modules: Iterable[Named]) -> bool:
    dtypes: set[Any] = set()
    for named in modules:
        dtypes.add(getattr(named.module, "activation_dtype", None))
        dtypes.update(parameter.dtype for parameter in named.module.parameters(recurse=False))
    return torch.float16 in dtypes


def amax_reductions(modules: Iterable[Named]) -> list[Row]:
    """Return over which ranks the amaxes of delayed scaling are reduced.

    Read from ``FP8GlobalStateManager.reduce_and_update_fp8_tensors``: over ``amax_reduction_group`` of ``te.autocast``,
    or over all ranks without a group, unless the recipe has ``reduce_amax=False``.

    Returns:
        Rows with ``layers`` (names), ``reduced``, and counts: ``ranks``, ``tensor_parallel`` (the layer's
        tensor-parallel ranks) and ``outside`` (tensor-parallel ranks that do not take part).
    """
    rows: dict[tuple[bool, int, int, int], list[str]] = {}
    for named in modules:
        for meta in metas_in_use(named.module):
            if delayed_state(meta, FORWARD) is None:
                continue
            reduced = bool(getattr(meta["recipe"], "reduce_amax", True))
            over = set(_ranks_of(meta.get("fp8_group"))) if reduced else {own_rank()}
            group = te_modules.tensor_parallel_group(named.module)
            tensor_parallel = {own_rank()} if group is None else set(_ranks_of(group))
            key = reduced, len(over), len(tensor_parallel), len(tensor_parallel - over)
            rows.setdefault(key, []).extend(named.names)
            break
    names = "reduced", "ranks", "tensor_parallel", "outside"
    return [{**dict(zip(names, key, strict=True)), "layers": layers} for key, layers in rows.items()]


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    if is_initialized():
        return dist.get_process_group_ranks(group)
    return [0]
