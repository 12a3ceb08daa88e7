"""Layers with GEMMs to switch in a search, their names in recipes and configs, and groups of layers."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.vocabulary import GEMMS, OPERANDS, GemmName
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.coverage.planned_products import gemm_sizes
from te_precision_callbacks.coverage.precision_audit import gemms_left_out
from te_precision_callbacks.layers.forwards import is_in_backward
from te_precision_callbacks.layers.naming import Model, named_operations, named_te_modules
from te_precision_callbacks.search.factory import assign_names
from te_precision_callbacks.te import modules as te_modules


class SearchError(PrecisionDebugError, RuntimeError):
    """A search cannot run, or cannot continue. The state of the training was put back."""


class BudgetError(SearchError):
    """No choice meets the budget."""


Switch = tuple[str, GemmName]
"""A unit and one of its GEMMs."""

Choice = frozenset[Switch]
"""The GEMMs in high precision."""


class Unit(NamedTuple):
    """A layer of the model; the groups of a grouped module are one unit.

    Attributes:
        name: the name in the roles of quantizers.
        layers: the names of its layers in configs.
        module: the path of its module.
    """

    name: str
    layers: tuple[str, ...]
    module: str


class LayerGroup(NamedTuple):
    """GEMMs that are switched together, or one of their operands."""

    name: str
    switches: Choice
    operand: str = ""


class Units:
    """The units of a model. The modules have other names until :meth:`restore`.

    Attributes:
        all: name -> unit.
        modules: path -> module.
        switches: all GEMMs of all units.

    Raises:
        SearchError: the model has no layers to search, or has parts that a search cannot switch.
    """

    def __init__(self, model: Model) -> None:
        if not isinstance(model, torch.nn.Module):
            raise SearchError("A search needs a single model, a torch.nn.Module.")
        operations: list[str] = []
        for operation in named_operations(model):
            operations += operation.names
        if operations:
            raise SearchError(f"A search cannot switch operations of te.ops: {', '.join(operations[:3])}.")
        modules = named_te_modules(model)
        if not modules:
            raise SearchError("The model has no layers of Transformer Engine, so there is nothing to search.")
        self.modules: dict[str, torch.nn.Module] = {}
        for entry in modules:
            _require_plain(entry.module, entry.name)
            self.modules[entry.name] = entry.module
        self._names = [(module, module.name) for module in model.modules() if "name" in vars(module)]
        assign_names(model)
        self.all: dict[str, Unit] = {}
        self._parts: dict[Any, list[str]] = {}
        for entry in modules:
            module: Any = entry.module
            row = te_modules.of(module)
            parts: dict[str, tuple[str, ...]] = {}
            if row.groups:
                parts[module.name] = entry.names
            else:
                for part, layer in zip(row.layers(module), entry.names, strict=True):
                    parts[module.name + part] = (layer,)
            for name, layers in parts.items():
                self.all[name] = Unit(name, layers, entry.name)
            self._parts[module] = list(parts)
        self.switches: Choice = frozenset(itertools.product(self.all, GEMMS))

    def restore(self) -> None:
        for module, name in self._names:
            module.name = name

    def high(self, choice: Choice) -> dict[str, tuple[str, ...]]:
        """Return unit -> its GEMMs in high precision, for :class:`~.factory.QuantizerFactory`."""
        high: dict[str, tuple[str, ...]] = dict.fromkeys(self.all, ())
        for name, gemm in itertools.product(self.all, GEMMS):
            if (name, gemm) in choice:
                high[name] += (gemm,)
        return high

    def atoms(self, together: Sequence[str], *, whole_modules: bool) -> list[LayerGroup]:
        """Return the smallest groups of whole layers.

        Args:
            together: patterns of whole names. Layers that match one, with equal captures, are a group.
            whole_modules: whether the layers of a module are switched together.

        Raises:
            SearchError: a pattern matches no layer.
        """
        members: dict[object, list[str]] = defaultdict(list)
        unmatched = set(together)
        for name, unit in self.all.items():
            key: object = unit.module if whole_modules else name
            for pattern in together:
                match = re.fullmatch(pattern, name)
                if match:
                    unmatched.discard(pattern)
                    key = pattern, match.groups()
            members[key].append(name)
        if unmatched:
            raise SearchError(
                f"together={sorted(unmatched)[0]!r} matches no layer. Layers: {', '.join(list(self.all)[:4])}, ..."
            )
        groups = []
        for key, names in members.items():
            label = key if isinstance(key, str) else " + ".join(names)
            groups.append(LayerGroup(label, frozenset(itertools.product(names, GEMMS))))
        return groups

    def products(self, run: Callable[[], object]) -> list[Product]:
        """Return the products of each unit and GEMM in a call, in high precision."""
        calls: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        left_out: set[Switch] = set()

        def see(module: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
            if is_in_backward() or not torch.is_grad_enabled():  # a recomputation, or no training
                return
            given = (*arguments, *keywords.values())
            inp = next(value for value in given if isinstance(value, torch.Tensor))
            names = self._parts[module]
            left_out.update(gemms_left_out(module, names, input_needs_gradient=inp.requires_grad))
            row = te_modules.of(module)
            splits = keywords.get("m_splits", given[1] if row.groups and len(given) > 1 else None)
            tokens = row.tokens(module, inp.numel() // max(1, inp.shape[-1]), splits)
            for number, (count, sizes) in enumerate(zip(tokens, row.features(module), strict=True)):
                calls[names[0 if row.groups else number]].append((count, *sizes))

        handles = [module.register_forward_pre_hook(see, with_kwargs=True) for module in self._parts]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        products = []
        for name, sizes in calls.items():
            macs = sum(map(math.prod, sizes))
            for gemm, (n, m, k) in gemm_sizes(*max(sizes)).items():
                if (name, gemm) in left_out:
                    continue
                products.append(Product(name, "te", gemm, gemm != "fprop", n, m, k, 1, len(sizes), macs, {}))
        return products


def _require_plain(module: Any, name: str) -> None:
    problem = ""
    if getattr(module, "fuse_wgrad_accumulation", False):
        problem = "fuse_wgrad_accumulation=True, so its gradients cannot be read"
    elif getattr(module, "sequence_parallel", False):
        problem = "sequence_parallel=True, for which a CustomRecipe does not reduce the amax"
    elif any(hasattr(weight, "_quantizer") for weight in module.parameters(recurse=False)):
        problem = "weights in low precision (te.quantized_model_init), so there is no high precision to compare with"
    if problem:
        raise SearchError(f"A search cannot switch {name!r}: it has {problem}.")


def block_of(group: LayerGroup) -> str:
    """Return the part of its layers' names up to the first number, such as ``layers.3``; else the group's name."""
    blocks = set()
    for name, _ in group.switches:
        match = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
        if match is None:
            return group.name
        blocks.add(match[0])
    return blocks.pop() if len(blocks) == 1 else group.name


def split_by_block(atoms: Iterable[LayerGroup]) -> dict[str, list[LayerGroup]]:
    return group_by_key((block_of(atom), atom) for atom in atoms)


def merged(name: str, groups: Iterable[LayerGroup]) -> LayerGroup:
    return LayerGroup(name, Choice().union(*(group.switches for group in groups)))


def split_by_gemm(atom: LayerGroup) -> list[LayerGroup]:
    switches = group_by_key((switch[1], switch) for switch in atom.switches)
    return [LayerGroup(f"{atom.name} {gemm}", frozenset(switches[gemm])) for gemm in GEMMS]


def split_by_operand(group: LayerGroup) -> list[LayerGroup]:
    """Return the operands of groups with one GEMM."""
    (gemm,) = {gemm for _, gemm in group.switches}
    return [LayerGroup(f"{group.name} {operand}", group.switches, operand) for operand in OPERANDS[gemm]]
