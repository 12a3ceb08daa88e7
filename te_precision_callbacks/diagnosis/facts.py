"""The facts about a run that rules use: its layers, their precision, and why a product is not in low precision.

They are built from rows of the record's tables (:mod:`te_precision_callbacks.runs.tables`). A live run has the same
rows, so live and recorded runs are checked alike.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from te_precision_callbacks.base.vocabulary import OPERANDS
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.coverage.gemm_precision import NO_BACKWARD
from te_precision_callbacks.layers.folding import block_of, form_of

Row = Mapping[str, Any]


_UNSEEN = 1 << 40

OF_SPANS = ("layers", "gemms", "operands")


@dataclass(frozen=True)
class LayerFacts:
    """A layer.

    Attributes:
        module_class: the class of its module; ``attention`` for attention.
        forward, backward: the places in the order of execution; None if it has not run.
        formats: tensor -> its format as an operand, such as ``FP8 E4M3``; without unknown ones.
        recipe: empty without one.
        weight_dtype: the dtypes of its weights; empty if unknown.
        shape: m and k of its forward product (outputs and inputs); empty if unknown.
        reasons: GEMM in high precision -> the name of the reason, and details.
        low: the GEMMs in low precision.
        never: GEMM -> why it did not run.
        calls: how often its forward product runs in a step; 0 if unknown.
        since: the first iteration with the present precision of its forward product.
        refused: why it, or some of its forwards, are not observed; empty if they are.
        is_quantized_only: whether its weights exist in quantized form only (``te.quantized_model_init``).
    """

    name: str
    module_class: str = ""
    forward: int | None = None
    backward: int | None = None
    formats: Mapping[str, str] = field(default_factory=dict)
    recipe: str = ""
    weight_dtype: str = ""
    shape: tuple[int, ...] = ()
    reasons: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    low: frozenset[str] = frozenset()
    never: Mapping[str, str] = field(default_factory=dict)
    calls: int = 0
    since: int = 0
    is_of_te: bool = False
    refused: str = ""
    is_quantized_only: bool = False

    @property
    def is_explicit(self) -> bool:
        reason, exactly = self.reasons.get("fprop", ("", ""))
        return reason == "NO_AUTOCAST" and "enabled=False" in exactly

    @property
    def is_frozen(self) -> bool:
        return self.never.get("wgrad", NO_BACKWARD) != NO_BACKWARD

    @property
    def has_run(self) -> bool:
        return bool(self.low or self.reasons)

    @property
    def is_unobserved(self) -> bool:
        return bool(self.refused) and not self.has_run

    @property
    def has_no_gradient(self) -> bool:
        """True if neither its input nor its weight needs a gradient."""
        return self.is_frozen and self.never.get("dgrad", NO_BACKWARD) != NO_BACKWARD

    @property
    def lacks_backward(self) -> bool:
        return self.never.get("wgrad") == NO_BACKWARD


@dataclass(frozen=True)
class Settings:
    """Settings of a whole run; ``settings`` of its ``run.json``.

    Attributes:
        loss_is_scaled: whether a GradScaler has stepped an optimizer of the model.
        adds_eps: whether an optimizer of the model adds ``eps`` as Adam does; None if unknown.
        float16: whether a layer has products in float16.
        ranks: the number of ranks that reduce their statistics together.
        alike: whether these ranks have the same layers.
        ignored: arguments of recipes without effect, rows of
            :func:`~te_precision_callbacks.instrumentation.recipe_arguments.ignored_arguments`.
        margins: margins of delayed scaling that are not 0.
        amaxes: the ranks over which amaxes are reduced, rows of
            :func:`~te_precision_callbacks.instrumentation.recipe_arguments.amax_reductions`.
        unmeasured: why LogGemmError has measured nothing; empty otherwise.
        loss_is_filtered: whether the trainer leaves inf and nan out of the logged loss.
        expects_low: why low precision is expected, such as "Accelerate's mixed_precision is 'fp8'"; empty otherwise.
    """

    loss_is_scaled: bool = False
    adds_eps: bool | None = None
    float16: bool = False
    ranks: int = 1
    alike: bool = True
    ignored: Sequence[Row] = ()
    margins: Sequence[float] = ()
    amaxes: Sequence[Row] = ()
    unmeasured: str = ""
    expects_low: str = ""
    loss_is_filtered: bool = False

    @classmethod
    def from_run(cls, run: Mapping[str, Any]) -> Settings | None:
        """Read ``settings`` of a ``run.json``; None without settings."""
        settings = run.get("settings")
        if settings is None:
            return None
        return cls(**{name: settings[name] for name in cls.__dataclass_fields__.keys() & settings.keys()})


@dataclass(frozen=True)
class Facts:
    """The facts of an iteration.

    Attributes:
        layers: name -> layer; in the order of the model.
        states: subject -> its types, as in the table of states.
        micro_batches: the maximum number of calls of a product in a step.
        settings: settings of the whole run; None if unknown.
    """

    layers: Mapping[str, LayerFacts] = field(default_factory=dict)
    states: Mapping[str, frozenset[str]] = field(default_factory=dict)
    micro_batches: int = 1
    settings: Settings | None = None

    @classmethod
    def from_rows(
        cls,
        layers: Iterable[Row],
        gemms: Sequence[Row],
        operands: Iterable[Row],
        states: Iterable[Row] = (),
        settings: Settings | None = None,
    ) -> Facts:
        fields: dict[str, dict[str, Any]] = {}
        micro_batches = 1

        def of(name: str) -> dict[str, Any]:
            return fields.setdefault(name, {"name": name, "low": set(), "formats": {}, "reasons": {}, "never": {}})

        for row in layers:
            known = of(row["layer"])
            known |= {"forward": row.get("exec_fwd"), "backward": row.get("exec_bwd")}
            known |= {"module_class": row.get("class") or "", "weight_dtype": row.get("weight_dtype") or ""}
            known["refused"] = row.get("refused") or ""
            known["is_quantized_only"] = row.get("primary_weights") == "quantized"
        for row in gemms:
            known = of(row["layer"])
            gemm = row["gemm"]
            if gemm == "fprop":
                known |= {"shape": (row["m"], row["k"]), "since": row.get("since") or 0}
                known["calls"] = row.get("calls") or 0
            known["recipe"] = row["recipe"] or known.get("recipe", "")
            known["module_class"] = known.get("module_class") or row["family"] or ""
            known["is_of_te"] = row["family"] in ("te", "te_ops")
            if known["is_of_te"] and gemm == "fprop":
                micro_batches = max(micro_batches, row["calls"] or 0)
            if row["family"] == "te_ops":  # counted by coverage, and without statistics
                known["refused"] = known.get("refused") or "an operation of te.ops"
            if row["runs"] == "never":
                known["never"][gemm] = row["not_run"] or ""
            elif row["runs"] in ("seen", "planned") and row["reason"]:
                known["reasons"][gemm] = row["reason"], row["reason_ref"] or ""
            elif row["runs"] in ("seen", "planned") and row["macs"]:
                known["low"].add(gemm)
        for row in operands:
            if row["format"] and row["layer"] in fields:
                fields[row["layer"]]["formats"].setdefault(row["tensor"], row["format"])
        kept: dict[str, set[str]] = defaultdict(set)
        for row in states:
            kept[row["subject"]].add(row["dtype"])
        return cls(
            {name: LayerFacts(**{**known, "low": frozenset(known["low"])}) for name, known in fields.items()},
            {subject: frozenset(types) for subject, types in kept.items()},
            micro_batches,
            settings,
        )

    @classmethod
    def from_tables(cls, tables: Mapping[str, Iterable[Row]], iteration: int, settings: Settings | None) -> Facts:
        layers, gemms, operands = (_rows_at(tables[name], iteration) for name in OF_SPANS)
        return cls.from_rows(layers, gemms, operands, tables["states"], settings)

    @classmethod
    def from_plan(cls, products: Iterable[Product], recipe: str, ignored: Sequence[Row]) -> Facts:
        gemms: list[Row] = []
        operands: list[Row] = []
        for product in products:
            if not product.backward or product.family in ("te", "te_ops"):
                reason = None if product.reason is None else product.reason.name
                gemms.append({**vars(product), "reason": reason, "recipe": recipe if product.is_low else ""})
                for tensor, text in product.operands.items():
                    row: Row = {"layer": product.layer, "tensor": tensor, "format": text}
                    operands.append(row)
        return cls.from_rows((), gemms, operands, settings=Settings(ignored=ignored))

    def order_key(self, layer: str, tensor: str) -> tuple[int, int]:
        """A key that orders the tensors of a step by execution: the forward's first, then the backward's.

        A module with several layers has the place of the first one.
        """
        if layer in self.layers:
            of_layers = [self.layers[layer]]
        else:
            of_layers = [known for name, known in self.layers.items() if name.startswith(f"{layer}.")]
        backward = tensor in ("gradient", "dgrad", "wgrad")
        first = _UNSEEN
        for known in of_layers:
            place = known.backward if backward else known.forward
            if place is not None:
                first = min(first, place)
        if first == _UNSEEN:
            first += self._places.get(layer, _UNSEEN)
        return int(backward), first

    def sort_by_execution(self, layers: Iterable[str], tensor: str) -> list[str]:
        return sorted(layers, key=lambda layer: self.order_key(layer, tensor))

    def format_of(self, layer: str, tensor: str) -> str:
        known = self.layers.get(layer)
        if known is None:
            return ""
        return known.formats.get(tensor, "")

    def quantizes(self, layer: str, tensor: str) -> bool:
        """Return whether a product that reads a tensor of a layer runs in low precision; True if unknown."""
        known = self.layers.get(layer)
        if known is None:
            return True
        readers = {gemm for gemm, operands in OPERANDS.items() if tensor in operands}
        low = readers & known.low
        return bool(low) or not readers & known.reasons.keys()

    def recipe_of(self, layer: str) -> str:
        known = self.layers.get(layer)
        if known is None:
            return ""
        return known.recipe

    @property
    def has_run(self) -> bool:
        """True after a forward of a layer, or a step of an optimizer."""
        layers = self.layers.values()
        stepped = self.settings is not None and (self.settings.loss_is_scaled or self.settings.adds_eps is not None)
        return any(stepped or layer.has_run or layer.forward is not None for layer in layers)

    @functools.cached_property
    def layers_that_ran(self) -> Sequence[LayerFacts]:
        return [layer for layer in self.layers.values() if layer.has_run]

    @property
    def te_layers_that_ran(self) -> Sequence[LayerFacts]:
        return [layer for layer in self.layers_that_ran if layer.is_of_te]

    @property
    def has_low(self) -> bool:
        return any(layer.low for layer in self.layers_that_ran)

    @property
    def unobserved(self) -> LayerFacts | None:
        """The first layer that is not observed."""
        return next((layer for layer in self.layers.values() if layer.is_unobserved), None)

    @property
    def knows_recipes(self) -> bool:
        """True if the recipes are known, as in each session, but not in a plain log."""
        shown = any(layer.has_run or layer.recipe for layer in self.layers.values())
        return shown or bool(self.layers and self.settings is not None)

    @property
    def has_delayed_scaling(self) -> bool:
        return any(layer.recipe == "fp8_delayed_scaling" for layer in self.layers.values())

    @property
    def heads(self) -> list[LayerFacts]:
        """The layers that may be the model's head: the last of Transformer Engine, and the last of torch."""
        last = None
        last_of_torch = None
        for layer in self.layers.values():
            if not (layer.shape and layer.calls):
                continue
            if layer.forward is None:
                if not layer.is_of_te:
                    last_of_torch = layer
            elif last is None or layer.forward > (last.forward or 0):
                last = layer
        return list(filter(None, (last, last_of_torch)))

    @functools.cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self.layers)}

    def kind_of(self, layer: str) -> str:
        """Return a key that is equal for layers with similar names, class and shape, in blocks with the same parts."""
        known = self.layers.get(layer)
        form = form_of(layer)
        if known is None:
            return form
        parts = "".join(sorted(self._parts_of_blocks[block_of(layer)]))
        return f"{form}|{known.module_class}|{known.shape}|{parts}"

    @functools.cached_property
    def _parts_of_blocks(self) -> Mapping[str, set[str]]:
        """Block, such as an encoder's or a decoder's -> the names of its layers without numbers."""
        parts: dict[str, set[str]] = {}
        for layer in self.layers:
            parts.setdefault(block_of(layer), set()).add(form_of(layer))
        return parts


def _rows_at(rows: Iterable[Row], iteration: int) -> list[Row]:
    current = []
    for row in rows:
        until = row.get("until")
        if (row["since"] or 0) <= iteration and (until is None or iteration <= until):
            current.append(row)
    return current
