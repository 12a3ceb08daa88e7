"""Count the bytes of the real tensors that layers keep and that forwards save, to compare a plan with.

    with SavedTensors(model, modules) as saved:
        loss = model(x).sum()             # at most until here: a backward frees what its forward has saved
    rows = [*saved.rows, *kept_rows(model, modules)]

Only numbers are kept, no tensor. A tensor that several layers save counts once, for the first. Nothing in Transformer
Engine is replaced: hooks of torch find the node of autograd behind a module's output, which has what was saved.

Read from Transformer Engine 2.20.2: what the Functions of ``pytorch/module/*.py`` hand to ``prepare_for_saving``, in
this order; ``_OperationFuserAutogradFunction`` of ``pytorch/ops/fuser.py``, whose ``basic_op_ctxs`` have a range of the
saved tensors each; ``restore_from_saved`` and ``prepare_for_saving`` of the storages, each the other's inverse;
``_fp8_workspaces`` of a module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.layers.fp8_state import delayed_states
from te_precision_callbacks.layers.naming import Model, NamedModule, named_operations, named_roots
from te_precision_callbacks.speed.memory.planned import (
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    INPUT,
    NORM_INPUT,
    NORM_OUTPUT,
    NORM_STATISTICS,
    OTHER_PARAMETERS,
    WEIGHT,
    is_quantized,
    is_weight,
    layer_of_parameter,
)
from te_precision_callbacks.speed.memory.rows import Lives

_MOST_NODES = 8
"""The nodes that are looked at behind an output, for the one of Transformer Engine's Function."""

_WEIGHTS_OF_PART: Mapping[str, str] = {
    "rowwise": "weight_rowwise",
    "columnwise": "weight_columnwise",
    "scales": "weight_scales",
    "high": "parameter",
}
_SAVED_OF_PART: Mapping[str, str] = {
    "rowwise": "saved_rowwise",
    "columnwise": "saved_columnwise",
    "scales": "saved_scales",
    "high": "saved_high",
}

_ROWWISE = ("_data", "_rowwise_data", "rowwise_data")
_COLUMNWISE = ("_transpose", "_columnwise_data", "columnwise_data")
_SCALES = ("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise")
_OF_GROUPED = ("scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax")
"""Attributes of the storages in ``pytorch/tensor/storage``, the last ones of a GroupedTensorStorage."""

_Place = tuple[int, str]
"""The number of a module's layer, and what a saved tensor is of it; ``""`` for what is a parameter anyway."""

_LINEAR: tuple[_Place, ...] = ((0, INPUT), (0, WEIGHT), (0, ""), (0, ""))
_LAYERNORM_LINEAR: tuple[_Place, ...] = (
    *((0, NORM_INPUT), (0, WEIGHT), (0, ""), (0, ""), (0, "")),
    *((0, NORM_OUTPUT), (0, NORM_STATISTICS), (0, NORM_STATISTICS)),
)
_LAYERNORM_MLP: tuple[_Place, ...] = (
    *((0, NORM_INPUT), (0, ""), (0, NORM_OUTPUT), (0, WEIGHT), (0, ""), (0, "")),
    *((1, ACTIVATION_INPUT), (1, ACTIVATION_INPUT), (1, ACTIVATION_OUTPUT), (1, WEIGHT), (1, ""), (1, "")),
    *((0, NORM_STATISTICS), (0, NORM_STATISTICS)),
)
_RECOMPUTED_MLP: tuple[_Place, ...] = ((0, NORM_INPUT), *(((0, ""),) * 6))


@dataclass(frozen=True)
class CountedRow:
    """Bytes of real tensors; the attributes are those of MemoryRow."""

    layer: str
    kind: str
    what: str
    bytes: int
    lives: Lives


class SavedTensors(AbstractContextManager["SavedTensors"]):
    """Counts what forwards save for the backward while it is entered.

    Args:
        model: the model.
        modules: its modules of Transformer Engine.

    Attributes:
        rows: what was counted.
        failures: what could not be counted: layer -> why.
    """

    def __init__(self, model: Model, modules: Sequence[NamedModule]) -> None:
        self.rows: list[CountedRow] = []
        self.failures: dict[str, str] = {}
        self._model = model
        self._layers = {id(named.module): tuple(layer.name for layer in named.layers) for named in modules}
        self._modules = [named.module for named in modules]
        self._operations = {id(found.module): found.layers for found in named_operations(model)}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._known: set[int] = set()
        self._nodes: set[int] = set()

    def __enter__(self) -> SavedTensors:
        roots = [root for _, root in named_roots(self._model) or ()]
        self._known = {pointer for root in roots for p in root.parameters() for pointer in _pointers(p)}
        for module in self._modules:
            self._handles.append(module.register_forward_hook(outside_of_dynamo(self._look_at_module)))
        for root in roots:
            for module in root.modules():
                if class_names(module)[-1:] and _is_of_operations(module):
                    self._handles.append(module.register_forward_hook(outside_of_dynamo(self._look_at_operations)))
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._known, self._nodes = set(), set()

    def _look_at_module(self, module: Any, _: Any, output: Any) -> None:
        layers = self._layers[id(module)]
        try:
            node = _node_behind(output)
            if node is None:
                return
            for workspace in vars(module).get("_fp8_workspaces", {}).values():
                self._known.update(_pointers(workspace))
            places = _places(module, node, len(layers))
            objects = _restored(node)
            if len(places) != len(objects):
                raise ValueError(
                    f"{type(node).__name__} has saved {len(objects)} tensors, where {len(places)} are known"
                )
            for (number, what), tensor in zip(places, objects, strict=True):
                self._count(layers[number], what, tensor)
            _taken_apart(node, objects)
        except Exception as error:
            self.failures[layers[0]] = f"{type(error).__name__}: {error}"

    def _look_at_operations(self, module: Any, _: Any, output: Any) -> None:
        try:
            node = _node_behind(output, "basic_op_ctxs")
            if node is None or id(node) in self._nodes:  # a te.ops.Linear in a Sequential has no node of its own
                return
            self._nodes.add(id(node))
            objects = _restored(node)
            for operation, context in zip(node.basic_ops, node.basic_op_ctxs, strict=True):
                layers = self._operations.get(id(operation), ())
                saved = objects[slice(*context._saved_tensors_range)]
                if len(layers) == 1:
                    for what, tensor in zip((INPUT, WEIGHT), saved, strict=True):
                        self._count(layers[0], what, tensor)
                elif layers:
                    of_layers = saved[-2 * len(layers) :]
                    for number, tensor in enumerate(of_layers):
                        what = INPUT if number < len(layers) else WEIGHT
                        self._count(layers[number % len(layers)], what, tensor)
            _taken_apart(node, objects)
        except Exception as error:
            self.failures[type(module).__name__] = f"{type(error).__name__}: {error}"

    def _count(self, layer: str, what: str, tensor: Any) -> None:
        if tensor is None or not what:
            return
        kinds = _WEIGHTS_OF_PART if what == WEIGHT else _SAVED_OF_PART
        for part, size in _new_parts(tensor, self._known):
            self.rows.append(CountedRow(layer, kinds[part], what, size, "to_backward"))


def kept_rows(model: Model, modules: Sequence[NamedModule]) -> Iterator[CountedRow]:
    """What the layers keep from step to step, as it is now.

    Args:
        model: the model.
        modules: its modules of Transformer Engine.
    """
    of_parameter: dict[int, torch.Tensor] = {}
    counted: set[int] = set()
    for named in modules:
        layers = [layer.name for layer in named.layers]
        module: Any = named.module
        for name, parameter in module.named_parameters(recurse=False):
            of_parameter[id(parameter)] = parameter
            yield from _of_parameter(layer_of_parameter(name, layers), name, parameter, counted)
        for name, workspace in vars(module).get("_fp8_workspaces", {}).items():
            for part, size in _new_parts(workspace, counted):
                yield CountedRow(layer_of_parameter(name, layers), _WEIGHTS_OF_PART[part], WEIGHT, size, "always")
        yield from _scaling_state(module, layers)
    for found in named_operations(model):
        for name, parameter in found.module.named_parameters(recurse=False):
            yield from _of_parameter(layer_of_parameter(name, found.layers), name, parameter, counted)
        yield from _scaling_state(found.module, found.layers)


def _of_parameter(layer: str, name: str, parameter: torch.Tensor, counted: set[int]) -> Iterator[CountedRow]:
    what = WEIGHT if is_weight(name, parameter) else OTHER_PARAMETERS
    local = getattr(parameter, "_local_tensor", parameter)
    for part, size in _new_parts(local, counted):
        yield CountedRow(layer, _WEIGHTS_OF_PART[part], what, size, "always")
    for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
        if isinstance(gradient, torch.Tensor):
            yield from (CountedRow(layer, "gradient", what, n, "always") for _, n in _new_parts(gradient, counted))


def _scaling_state(module: torch.nn.Module, layers: Sequence[str]) -> Iterator[CountedRow]:
    for state in delayed_states(module):
        size = _bytes(state.scale) + _bytes(state.amax_history)
        shares = len(layers)
        for number, layer in enumerate(layers):
            own = size * (number + 1) // shares - size * number // shares
            yield CountedRow(layer, "scaling_state", "", own, "always")


# ---------------------------------------------------------------------- autograd


def _is_of_operations(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("transformer_engine.pytorch.ops.")


def _node_behind(output: Any, attribute: str = "tensor_objects") -> Any:
    """The node of autograd behind an output that has an attribute; None if the forward saves nothing."""
    first = output[0] if isinstance(output, (tuple, list)) else output
    left = [getattr(first, "grad_fn", None)]
    for _ in range(_MOST_NODES):
        if not left:
            return None
        node = left.pop(0)
        if node is None:
            continue
        if getattr(node, attribute, None) is not None:
            return node
        left += [following for following, _ in node.next_functions]
    return None


def _restored(node: Any) -> list[Any]:
    """What a forward has saved, as it has handed it over."""
    from transformer_engine.pytorch.quantized_tensor import restore_from_saved

    objects: list[Any] = restore_from_saved(node.tensor_objects, list(node.saved_tensors))
    return objects


def _taken_apart(node: Any, objects: Sequence[Any]) -> None:
    """Leave the storages in a node without their tensors again, as the backward wants them."""
    for kept, found in zip(node.tensor_objects, objects, strict=True):
        if kept is not None and not isinstance(kept, torch.Tensor):
            found.prepare_for_saving()


def _places(module: Any, node: Any, layers: int) -> Sequence[_Place]:
    kind = next((name for name in class_names(module) if name in _PLACES), "GroupedLinear")
    if kind != "GroupedLinear":
        is_recomputed = kind == "LayerNormMLP" and module.checkpoint
        return _RECOMPUTED_MLP if is_recomputed else _PLACES[kind]
    each = range(layers)
    if getattr(node, "grouped_tensor_supported", False):
        weights = 1 if module.single_grouped_weight else layers
        return (0, INPUT), *((number, WEIGHT) for number in range(weights)), *(((0, ""),) * 4)
    biases = len(node.tensor_objects) - 3 * layers
    return (
        *((number, INPUT) for number in each),
        *((number, WEIGHT) for number in each),
        *((0, "") for _ in each),
        *(((0, ""),) * biases),
    )


_PLACES: Mapping[str, Sequence[_Place]] = {
    "LayerNormLinear": _LAYERNORM_LINEAR,
    "LayerNormMLP": _LAYERNORM_MLP,
    "Linear": _LINEAR,
}


def _new_parts(tensor: Any, counted: set[int]) -> Iterator[tuple[str, int]]:
    """The parts of a tensor that have not been counted, and their bytes."""
    for part, held in _parts(tensor):
        if held.numel() and held.data_ptr() not in counted:
            counted.add(held.data_ptr())
            yield part, _bytes(held)


def _pointers(tensor: Any) -> set[int]:
    return {held.data_ptr() for _, held in _parts(tensor) if held.numel()}


def _parts(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in one that may be quantized, and whether each is codes, scales, or in high precision."""
    if tensor is None:
        return
    for inner in ("_rowwise_storage", "_columnwise_storage", "rowwise_gemm_tensor", "columnwise_gemm_tensor"):
        if hasattr(tensor, inner):
            yield from _parts(getattr(tensor, inner))
    if is_quantized(tensor):
        if hasattr(tensor, "_hp_data"):
            yield "high", tensor._hp_data
        yield from ((_part_of(name), held) for name, held in _buffers(tensor))
    elif isinstance(tensor, torch.Tensor):
        yield "high", getattr(tensor, "_local_tensor", tensor)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _buffers(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a quantized tensor keeps, with the attributes that hold them."""
    for name in (*_ROWWISE, *_COLUMNWISE, *_SCALES, *_OF_GROUPED):
        held = getattr(tensor, name, None)
        if isinstance(held, torch.Tensor):
            yield name, held


def _part_of(buffer: str) -> str:
    """The part that a buffer is, by its attribute: ``rowwise``, ``columnwise`` or ``scales``."""
    if buffer in _ROWWISE:
        return "rowwise"
    return "columnwise" if buffer in _COLUMNWISE else "scales"
