"""Prints a plan as a table, or as an object for JSON. Layers with the same plan share a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer
from rich.text import Text

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import first_of, many
from te_precision_callbacks.base.vocabulary import GEMMS, PRECISIONS, GemmName
from te_precision_callbacks.check.accelerate_conversion import ConversionResult
from te_precision_callbacks.check.checked_model import ActingFeature, CheckedModel
from te_precision_callbacks.coverage.coverage import Coverage, Product, Reason, percent
from te_precision_callbacks.coverage.gemm_precision import format_operands
from te_precision_callbacks.layers.folding import fold_names
from te_precision_callbacks.speed.memory import show as show_memory

_INDENT = 2
_MOST_NAMES = 8
_MOST_ROWS = 60
_WITHOUT_WEIGHT = ("qk", "pv", "other")


@dataclass(frozen=True)
class PlannedLayers:
    """Layers with the same plan.

    Attributes:
        gemms: GEMM, ``lookup``, ``qk``, ``pv`` or ``other`` -> its product in the first layer. ``backward`` is appended
            to the last three for products of the backward.
        macs: the multiply-adds of all layers in a step.
    """

    layers: tuple[str, ...]
    gemms: Mapping[str, Product]
    features: tuple[ActingFeature, ...]
    macs: int

    @property
    def family(self) -> str:
        return next(iter(self.gemms.values())).family

    @property
    def why(self) -> str:
        """The reasons for high precision, except features; with the GEMMs, unless a reason holds for all."""
        by_reason: dict[str, list[str]] = {}
        running = []
        for gemm, product in self.gemms.items():
            if product.operands:
                running.append(gemm)
            if product.reason not in (None, Reason.SECTION):
                by_reason.setdefault(product.reason_ref or product.why, []).append(gemm)
        texts = []
        for why, gemms in by_reason.items():
            of_gemms = "" if gemms == running else f"{', '.join(gemms)}: "
            texts.append(f"{of_gemms}{why}")
        return "; ".join(texts)


def rows(checked: CheckedModel) -> list[PlannedLayers]:
    by_layer: dict[str, list[Product]] = {}
    planned: dict[str, list[object]] = {}
    for p in checked.coverage:
        by_layer.setdefault(p.layer, []).append(p)
        planned.setdefault(p.layer, []).append(
            (p.family, _name(p), tuple(p.operands.items()), p.not_run, p.reason, p.reason_ref)
        )
    alike: dict[object, list[str]] = {}
    for layer, rows_of_layer in planned.items():
        alike.setdefault((tuple(rows_of_layer), checked.features.get(layer, ())), []).append(layer)
    planned_layers = []
    for layers in alike.values():
        gemms = {_name(product): product for product in sorted(by_layer[layers[0]], key=_order)}
        macs = sum(Coverage(by_layer[layer]).macs() for layer in layers)
        planned_layers.append(PlannedLayers(tuple(layers), gemms, checked.features.get(layers[0], ()), macs))
    return planned_layers


def _name(product: Product) -> str:
    if product.backward and product.gemm not in GEMMS:
        return f"{product.gemm} backward"
    return product.gemm


def _order(product: Product) -> int:
    if product.gemm in GEMMS:
        return GEMMS.index(product.gemm)
    return len(GEMMS)


def show(checked: CheckedModel, model: str, device: str, batch: str | None, converted: ConversionResult | None) -> None:
    subject = model
    if converted is not None:
        subject += ", converted by Accelerate"
    terminal.show_text(
        f"{subject}: {checked.layers} Transformer Engine layers, on the {device} device. {_conditions(checked, batch)}"
    )
    planned = rows(checked)
    table = terminal.table("layer", "fprop", "dgrad", "wgrad", "multiply-adds", "reason, features")
    for row in planned[:_MOST_ROWS]:
        table.add_row(*_cells(row, checked.coverage.macs()))
    terminal.show(table, optional=("multiply-adds",))
    if planned[_MOST_ROWS:]:
        layers = sum(len(row.layers) for row in planned[_MOST_ROWS:])
        terminal.show_text(f"and {len(planned) - _MOST_ROWS} more rows with {layers} layers; --json lists all.")
    terminal.show_text(_coverage(checked))
    for steps, coverage in checked.spans.items():
        terminal.show_text(f"In {steps}: {coverage}")
    if checked.not_reached:
        names = ", ".join(fold_names(checked.not_reached, most=_MOST_NAMES))
        terminal.show_text(f"Not reached by the forward: {names}.")
    if checked.memory is not None:
        typer.echo()
        show_memory(checked.memory)
    terminal.show_notes(checked.notes)
    if checked.findings:
        typer.echo(f"\n{many(len(checked.findings), 'finding')}")
    for finding in checked.findings:
        typer.echo()
        terminal.show_text(finding.text, _INDENT, hanging=_INDENT)


def _coverage(checked: CheckedModel) -> str:
    if not checked.coverage.macs():
        return "No matrix product is planned."
    left = []
    if checked.attention:
        left.append("attention")
    if checked.not_counted:
        left.append(f"{many(len(checked.not_counted), 'module')} that need a batch")
    if left:
        return f"Without {' and '.join(left)}: {checked.coverage}"
    return str(checked.coverage)


def _conditions(checked: CheckedModel, batch: str | None) -> str:
    from transformer_engine.pytorch.utils import get_device_compute_capability

    capability = "{}.{}".format(*get_device_compute_capability())
    of = "multiply-adds per token"
    if checked.tokens is not None:
        of = f"{checked.tokens} tokens a step"
    elif batch is not None:
        of = f"the batch of {batch}"
    return f"Recipe: {checked.recipe or 'none'}, compute capability {capability}, {of}."


def _cells(row: PlannedLayers, whole: int) -> list[Text]:
    macs = ""
    if row.macs:
        macs = f"{row.macs:.3g} ({percent(row.macs / whole)} %)"
    beside = [row.why, *map(str, row.features)]
    if row.family == "lookup":
        beside = [row.family, *beside]
    return [
        terminal.cell_lines(first_of(fold_names(row.layers), _MOST_NAMES)),
        *(terminal.cell(_formats(row, gemm)) for gemm in GEMMS),
        terminal.cell(macs),
        terminal.cell_lines(filter(None, beside)),
    ]


def _formats(row: PlannedLayers, gemm: GemmName) -> str:
    """The formats of a GEMM. Products without a weight are in the column ``fprop``, their backward in ``dgrad``."""
    if gemm in row.gemms:
        return _text(row.gemms[gemm])
    suffix = {"fprop": "", "dgrad": " backward"}.get(gemm)
    texts = {}
    for name in _WITHOUT_WEIGHT:
        product = row.gemms.get(f"{name}{suffix}")
        if product is not None:
            texts[name] = _text(product)
    if len(set(texts.values())) == 1:
        return f"{', '.join(texts)}: {next(iter(texts.values()))}"
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def _text(product: Product) -> str:
    if product.not_run:
        return f"not run: {product.not_run}"
    return format_operands(product.operands)


def _shares(coverage: Coverage) -> dict[str, float]:
    """Return precision -> share; empty if products are not counted."""
    if coverage.has_unknown:
        return {}
    return {name: coverage.share(name) for name in PRECISIONS if coverage.macs(name)}


def _row_as_json(row: PlannedLayers) -> dict[str, object]:
    return {
        "layers": row.layers,
        "family": row.family,
        "macs": row.macs,
        "gemms": {name: _gemm_as_json(product) for name, product in row.gemms.items()},
        "features": [feature._asdict() for feature in row.features],
    }


def _gemm_as_json(product: Product) -> dict[str, object]:
    return {
        "operands": product.operands,
        "precision": product.precision,
        "not_run": product.not_run,
        "reason": getattr(product.reason, "value", ""),
        "reason_ref": product.reason_ref,
    }


def as_json(
    checked: CheckedModel, model: str, device: str, batch: str | None, converted: ConversionResult | None
) -> dict[str, Any]:
    coverage = checked.coverage
    unconverted = converted and converted.left_out
    return {
        "model": model,
        "convert": converted and "accelerate",
        "unconverted": unconverted or {},
        "device": device,
        "recipe": checked.recipe or "none",
        "tokens": checked.tokens,
        "batch": batch,
        "macs": coverage.macs(),
        "share": _shares(coverage),
        "spans": {steps: _shares(of_span) for steps, of_span in checked.spans.items()},
        "plan": list(map(_row_as_json, rows(checked))),
        "not_counted": checked.not_counted,
        "attention": checked.attention,
        "not_reached": checked.not_reached,
        "findings": checked.findings,
        "notes": checked.notes,
        "memory": checked.memory,
    }
