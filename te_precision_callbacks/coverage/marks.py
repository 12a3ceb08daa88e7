"""Marks on the memory of tensors, and on autograd nodes.

All views of a tensor share a mark, which is dropped with the memory. The products of a forward are stored in the
``torch.autograd.graph.Node.metadata`` of the node that computes their gradients. Autograd creates that node before it
calls the kernel, so a sequence number identifies it; sequence numbers are per thread, and a backward may run in another
thread, so only the forward uses them.

Read from torch 2.13: ``Node._sequence_nr``, ``torch._C._autograd._get_sequence_nr``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.layers.forwards import running_functions
from te_precision_callbacks.layers.naming import NamedTorchModule

made_in_thread: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of autograd nodes of this thread. Not a Python function, since it is called around each layer."""

_PRODUCTS = "te_precision_products"
_CALL = "te_precision_call"
_NOTHING = object()
_FURTHEST = 8


class _ThreadNodes(threading.local):
    def __init__(self) -> None:
        self.waiting: dict[int, list[Any]] = {}
        self.results: list[torch.Tensor] = []
        self.outer = -1


class NodesOfProducts:
    """Finds for each product of a forward the node of the autograd graph that computes its gradients."""

    def __init__(self) -> None:
        self._here = _ThreadNodes()

    def enter_outer(self, arguments: Iterable[Any]) -> None:
        """Note the start of an operator on DTensors, which runs operators on the local shards."""
        self._here.outer = -1
        if _has_node(arguments):
            self._here.outer += made_in_thread()

    def note(self, seen: object, arguments: Iterable[Any], result: Any) -> None:
        self.note_running(seen)
        number = made_in_thread() - 1
        if _has_node(arguments) or self._here.outer == number:
            self._here.waiting.setdefault(number, []).append(seen)
            self._here.results = list(tensors_in([result]))

    def note_running(self, seen: object) -> None:
        """Note a product with the running autograd Functions. The outermost Function computes its gradients."""
        for function in filter(None, running_functions()):
            function.metadata.setdefault(_PRODUCTS, []).append(seen)  # type: ignore[attr-defined]

    def bind(self, values: Iterable[Any]) -> None:
        """Attach noted products to their nodes in the graph of some tensors.

        Called before each operator, and after a forward.
        """
        here = self._here
        if not here.waiting:
            return
        with torch._C.DisableTorchFunctionSubclass():
            nodes: list[Any] = [tensor.grad_fn for tensor in (*here.results, *tensors_in(values))]
        for _ in range(_FURTHEST):  # converting a DTensor to a plain tensor adds nodes
            nodes = list(dict.fromkeys(filter(None, nodes)))
            for node in nodes:
                number = node._sequence_nr()
                if number in here.waiting and _PRODUCTS not in node.metadata:
                    node.metadata[_PRODUCTS] = here.waiting.pop(number)
            if not here.waiting:
                break
            following = []
            for node in nodes:
                following += node.next_functions
            nodes = [node for node, _ in following]
        here.results = []


def products_of_current_node() -> list[Any]:
    """The products of the autograd node that this thread runs a backward of."""
    node: Any = torch._C._current_autograd_node()
    products: list[Any] = []
    if node is not None:
        products = node.metadata.get(_PRODUCTS, products)
    return products


def mark_call(results: Iterable[Any], call: object) -> bool:
    """Mark the autograd nodes of a call's results; returns False if there are none."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(results) if tensor.grad_fn is not None]
    for node in nodes:
        node.metadata.setdefault(_CALL, call)
    return bool(nodes)


def calls_in_graph(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the nearest call on each path of a backward from these tensors or edges, by its mark or a product."""
    nodes = [getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots]
    seen_nodes = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        metadata = node.metadata
        if _CALL in metadata or _PRODUCTS in metadata:
            call = metadata.get(_CALL) or metadata[_PRODUCTS][0].call
            if call is not None:
                yield call
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen_nodes:
                seen_nodes.add(following)
                nodes.append(following)


def _has_node(arguments: Iterable[Any]) -> bool:
    # Without gradients the node is the running Function's, which is known unless its forward has no context.
    if not torch.is_grad_enabled() and next(running_functions(), _NOTHING) is not None:
        return False
    return any(tensor.requires_grad for tensor in tensors_in(arguments))


MarkT = TypeVar("MarkT")


class Marks(Generic[MarkT]):
    """Marks on the storages of tensors, by weak reference, so that reused addresses are not confused."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[StorageWeakRef, MarkT]] = {}

    def __bool__(self) -> bool:
        return bool(self._marks)

    def put(self, tensor: torch.Tensor, mark: MarkT) -> None:
        storage = _storage(tensor)
        if storage is not None:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._marks[storage._cdata] = reference, mark  # unique while the weak reference is alive

    def get(self, tensor: torch.Tensor) -> MarkT | None:
        storage = _storage(tensor)
        if storage is None or storage._cdata not in self._marks:
            return None
        return self._marks[storage._cdata][1]


UNFUSED = "UnfusedDotProductAttention"
"""Transformer Engine's attention in torch: it multiplies by ``baddbmm`` first, then by ``bmm`` (2.20.2,
``pytorch/attention/dot_product_attention/backends.py``)."""

UNFUSED_KERNEL = "Transformer Engine's unfused attention"


def kind_of(module: torch.nn.Module) -> str:
    """The kernel or class of a module, as reasons name it."""
    kind = type(module)
    if kind.__name__ == UNFUSED:
        return UNFUSED_KERNEL
    if kind.__module__.startswith("torch.nn."):
        return f"torch.nn.{kind.__name__}"
    return kind.__name__


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a module: the path and the kind of the module, the name, and whether it trains."""

    module: str
    name: str
    trains: bool
    kind: str


class WeightMarks:
    """Finds the parameters of a model by their memory, also if several modules share a storage."""

    def __init__(self) -> None:
        self._weights: Mapping[Any, list[Weight]] = {}  # by place, and the first at each place by storage
        self._copies = Marks[Weight]()

    def read(self, modules: Iterable[NamedTorchModule]) -> None:
        by_place: dict[tuple[int, int], list[Weight]] = {}
        embeddings_last = sorted(modules, key=lambda named: isinstance(named[1], torch.nn.Embedding))
        for path, module in embeddings_last:
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                address = _place(parameter)
                if address is not None:
                    weight = Weight(path, name, parameter.requires_grad, kind_of(module))
                    by_place.setdefault(address, []).append(weight)
        by_storage = group_by_key((storage, weights[0]) for (storage, _), weights in by_place.items())
        self._weights = {**by_place, **by_storage}  # in one assignment: another thread may be searching

    def find(
        self, tensor: torch.Tensor, inside: NamedTorchModule | None = None, *, embedding: bool = False
    ) -> Weight | None:
        """Find the parameter behind a tensor, which may be the parameter, a view of it, or a cast copy.

        If several modules share the parameter, ``inside`` is preferred; with ``embedding``, an embedding.
        """
        address = _place(tensor)
        if address is None:
            return None
        if inside is not None:
            path, module = inside
            for name, parameter in module._parameters.items():
                if parameter is not None and _place(parameter) == address:
                    return Weight(path, name, parameter.requires_grad, kind_of(module))
        owners = self._weights.get(address) or self._weights.get(address[0], [])
        if address in self._weights or len(owners) == 1:
            return owners[-embedding]
        return self._copies.get(tensor)

    def follow(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        weight = self.find(source)
        if weight is not None:
            self._copies.put(copy, weight)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
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
    if storage is None:
        return None
    return (storage._cdata, int(local.storage_offset()))
