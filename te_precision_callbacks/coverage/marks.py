"""Marks on the memory of tensors. All views share a mark, which ends with the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

MarkT = TypeVar("MarkT")


class Marks(Generic[MarkT]):
    """Marks on the storages of tensors. Keeps no memory alive, and never mistakes new memory for old."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[StorageWeakRef, MarkT]] = {}

    def put(self, tensor: torch.Tensor, mark: MarkT) -> None:
        storage = _storage(tensor)
        if storage is not None:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._marks[storage._cdata] = reference, mark  # as long as there is one, no other storage has the number

    def get(self, tensor: torch.Tensor) -> MarkT | None:
        storage = _storage(tensor)
        found = None if storage is None else self._marks.get(storage._cdata)
        return None if found is None else found[1]


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter that products read.

    Attributes:
        module: the path of its module.
        name: its name in that module.
        trains: whether it needs a gradient.
        owner: its module.
    """

    module: str
    name: str
    trains: bool
    owner: torch.nn.Module | None = field(default=None, compare=False, repr=False)


class WeightMarks:
    """Finds the parameters of a model by their memory, also if several modules share a storage."""

    def __init__(self) -> None:
        self._of_place: dict[tuple[int, int], list[Weight]] = {}
        self._of_storage: dict[int, list[Weight]] = {}
        self._copies = Marks[Weight]()

    def read(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Read the current memory of the parameters of modules, given with their paths."""
        of_place: dict[tuple[int, int], list[Weight]] = {}
        of_storage: dict[int, list[Weight]] = {}
        for path, module in modules:
            for name, parameter in module._parameters.items():
                place = None if parameter is None else _place(parameter)
                if parameter is not None and place is not None:
                    of_place.setdefault(place, []).append(Weight(path, name, parameter.requires_grad, module))
        for place, weights in of_place.items():
            weights.sort(key=lambda weight: isinstance(weight.owner, torch.nn.Embedding))
            of_storage.setdefault(place[0], []).append(weights[0])
        self._of_place, self._of_storage = of_place, of_storage  # at once: another thread may look for one

    def find(
        self, tensor: torch.Tensor, inside: tuple[str, torch.nn.Module] | None = None, *, embedding: bool = False
    ) -> Weight | None:
        """Find the parameter that a tensor is, views, or is a cast copy of.

        Args:
            tensor: the tensor.
            inside: the running module and its path, which is preferred if several modules share the parameter.
            embedding: whether to prefer an embedding, which multiplies nothing.
        """
        place = _place(tensor)
        if place is None:
            return None
        path, module = inside or ("", None)
        for name, parameter in () if module is None else module._parameters.items():
            if parameter is not None and _place(parameter) == place:
                return Weight(path, name, parameter.requires_grad, module)
        owners = self._of_place.get(place) or self._of_storage.get(place[0], [])
        if place in self._of_place or len(owners) == 1:
            return owners[-1 if embedding else 0]
        return self._copies.get(tensor)

    def follow(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """Note a cast copy of a tensor, which may be a parameter."""
        weight = self.find(source)
        if weight is not None:
            self._copies.put(copy, weight)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operator, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _storage(tensor: torch.Tensor) -> Any:
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor holds its shard (torch 2.13)
    try:
        return local.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a tensor without own memory, such as a quantized one
        return None


def _place(tensor: torch.Tensor) -> tuple[int, int] | None:
    storage = _storage(tensor)
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return None if storage is None else (storage._cdata, int(local.storage_offset()))
