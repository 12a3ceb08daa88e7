"""Finds the tensors in a module's inputs and outputs: in nested tuples, lists, mappings and dataclasses.

list(tensors_in({"logits": a, "cache": (b, None)}, "output")) == [("output[logits]", a), ("output[cache][0]", b)]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_DEEPEST = 8

_WITHOUT_TENSORS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def arguments(inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The tensors in a call's arguments: ``input[0]``, ``input[hidden_states]``. None as in :func:`tensors_in`."""
    for index, value in enumerate(inputs):
        yield from tensors_in(value, f"input[{index}]")
    for name, value in keywords.items():
        yield from tensors_in(value, f"input[{name}]")


def tensors_in(value: Any, role: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each tensor with its role: that of ``value``, and the index, key or field in brackets.

    Nesting is followed to a depth of 8; objects of other classes, such as key-value caches, are not searched. A
    container that raises while it is searched gives None.
    """
    if isinstance(value, torch.Tensor):
        yield role, value
    elif type(value) not in _WITHOUT_TENSORS and depth < _DEEPEST:
        try:
            yield from _items(value, role, depth)
        except Exception:  # user code, such as a mapping that computes its items
            yield role, None


def _items(value: Any, role: str, depth: int) -> Iterator[tuple[str, torch.Tensor | None]]:
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{role}[{index}]", depth + 1)
    elif isinstance(value, Mapping):  # ModelOutput of transformers is one
        for key, item in value.items():
            yield from tensors_in(item, f"{role}[{key}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), f"{role}[{field.name}]", depth + 1)
