"""Plans the matrix products of a training step from a model's modules. Nothing runs; the model may be on ``meta``.

Formats come from the quantizers that Transformer Engine creates for the recipe, changed by features of the config.
Assumptions: each layer of Transformer Engine runs in ``te.autocast``, and its input needs a gradient; high precision is
the dtype of the layer's weight; each token passes each layer once; experts share the tokens equally. Attention is not
planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from te_precision_callbacks.base.vocabulary import OPERANDS, class_names
from te_precision_callbacks.config.effects import Acting
from te_precision_callbacks.coverage.coverage import Coverage, Family, Product, Reason
from te_precision_callbacks.coverage.formats import (
    MODIFIED,
    LayerGemm,
    LayerOperand,
    dtype_name,
    formats_of_layer,
    gemms_left_out,
    recipe_text,
)
from te_precision_callbacks.coverage.gemm_precision import FROZEN, HIGH_PRECISION, Format
from te_precision_callbacks.coverage.history import HighPrecisionFacts, explain, kept_by_sections
from te_precision_callbacks.coverage.products import gemm_sizes, kind_of
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
    others: dict[str, torch.nn.Module] = {}
    counted: set[int] = set()
    names = module_names(model)
    for key, path in names.items():
        module = by_id[key]
        if key in layers:
            planner.plan_module(module, layers[key])
        elif not planner.plan_torch(path, module):
            others[path] = module
            continue
        counted.update(map(id, module.parameters(recurse=False)))
    # A te.ops.Linear also holds the weight of the operation inside it.
    not_counted = []
    for path, other in others.items():
        if any(p.ndim > 1 and id(p) not in counted for p in other.parameters(recurse=False)):
            not_counted.append(path)
    return PlannedProducts(Coverage(planner.products), tuple(not_counted), _attention(names, by_id))


class _ProductPlanner:
    """Plans the matrix products of a model's modules from their sizes."""

    def __init__(self, acting: Mapping[str, Sequence[Acting]], recipe: Any, tokens: int, *, trains: bool) -> None:
        self.products: list[Product] = []
        self._acting = acting
        self._recipe = recipe
        self._override = getattr(recipe, "backward_override", None)
        self._tokens = tokens
        self._trains = trains
        self._quantizers = MadeQuantizers()
        self._formats: dict[tuple[object, ...], Mapping[LayerOperand, Format]] = {}

    # ------------------------------------------------------------------ Transformer Engine

    def plan_module(self, module: Any, layers: Sequence[str]) -> None:
        row = te_modules.of(module)
        left_out = gemms_left_out(module, layers, input_needs_gradient=self._trains)
        made = self._quantizers.of(module, self._recipe)
        dtype = next(p.dtype for p in module.parameters(recurse=False) if p.ndim > 1)
        groups = 1
        if row.groups:
            groups = len(layers)
        family: Family = "te"
        if row.is_operation:
            family = "te_ops"
        for layer, quantizers, sizes in zip(layers, made, row.features(module), strict=True):
            self._plan_layer(layer, family, quantizers, dtype, sizes, groups, left_out)

    def _plan_layer(
        self,
        layer: str,
        family: Family,
        quantizers: Mapping[str, Any],
        dtype: torch.dtype,
        sizes: tuple[int, int],
        groups: int,
        left_out: Mapping[LayerGemm, str],
    ) -> None:
        recipe = recipe_text(self._recipe)
        key = (*map(id, quantizers.values()), *quantizers, dtype)  # many layers have the same
        if key not in self._formats:
            self._formats[key] = formats_of_layer(
                "", quantizers, dtype, recipe=recipe, backward_override=self._override
            )
        formats = self._formats[key]
        sections = self._acting.get(layer, ())
        kept = kept_by_sections(sections)
        modified: set[object] = set()
        for section in sections:
            for effect in section.effects.values():
                modified.update(effect.modifies)
        facts = HighPrecisionFacts(kept, self._override or "")
        rows = max(1, self._tokens // groups)
        macs = self._tokens * sizes[0] * sizes[1] // groups
        for gemm, (n, m, k) in gemm_sizes(rows, *sizes).items():
            not_run = left_out.get(LayerGemm(layer, gemm), "")
            if not_run:
                self.products.append(Product.left_out(layer, family, gemm, not_run))
                continue
            operands: dict[str, str] = {}
            for tensor in OPERANDS[gemm]:
                text = formats[LayerOperand("", gemm, tensor)].text
                if gemm in kept:
                    text = dtype_name(dtype)
                if (gemm, tensor) in modified:
                    text += MODIFIED
                operands[tensor] = text
            backward = gemm != "fprop"
            product = Product(layer, family, gemm, backward, n, m, k, 1, 1, macs, operands, "planned")
            self.products.append(explain(replace(product, recipe=recipe or HIGH_PRECISION), facts, 0))

    # ------------------------------------------------------------------ torch

    def plan_torch(self, path: str, module: torch.nn.Module) -> bool:
        if isinstance(module, torch.nn.Linear):
            sizes = module.in_features, module.out_features
        elif "Conv1D" in class_names(module) and hasattr(module, "nf"):  # transformers' GPT-2: x @ weight
            sizes = cast(torch.Tensor, module.weight).shape[0], cast(int, module.nf)
        else:
            return isinstance(module, torch.nn.Embedding)  # a look-up has no multiply-adds
        weight = cast(torch.Tensor, module.weight)
        macs = self._tokens * sizes[0] * sizes[1]
        for gemm, (n, m, k) in gemm_sizes(self._tokens, *sizes).items():
            if gemm != "fprop" and not self._trains:
                continue
            if gemm == "wgrad" and not weight.requires_grad:
                self.products.append(Product.left_out(path, "torch", gemm, FROZEN))
                continue
            operands: dict[str, str] = dict.fromkeys(OPERANDS[gemm], dtype_name(weight.dtype))
            backward = gemm != "fprop"
            ref = kind_of(module)
            self.products.append(
                Product(path, "torch", gemm, backward, n, m, k, 1, 1, macs, operands, "planned", "", Reason.NOT_TE, ref)
            )
        return True


def _attention(names: Mapping[int, str], below: Mapping[int, torch.nn.Module]) -> tuple[str, ...]:
    paths: list[str] = []
    for key, path in names.items():
        is_inner = paths and path.startswith(f"{paths[-1]}.")
        if not is_inner and any("Attention" in name for name in class_names(below[key])):
            paths.append(path)
    return tuple(paths)
