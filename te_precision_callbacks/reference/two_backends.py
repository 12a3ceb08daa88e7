"""Process groups of two backends, such as ``"cpu:gloo,cuda:nccl"``, where gloo replaces NCCL.

On GPUs, asynchronous checkpoints rely on both: a thread gathers objects over gloo while the training reduces gradients
over NCCL. One gloo for both would mix up their messages. So ``async_save`` saves before it returns, and collectives
over such a group in any other thread than the one that made it raise. The default group has two backends unless one is
named, and other groups inherit that. Read from torch 2.13 (torch/distributed/distributed_c10d.py).
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed import distributed_c10d

from te_precision_callbacks.reference.errors import MissingFunctionError

_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all"),
    *(
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "irecv",
        "isend",
    ),
    *("recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list", "send", "send_object_list"),
)

_made_in: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""A group of two backends -> the thread that made it."""


def noting_thread(create: Callable[..., Any]) -> Callable[..., Any]:
    """``init_process_group`` or ``new_group``, which notes the thread that makes a group of two backends."""
    signature = inspect.signature(create)
    makes_default = "ranks" not in signature.parameters

    @functools.wraps(create)
    def created(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options).arguments
        result = create(*arguments, **options)
        group = distributed_c10d._get_default_group() if makes_default else result
        asked = bound.get("backend")
        if asked is None:
            two = bound.get("device_id") is None if makes_default else distributed_c10d._get_default_group() in _made_in
        else:
            two = isinstance(asked, str) and "cpu:" in asked.lower() and "," in asked
        if two and isinstance(group, distributed_c10d.ProcessGroup):  # this rank is in it
            _made_in[group] = threading.get_ident()
        return result

    return created


def refuse_other_threads() -> None:
    """Let collectives raise in other threads than the group's. For the rest of the process."""
    for name in _COLLECTIVES:
        if (function := getattr(distributed_c10d, name, None)) is not None:
            for module in (distributed_c10d, torch.distributed):
                setattr(module, name, _in_its_thread(function))


def _in_its_thread(collective: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def called(*arguments: Any, **options: Any) -> Any:
        if _made_in:
            group = (
                signature.bind(*arguments, **options).arguments.get("group") or distributed_c10d._get_default_group()
            )
            own = threading.get_ident()
            if isinstance(group, distributed_c10d.ProcessGroup) and _made_in.get(group, own) != own:
                raise MissingFunctionError(
                    f"{collective.__name__} in another thread than the one that made the process group: on a pretended"
                    " GPU, gloo would mix its messages with the training's. Call it in that thread, or give it a group"
                    " of its own: torch.distributed.new_group(backend='gloo')."
                )
        return collective(*arguments, **options)

    return called


def save_at_once(save: Callable[..., Any], async_save: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``async_save`` of torch.distributed.checkpoint by ``save`` with a finished future."""
    taken = inspect.signature(save).parameters

    @functools.wraps(async_save)
    def saved(state_dict: Mapping[str, Any], **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(save(state_dict, **{name: value for name, value in options.items() if name in taken}))
        return done

    return saved
