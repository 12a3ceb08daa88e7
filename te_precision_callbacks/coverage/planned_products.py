"""Plans the matrix products of a training step from a model's modules. Nothing runs; the model may be on ``meta``.

Formats come from the quantizers that Transformer Engine creates for the recipe, changed by features of the config.
Assumptions: each layer of Transformer Engine runs in ``te.autocast``, and its input needs a gradient; high precision is
the dtype of the layer's weight; each token passes each layer once; experts share the tokens equally. Attention is not
planned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from te_precision_callbacks.base.vocabulary import GEMMS, OPERANDS, ROWWISE, GemmName, class_names
from te_precision_callbacks.config.effects import Acting
from te_precision_callbacks.coverage.coverage import Coverage, Family, Product, Reason
from te_precision_callbacks.coverage.formats import (
    MODIFIED,
    dtype_name,
    gemms_left_out,
    quantizer_format,
    recipe_text,
)
from te_precision_callbacks.coverage.gemm_precision import FROZEN, HIGH_PRECISION
from te_precision_callbacks.coverage.history import HighPrecisionFacts, explain, kept_by_sections
from te_precision_callbacks.coverage.marks import kind_of
from te_precision_callbacks.coverage.products import gemm_sizes
from te_precision_callbacks.layers.naming import (
    Model,
    NamedModule,
    NamedOperation,
    module_names,
    modules_of,
    modules_with_gemms,
    parameters_of,
)
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.state import MadeQuantizers


@dataclass(frozen=True)
class PlannedProducts:
    """The planned matrix products of a model.

    Attributes:
        coverage: in the order of the module tree.
        not_counted: the paths of modules with a matrix and an unknown class.
        attention: the paths of outer attention modules; their products are not planned.
    """

    coverage: Coverage
    not_counted: tuple[str, ...]
    attention: tuple[str, ...]


def plan_products(
    model: Model,
    modules: Sequence[NamedModule],
    operations: Sequence[NamedOperation],
    acting: Mapping[str, Sequence[Acting]],
    recipe: Any,
    *,
    tokens: int,
) -> PlannedProducts:
    """Plan the products of a training step with ``tokens`` on this rank.

    Args:
        acting: layer -> the sections of the config that act on it.
        recipe: one of Transformer Engine's recipes; None for high precision.
    """
    layers = {id(named.module): named.names for named in modules_with_gemms(modules, operations)}
    by_id = {id(module): module for module in modules_of(model)}
    trains = any(parameter.requires_grad for parameter in parameters_of(model))
    planner = _ProductPlanner(acting, recipe, tokens, trains=trains)
    plain_modules: dict[str, torch.nn.Module] = {}
    counted: set[int] = set()
    names = module_names(model)
    for key, path in names.items():
        module = by_id[key]
        if key in layers:
            planner.plan_module(module, layers[key])
        elif not planner.plan_torch(path, module):
            plain_modules[path] = module
            continue
        counted.update(map(id, module.parameters(recurse=False)))
    # A te.ops.Linear also holds the weight of the operation inside it.
    not_counted = []
    for path, other in plain_modules.items():
        if any(p.ndim > 1 and id(p) not in counted for p in other.parameters(recurse=False)):
            not_counted.append(path)
    return PlannedProducts(Coverage(planner.products), tuple(not_counted), _attention(names, by_id))


class _ProductPlanner:
    """Plans the matrix products of a model's modules from their sizes."""

    def __init__(self, acting: Mapping[str, Sequence[Acting]], recipe: Any, tokens: int, *, trains: bool) -> None:
        self.products: list[Product] = []
        self._acting = acting
        self._recipe = recipe
        self._tokens = tokens
        self._trains = trains
        self._quantizers = MadeQuantizers()

    def plan_module(self, module: Any, layers: Sequence[str]) -> None:
        """Plan the products of a module of Transformer Engine."""
        row = te_modules.of(module)
        left_out = gemms_left_out(module, layers, input_needs_gradient=self._trains)
        dtype = next(p.dtype for p in module.parameters(recurse=False) if p.ndim > 1)
        groups = 1
        if row.groups:
            groups = len(layers)
        family: Family = "te"
        if row.is_operation:
            family = "te_ops"
        recipe = recipe_text(self._recipe) or HIGH_PRECISION
        override = getattr(self._recipe, "backward_override", None)
        module_quantizers = self._quantizers.of(module, self._recipe)
        for layer, quantizers, sizes in zip(layers, module_quantizers, row.features(module), strict=True):
            sections = self._acting.get(layer, ())
            kept_high = kept_by_sections(sections)
            effects = itertools.chain.from_iterable(section.effects.values() for section in sections)
            modified: set[object] = set(itertools.chain.from_iterable(effect.modifies for effect in effects))
            operands: dict[GemmName, dict[str, str]] = {gemm: {} for gemm in GEMMS}
            for gemm, gemm_formats in operands.items():
                is_high = gemm in kept_high or (override is not None and gemm != "fprop")
                for tensor in OPERANDS[gemm]:
                    quantizer = None
                    if not is_high:
                        quantizer = quantizers.get(tensor)
                    gemm_formats[tensor] = quantizer_format(quantizer, dtype, columnwise=ROWWISE[tensor] != gemm)
                    if (gemm, tensor) in modified:
                        gemm_formats[tensor] += MODIFIED
            facts = HighPrecisionFacts(kept_high, override or "")
            for product in self._products(layer, family, sizes, operands, left_out[layer], groups):
                if product.operands:
                    product = explain(replace(product, recipe=recipe), facts, 0)
                self.products.append(product)

    def plan_torch(self, path: str, module: torch.nn.Module) -> bool:
        if isinstance(module, torch.nn.Linear):
            sizes = module.in_features, module.out_features
        elif "Conv1D" in class_names(module) and hasattr(module, "nf"):  # transformers' GPT-2: x @ weight
            sizes = cast(torch.Tensor, module.weight).shape[0], cast(int, module.nf)
        else:
            return isinstance(module, torch.nn.Embedding)  # a look-up has no multiply-adds
        weight = cast(torch.Tensor, module.weight)
        gemms = [gemm for gemm in GEMMS if self._trains or gemm == "fprop"]
        operands: dict[GemmName, dict[str, str]]
        operands = {gemm: dict.fromkeys(OPERANDS[gemm], dtype_name(weight.dtype)) for gemm in gemms}
        reasons: dict[GemmName, str] = {}
        if not weight.requires_grad:
            reasons["wgrad"] = FROZEN
        for product in self._products(path, "torch", sizes, operands, reasons):
            if product.operands:
                product = replace(product, reason=Reason.NOT_TE, reason_ref=kind_of(module))
            self.products.append(product)
        return True

    def _products(
        self,
        layer: str,
        family: Family,
        sizes: tuple[int, int],
        operands: Mapping[GemmName, Mapping[str, str]],
        left_out: Mapping[GemmName, str],
        groups: int = 1,
    ) -> Iterator[Product]:
        macs = self._tokens * math.prod(sizes) // groups
        for gemm, (n, m, k) in gemm_sizes(max(1, self._tokens // groups), *sizes).items():
            if gemm not in operands:
                continue
            if gemm in left_out:
                yield Product.left_out(layer, family, gemm, left_out[gemm])
            else:
                yield Product(layer, family, gemm, gemm != "fprop", n, m, k, 1, 1, macs, operands[gemm], "planned")


def _attention(names: Mapping[int, str], below: Mapping[int, torch.nn.Module]) -> tuple[str, ...]:
    paths: list[str] = []
    for key, path in names.items():
        is_inner = paths and path.startswith(f"{paths[-1]}.")
        if not is_inner and any("Attention" in name for name in class_names(below[key])):
            paths.append(path)
    return tuple(paths)
