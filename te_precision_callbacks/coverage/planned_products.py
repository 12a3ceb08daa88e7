"""Plans the matrix products of a training step from a model's modules. Nothing runs; the model may be on ``meta``.

Formats come from the quantizers that Transformer Engine creates for the recipe, changed by features of the config.
Assumptions: each layer of Transformer Engine runs in ``te.autocast``, and its input needs a gradient; high precision is
the dtype of the layer's weight; each token passes each layer once; experts share the tokens equally. Without a dry run,
attention is not planned. After a dry run (:class:`Ran`), only formats are planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from te_precision_callbacks.base.vocabulary import OPERANDS, GemmName, class_names
from te_precision_callbacks.config.effects import Acting
from te_precision_callbacks.coverage.coverage import Coverage, Family, Product, Reason
from te_precision_callbacks.coverage.gemm_precision import FROZEN, NO_BACKWARD, Format, GemmPrecision
from te_precision_callbacks.coverage.gemm_precision import HIGH_PRECISION as NO_RECIPE
from te_precision_callbacks.coverage.history import HighPrecisionFacts, apply_precision, kept_by_sections
from te_precision_callbacks.coverage.precision_audit import (
    MODIFIED,
    LayerGemm,
    LayerOperand,
    dtype_name,
    formats_of_layer,
    gemms_left_out,
    recipe_text,
)
from te_precision_callbacks.coverage.products import kind_of
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

NOT_REACHED = "the forward does not reach it"


@dataclass
class Ran:
    """The sizes of a step, from a dry run.

    Attributes:
        products: without the formats of Transformer Engine's layers.
        recipes: layer of Transformer Engine -> the recipe of its first call; None for high precision.
        tokens: layer -> the rows of its input in each call.
        left_out: GEMM that the backward skips -> the reason.
        enters_region: whether the model enters ``te.autocast`` itself, so that no region is assumed around it.
    """

    products: tuple[Product, ...] = ()
    recipes: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    left_out: dict[LayerGemm, str] = field(default_factory=dict)
    enters_region: bool = False


@dataclass(frozen=True)
class PlannedProducts:
    """The planned matrix products of a model.

    Attributes:
        coverage: in the order of the module tree, or of the dry run.
        not_counted: the paths of modules with a matrix and an unknown class.
        not_reached: the layers, and the paths of other modules with a matrix, that the dry run did not call.
        attention: the paths of outer attention modules; their products are not planned.
    """

    coverage: Coverage
    not_counted: tuple[str, ...] = ()
    not_reached: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()


def plan_products(
    model: Model,
    modules: Sequence[NamedModule],
    operations: Sequence[NamedOperation],
    acting: Mapping[str, Sequence[Acting]],
    recipe: Any,
    *,
    tokens: int,
    ran: Ran | None,
    unconverted: Mapping[str, str] | None,
) -> PlannedProducts:
    """Plan the products of a training step with ``tokens`` on this rank, or of a dry run.

    Args:
        acting: layer -> the sections of the config that act on it.
        recipe: one of Transformer Engine's recipes; None for high precision.
        unconverted: layer -> why the trainer's conversion to Transformer Engine skipped it.
    """
    return _ProductPlanner(model, modules, operations, acting, recipe, tokens, ran, unconverted or {}).plan()


class _ProductPlanner:
    """Plans the matrix products of a model's modules, from their sizes or from a dry run."""

    def __init__(
        self,
        model: Model,
        modules: Sequence[NamedModule],
        operations: Sequence[NamedOperation],
        acting: Mapping[str, Sequence[Acting]],
        recipe: Any,
        tokens: int,
        ran: Ran | None,
        unconverted: Mapping[str, str],
    ) -> None:
        self._model = model
        self._layers = {id(named.module): named.names for named in modules_with_gemms(modules, operations)}
        self._acting = acting
        self._recipe = recipe
        self._tokens = tokens
        self._unconverted = unconverted
        self._ran = ran
        self._recipes: Mapping[str, Any] = {}
        self._reached: set[str] = set()
        if ran is not None:
            self._recipes = ran.recipes
            self._reached = {product.layer for product in ran.products}
        self._quantizers = MadeQuantizers()
        self._formats: dict[tuple[object, ...], Mapping[LayerOperand, Format]] = {}
        self._products: list[Product] = []
        self._precision: list[GemmPrecision] = []
        self._facts: dict[str, HighPrecisionFacts] = {}
        self._trains = False

    def plan(self) -> PlannedProducts:
        below = {id(module): module for module in modules_of(self._model)}
        self._trains = any(parameter.requires_grad for parameter in parameters_of(self._model))
        others: dict[str, torch.nn.Module | None] = {}
        counted: set[int] = set()
        names = module_names(self._model)
        for key, path in names.items():
            module = below[key]
            layers = self._layers.get(key, ())
            if layers:
                self._plan_module(module, layers)
            if self._ran is None:
                is_known = bool(layers) or self._plan_torch(path, module)
            else:
                is_known = bool(layers) or any(f"{layer}.".startswith(f"{path}.") for layer in self._reached)
            if not is_known:
                others[path] = module
                continue
            for layer in layers:
                if self._ran is not None and layer not in self._reached:
                    others[layer] = None
            counted.update(map(id, module.parameters(recurse=False)))
        # A te.ops.Linear also holds the weight of the operation inside it.
        left = []
        for name, other in others.items():
            if other is None or any(p.ndim > 1 and id(p) not in counted for p in other.parameters(recurse=False)):
                left.append(name)
        if self._ran is not None:
            return PlannedProducts(Coverage(self._products_of(self._ran)), not_reached=tuple(left))
        products = apply_precision(self._products, self._facts, self._precision, self._unconverted)
        return PlannedProducts(Coverage(products), not_counted=tuple(left), attention=_attention(names, below))

    def _products_of(self, ran: Ran) -> list[Product]:
        seen = list(ran.products)
        for place, product in enumerate(seen):
            if product.runs == "seen":
                seen[place] = replace(product, runs="planned")
        products = list(apply_precision(seen, self._facts, self._precision, self._unconverted))
        have = {(product.layer, product.gemm) for product in products}
        for planned in self._products:
            layer = planned.layer
            gemm = planned.gemm
            if (layer, gemm) not in have:
                why = NOT_REACHED
                if layer in self._reached:
                    why = ran.left_out.get(LayerGemm(layer, cast(GemmName, gemm)), NO_BACKWARD)
                products.append(Product.left_out(layer, planned.family, gemm, why))
        return products

    # ------------------------------------------------------------------ Transformer Engine

    def _plan_module(self, module: Any, layers: Sequence[str]) -> None:
        row = te_modules.of(module)
        left_out = gemms_left_out(module, layers, input_needs_gradient=self._trains)
        made = self._quantizers.of(module, self._recipe_of(layers))
        dtype = next(p.dtype for p in module.parameters(recurse=False) if p.ndim > 1)
        groups = 1
        if row.groups:
            groups = len(layers)
        family: Family = "te"
        if row.is_operation:
            family = "te_ops"
        for layer, quantizers, sizes in zip(layers, made, row.features(module), strict=True):
            self._plan_layer(layer, family, quantizers, dtype, sizes, groups, left_out)

    def _recipe_of(self, layers: Sequence[str]) -> Any:
        return self._recipes.get(layers[0], self._recipe)

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
        in_force = self._recipe_of([layer])
        override = getattr(in_force, "backward_override", None)
        recipe = recipe_text(in_force)
        key = (*map(id, quantizers.values()), *quantizers, dtype, recipe, override)  # many layers have the same
        if key not in self._formats:
            self._formats[key] = formats_of_layer("", quantizers, dtype, recipe=recipe, backward_override=override)
        formats = self._formats[key]
        sections = self._acting.get(layer, ())
        kept = kept_by_sections(sections)
        modified: set[object] = set()
        for section in sections:
            for effect in section.effects.values():
                modified.update(effect.modifies)
        has_region = self._recipe is not None and not (self._ran is not None and self._ran.enters_region)
        excluded = has_region and self._recipes.get(layer, in_force) is None
        self._facts[layer] = HighPrecisionFacts(kept, override or "")
        rows = max(1, self._tokens // groups)
        macs = self._tokens * sizes[0] * sizes[1] // groups
        for gemm, (n, m, k) in gemm_sizes(rows, *sizes).items():
            not_run = left_out.get(LayerGemm(layer, gemm), "")
            if not_run:
                self._products.append(Product.left_out(layer, family, gemm, not_run))
                continue
            self._products.append(Product(layer, family, gemm, gemm != "fprop", n, m, k, 1, 1, macs, {}, "planned"))
            operands: dict[str, str] = {}
            for tensor in OPERANDS[gemm]:
                text = formats[LayerOperand("", gemm, tensor)].text
                if gemm in kept:
                    text = dtype_name(dtype)
                if (gemm, tensor) in modified:
                    text += MODIFIED
                operands[tensor] = text
            self._precision.append(
                GemmPrecision(layer, gemm, operands, seen=False, recipe=recipe or NO_RECIPE, excluded=excluded)
            )

    # ------------------------------------------------------------------ torch

    def _plan_torch(self, path: str, module: torch.nn.Module) -> bool:
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
                self._products.append(Product.left_out(path, "torch", gemm, FROZEN))
                continue
            operands: dict[str, str] = dict.fromkeys(OPERANDS[gemm], dtype_name(weight.dtype))
            backward = gemm != "fprop"
            ref = kind_of(module)
            self._products.append(
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


def gemm_sizes(tokens: int, in_features: int, out_features: int) -> Mapping[GemmName, tuple[int, int, int]]:
    return {
        "fprop": (tokens, out_features, in_features),
        "dgrad": (tokens, in_features, out_features),
        "wgrad": (out_features, in_features, tokens),
    }
