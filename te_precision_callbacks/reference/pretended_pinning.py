"""Pinned memory where the CPU replaces the GPU: ordinary memory with a mark.

Usage::

    pin_as_on_gpu()
    torch.zeros(4).pin_memory().is_pinned()  # True, also for views

As on a GPU, ``pin_memory`` gives a copy, or the tensor itself if it is pinned, and what a ``DataLoader`` with
``pin_memory=True`` yields is pinned. The mark is on the storage, which views share and copies do not. A compiled
function neither sets nor sees it. Read from torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_MARK = "_pinned_on_the_pretended_gpu"


def pin_as_on_gpu() -> None:
    """Replace torch's functions for pinned memory, for the rest of the process."""
    methods: Any = torch.Tensor
    methods.pin_memory, methods.is_pinned = _pin_memory, _asking(torch.Tensor.is_pinned)
    _load_pinned()


def mark(tensor: Any) -> None:
    """Mark ``tensor``, and its parts, as pinned, unless it is being compiled."""
    if torch.compiler.is_dynamo_compiling():
        return
    for part in _parts(tensor):
        setattr(part.untyped_storage(), _MARK, True)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside a wrapping subclass, such as a DTensor, or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor] if tensor.layout == torch.strided else []
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for wrapped in inner for part in _parts(wrapped)]


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Replaces ``torch.Tensor.pin_memory``."""
    if torch.compiler.is_dynamo_compiling() or self.is_pinned():
        return self
    pinned = self.clone()
    mark(pinned)
    return pinned


def _asking(is_pinned: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(is_pinned)
    def asking(self: torch.Tensor, device: Any = None) -> bool:
        if torch.compiler.is_compiling():  # pinned memory that a compiled function allocates needs a GPU
            return is_pinned(self)
        parts = _parts(self)
        return bool(parts) and all(hasattr(part.untyped_storage(), _MARK) for part in parts)

    return asking


def _load_pinned() -> None:
    """Let a ``DataLoader`` pin in the thread that takes the batches: its own pinning thread needs an accelerator."""
    iterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    pin_batch: Callable[..., Any] = torch.utils.data._utils.pin_memory.pin_memory
    original_init: Callable[..., None] = iterator.__init__
    original_next: Callable[..., Any] = iterator.__next__

    @functools.wraps(original_init)
    def init(self: Any, loader: Any) -> None:
        pin_memory, loader.pin_memory = loader.pin_memory, False
        try:
            original_init(self, loader)
        finally:
            loader.pin_memory = self._pins_batches = pin_memory

    @functools.wraps(original_next)
    def pinned_next(self: Any) -> Any:
        batch = original_next(self)
        return pin_batch(batch) if self._pins_batches else batch

    iterator.__init__, iterator.__next__ = init, pinned_next
