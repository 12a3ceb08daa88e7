"""Process groups of two backends, such as ``"cpu:gloo,cuda:nccl"``, where gloo replaces NCCL.

Usage::

    init_process_group = keeping_apart(init_process_group)
    new_group = keeping_apart(new_group)
    send_objects_apart()

On GPUs such a group has two independent backends: gloo for tensors on the CPU, and NCCL for tensors on the GPU.
Asynchronous checkpoints rely on that: a thread gathers objects over gloo while the training reduces gradients over
NCCL. With one gloo for both, the messages of the thread and of the training would be mixed up, and the ranks would
hang. So a group that was requested with two backends, or with none named, which is the same, gets a second gloo, which
carries objects and barriers, as on GPUs. Read from torch 2.13 (torch/distributed/distributed_c10d.py).
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d

_SENDING_OBJECTS = (
    *("all_gather_object", "barrier", "broadcast_object_list", "gather_object", "recv_object_list"),
    *("scatter_object_list", "send_object_list"),
)

_for_objects: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def keeping_apart(create: Callable[..., Any]) -> Callable[..., Any]:
    """``init_process_group`` or ``new_group``, with a second gloo for a group of two backends."""
    signature = inspect.signature(create)

    @functools.wraps(create)
    def created(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options).arguments
        group = create(*arguments, **options)
        asked = bound.get("backend")
        by_default = asked is None and "ranks" not in signature.parameters and bound.get("device_id") is None
        if by_default or (isinstance(asked, str) and "cpu:" in asked.lower() and "," in asked):
            ranks = bound.get("ranks")
            local = bound.get("use_local_synchronization", False)
            second = distributed_c10d.new_group(ranks, backend="gloo", use_local_synchronization=local)
            first = distributed_c10d._get_default_group() if group is None else group
            if first is not distributed_c10d.GroupMember.NON_GROUP_MEMBER:
                _for_objects[first] = second
        return group

    return created


def send_objects_apart() -> None:
    """Let functions that send objects use the second gloo of a group that has one. For the rest of the process."""
    for name in _SENDING_OBJECTS:
        sending = _sending_apart(getattr(distributed_c10d, name))
        setattr(distributed_c10d, name, sending)
        setattr(torch.distributed, name, sending)


def _sending_apart(send: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(send)

    @functools.wraps(send)
    def sent(*arguments: Any, **options: Any) -> Any:
        if not _for_objects:
            return send(*arguments, **options)
        bound = signature.bind(*arguments, **options)
        group = bound.arguments.get("group") or distributed_c10d._get_default_group()
        bound.arguments["group"] = _for_objects.get(group, group)
        return send(*bound.args, **bound.kwargs)

    return sent
