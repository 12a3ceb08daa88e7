"""Units with GEMMs to switch in a search, and their names in recipes and configs.

A unit is a layer of the model; the groups of a grouped module are one unit.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.vocabulary import GEMMS, GemmName
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.coverage.formats import gemms_left_out
from te_precision_callbacks.coverage.products import gemm_sizes
from te_precision_callbacks.layers.forwards import is_in_backward
from te_precision_callbacks.layers.naming import Model, named_operations, named_te_modules
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.custom_recipe import assign_names
from te_precision_callbacks.te.state import has_quantized_weights


class SearchError(PrecisionDebugError, RuntimeError):
    """A search cannot run, or cannot continue. The state of the training was put back."""


class BudgetError(SearchError):
    """No choice meets the budget."""


Switch = tuple[str, GemmName]
"""A unit and one of its GEMMs."""

Choice = frozenset[Switch]
"""The GEMMs in high precision."""


class LayerGroup(NamedTuple):
    """GEMMs that are switched together."""

    name: str
    switches: Choice


class Units:
    """The units of a model. The modules have other names until :meth:`restore`.

    Attributes:
        layers: name of a unit, in the roles of quantizers, -> the names of its layers in configs.
        module_of: name of a unit -> the path of its module.
        switches: all GEMMs of all units.

    Raises:
        SearchError: the model has no layers to search, or has parts that a search cannot switch.
    """

    def __init__(self, model: Model) -> None:
        if not isinstance(model, torch.nn.Module):
            raise SearchError("A search needs a single model, a torch.nn.Module.")
        operations = [name for operation in named_operations(model) for name in operation.names]
        if operations:
            raise SearchError(f"A search cannot switch operations of te.ops: {', '.join(operations[:3])}.")
        named_modules = named_te_modules(model)
        if not named_modules:
            raise SearchError("The model has no layers of Transformer Engine, so there is nothing to search.")
        for entry in named_modules:
            _require_plain(entry.module, entry.name)
        self._names = [(module, module.name) for module in model.modules() if "name" in vars(module)]
        assign_names(model)
        self.layers: dict[str, tuple[str, ...]] = {}
        self.module_of: dict[str, str] = {}
        self._parts: dict[Any, list[str]] = {}
        for entry in named_modules:
            module: Any = entry.module
            row = te_modules.of(module)
            if row.groups:
                parts = {module.name: entry.names}
            else:
                names = [module.name + part for part in row.layers(module)]
                parts = {name: (layer,) for name, layer in zip(names, entry.names, strict=True)}
            self.layers |= parts
            self.module_of |= dict.fromkeys(parts, entry.name)
            self._parts[module] = list(parts)
        self.switches = frozenset(itertools.product(self.layers, GEMMS))

    def restore(self) -> None:
        for module, name in self._names:
            module.name = name

    def high(self, choice: Choice) -> dict[str, tuple[str, ...]]:
        """Return unit -> its GEMMs in high precision, for :class:`~.factory.QuantizerFactory`."""
        return {name: tuple(gemm for gemm in GEMMS if (name, gemm) in choice) for name in self.layers}

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
        for name, path in self.module_of.items():
            key: object = path if whole_modules else name
            for pattern in together:
                if match := re.fullmatch(pattern, name):
                    unmatched.discard(pattern)
                    key = pattern, match.groups()
            members[key].append(name)
        if unmatched:
            raise SearchError(
                f"together={sorted(unmatched)[0]!r} matches no layer. Layers: {', '.join(list(self.layers)[:4])}, ..."
            )
        return [
            LayerGroup(key if isinstance(key, str) else " + ".join(names), frozenset(itertools.product(names, GEMMS)))
            for key, names in members.items()
        ]

    def products(self, run: Callable[[], object]) -> list[Product]:
        """Return the products of each unit and GEMM in a call, in high precision."""
        calls: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        left_out: set[Switch] = set()

        def see(module: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
            if is_in_backward() or not torch.is_grad_enabled():  # a recomputation, or no training
                return
            inputs = (*arguments, *keywords.values())
            inp = next(value for value in inputs if isinstance(value, torch.Tensor))
            names = self._parts[module]
            for name, reasons in gemms_left_out(module, names, input_needs_gradient=inp.requires_grad).items():
                left_out.update((name, gemm) for gemm in reasons)
            row = te_modules.of(module)
            splits = keywords.get("m_splits", inputs[1] if row.groups and len(inputs) > 1 else None)
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
                if (name, gemm) not in left_out:
                    products.append(Product(name, "te", gemm, gemm != "fprop", n, m, k, 1, len(sizes), macs, {}))
        return products


def _require_plain(module: Any, name: str) -> None:
    problem = ""
    if getattr(module, "fuse_wgrad_accumulation", False):
        problem = "fuse_wgrad_accumulation=True, so its gradients cannot be read"
    elif getattr(module, "sequence_parallel", False):
        problem = "sequence_parallel=True, for which a CustomRecipe does not reduce the amax"
    elif has_quantized_weights(module):
        problem = "weights in low precision (te.quantized_model_init), so there is no high precision to compare with"
    if problem:
        raise SearchError(f"A search cannot switch {name!r}: it has {problem}.")
