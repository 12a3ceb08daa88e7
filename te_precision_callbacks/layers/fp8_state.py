"""Saves and restores, to the last bit, the state that FP8 training keeps besides parameters and optimizer.

    before = fp8_state.save(model)
    parameters = [parameter.detach().clone() for parameter in model.parameters()]  # as a checkpoint holds them
    ...                                                                            # some steps in another precision
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), parameters):
            parameter.copy_(value)
    fp8_state.restore(before)                                                      # last

The state, read from Transformer Engine 2.20.2, includes:

- the recipe's state of each module, as its last forward has left it (``pytorch/module/base.py``: ``fp8_meta``, with
  scales and amax histories, ``quantizers``, the flags by which the next forward and ``get_extra_state`` decide;
  ``pytorch/ops/op.py``: ``_fp8_metas``, ``_quantizers``);
- the quantized weights that ``is_first_microbatch`` caches (``base.py``: ``_fp8_workspaces``);
- parameters that are quantized themselves, by ``quantized_model_init``, with scales, transposes and quantizers
  (``pytorch/tensor``), which ``load_state_dict`` may quantize anew;
- the module's places in the buffers of the delayed scaling's reduction, copies of scales that wait for a recomputation,
  and the flag by which a CUDA graph leaves a cached weight as it is (``pytorch/quantization.py: FP8GlobalState``);
- the states of random generators: torch's of the CPU and of all GPUs, from which stochastic rounding and dropout draw,
  and those of Transformer Engine's tracker (``pytorch/distributed.py``).

It does not include parameters in high precision, gradients and the optimizer's state, which a checkpoint holds anyway,
often in parts and elsewhere; modules outside the model; the region of ``autocast``, since a state is saved between
steps; effects of a session's debug features.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.vocabulary import class_names

_OF_MODULE = (
    # The states of recipes come first: quantizers have views of their tensors.
    *("fp8_meta", "_fp8_metas", "quantizers", "_quantizers", "_fp8_workspaces"),
    *("fp8", "fp8_calibration", "fp8_initialized", "fp8_meta_tensors_initialized", "fp8_parameters"),
    "activation_dtype",
)
_IN_PLACE = ("fp8_meta", "_fp8_metas")
_OF_GROUPED_TENSOR = (
    *("rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax", "scale"),
    *("quantizer", "quantized_tensors"),
)
_WITH_ATTRIBUTES = frozenset({"RecipeState", "Quantizer", "QuantizedTensorStorage", "GroupedTensorStorage"})
_REDUCED = ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer")
_MISSING = object()


class Fp8StateError(PrecisionDebugError, RuntimeError):
    """A state cannot be restored."""


class Fp8State:
    """The state that :func:`save` has found in a model: copies, on the devices of the originals."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = tuple(module for module in model.modules() if any(name in vars(module) for name in _IN_PLACE))
        self._put_back: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        self._parameters: list[tuple[torch.nn.Module, str, Any]] = []
        for module in self._modules:
            self._save_attributes(module, _OF_MODULE)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                local = getattr(parameter, "_local_tensor", parameter)  # a DTensor holds its shard (torch 2.13)
                if not _WITH_ATTRIBUTES.isdisjoint(class_names(local)):
                    self._parameters.append((module, name, parameter))
                    self._save(local)
        self._save_global_state()
        self._save_generators()

    def put_back(self) -> None:
        """See :func:`restore`."""
        for module, name, parameter in self._parameters:
            if module._parameters.get(name) is not parameter:
                raise Fp8StateError(
                    f"{name} of a {type(module).__name__} was replaced since the FP8 state was saved, so the state"
                    " cannot be restored. Save the state after anything that replaces parameters, such as a change of"
                    " device or a wrapper."
                )
        self._forget_places()
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()

    def _save(self, value: Any) -> None:
        """Keep the content of a value of any kind, and a function that restores it."""
        if id(value) in self._seen:
            return
        if isinstance(value, dict):
            self._add(value, functools.partial(_refill, value.update, value, dict(value)), list(value.values()))
        elif isinstance(value, (list, deque)):
            self._add(value, functools.partial(_refill, value.extend, value, list(value)), list(value))
        elif isinstance(value, tuple):
            for member in value:
                self._save(member)
        elif not _WITH_ATTRIBUTES.isdisjoint(class_names(value)):
            self._seen[id(value)] = value
            self._save_attributes(value, _attributes(value))
        elif isinstance(value, torch.Tensor) and id(value._base) not in self._seen:
            copy = value.detach().clone()
            self._add(value, lambda: value.copy_(copy), ())

    def _add(self, value: Any, put_back: Callable[[], Any], inside: Iterable[Any]) -> None:
        self._seen[id(value)] = value  # kept alive, so that no other object gets its id
        self._put_back.append(put_back)
        for member in inside:
            self._save(member)

    def _save_attributes(self, owner: Any, names: tuple[str, ...]) -> None:
        attributes = vars(owner)
        kept = {name: attributes.get(name, _MISSING) for name in names}

        def put_back() -> None:
            for name, value in kept.items():
                if value is _MISSING:
                    attributes.pop(name, None)
                else:
                    attributes[name] = value

        self._put_back.append(put_back)
        for value in kept.values():
            self._save(value)

    def _save_global_state(self) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        kept = FP8GlobalStateManager.quantization_state
        buffers = {name: {key: list(held) for key, held in getattr(kept, name).items()} for name in _REDUCED}
        waiting = [list(copies) for copies in kept.fp8_tensors_recompute_buffer]
        arguments, skip = dict(kept.autocast_arguments), kept.skip_fp8_weight_update_tensor

        def put_back() -> None:
            state = FP8GlobalStateManager.quantization_state  # another one after FP8GlobalStateManager.reset()
            for name, before in buffers.items():
                now = getattr(state, name)
                for key, held in before.items():
                    now.setdefault(key, [])[: len(held)] = held
            for number, copies in enumerate(waiting):
                if number == len(state.fp8_tensors_recompute_buffer):
                    state.fp8_tensors_recompute_buffer.append(deque())
                state.fp8_tensors_recompute_buffer[number].clear()
                state.fp8_tensors_recompute_buffer[number].extend(copies)
            state.autocast_arguments.update(arguments)
            state.skip_fp8_weight_update_tensor = skip

        self._put_back.append(put_back)
        self._save(skip)

    def _forget_places(self) -> None:
        """Remove modules from the reduction of amaxes, from the ends of its buffers.

        A module that has begun delayed scaling since is registered at an end, and would be registered once more.
        """
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        own = {id(state.amax_history) for module in self._modules for state in delayed_states(module)}
        buffers = [getattr(FP8GlobalStateManager.quantization_state, name) for name in _REDUCED]
        for key, histories in list(buffers[1].items()):
            while histories and id(histories[-1]) in own:
                for buffer in buffers:
                    buffer[key].pop()
            if not histories:
                for buffer in buffers:
                    del buffer[key]

    def _save_generators(self) -> None:
        from transformer_engine.pytorch.distributed import get_all_rng_states

        host, devices = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        tracked = {name: _state_of(state) for name, state in get_all_rng_states().items()}

        def put_back() -> None:
            torch.set_rng_state(host)
            torch.cuda.set_rng_state_all(devices)
            now = get_all_rng_states()
            for name, state in tracked.items():
                if isinstance(now.get(name), torch.Generator):
                    now[name].set_state(state)
                else:
                    now[name] = state.clone()

        self._put_back.append(put_back)


def save(model: torch.nn.Module) -> Fp8State:
    """Save the state that FP8 training keeps between the steps of a model, as the module's docstring describes.

    Args:
        model: the model, on any device, also without a module of Transformer Engine.
    """
    return Fp8State(model)


def restore(state: Fp8State) -> None:
    """Put a state back into the modules from which it was saved, as often as needed.

    The saved tensors and objects are back in their places, with their saved contents, so optimizers and CUDA graphs
    that refer to them stay valid. If parameters are restored too, restore them first: loading quantizes.

    Args:
        state: the result of :func:`save`, in this process.

    Raises:
        Fp8StateError: a quantized parameter was replaced since; nothing was changed.
    """
    state.put_back()


def delayed_states(module: torch.nn.Module) -> Iterator[Any]:
    """The states of delayed scaling in a module or an operation of Transformer Engine, with scale and history.

    Read from Transformer Engine 2.20.2: ``DelayedScalingRecipeState``, and a ``CustomRecipeState`` that contains one.
    """
    attributes = vars(module)
    for meta in (attributes.get("fp8_meta"), *(attributes.get("_fp8_metas") or {}).values()):
        for key in ("scaling_fwd", "scaling_bwd"):
            state = delayed_state(meta, key)
            if state is not None:
                yield state


def delayed_state(meta: Mapping[str, Any] | None, direction: str) -> Any:
    """The state of delayed scaling in an ``fp8_meta``; None if there is none.

    Args:
        meta: the attribute ``fp8_meta`` of a module.
        direction: ``scaling_fwd`` or ``scaling_bwd``.
    """
    state = (meta or {}).get(direction)
    return None if getattr(state, "amax_history", None) is None else state


def _attributes(value: Any) -> tuple[str, ...]:
    """The names of Transformer Engine's attributes of an object; a parameter may have other attributes, too."""
    if not isinstance(value, torch.Tensor):
        return tuple(vars(value))
    own = _OF_GROUPED_TENSOR if "GroupedTensorStorage" in class_names(value) else ()
    return tuple(name for name in vars(value) if name.startswith("_") or name in own)


def _refill(fill: Callable[[Any], None], container: Any, members: Any) -> None:
    container.clear()
    fill(members)


def _state_of(generator: Any) -> torch.Tensor:
    state: torch.Tensor = generator.get_state() if isinstance(generator, torch.Generator) else generator.clone()
    return state
