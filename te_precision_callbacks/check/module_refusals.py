"""The inputs and settings that modules of Transformer Engine refuse because of their options and the recipe.

    for refusal in refusals_of(module, recipe):
        refusal.text, refusal.remedy

Transformer Engine raises in the first forward. Shapes are in :mod:`te_precision_callbacks.base.numerics.gemm_shapes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from te_precision_callbacks.base.vocabulary import class_names


@dataclass(frozen=True)
class ModuleRefusal:
    """A row of the table.

    Attributes:
        text: the options that exclude each other.
        remedy: what to do, in a sentence.
        place, source: the function of Transformer Engine 2.20.2 with the refusal, below ``transformer_engine``, and its
            text.
        applies: whether a module raises under a recipe; the recipe is not None.
    """

    text: str
    remedy: str
    place: str
    source: str
    applies: Callable[[Any, Any], bool]


def _trains(module: Any) -> bool:
    return any(p.requires_grad for name, p in module.named_parameters(recurse=False) if name.startswith("weight"))


def _keeps_original_input(module: Any, recipe: Any) -> bool:
    is_kept = getattr(module, "save_original_input", False) and recipe.backward_override is None
    return bool(is_kept and recipe.delayed() and _trains(module))


def _is_grouped_in_blocks(module: Any, recipe: Any) -> bool:
    from transformer_engine.pytorch.utils import get_device_compute_capability

    on_blackwell = (10, 0) <= get_device_compute_capability() <= (11, 0)
    return bool(getattr(module, "use_grouped_tensor", False) and recipe.float8_block_scaling() and on_blackwell)


def _weights_of_another_recipe(module: Any, recipe: Any) -> bool:
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    weights = (getattr(module, name) for name in getattr(module, "weight_names", ()))
    quantizers = (weight._get_quantizer() for weight in weights if isinstance(weight, QuantizedTensorStorage))
    kinds = (quantizer._get_compatible_recipe() for quantizer in quantizers if quantizer is not None)
    return any(kind is not None and not isinstance(recipe, kind) for kind in kinds)


REFUSALS = (
    ModuleRefusal(
        "save_original_input=True excludes delayed scaling",
        "Leave save_original_input out, or take another recipe.",
        "pytorch.module.linear:_linear_forward_impl",
        "DelayedScaling recipe is not supported with save_original_input",
        _keeps_original_input,
    ),
    ModuleRefusal(
        "LayerNormMLP excludes a recipe with backward_override",
        "A LayerNormLinear and a Linear in its place take it.",
        "pytorch.module.layernorm_mlp:_LayerNormMLP._forward",
        "is not implemented in LayerNormMLP.",
        lambda module, recipe: recipe.backward_override is not None and "LayerNormMLP" in class_names(module),
    ),
    ModuleRefusal(
        "use_grouped_tensor=True excludes FP8 block scaling on Blackwell",
        "Set use_grouped_tensor=False, or leave NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM unset.",
        "pytorch.module.grouped_linear:_GroupedLinear.forward",
        "use_grouped_tensor=True does not support the FP8 block-scaling recipe on ",
        _is_grouped_in_blocks,
    ),
    ModuleRefusal(
        "GroupedLinear with tensor parallelism excludes current scaling",
        "Take another recipe, or tp_size=1 for the experts.",
        "pytorch.module.grouped_linear:GroupedLinear._customize_quantizers_float8_current_scaling",
        "GroupedLinear doesn't support TP > 1 with Float8 current scaling. ",
        lambda module, recipe: hasattr(module, "num_gemms") and module.tp_size > 1 and recipe.float8_current_scaling(),
    ),
    ModuleRefusal(
        "sequence parallelism excludes delayed scaling with reduce_amax=False",
        "Leave reduce_amax out of the recipe.",
        "pytorch.module.base:TransformerEngineBaseModule.prepare_forward",
        "necessary when using sequence parallelism with FP8.",
        lambda module, recipe: module.sequence_parallel and recipe.delayed() and not recipe.reduce_amax,
    ),
    ModuleRefusal(
        "weights quantized by quantized_model_init for another recipe",
        "Give quantized_model_init(recipe=...) and te.autocast(recipe=...) the same recipe.",
        "pytorch.module.base:TransformerEngineBaseModule._check_weight_tensor_recipe_correspondence",
        "Recipe mismatch for '",
        _weights_of_another_recipe,
    ),
)


def refusals_of(module: Any, recipe: Any) -> Iterator[ModuleRefusal]:
    if recipe is not None:
        yield from (row for row in REFUSALS if row.applies(module, recipe))
