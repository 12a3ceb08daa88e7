"""Bypasses layers' CUDA graphs in collection steps.

A replay runs no Python, so it cannot be observed. Read from Transformer Engine 2.20.2 (``pytorch/graph.py``), torch
2.13 (``cuda/graphs.py``) and Megatron-LM (``transformer/module.py``, August 2026):

- ``make_graphed_callables`` of the first two replaces a module's ``forward`` by ``new_fwd``, a closure over the
  original, ``orig_fwd``. In torch 2.15 the original is ``orig_call``, a method without its module, ``func_ref()``.
- Megatron's layers keep the graphs of ``cuda_graph_impl="transformer_engine"`` in the list ``cuda_graphs``. While it is
  empty, a layer calls its own forward.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from te_precision_callbacks.te.state import CapturedPrecision, cached_weights

_GRAPH_MODULES = frozenset({"transformer_engine.pytorch.graph", "torch.cuda.graphs"})

_STREAM_KEYWORDS = ("cuda_graph_stream", "cuda_graph_event")


def why_not_bypassed(module: Any) -> str | None:
    """Return why a module's graph cannot be bypassed; empty if it can, None without a graph."""
    attributes = module.__dict__
    forward = attributes.get("forward")
    if _graphs_of_megatron(module) or isinstance(forward, _Graph):
        return ""
    if not _is_graphed(forward):
        wraps_graph = callable(forward) and _is_graphed(inspect.unwrap(forward))
        if wraps_graph:
            return "its forward was wrapped after its graph was made"
        return None
    if _below(forward) is None:
        return "the original forward cannot be found"
    if _closure(attributes.get("backward_dw")).get("need_bwd_dw"):
        return "a second graph computes its weight gradients (delay_wgrad_compute)"
    return ""


def _is_graphed(forward: Any) -> bool:
    return getattr(forward, "__module__", None) in _GRAPH_MODULES


def _graphs_of_megatron(module: Any) -> list[Any]:
    graphs = module.__dict__.get("cuda_graphs")
    if isinstance(graphs, list):
        return graphs
    return []


def _closure(function: Any) -> Mapping[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _below(forward: Any) -> Any:
    """Return the forward that a graphed one replaces; None where it has another form."""
    names = _closure(forward) if _is_graphed(forward) else {}
    if names.get("orig_bound_to_func"):
        return types.MethodType(names["orig_call"], names["func_ref"]())
    return names.get("orig_fwd", names.get("orig_call"))


def _original(forward: Any) -> Any:
    """Unwrap all graphs: a module may have another one for evaluation."""
    while (below := forward.original if isinstance(forward, _Graph) else _below(forward)) is not None:
        forward = below
    return forward


class _Graph:
    """One or more graphs of a module. In a collection step it is the module's ``forward``, and calls the original.

    Attributes:
        layers: the watched modules in it, by id.
        why_not: why it cannot be bypassed; empty if it can.
    """

    def __init__(self, module: torch.nn.Module, layers: Mapping[int, torch.nn.Module], why_not: str) -> None:
        self._module = module
        self.layers = layers
        self.why_not = why_not
        self._captured = CapturedPrecision.of(layers.values())
        self._name = "cuda_graphs" if _graphs_of_megatron(module) else "forward"
        self._graphed = module.__dict__[self._name]
        self.original = _original(self._graphed)
        self._replacement: Any = None
        self._cached: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @property
    def is_bypassed(self) -> bool:
        return self._replacement is not None

    def is_of(self, attributes: Mapping[str, Any]) -> bool:
        return attributes.get(self._name) is self._graphed or self.is_bypassed

    def bypass(self) -> None:
        """Run the original forward from now on.

        A graph reads and updates its layers' cached low-precision weights at fixed addresses, which features may
        replace meanwhile.
        """
        caches = map(cached_weights, self.layers.values())
        self._cached = [(cache, dict(cache)) for cache in caches]
        self._replacement = self if self._name == "forward" else []
        self._module.__dict__[self._name] = self._replacement

    def restore(self) -> None:
        # Otherwise the script has created other graphs, or deleted them.
        if self._module.__dict__.get(self._name) is self._replacement:
            self._module.__dict__[self._name] = self._graphed
        self._replacement = None
        for cache, former_values in self._cached:
            cache.clear()
            cache.update(former_values)
        self._cached = []

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self._module.training and not self._captured.matches_current_recipe:
            self.why_not = "te.autocast around the replay has another recipe than at the capture"
        if self.why_not or not self._module.training:
            return self._graphed(*arguments, **keywords)
        for name in _STREAM_KEYWORDS:
            keywords.pop(name, None)
        return self.original(*arguments, **keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied module gets the forward that it would have without a session."""
        return self._graphed


class CudaGraphs:
    """The CUDA graphs of watched modules: finds them, and bypasses them in steps that observe their layers."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, Mapping[int, torch.nn.Module]]] = []
        self._graphs: dict[int, _Graph] = {}
        self._unused: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._graphs)

    def watch(self, roots: Iterable[torch.nn.Module], watched: Collection[int]) -> None:
        self._places = []
        self._graphs = {}
        self._unused = set()
        for root in roots:
            for module in root.modules():
                layers = {id(part): part for part in module.modules() if id(part) in watched}
                if layers:
                    self._places.append((module, layers))

    def find(self) -> None:
        former_graphs = self._graphs
        self._graphs = {}
        for module, layers in self._places:
            if "forward" not in module.__dict__ and "cuda_graphs" not in module.__dict__:
                continue
            former_graph = former_graphs.get(id(module))
            if former_graph is not None and former_graph.is_of(module.__dict__):
                self._graphs[id(module)] = former_graph
            elif (why_not := why_not_bypassed(module)) is not None:
                self._graphs[id(module)] = _Graph(module, layers, why_not)

    def bypass(self, armed: Collection[int], *, all_graphs: bool) -> None:
        """Bypass the graphs of modules to observe in this step; every graph with ``all_graphs``."""
        self.find()
        for graph in self._graphs.values():
            is_bypass_needed = all_graphs or any(key in armed and key not in self._unused for key in graph.layers)
            if is_bypass_needed and not graph.why_not and not graph.is_bypassed:
                graph.bypass()

    def restore(self, armed: Collection[int] = (), ran: Collection[int] = ()) -> None:
        """Run all graphs again.

        Args:
            armed: ids of the modules to observe in the step.
            ran: ids of the modules that ran. A graph's other armed modules are unused: they no longer bypass it.
        """
        for graph in self._graphs.values():
            if graph.is_bypassed:
                graph.restore()
                if any(key in ran for key in graph.layers):
                    self._unused.update(key for key in graph.layers if key in armed and key not in ran)

    @property
    def bypassable(self) -> set[int]:
        return set[int]().union(*(graph.layers for graph in self._graphs.values() if not graph.why_not))

    def refused(self) -> Iterator[tuple[torch.nn.Module, str]]:
        for graph in self._graphs.values():
            if graph.why_not:
                for layer in graph.layers.values():
                    yield layer, graph.why_not
