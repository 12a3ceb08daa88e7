"""Prints a plan as a table, or as an object for JSON. Layers with the same plan share a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import first_of, group_by_key, many
from te_precision_callbacks.base.vocabulary import GEMMS, PRECISIONS
from te_precision_callbacks.check.checked_model import ActingFeature, CheckedModel
from te_precision_callbacks.coverage.coverage import Coverage, Product, Reason, percent
from te_precision_callbacks.coverage.gemm_precision import format_operands
from te_precision_callbacks.layers.folding import fold_names

_INDENT = 2
_MOST_NAMES = 8
_ONE_STEP = "One step shows it: te-precision run SCRIPT, with max_steps=1 in the trainer and require= in the callback."


@dataclass(frozen=True)
class PlannedLayers:
    """Layers with the same plan.

    Attributes:
        gemms: GEMM -> its product in the first layer.
        macs: the multiply-adds of all layers in a step.
    """

    layers: tuple[str, ...]
    gemms: Mapping[str, Product]
    features: tuple[ActingFeature, ...]
    macs: int

    @property
    def why(self) -> str:
        """The reasons for high precision, except features; with the GEMMs, unless a reason holds for all."""
        running = [gemm for gemm, product in self.gemms.items() if product.operands]
        by_reason = group_by_key(
            (product.reason_ref or product.why, gemm)
            for gemm, product in self.gemms.items()
            if product.reason not in (None, Reason.SECTION)
        )
        texts = []
        for why, gemms in by_reason.items():
            gemm_names = "" if gemms == running else f"{', '.join(gemms)}: "
            texts.append(f"{gemm_names}{why}")
        return "; ".join(texts)


def rows(checked: CheckedModel) -> list[PlannedLayers]:
    by_layer = group_by_key((product.layer, product) for product in checked.coverage)
    groups = group_by_key(
        ((tuple(map(_plan_of, products)), checked.features.get(layer, ())), layer)
        for layer, products in by_layer.items()
    )
    planned_layers = []
    for (_, features), layers in groups.items():
        gemms: dict[str, Product] = {product.gemm: product for product in by_layer[layers[0]]}
        macs = sum(Coverage(by_layer[layer]).macs() for layer in layers)
        planned_layers.append(PlannedLayers(tuple(layers), gemms, features, macs))
    return planned_layers


def _plan_of(p: Product) -> tuple[object, ...]:
    return p.family, p.gemm, tuple(p.operands.items()), p.not_run, p.reason, p.reason_ref


def show(checked: CheckedModel, model: str, device: str) -> None:
    from te_precision_callbacks.te.recipes import compute_capability

    counted = "multiply-adds per token" if checked.tokens is None else f"{checked.tokens} tokens a step"
    terminal.show_text(
        f"{model}: {checked.layers} Transformer Engine layers, on the {device} device."
        f" Recipe: {checked.recipe or 'none'}, compute capability {'{}.{}'.format(*compute_capability())}, {counted}."
    )
    table = terminal.table("layer", "fprop", "dgrad", "wgrad", "multiply-adds", "reason, features")
    whole = checked.coverage.macs()
    for row in rows(checked):
        table.add_row(
            terminal.cell_lines(first_of(fold_names(row.layers), _MOST_NAMES)),
            *(terminal.cell(_text(row.gemms.get(gemm))) for gemm in GEMMS),
            terminal.cell(f"{row.macs:.3g} ({percent(row.macs / whole)} %)" if row.macs else ""),
            terminal.cell_lines(filter(None, [row.why, *map(str, row.features)])),
        )
    terminal.show(table, optional=("multiply-adds",))
    terminal.show_text(_coverage(checked))
    for steps, coverage in checked.spans.items():
        terminal.show_text(f"In {steps}: {coverage}")
    typer.echo("\nNot known before the run:")
    for text in checked.unknown:
        terminal.show_text(f"{text}.", _INDENT, hanging=_INDENT)
    terminal.show_text(_ONE_STEP)
    terminal.show_notes(checked.notes)
    if checked.findings:
        typer.echo(f"\n{many(len(checked.findings), 'finding')}")
    for finding in checked.findings:
        typer.echo()
        terminal.show_text(finding.text, _INDENT, hanging=_INDENT)


def _coverage(checked: CheckedModel) -> str:
    if not checked.coverage.macs():
        return "No matrix product is planned."
    uncounted = []
    if checked.attention:
        uncounted.append("attention")
    if checked.not_counted:
        uncounted.append(f"{many(len(checked.not_counted), 'module')} with unknown products")
    if uncounted:
        return f"Without {' and '.join(uncounted)}: {checked.coverage}"
    return str(checked.coverage)


def _text(product: Product | None) -> str:
    if product is None:
        return ""
    if product.not_run:
        return f"not run: {product.not_run}"
    return format_operands(product.operands)


def _shares(coverage: Coverage) -> dict[str, float]:
    return {name: coverage.share(name) for name in PRECISIONS if coverage.macs(name)}


def _gemm_as_json(product: Product) -> dict[str, object]:
    return {
        "operands": product.operands,
        "precision": product.precision,
        "not_run": product.not_run,
        "reason": getattr(product.reason, "value", ""),
        "reason_ref": product.reason_ref,
    }


def as_json(checked: CheckedModel, model: str, device: str) -> dict[str, Any]:
    coverage = checked.coverage
    return {
        "model": model,
        "device": device,
        "recipe": checked.recipe or "none",
        "tokens": checked.tokens,
        "macs": coverage.macs(),
        "share": _shares(coverage),
        "spans": {steps: _shares(span_coverage) for steps, span_coverage in checked.spans.items()},
        "plan": [
            {
                "layers": row.layers,
                "family": next(iter(row.gemms.values())).family,
                "macs": row.macs,
                "gemms": {name: _gemm_as_json(product) for name, product in row.gemms.items()},
                "features": [feature._asdict() for feature in row.features],
            }
            for row in rows(checked)
        ],
        "unknown": checked.unknown,
        "undecided": checked.undecided,
        "not_counted": checked.not_counted,
        "attention": checked.attention,
        "findings": checked.findings,
        "notes": checked.notes,
    }
