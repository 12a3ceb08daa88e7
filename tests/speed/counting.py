"""Count the bytes of the real tensors that layers keep and that forwards save, to compare a plan with.

    counted = Counter()
    with counting_saved(modules, counted):
        loss = model(x).sum()             # until here: a backward frees what its forward has saved
    count_kept(modules, counted)

A tensor that several layers save counts once, for the first. Read from Transformer Engine 2.20.2: ``tensor_objects`` of
the Functions in ``pytorch/module/*.py``, which ``restore_from_saved`` and ``prepare_for_saving`` of the storages fill
and empty; ``_fp8_workspaces`` of a module.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformer_engine.pytorch.quantized_tensor import restore_from_saved

from te_precision_callbacks.layers.fp8_state import delayed_states
from te_precision_callbacks.layers.naming import NamedModule

BUFFERS = (
    *("_data", "_rowwise_data", "rowwise_data", "_transpose", "_columnwise_data", "columnwise_data"),
    *("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise"),
    *("scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax"),
)
"""Attributes of the storages in ``pytorch/tensor/storage``, the last ones of a GroupedTensorStorage."""

Counts = Counter[tuple[str, str, str]]
"""(module, ``high``, ``codes``, ``gradient`` or ``scaling``, lifetime) -> bytes."""


@contextmanager
def counting_saved(modules: Sequence[NamedModule], counts: Counts) -> Iterator[None]:
    seen = {held.data_ptr() for named in modules for p in named.module.parameters() for _, held in parts(p)}

    def look(module: Any, _: Any, output: Any) -> None:
        for workspace in vars(module).get("_fp8_workspaces", {}).values():
            seen.update(held.data_ptr() for _, held in parts(workspace))
        node = node_behind(output)
        objects = restore_from_saved(node.tensor_objects, list(node.saved_tensors))
        for tensor in objects:
            count(names[id(module)], tensor, "to_backward", seen, counts)
        for kept, tensor in zip(node.tensor_objects, objects, strict=True):
            if kept is not None and not isinstance(kept, torch.Tensor):
                tensor.prepare_for_saving()

    names = {id(named.module): named.layers[0].name.partition(".")[0] for named in modules}
    handles = [named.module.register_forward_hook(look) for named in modules]
    yield
    for handle in handles:
        handle.remove()


def count_kept(modules: Sequence[NamedModule], counts: Counts) -> None:
    seen: set[int] = set()
    for named in modules:
        module: Any = named.module
        name = named.layers[0].name.partition(".")[0]
        for parameter in module.parameters(recurse=False):
            count(name, parameter, "always", seen, counts)
            if parameter.grad is not None:
                counts[name, "gradient", "always"] += parameter.grad.nbytes
        for workspace in vars(module).get("_fp8_workspaces", {}).values():
            count(name, workspace, "always", seen, counts)
        for state in delayed_states(module):
            counts[name, "scaling", "always"] += state.scale.nbytes + state.amax_history.nbytes


def count(name: str, tensor: Any, lives: str, seen: set[int], counts: Counts) -> None:
    for part, held in parts(tensor):
        if held.is_floating_point() is False and part == "high":
            continue  # offsets of groups
        if held.numel() and held.data_ptr() not in seen:
            seen.add(held.data_ptr())
            counts[name, part, lives] += held.nbytes


def node_behind(output: Any) -> Any:
    node = (output[0] if isinstance(output, tuple) else output).grad_fn
    while getattr(node, "tensor_objects", None) is None:
        node = node.next_functions[0][0]
    return node


def parts(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    held = [getattr(tensor, name, None) for name in BUFFERS]
    codes = [buffer for buffer in held if isinstance(buffer, torch.Tensor)]
    yield from (("codes", buffer) for buffer in codes)
    if not codes and isinstance(tensor, torch.Tensor):
        yield "high", tensor
