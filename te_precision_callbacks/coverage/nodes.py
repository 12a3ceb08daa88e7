"""Maps autograd nodes to the products of the forward whose gradients they compute.

Autograd numbers nodes by thread, and on a GPU the backward and its recomputation run in the device's thread. So
products are stored with the node itself, in ``torch.autograd.graph.Node.metadata``. The number only finds the node in
the thread that made it: autograd makes the node before it calls the kernel, and attaches it to the result after it.

Read from torch 2.13: ``Node._sequence_nr``, ``torch._C._autograd._get_sequence_nr``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from te_precision_callbacks.coverage.marks import tensors_in
from te_precision_callbacks.layers.forwards import running_functions

_PRODUCTS = "te_precision_products"
_CALL = "te_precision_call"
_NOTHING = object()
_FURTHEST = 8


class _OfThread(threading.local):
    """Products of a thread that have no node yet.

    Attributes:
        waiting: number of a node -> its products.
        results: the results of the last product.
        outer: the number of the node of the running operator of a DTensor, for the operators on its shards.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, list[Any]] = {}
        self.results: list[torch.Tensor] = []
        self.outer = -1


class NodesOfProducts:
    def __init__(self) -> None:
        self._here = _OfThread()

    def enter_outer(self, arguments: Iterable[Any]) -> None:
        """Note the beginning of an operator of a DTensor, which runs others on its shards."""
        self._here.outer = made_in_thread() - 1 if _has_node(arguments) else -1

    def note(self, seen: object, arguments: Iterable[Any], result: Any) -> None:
        """Note a product of the forward that has just run, with the arguments and the result of its operator."""
        self.note_running(seen)
        number = made_in_thread() - 1
        if _has_node(arguments) or self._here.outer == number:
            self._here.waiting.setdefault(number, []).append(seen)
            self._here.results = list(tensors_in([result]))

    def note_running(self, seen: object) -> None:
        """Note a product with the running autograd Functions. The outermost one has gradients."""
        for function in filter(None, running_functions()):
            function.metadata.setdefault(_PRODUCTS, []).append(seen)  # type: ignore[attr-defined]

    def bind(self, values: Iterable[Any]) -> None:
        """Find the nodes of products among tensors: called before each operator, and after a forward."""
        here = self._here
        if not here.waiting:
            return
        with torch._C.DisableTorchFunctionSubclass():
            nodes: list[Any] = [tensor.grad_fn for tensor in (*here.results, *tensors_in(values))]
        for _ in range(_FURTHEST):  # a DTensor's result may have become a plain tensor, through more nodes
            nodes = list(dict.fromkeys(filter(None, nodes)))
            for node in nodes:
                number = node._sequence_nr()
                if number in here.waiting and _PRODUCTS not in node.metadata:
                    node.metadata[_PRODUCTS] = here.waiting.pop(number)
            if not here.waiting:
                break
            nodes = [following for node in nodes for following, _ in node.next_functions]
        here.results = []


def products_of_node(node: Any) -> list[Any]:
    """The products of a node in the order of the forward; empty without products."""
    found: list[Any] = [] if node is None else node.metadata.get(_PRODUCTS, [])
    return found


def mark_call(results: Iterable[Any], mark: object) -> bool:
    """Store a mark with the last nodes of a forward; returns False if there are none."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(results)]
    marked = False
    for node in nodes:
        marked = marked or node is not None
        if node is not None:
            node.metadata.setdefault(_CALL, mark)
    return marked


def found_in_graph(roots: Iterable[Any]) -> Iterator[tuple[object | None, list[Any]]]:
    """Yield the marks of calls, and the products, that a backward from these tensors or edges reaches first.

    Nodes behind a mark or a product are not visited.
    """
    nodes = [getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots]
    known = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        metadata = node.metadata
        if _CALL in metadata or _PRODUCTS in metadata:
            yield metadata.get(_CALL), metadata.get(_PRODUCTS, [])
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                nodes.append(following)


def made_in_thread() -> int:
    return torch._C._autograd._get_sequence_nr()


def _has_node(arguments: Iterable[Any]) -> bool:
    """Return whether an operator with these arguments has a node; inside of an autograd Function, the Function."""
    # Without gradients the node is that of a Function: it is known, but for one whose forward has no context.
    if not torch.is_grad_enabled() and next(running_functions(), _NOTHING) is not None:
        return False
    return any(tensor.requires_grad for tensor in tensors_in(arguments))
