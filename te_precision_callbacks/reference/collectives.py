"""Collectives that NCCL runs and that gloo lacks or gets wrong. Read from torch 2.13.

**Coalescing.** gloo copies the tensors of a coalesced all-gather into one buffer of the first tensor's type: FP8 codes
and their float32 scales are read as the wrong type. Given a device, gloo refuses the manager, and torch then keeps
recording: every later collective of the group does nothing. Here the recorded collectives run one after the other.

**Memory.** NCCL writes to the memory of a tensor, and ignores autograd and, if it only moves data, the type. gloo
refuses leaves and split views that autograd follows, float8 types, and tensors of another shape with as many numbers.
Of a tensor with gaps gloo takes the numbers in the gaps; NCCL refuses it, and so does the backend.

**Groups.** Ranks may create disjoint NCCL groups at the same time. torch gives such groups one name, under which
gloo's ranks find the ranks of another group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

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
# With a tensor of all ranks and one of each: NCCL counts their numbers, gloo also compares their shapes.
_COUNTING = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
_IN_PLACE = ("all_reduce", "broadcast", "reduce")  # here gloo takes the memory from a tensor's first element on
_FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


@contextmanager
def one_by_one(group: Any = None, device: Any = None, async_ops: bool | None = False) -> Iterator[Any]:
    """Replaces ``torch.distributed._coalescing_manager``: the recorded collectives run one by one at the block's end.

    Raises:
        ValueError: the group is in a manager already, as in torch.
        ReferenceBackendError: different collectives or reductions; torch would run all of them as the first.
    """
    from torch.distributed import distributed_c10d

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
    recorded = recording.pop(group)
    kinds = sorted({f"{call.op.__name__}({'' if call.redop is None else call.redop})" for call in recorded})
    if len(kinds) > 1:
        raise ReferenceBackendError(
            f"A coalescing manager takes collectives of one kind, and was given {', '.join(kinds)}. Use one for each."
        )
    for call in recorded:
        if call.dst_tensor is None:
            call.op(call.tensor, call.redop, group)
        elif call.redop is None:
            call.op(call.dst_tensor, call.tensor, group)
        else:
            call.op(call.dst_tensor, call.tensor, call.redop, group)


def make_gloo_stand_for_nccl() -> None:
    """Replace functions of torch.distributed where gloo differs from NCCL, for the rest of the process."""
    from torch.distributed import _functional_collectives, distributed_c10d

    for names, moves in ((_MOVING, True), (_REDUCING, False)):
        for name in names:
            if (function := getattr(distributed_c10d, name, None)) is not None:
                _replace(distributed_c10d, torch.distributed, name=name, by=_on_memory(function, moves))
    _replace(distributed_c10d, torch.distributed, name="_coalescing_manager", by=one_by_one)
    for single, coalesced in (
        ("all_gather_single", "all_gather_single_coalesced"),
        ("all_gather_tensor", "all_gather_into_tensor_coalesced"),
    ):
        if hasattr(_functional_collectives, single) and hasattr(_functional_collectives, coalesced):
            gather = getattr(_functional_collectives, single)
            _replace(_functional_collectives, name=coalesced, by=_gathering_one_by_one(gather))
    meeting = _meeting_in_a_store_of_its_own(distributed_c10d._new_process_group_helper)
    _replace(distributed_c10d, name="_new_process_group_helper", by=meeting)


def _replace(*modules: Any, name: str, by: Any) -> None:
    for module in modules:
        setattr(module, name, by)


def _on_memory(function: Callable[..., Any], moves: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_memory(*arguments: Any, **options: Any) -> Any:
        memory = functools.partial(_memory, as_bytes=moves)
        given = [memory(value) for value in (*arguments, *options.values())]
        if function.__name__ in _IN_PLACE:
            _refuse_gaps(function.__name__, given)
        if function.__name__ in _COUNTING:
            given = _flat(given)
        positional, named = given[: len(arguments)], given[len(arguments) :]
        return function(*positional, **dict(zip(options, named, strict=True)))

    return on_memory


def _memory(value: Any, *, as_bytes: bool) -> Any:
    """Return tensors without autograd, and float8 as bytes; other values and subclasses unchanged."""
    if isinstance(value, (list, tuple)):
        return type(value)(_memory(item, as_bytes=as_bytes) for item in value) if _holds_tensors(value) else value
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return value
    plain = value.detach()
    return plain.view(torch.uint8) if as_bytes and plain.dtype in _FLOAT8 else plain


def _refuse_gaps(name: str, values: list[Any]) -> None:
    for tensor in values:
        if type(tensor) is not torch.Tensor or tensor.is_contiguous():
            continue
        by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        if not tensor.permute(by_stride).is_contiguous():
            raise ReferenceBackendError(
                f"{name}: the tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps or "
                "overlaps, which NCCL refuses (Tensors must be contiguous). Give it tensor.contiguous()."
            )


def _flat(values: list[Any]) -> list[Any]:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in tensors):
        return values
    return [value.view(-1) if isinstance(value, torch.Tensor) else value for value in values]


def _holds_tensors(values: Any) -> bool:
    return type(values) in (list, tuple) and any(isinstance(value, torch.Tensor) for value in values)


def _gathering_one_by_one(gather: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    def coalesced(tensors: list[torch.Tensor], group: Any, tag: str = "") -> list[torch.Tensor]:
        return [gather(tensor, 0, group, tag) for tensor in tensors]

    return coalesced


def _meeting_in_a_store_of_its_own(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.distributed``'s function for new groups so that rendezvous names include the ranks."""

    from torch.distributed.distributed_c10d import PrefixStore

    @functools.wraps(create)
    def created(
        size: int, rank: int | None, ranks: list[int], backend: Any, store: Any, *arguments: Any, **options: Any
    ) -> Any:
        if ranks:  # those of the default group are not listed
            store = PrefixStore(f"ranks_{'_'.join(map(str, ranks))}", store)
        return create(size, rank, ranks, backend, store, *arguments, **options)

    return created
