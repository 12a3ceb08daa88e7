"""Collectives that NCCL runs and that gloo lacks or gets wrong. Read from torch 2.13.

**Coalescing.** gloo copies the tensors of a coalesced all-gather into one buffer of the first tensor's type: FP8 codes
and their float32 scales are read as the wrong type. Given a device, gloo refuses the manager, and torch then keeps
recording: every later collective of the group does nothing. Here the recorded collectives run one after the other.

**Memory.** NCCL writes to the memory of a tensor, and ignores autograd and, if it only moves data, the type. gloo
refuses leaves and split views that autograd follows, float8 types, and tensors of another shape with as many numbers.
Of a tensor with gaps gloo takes the numbers in the gaps; NCCL refuses it, and so does the backend.

**Groups.** Ranks may create disjoint NCCL groups at the same time. torch gives such groups one name, under which
gloo's ranks find the ranks of another group.

**Two backends**, such as ``"cpu:gloo,cuda:nccl"``. Asynchronous checkpoints rely on both: a thread gathers objects
over gloo while the training reduces gradients over NCCL. One gloo for both would mix up their messages: it aborts, or
the ranks hang. So a group that was requested with two backends gets a second gloo. The default group has two backends
unless one is named, and other groups inherit that.

The second gloo carries objects and barriers, as on GPUs, and the tensors of every thread but the one that made the
group: a pretended GPU's tensors are on the CPU, so a tensor does not show where it belongs, but the tensors of that
thread are sent by all ranks in one order (torch/distributed/distributed_c10d.py).
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
            f"A coalescing manager takes only one kind of collective, but was given {', '.join(kinds)}. Use one for"
            " each."
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


_SENDING_OBJECTS = (
    *("all_gather_object", "barrier", "broadcast_object_list", "gather_object", "recv_object_list"),
    *("scatter_object_list", "send_object_list"),
)
_SENDING_TENSORS = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single"),
    *("broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "scatter", "send"),
)

_RANKS = ("ranks", "sort_ranks", "use_local_synchronization")  # arguments of new_group that say who is in it


class _Second(NamedTuple):
    group: Any
    made_in: int


_seconds: weakref.WeakKeyDictionary[Any, _Second] = weakref.WeakKeyDictionary()


def keeping_apart(create: Callable[..., Any]) -> Callable[..., Any]:
    """``init_process_group`` or ``new_group``, with a second gloo for a group of two backends."""
    signature = inspect.signature(create)
    makes_default = "ranks" not in signature.parameters

    @functools.wraps(create)
    def created(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options).arguments
        group = create(*arguments, **options)
        if makes_default:
            group = distributed_c10d._get_default_group()
        asked = bound.get("backend")
        if asked is None:
            two = bound.get("device_id") is None if makes_default else distributed_c10d._get_default_group() in _seconds
        else:
            two = isinstance(asked, str) and "cpu:" in asked.lower() and "," in asked
        if two:
            given = {name: bound[name] for name in _RANKS if name in bound}
            second = distributed_c10d.new_group(**given, backend="gloo")
            if isinstance(group, distributed_c10d.ProcessGroup):  # this rank is in it
                _seconds[group] = _Second(second, threading.get_ident())
        return None if makes_default else group

    return created


def send_apart() -> None:
    """Let functions of torch.distributed use the second gloo of a group that has one. For the rest of the process."""
    for names, objects in ((_SENDING_OBJECTS, True), (_SENDING_TENSORS, False)):
        for name in names:
            if (function := getattr(distributed_c10d, name, None)) is not None:
                sending = _sending_apart(function, objects)
                setattr(distributed_c10d, name, sending)
                setattr(torch.distributed, name, sending)


def _sending_apart(send: Callable[..., Any], objects: bool) -> Callable[..., Any]:
    signature = inspect.signature(send)

    @functools.wraps(send)
    def sent(*arguments: Any, **options: Any) -> Any:
        if not _seconds:
            return send(*arguments, **options)
        bound = signature.bind(*arguments, **options)
        group = bound.arguments.get("group") or distributed_c10d._get_default_group()
        second = _seconds.get(group) if isinstance(group, distributed_c10d.ProcessGroup) else None
        if second is not None and (objects or second.made_in != threading.get_ident()):
            bound.arguments["group"] = second.group
        return send(*bound.args, **bound.kwargs)

    return sent
