"""Problems of a plan: recipes that features need, and shapes that GEMMs do not support."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.vocabulary import GEMMS, RECIPES
from te_precision_callbacks.config.effects import NAMESPACE
from te_precision_callbacks.config.planning import Section
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.coverage.formats import recipe_text
from te_precision_callbacks.layers.naming import NamedModule, NamedOperation, modules_with_gemms
from te_precision_callbacks.maps.precision_map import join_names
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.gemm_shapes import refusals

FindingKind = Literal["config", "unmatched", "refused", "recipe", "shape", "high_precision", "rule", "contract", "same"]

_ANY_MULTIPLE = 1 << 10
"""A number of tokens that no GEMM refuses."""


@dataclass(frozen=True)
class PlanFinding:
    """A problem of a plan.

    Attributes:
        kind: ``config``, a problem of the config; ``unmatched``, a selector without a layer; ``refused``, layers that
            no feature can act on; ``recipe``, a recipe that does not fit; ``shape``, unsupported sizes of a GEMM;
            ``high_precision``, nothing runs in low precision; ``rule``, a finding of a rule; ``contract``, a contract
            that the plan breaks; ``same``, a difference from ``--same-as``.
        text: the message, with abbreviated names of layers.
        layers: the affected layers.
    """

    kind: FindingKind
    text: str
    layers: tuple[str, ...] = ()


def findings_of(kind: FindingKind, texts: Iterable[str]) -> list[PlanFinding]:
    return [PlanFinding(kind, text) for text in texts]


def find_recipe_problems(recipe: Any, acting: Mapping[str, Sequence[Section]]) -> Iterator[PlanFinding]:
    name = recipe_text(recipe)
    needing = []
    for layer, sections in acting.items():
        for section in sections:
            for feature, effect in section.effects.items():
                if effect.needs_recipe not in ("", name):
                    needing.append(((section.place(NAMESPACE, feature), feature, effect.needs_recipe), layer))
    for (place, feature, needed), names in group_by_key(needing).items():
        text = f"{place}: {feature} on {join_names(names)} needs the recipe {needed}, and fails with {name or 'none'}."
        yield PlanFinding("recipe", text, tuple(names))


def find_refused_options(recipe: Any, modules: Iterable[NamedModule]) -> Iterator[PlanFinding]:
    """Find layers that raise in their first forward with delayed scaling.

    Read from Transformer Engine 2.20.2: ``_linear_forward_impl`` of ``pytorch/module/linear.py``, and
    ``grouped_linear.py``.
    """
    if recipe is None or not recipe.delayed():
        return
    names: list[str] = []
    for named in modules:
        saves_input = getattr(named.module, "save_original_input", False)
        if saves_input and any(weight.requires_grad and weight.ndim > 1 for weight in named.module.parameters()):
            names += named.names
    if names:
        text = (
            f"{join_names(names)}: Transformer Engine refuses save_original_input=True with delayed scaling. Set it to"
            " False, or use Float8CurrentScaling."
        )
        yield PlanFinding("recipe", text, tuple(names))


def find_shape_problems(
    recipe: Any,
    modules: Sequence[NamedModule],
    operations: Sequence[NamedOperation],
    coverage: Coverage,
    *,
    tokens: int | None,
) -> Iterator[PlanFinding]:
    """Find sizes and dtypes that GEMMs in low precision do not support.

    Args:
        tokens: the tokens of a step; None skips checks of tokens. They are also skipped for experts, since a router
            decides their share of the tokens.
    """
    from te_precision_callbacks.te.recipes import compute_capability

    name = recipe_text(recipe)
    if name not in RECIPES:
        return
    low = group_by_key((product.layer, product.gemm) for product in coverage if product.is_low)
    refused: list[tuple[tuple[str, ...], str]] = []
    by_hadamard: list[str] = []
    capability = compute_capability()
    for named in modules_with_gemms(modules, operations):
        row = te_modules.of(named.module)
        dtype = next(p.dtype for p in named.module.parameters(recurse=False) if p.ndim > 1)
        checked_tokens = _ANY_MULTIPLE if tokens is None or row.groups else tokens
        for layer, (in_features, out_features) in zip(named.names, row.features(named.module), strict=True):
            gemms = tuple(gemm for gemm in GEMMS if gemm in low.get(layer, ()))
            sizes = {"tokens": checked_tokens, "in_features": in_features, "out_features": out_features}
            problems = refusals(
                name, capability, **sizes, gemms=gemms, result_bytes=dtype.itemsize, asserted=row.checks_operands
            )
            if problems:
                refused.append((tuple(map(str, problems)), layer))
            if name == "nvfp4" and "wgrad" in gemms and dtype != torch.bfloat16:
                by_hadamard.append(layer)
    for texts, names in group_by_key(refused).items():
        yield PlanFinding("shape", f"{join_names(names)}: {'; '.join(texts)}.", tuple(names))
    if by_hadamard and not recipe.disable_rht:
        # common/hadamard_transform/*.cu of Transformer Engine 2.20.2
        text = (
            f"NVFP4's random Hadamard transform needs bfloat16, but the weights of {join_names(by_hadamard)} have"
            " another dtype. Convert them to bfloat16, or set disable_rht=True in the recipe."
        )
        yield PlanFinding("recipe", text, tuple(by_hadamard))
