"""Finds arguments of Transformer Engine's recipes that are accepted and have no effect, and how amaxes are reduced.

ignored_arguments([recipe], Uses(modules=True, operations=False, attention=False))
[{"recipe": "MXFP8BlockScaling", "argument": "margin", "value": "2", "why": ..., "instead": ..., "severity": "warning"}]

Read from Transformer Engine 2.20.2. :data:`IGNORED` names for each argument the place that was read, and the text there
that a test looks for. Most were also run on the reference backend: the results have the same bits with and without the
argument.

What a recipe never had, such as ``interval`` of earlier versions or a misspelled name, cannot be found here: the
recipes are dataclasses of pydantic, which drop unknown arguments, so that nothing of them is left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from te_precision_callbacks.base.ranks import is_initialized, own_rank
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.layers.fp8_state import delayed_state, metas_of
from te_precision_callbacks.layers.naming import NamedModule, NamedOperation

Row = dict[str, Any]

_Computing = tuple[torch.nn.Module, tuple[str, ...]]
"""A module or an operation with products, and the names of its layers."""

_OF_QUANTIZERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")

_OF_OPERATIONS = {"fp8_gemm_fprop": False, "fp8_gemm_dgrad": True, "fp8_gemm_wgrad": True}
"""Argument -> the split accumulator that ``transformer_engine.pytorch.ops`` uses instead of it."""


class Uses(NamedTuple):
    """What computes with a recipe.

    Attributes:
        modules: whether modules such as ``Linear`` do.
        operations: whether operations of ``transformer_engine.pytorch.ops`` do.
        attention: whether the model has a ``DotProductAttention``.
    """

    modules: bool
    operations: bool
    attention: bool


@dataclass(frozen=True)
class Ignored:
    """An argument of a recipe that has no effect in some cases.

    Attributes:
        recipe: the class of the recipe.
        argument: the argument; also the attribute of the recipe.
        holds: whether the argument of a recipe was set and has no effect.
        why: why it has none.
        instead: what to do.
        place: where this was read: a module of ``transformer_engine``, a colon, and a name there.
        source: a text that is in the source of that place.
        severity: of the finding: a warning if the recipe does not do what the argument asks for.
    """

    recipe: str
    argument: str
    holds: Callable[[Any, Uses], bool]
    why: str
    instead: str
    place: str
    source: str
    severity: Literal["warning", "note"] = "warning"


def _is_set(recipe: Any, argument: str) -> bool:
    """Whether an argument has another value than the default, which follows from the environment."""
    return bool(getattr(recipe, argument) != getattr(type(recipe), argument))


def _scales(recipe: Any) -> set[bool]:
    return {getattr(recipe, name).power_2_scale for name in _OF_QUANTIZERS}


def _epsilon_of_operations(recipe: Any, uses: Uses) -> bool:
    return uses.operations and any(getattr(recipe, name).amax_epsilon for name in _OF_QUANTIZERS)


def _of_gemms(argument: str) -> Callable[[Any, Uses], bool]:
    def holds(recipe: Any, uses: Uses) -> bool:
        return uses.operations and getattr(recipe, argument).use_split_accumulator != _OF_OPERATIONS[argument]

    return holds


def _of_four_over_six(argument: str) -> Callable[[Any, Uses], bool]:
    return lambda recipe, uses: recipe.nvfp4_4over6 == "none" and _is_set(recipe, argument)


def _of_nvfp4(argument: str, attribute: str, *tensors: str) -> Callable[[Any, Uses], bool]:
    """Whether ``disable_...`` of NVFP4BlockScaling was set after the recipe was made, and contradicts what it does."""

    def holds(recipe: Any, uses: Uses) -> bool:
        does = {getattr(getattr(recipe, f"fp4_quant_{tensor}"), attribute) for tensor in tensors}
        return _is_set(recipe, argument) and does == {getattr(recipe, argument)}

    return holds


def _without_attention(recipe: Any, uses: Uses) -> bool:
    return (recipe.fp8_dpa or recipe.fp8_mha) and not uses.attention


_FORCED = "force_pow_2_scales = recipe.fp8_quant_fwd_inp.power_2_scale"

_AFTER = "the recipe reads it once, when it is made, and it was changed later"

_LINEAR = "pytorch.module.linear:Linear._customize_quantizers_float8_current_scaling"

_OPERATION = "pytorch.ops.basic.basic_linear:BasicLinear"

IGNORED: Sequence[Ignored] = (
    Ignored(
        "MXFP8BlockScaling",
        "margin",
        lambda recipe, uses: recipe.margin != 0,
        "only DelayedScaling has a margin: the scale of an MXFP8 block follows from its largest element alone",
        "Leave it out",
        "pytorch.quantization:MXFP8BlockScalingRecipeState.make_quantizers",
        "MXFP8Quantizer(self.dtype)",
    ),
    Ignored(
        "Float8CurrentScaling",
        "use_power_2_scales",
        lambda recipe, uses: (
            _is_set(recipe, "use_power_2_scales") and _scales(recipe) == {not recipe.use_power_2_scales}
        ),
        "the layers take power_2_scale of fp8_quant_fwd_inp, fp8_quant_fwd_weight and fp8_quant_bwd_grad, which are"
        " made when Transformer Engine is imported",
        "Set NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1 before the import, or assign these three attributes of the"
        " recipe, such as recipe.fp8_quant_fwd_inp = QParams(power_2_scale=True)",
        _LINEAR,
        _FORCED,
    ),
    Ignored(
        "Float8BlockScaling",
        "use_f32_scales",
        lambda recipe, uses: _is_set(recipe, "use_f32_scales") and _scales(recipe) == {recipe.use_f32_scales},
        "the layers take power_2_scale of fp8_quant_fwd_inp, fp8_quant_fwd_weight and fp8_quant_bwd_grad, which are"
        " made when Transformer Engine is imported",
        "Set NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 before the import, or assign these three attributes of the recipe,"
        " such as recipe.fp8_quant_fwd_inp = QParams(power_2_scale=False)",
        "pytorch.quantization:Float8BlockScalingRecipeState.make_quantizers",
        "force_pow_2_scales=qparams.power_2_scale",
    ),
    Ignored(
        "Float8CurrentScaling",
        "amax_epsilon",
        _epsilon_of_operations,
        "operations of transformer_engine.pytorch.ops set amax_epsilon_scales of the quantizer, which nothing reads",
        "Use the modules, such as te.Linear, where amax_epsilon matters",
        f"{_OPERATION}.reset_recipe_state",
        "input_quantizer.amax_epsilon_scales = recipe.fp8_quant_fwd_inp.amax_epsilon",
    ),
    *(
        Ignored(
            "Float8CurrentScaling",
            argument,
            _of_gemms(argument),
            "operations of transformer_engine.pytorch.ops choose the accumulator themselves",
            "Use the modules, such as te.Linear, where the accumulator matters",
            f"{_OPERATION}.{function}",
            f"use_split_accumulator=_2X_ACC_{argument.rpartition('_')[2].upper()}",
            "note",
        )
        for argument, function in (
            ("fp8_gemm_fprop", "_functional_forward"),
            ("fp8_gemm_dgrad", "_functional_backward"),
            ("fp8_gemm_wgrad", "_functional_backward"),
        )
    ),
    *(
        Ignored(
            "NVFP4BlockScaling",
            argument,
            _of_four_over_six(argument),
            "it belongs to nvfp4_4over6, which is 'none'",
            "Set nvfp4_4over6, or leave it out",
            "pytorch.quantization:NVFP4BlockScalingRecipeState.make_quantizers",
            'if self.recipe.nvfp4_4over6 == "all"',
            "note",
        )
        for argument in ("nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode")
    ),
    *(
        Ignored(
            "NVFP4BlockScaling",
            argument,
            _of_nvfp4(argument, attribute, *tensors),
            _AFTER,
            f"Make the recipe with NVFP4BlockScaling({argument}=...)",
            "common.recipe:NVFP4BlockScaling.__post_init__",
            f"{attribute}=not self.{argument}",
        )
        for argument, attribute, *tensors in (
            ("disable_rht", "random_hadamard_transform", "fwd_inp", "bwd_grad"),
            ("disable_stochastic_rounding", "stochastic_rounding", "bwd_grad"),
            ("disable_2d_quantization", "fp4_2d_quantization", "fwd_weight"),
        )
    ),
    Ignored(
        "DelayedScaling",
        "amax_history_len",
        lambda recipe, uses: (
            recipe.amax_compute_algo == "most_recent"
            and _is_set(recipe, "amax_history_len")
            and recipe.amax_history_len > 1
        ),
        "amax_compute_algo='most_recent' takes the last amax alone",
        "Set amax_history_len=1, which needs less memory, or amax_compute_algo='max'",
        "pytorch.quantization:_default_get_amax_and_update_history",
        "amax = amax_history[0].clone()",
        "note",
    ),
    *(
        Ignored(
            recipe,
            "fp8_dpa",
            _without_attention,
            "only te.DotProductAttention reads fp8_dpa and fp8_mha, and the model has none",
            "Use te.DotProductAttention, or leave them out",
            "pytorch.attention.dot_product_attention.dot_product_attention:DotProductAttention.init_fp8_metadata",
            "fp8_recipe.fp8_dpa or fp8_recipe.fp8_mha",
            "note",
        )
        for recipe in ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
    ),
)
"""The arguments that can be without effect."""

VARIABLES: Mapping[str, tuple[str, str]] = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": ("Float8CurrentScaling", "use_power_2_scales"),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("Float8BlockScaling", "use_f32_scales"),
    "NVTE_NVFP4_DISABLE_RHT": ("NVFP4BlockScaling", "disable_rht"),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": ("NVFP4BlockScaling", "disable_stochastic_rounding"),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": ("NVFP4BlockScaling", "disable_2d_quantization"),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": ("NVFP4BlockScaling", "row_scaled_activation"),
    "NVTE_NVFP4_4OVER6": ("NVFP4BlockScaling", "nvfp4_4over6"),
}
"""Environment variable -> the class of a recipe and its argument whose default the variable is. ``common/recipe`` reads
them when it is imported."""


def ignored_arguments(recipes: Iterable[Any], uses: Uses) -> list[Row]:
    """The arguments of recipes that have no effect.

    Args:
        recipes: recipes of Transformer Engine, and users' own.
        uses: what computes with them.

    Returns:
        Rows with ``recipe``, ``argument``, ``value``, ``why``, ``instead`` and ``severity``; each once.
    """
    known = list({id(recipe): recipe for recipe in recipes}.values())
    rows = [row for recipe in known for row in (*_of_recipe(recipe, uses), *_of_variables(recipe))]
    rows += _of_alike(known)
    return list({tuple(row.values()): row for row in rows}.values())


def _of_recipe(recipe: Any, uses: Uses) -> Iterator[Row]:
    classes = class_names(recipe)
    for ignored in IGNORED:
        if ignored.recipe in classes and ignored.holds(recipe, uses):
            value = getattr(recipe, ignored.argument, recipe)
            text = "" if value is recipe else str(value)
            yield _row(ignored.recipe, ignored.argument, text, ignored.why, ignored.instead, ignored.severity)


def _of_variables(recipe: Any) -> Iterator[Row]:
    """Variables of the environment that say now something else than when Transformer Engine was imported."""
    for variable, (kind, argument) in VARIABLES.items():
        now = os.environ.get(variable)
        if now is None or kind not in class_names(recipe) or _is_set(recipe, argument):
            continue
        at_import = getattr(type(recipe), argument)
        if at_import != ((now == "1") if isinstance(at_import, bool) else now):
            why = "Transformer Engine reads it when it is imported, and it was set later"
            yield _row(kind, variable, now, why, "Set it before Transformer Engine is imported", "warning")


def _of_alike(recipes: Sequence[Any]) -> Iterator[Row]:
    """Recipes of delayed scaling that differ only in what their text, by which buffers of amaxes are found, leaves out.

    Read from ``FP8GlobalStateManager.get_unique_autocast_key`` and ``DelayedScaling._make_repr``: layers of both are
    in one buffer, which each ``te.autocast`` updates when it ends, by its own recipe.
    """
    arguments = "amax_compute_algo", "scaling_factor_compute_algo"
    alike: dict[str, Any] = {}
    for recipe in (each for each in recipes if "DelayedScaling" in class_names(each)):
        other = alike.setdefault(str(recipe), recipe)
        for argument in arguments:
            value = getattr(recipe, argument)
            if value != getattr(other, argument):
                text = value if isinstance(value, str) else getattr(value, "__qualname__", "a function")
                why = "two recipes differ in it alone, so each te.autocast that ends updates the layers of both"
                yield _row("DelayedScaling", argument, text, why, "Let the recipes differ in amax_history_len too")


def _row(recipe: str, argument: str, value: str, why: str, instead: str, severity: str = "warning") -> Row:
    return {
        "recipe": recipe,
        "argument": argument,
        "value": value,
        "why": why,
        "instead": instead,
        "severity": severity,
    }


# ---------------------------------------------------------------------- what modules keep


def computing(modules: Iterable[NamedModule], operations: Iterable[NamedOperation]) -> list[_Computing]:
    """The modules and operations of a model, each with the names of its layers."""
    named = [(each.module, tuple(layer.name for layer in each.layers)) for each in modules]
    return [*named, *((each.module, each.layers) for each in operations)]


def recipes_of(found: Iterable[_Computing]) -> list[Any]:
    """The recipes that modules and operations have quantized with, each once."""
    recipes = (meta.get("recipe") for module, _ in found for meta in _in_use(module))
    return list({id(recipe): recipe for recipe in recipes if recipe is not None}.values())


def uses_of(found: Iterable[_Computing], roots: Iterable[torch.nn.Module]) -> Uses:
    """What computes in a model.

    Args:
        found: its modules and operations.
        roots: the model.
    """
    operations = ["_fp8_metas" in vars(module) for module, _ in found]
    attention = any("DotProductAttention" in class_names(module) for root in roots for module in root.modules())
    return Uses(not all(operations), any(operations), attention)


def computes_in_float16(found: Iterable[_Computing]) -> bool:
    """Whether a module computes in float16 beside its products in FP8: its activations are, or its parameters."""
    return any(
        getattr(module, "activation_dtype", None) is torch.float16
        or any(parameter.dtype is torch.float16 for parameter in module.parameters(recurse=False))
        for module, _ in found
    )


def amax_reductions(found: Iterable[_Computing]) -> list[Row]:
    """Over which ranks the amaxes of delayed scaling are reduced.

    Read from ``FP8GlobalStateManager.reduce_and_update_fp8_tensors``: over ``amax_reduction_group`` of ``te.autocast``,
    or over all ranks without one, unless the recipe has ``reduce_amax=False``.

    Returns:
        Rows with ``layers`` (names), ``reduced`` (whether they are reduced at all), ``ranks`` (the number over which),
        ``tensor_parallel`` (the number of ranks that share the layer by tensor parallelism) and ``outside`` (how many
        of these are not among the ranks).
    """
    rows: dict[tuple[bool, int, int, int], list[str]] = {}
    for module, layers in found:
        for meta in _in_use(module):
            if delayed_state(meta, "scaling_fwd") is None:
                continue
            reduced = bool(getattr(meta["recipe"], "reduce_amax", True))
            over = set(_ranks_of(meta.get("fp8_group"))) if reduced else {own_rank()}
            sharing = _sharing(module)
            rows.setdefault((reduced, len(over), len(sharing), len(sharing - over)), []).extend(layers)
            break
    names = "reduced", "ranks", "tensor_parallel", "outside"
    return [{**dict(zip(names, key, strict=True)), "layers": layers} for key, layers in rows.items()]


def _in_use(module: torch.nn.Module) -> Iterator[Mapping[str, Any]]:
    """The metadata of a module that has made quantizers; other modules have a recipe too, which means nothing."""
    return (meta for meta in metas_of(module) if "scaling_fwd" in meta or "scaling_bwd" in meta)


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group) if is_initialized() else [0]


def _sharing(module: torch.nn.Module) -> set[int]:
    group = getattr(module, "tp_group", None) if getattr(module, "tp_size", 1) > 1 else None
    return {own_rank()} if group is None else set(_ranks_of(group))
