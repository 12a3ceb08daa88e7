"""The state of Transformer Engine's modules and operations: recipes, quantizers, scales, cached weights.

Read from Transformer Engine 2.20.2: ``pytorch/module/base.py``, ``pytorch/ops/op.py``, ``pytorch/quantization.py``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.te.modules import of

FORWARD = "scaling_fwd"
BACKWARD = "scaling_bwd"
"""Keys of the states of a recipe in FP8 metadata."""


def has_state(module: torch.nn.Module) -> bool:
    return hasattr(module, "fp8_meta")


def meta_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return the FP8 metadata of a module, or of an operation's forward; empty without."""
    attributes = vars(module)
    return attributes.get("fp8_meta") or (attributes.get("_fp8_metas") or {}).get("forward") or {}


def metas_of(module: torch.nn.Module) -> Iterator[Mapping[str, Any]]:
    """Yield the FP8 metadata of a module, or of an operation's forward and backward."""
    attributes = vars(module)
    yield from filter(None, (attributes.get("fp8_meta"), *(attributes.get("_fp8_metas") or {}).values()))


def metas_in_use(module: torch.nn.Module) -> Iterator[Mapping[str, Any]]:
    """Yield FP8 metadata with quantizers; without quantizers, a module's recipe has no meaning."""
    return (meta for meta in metas_of(module) if FORWARD in meta or BACKWARD in meta)


def delayed_state(meta: Mapping[str, Any], direction: str) -> Any:
    """Return the state of delayed scaling in FP8 metadata, with scale and amax history; None for other recipes.

    It is a ``DelayedScalingRecipeState``, or a ``CustomRecipeState`` that contains one.
    """
    state = meta.get(direction)
    if getattr(state, "amax_history", None) is None:
        return None
    return state


def delayed_states(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the states of delayed scaling of a module or operation."""
    for meta in metas_of(module):
        yield from filter(None, (delayed_state(meta, FORWARD), delayed_state(meta, BACKWARD)))


def is_in_checkpoints(module: torch.nn.Module) -> bool:
    """Return whether a module's ``_extra_state`` contains its state of delayed scaling: after a forward in FP8."""
    attributes = vars(module)
    has_read = meta_of(module).get("fp8_checkpoint")
    return bool(has_read or attributes.get("fp8") or attributes.get("fp8_calibration"))


def cached_weights(module: torch.nn.Module) -> Any:
    """Return the weights that a module keeps quantized between micro-batches, by attribute."""
    return vars(module).get("_fp8_workspaces", {})


class Fp8State:
    """The FP8 state of a model's modules and of ``te.autocast``, which :meth:`restore` puts back.

    The modules' own objects do not change after :meth:`lend_copy`, which gives the modules new ones. In a
    ``CustomRecipe``, a module with delayed scaling of all tensors continues with its scales and amax histories.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        self._manager = FP8GlobalStateManager
        self._state = FP8GlobalStateManager.quantization_state
        self._modules = [(module, dict(vars(module))) for module in model.modules() if has_state(module)]

    def lend_copy(self) -> None:
        """Give the modules a copy of their state."""
        self._manager.quantization_state = type(self._state)()
        for module, attributes in self._modules:
            meta_of_module = attributes["fp8_meta"]
            meta = {
                key: meta_of_module[key]
                for key in meta_of_module
                if key != "recipe" and not key.startswith("global_fp8_")
            }
            for key, mode in ((FORWARD, "forward"), (BACKWARD, "backward")):
                state = delayed_state(meta, key)
                meta.pop(key, None)
                if state is not None:
                    meta[key] = _copy_of_delayed(getattr(state, "_ds_state", state), mode)
            _replace_attributes(module, attributes)
            fresh = {"fp8_initialized": False, "fp8_meta_tensors_initialized": False, "_fp8_workspaces": {}}
            vars(module).update(fp8_meta=meta, quantizers={FORWARD: {}, BACKWARD: {}}, **fresh)

    def restore(self) -> None:
        self._manager.quantization_state = self._state
        for module, attributes in self._modules:
            _replace_attributes(module, attributes)


def _replace_attributes(module: torch.nn.Module, attributes: Mapping[str, Any]) -> None:
    vars(module).clear()
    vars(module).update(attributes)


def _copy_of_delayed(state: Any, mode: str) -> Any:
    """Return a state of a ``CustomRecipe`` with the scales and amax histories of another state."""
    from transformer_engine.pytorch.quantization import CustomRecipe, CustomRecipeState

    copied = copy.copy(state)
    copied.scale = state.scale.clone()
    copied.amax_history = state.amax_history.clone()
    carrier = CustomRecipeState(CustomRecipe(qfactory=len), mode=mode, num_quantizers=state.num_quantizers)
    carrier._ds_state = copied
    return carrier


def debug_iteration() -> int:
    """Return the iteration of the debug path, as ``TEDebugState.get_iteration`` of 2.20.2."""
    import nvdlfw_inspect.api as debug_api

    return int(debug_api.DEBUG_MANAGER._trainer_iteration_count)


# ---------------------------------------------------------------------- recipes


def current_recipe() -> Any:
    """Return the recipe of the surrounding ``te.autocast``; None for high precision."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    if FP8GlobalStateManager.is_fp8_enabled():
        return FP8GlobalStateManager.get_fp8_recipe()
    return None


def recipe_of_module(module: torch.nn.Module) -> Any:
    """Return the recipe of a module's last forward in FP8, or of an operation's last forward."""
    return meta_of(module).get("recipe")


def recipe_in_use(module: Any) -> Any:
    """Return the recipe of a module's running forward; None in high precision."""
    attributes = module.__dict__
    if attributes["fp8"]:
        return attributes["fp8_meta"]["recipe"]
    return None


def backward_override(module: Any) -> str | None:
    return recipe_of_module(module).backward_override if module.fp8 else None


class CapturedPrecision(NamedTuple):
    """Precision of a graph's layers during the capture.

    Attributes:
        fp8: whether a layer ran in low precision.
        state: the recipe's state of such a layer.
    """

    fp8: bool
    state: Any

    @classmethod
    def of(cls, layers: Collection[Any]) -> CapturedPrecision:
        """Read the precision that modules and operations have now."""
        for layer in layers:
            meta = meta_of(layer)
            if getattr(layer, "fp8", True) and FORWARD in meta:
                return cls(True, meta[FORWARD])
        return cls(False, None)

    @property
    def matches_current_recipe(self) -> bool:
        """Return whether the original forward would now run in this precision.

        A graph runs in the precision of its capture, in any region of ``te.autocast``.
        """
        recipe = current_recipe()
        if recipe is None or not self.fp8:
            return recipe is None and not self.fp8
        names = {f"{kind.__name__.removesuffix('Recipe')}RecipeState" for kind in type(recipe).__mro__}
        if type(self.state).__name__ not in names:
            return False
        history = getattr(self.state, "amax_history", None)
        return history is None or len(history) == getattr(recipe, "amax_history_len", len(history))


def is_in_autocast() -> bool:
    """Return whether the script is in ``te.autocast``, enabled or not (TE 2.20.2, ``pytorch/quantization.py``)."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return bool(FP8GlobalStateManager.quantization_state.autocast_depth)


@functools.cache
def enters_autocast(forward: Any) -> bool:
    """Return whether the text of a function, not of Transformer Engine, has ``te.autocast`` or ``te.fp8_autocast``."""
    code = getattr(forward, "__code__", None)
    if code is None or forward.__module__.startswith("transformer_engine"):
        return False
    values = map(forward.__globals__.get, code.co_names)
    from_te = any("transformer_engine" in str(getattr(value, "__module__", value)) for value in values)
    return from_te and not {"autocast", "fp8_autocast"}.isdisjoint(code.co_names)


def is_captured() -> bool:
    """Return whether a CUDA graph is being captured, by Transformer Engine or ``torch.cuda.graph``.

    Also true during TE's warm-up, and on the reference backend, which has no graphs.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return bool(FP8GlobalStateManager.quantization_state.fp8_graph_capturing) or is_capturing()


def offloads_activations() -> bool:
    from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled

    return bool(is_cpu_offload_enabled())


# ---------------------------------------------------------------------- quantizers


def has_quantized_weights(module: torch.nn.Module) -> bool:
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensor

    # fully_shard keeps the local part of a parameter in a DTensor.
    weights = module.parameters(recurse=False)
    return any(isinstance(getattr(weight, "_local_tensor", weight), QuantizedTensor) for weight in weights)


def has_quantized_input(module: Any, tensor: Any) -> bool:
    """Return whether a module's input is already quantized, by ``fp8_output`` or FP8 attention.

    Only ``Linear`` takes such an input.
    """
    from transformer_engine import pytorch as te

    return isinstance(module, te.Linear) and isinstance(tensor, te.QuantizedTensorStorage)


_QUANTIZED = ("activation", "weight", "gradient")


class MadeQuantizers:
    """Cache of the quantizers that modules make, kept alive so that their ids stay unique."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], list[dict[str, Any]]] = {}

    def of(self, module: Any, recipe: Any) -> list[dict[str, Any]]:
        """Return tensor -> quantizer for each layer of a module or operation; empty without a recipe.

        The modules of a class share the quantizers of a recipe, unless it is custom. As
        ``TransformerEngineBaseModule.set_meta_tensor`` and ``BasicOperation.reset_recipe_state``.

        The order for each layer: input, weight, output; then gradients of output and input, as in ``FP8FwdTensorIdx``
        and ``FP8BwdTensorIdx`` (``pytorch/constants.py``) and in GroupedLinear's offsets. Operations have no output's.
        """
        from transformer_engine.pytorch.quantization import RecipeState

        row = of(module)
        layers = len(row.layers(module))
        if recipe is None:
            return [{}] * layers
        key = id(recipe), id(module) if recipe.custom() else type(module), layers
        if key not in self._made:
            quantizers = []
            for mode, layer_quantizers in zip(("forward", "backward"), row.quantizers, strict=True):
                count = layer_quantizers * layers
                if row.is_operation:
                    roles = module.get_quantizer_roles(mode)
                else:
                    roles = module.get_quantizer_roles(fwd=mode == "forward", num_quantizers=count)
                state = RecipeState.create(recipe, mode=mode, num_quantizers=count, roles=roles)
                quantizers.append(list(state.make_quantizers()))
            forward, backward = quantizers
            in_forward, in_backward = row.quantizers
            operands = zip(forward[::in_forward], forward[1::in_forward], backward[::in_backward], strict=False)
            self._made[key] = [dict(zip(_QUANTIZED, operand, strict=True)) for operand in operands]
        return self._made[key]
