"""Process groups of two backends, such as ``"cpu:gloo,cuda:nccl"``, where gloo replaces NCCL.

Asynchronous checkpoints rely on both backends: a thread gathers objects over gloo while the training reduces gradients
over NCCL. One gloo for both would mix up their messages: it aborts, or the ranks hang. So a group that was requested
with two backends gets a second gloo. The default group has two backends unless one is named, and other groups inherit
that.

The second gloo carries objects and barriers, as on GPUs, and the tensors of every thread but the one that made the
group: a pretended GPU's tensors are on the CPU, so a tensor does not show where it belongs, but the tensors of that
thread are sent by all ranks in one order. Read from torch 2.13 (torch/distributed/distributed_c10d.py).
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d

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
