"""NCCL collectives that gloo lacks or computes differently. Read from torch 2.13.

**Coalescing.** gloo copies the tensors of a coalesced all-gather into one buffer with the first tensor's dtype, so FP8
codes or their float32 scales are read as the wrong dtype. With a device, gloo rejects the manager, and torch then keeps
recording: later collectives of the group do nothing. Here the recorded collectives run one after the other.

**Memory.** NCCL writes to the memory of a tensor, and ignores autograd and, if it only moves data, the dtype. gloo
rejects leaves and split views under autograd, float8 dtypes, and tensors of a different shape with the same number of
elements. For a tensor with gaps, gloo sends the elements in the gaps; NCCL rejects it, and so does the backend.

**Groups.** Ranks may create disjoint NCCL groups at the same time. torch gives such groups the same name, so gloo would
connect ranks of different groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d

from te_precision_callbacks.reference.errors import ReferenceBackendError

_MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all_single",
    "all_to_all",
)
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor")
# Collectives with a tensor for all ranks and one per rank: NCCL compares element counts, gloo also shapes.
_COUNTING = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
_IN_PLACE = ("all_reduce", "broadcast", "reduce")  # gloo reads contiguous memory from the first element on
_FLOAT8 = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "float8" in str(dtype)]


@contextmanager
def one_by_one(group: Any = None, device: Any = None, async_ops: bool | None = False) -> Iterator[Any]:
    """Replaces ``torch.distributed._coalescing_manager``: the recorded collectives run one by one at the block's end.

    Raises:
        ValueError: the group is already in a manager, as in torch.
    """
    group = group or distributed_c10d._get_default_group()
    recording = distributed_c10d._world.pg_coalesce_state
    if group in recording:
        raise ValueError("Coalescing managers of one group cannot be nested.")
    recording[group] = []
    try:
        yield distributed_c10d._CoalescingManager()
    except BaseException:
        del recording[group]
        raise
    for call in recording.pop(group):
        if call.dst_tensor is None:
            call.op(call.tensor, call.redop, group)
        elif call.redop is None:
            call.op(call.dst_tensor, call.tensor, group)
        else:
            call.op(call.dst_tensor, call.tensor, call.redop, group)


def make_gloo_stand_for_nccl() -> None:
    """Replace functions of torch.distributed where gloo differs from NCCL, for the rest of the process."""
    from torch.distributed import _functional_collectives

    for name in (*_MOVING, *_REDUCING):
        function = getattr(distributed_c10d, name, None)
        if function is not None:
            replace(distributed_c10d, torch.distributed, **{name: _on_memory(function, moves=name in _MOVING)})
    replace(distributed_c10d, torch.distributed, _coalescing_manager=one_by_one)
    for single, coalesced in (
        ("all_gather_single", "all_gather_single_coalesced"),
        ("all_gather_tensor", "all_gather_into_tensor_coalesced"),
    ):
        if hasattr(_functional_collectives, single) and hasattr(_functional_collectives, coalesced):
            gather = getattr(_functional_collectives, single)
            replace(_functional_collectives, **{coalesced: _gather_one_by_one(gather)})
    meeting = _with_unique_rendezvous(distributed_c10d._new_process_group_helper)
    replace(distributed_c10d, _new_process_group_helper=meeting)


def replace(*owners: Any, **replacements: Any) -> None:
    """Set attributes of modules or classes, the same in each."""
    for owner in owners:
        for name, replacement in replacements.items():
            setattr(owner, name, replacement)


def _on_memory(function: Callable[..., Any], moves: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_memory(*arguments: Any, **options: Any) -> Any:
        in_memory = [_memory(value, as_bytes=moves) for value in (*arguments, *options.values())]
        if function.__name__ in _IN_PLACE:
            for tensor in in_memory:
                if type(tensor) is torch.Tensor and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
                    raise ReferenceBackendError(
                        f"{function.__name__}: the tensor of shape {tuple(tensor.shape)} and strides"
                        f" {tensor.stride()} has gaps or overlaps, which NCCL refuses (Tensors must be contiguous)."
                        " Give it tensor.contiguous()."
                    )
        if function.__name__ in _COUNTING:
            in_memory = _flat(in_memory)
        positional = in_memory[: len(arguments)]
        named = in_memory[len(arguments) :]
        return function(*positional, **dict(zip(options, named, strict=True)))

    return on_memory


def _memory(value: Any, *, as_bytes: bool) -> Any:
    """Detach tensors, and view float8 as bytes; other values and subclasses are unchanged."""
    if type(value) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(_memory(item, as_bytes=as_bytes) for item in value)
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return value
    plain = value.detach()
    if as_bytes and plain.dtype in _FLOAT8:
        return plain.view(torch.uint8)
    return plain


def _flat(values: list[Any]) -> list[Any]:
    flat = list(values)
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor or not value.is_contiguous():
                return values
            flat[index] = value.view(-1)
    return flat


def _gather_one_by_one(gather: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    def coalesced(tensors: list[torch.Tensor], group: Any, tag: str = "") -> list[torch.Tensor]:
        return [gather(tensor, 0, group, tag) for tensor in tensors]

    return coalesced


def _with_unique_rendezvous(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.distributed``'s function for new groups so that rendezvous names include the ranks."""

    @functools.wraps(create)
    def created(
        size: int, rank: int | None, ranks: list[int], backend: Any, store: Any, *arguments: Any, **options: Any
    ) -> Any:
        if ranks:  # empty for the default group
            store = distributed_c10d.PrefixStore(f"ranks_{'_'.join(map(str, ranks))}", store)
        return create(size, rank, ranks, backend, store, *arguments, **options)

    return created
