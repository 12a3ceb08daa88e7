"""The facts about a run that rules use: its layers, their precision, and why a product is not in low precision.

They are built from rows of the record's tables (:mod:`te_precision_callbacks.runs.tables`). A live run has the same
rows, so live and recorded runs are checked alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.vocabulary import OPERANDS
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.folding import block_of, form_of

Row = Mapping[str, Any]


_UNSEEN = 1 << 40

OF_SPANS = ("layers", "gemms", "operands")


@dataclass
class LayerFacts:
    """A layer.

    Attributes:
        place: in the order of the model.
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
    place: int = _UNSEEN
    module_class: str = ""
    forward: int | None = None
    backward: int | None = None
    formats: dict[str, str] = field(default_factory=dict)
    recipe: str = ""
    weight_dtype: str = ""
    shape: tuple[int, ...] = ()
    reasons: dict[str, tuple[str, str]] = field(default_factory=dict)
    low: set[str] = field(default_factory=set)
    never: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    since: int = 0
    is_of_te: bool = False
    refused: str = ""
    is_quantized_only: bool = False

    @property
    def reason(self) -> tuple[str, str]:
        """The name of the reason for a forward product in high precision, and details; empty without one."""
        return self.reasons.get("fprop", ("", ""))

    @property
    def is_explicit(self) -> bool:
        return self.reason[0] == "NO_AUTOCAST" and "enabled=False" in self.reason[1]

    @property
    def has_run(self) -> bool:
        return bool(self.low or self.reasons)

    def format_of(self, tensor: str) -> str:
        return self.formats.get(tensor, "")

    def quantizes(self, tensor: str) -> bool:
        """Return whether a product that reads a tensor runs in low precision; True if unknown."""
        readers = {gemm for gemm, operands in OPERANDS.items() if tensor in operands}
        return not readers.isdisjoint(self.low) or readers.isdisjoint(self.reasons)


@dataclass(frozen=True)
class Settings:
    """Settings of a whole run; ``settings`` of its ``run.json``.

    Attributes:
        are_known: False for :data:`UNKNOWN`, the settings of a plain log.
        loss_is_scaled: whether a GradScaler has stepped an optimizer of the model.
        takes_turns: whether optimizers step in turn, each after its own backward, as in a GAN.
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

    are_known: bool = True
    loss_is_scaled: bool = False
    takes_turns: bool = False
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
    def from_run(cls, run: Mapping[str, Any]) -> Settings:
        """Read ``settings`` of a ``run.json``."""
        settings = run.get("settings")
        if settings is None:
            return UNKNOWN
        return cls(**{name: settings[name] for name in cls.__dataclass_fields__.keys() & settings.keys()})


UNKNOWN = Settings(are_known=False)


@dataclass(frozen=True)
class Facts:
    """The facts of an iteration; iterates over the layers.

    Attributes:
        layers: name -> layer; in the order of the model.
        states: subject -> its types, as in the table of states.
        settings: settings of the whole run.
    """

    layers: dict[str, LayerFacts] = field(default_factory=dict)
    states: dict[str, set[str]] = field(default_factory=dict)
    settings: Settings = UNKNOWN

    @classmethod
    def from_rows(
        cls,
        layers: Iterable[Row],
        gemms: Iterable[Row],
        operands: Iterable[Row],
        states: Iterable[Row] = (),
        settings: Settings = UNKNOWN,
    ) -> Facts:
        facts = cls(settings=settings)
        for row in layers:
            layer = facts._add(row)
            layer.forward = row.get("exec_fwd")
            layer.backward = row.get("exec_bwd")
            layer.module_class = row.get("class") or ""
            layer.weight_dtype = row.get("weight_dtype") or ""
            layer.refused = row.get("refused") or ""
            layer.is_quantized_only = row.get("primary_weights") == "quantized"
        for row in gemms:
            layer = facts._add(row)
            gemm = row["gemm"]
            if gemm == "fprop":
                layer.shape = row["m"], row["k"]
                layer.since = row.get("since") or 0
                layer.calls = row.get("calls") or 0
            layer.recipe = row["recipe"] or layer.recipe
            layer.module_class = layer.module_class or row["family"] or ""
            layer.is_of_te = row["family"] in ("te", "te_ops")
            if row["family"] == "te_ops":  # counted by coverage, and without statistics
                layer.refused = layer.refused or "an operation of te.ops"
            runs = row["runs"] in ("seen", "planned")
            if row["runs"] == "never":
                layer.never[gemm] = row["not_run"] or ""
            elif runs and row["reason"]:
                layer.reasons[gemm] = row["reason"], row["reason_ref"] or ""
            elif runs and row["macs"]:
                layer.low.add(gemm)
        for row in operands:
            if row["format"] and row["layer"] in facts.layers:
                facts.layers[row["layer"]].formats.setdefault(row["tensor"], row["format"])
        for row in states:
            facts.states.setdefault(row["subject"], set()).add(row["dtype"])
        return facts

    def _add(self, row: Row) -> LayerFacts:
        name = row["layer"]
        return self.layers.setdefault(name, LayerFacts(name, len(self.layers)))

    @classmethod
    def from_tables(cls, tables: Mapping[str, Iterable[Row]], iteration: int, settings: Settings) -> Facts:
        layers, gemms, operands = (_rows_at(tables[name], iteration) for name in OF_SPANS)
        return cls.from_rows(layers, gemms, operands, tables["states"], settings)

    @classmethod
    def from_plan(cls, products: Iterable[Product], recipe: str, ignored: Sequence[Row]) -> Facts:
        gemms: list[Row] = []
        operands: list[Row] = []
        for product in products:
            if not product.backward or product.family in ("te", "te_ops"):
                reason = product.reason and product.reason.name
                gemms.append({**vars(product), "reason": reason, "recipe": recipe if product.is_low else ""})
                for tensor, text in product.operands.items():
                    operands.append({"layer": product.layer, "tensor": tensor, "format": text})
        return cls.from_rows((), gemms, operands, settings=Settings(ignored=ignored))

    def __iter__(self) -> Iterator[LayerFacts]:
        return iter(self.layers.values())

    def order_key(self, name: str, tensor: str) -> tuple[int, int]:
        """A key that orders the tensors of a step by execution: the forward's first, then the backward's.

        A module with several layers has the place of the first one.
        """
        layer = self.layer(name)
        layers = [layer]
        if name not in self.layers:
            layers = [part for inner, part in self.layers.items() if inner.startswith(f"{name}.")]
        in_backward = tensor in ("gradient", "dgrad", "wgrad")
        orders = [part.backward if in_backward else part.forward for part in layers]
        known_orders = [order for order in orders if order is not None]
        return int(in_backward), min(known_orders, default=_UNSEEN + layer.place)

    def layer(self, name: str) -> LayerFacts:
        """Return a layer, without any facts if it is unknown."""
        return self.layers.get(name) or LayerFacts(name)

    @property
    def micro_batches(self) -> int:
        """The maximum number of calls of a product in a step."""
        return max([1, *(layer.calls for layer in self if layer.is_of_te)])

    @property
    def has_run(self) -> bool:
        """True after a forward of a layer, or a step of an optimizer."""
        stepped = self.settings.loss_is_scaled or self.settings.adds_eps is not None
        return any(stepped or layer.has_run or layer.forward is not None for layer in self)

    @functools.cached_property
    def layers_that_ran(self) -> Sequence[LayerFacts]:
        return [layer for layer in self if layer.has_run]

    @property
    def te_layers_that_ran(self) -> Sequence[LayerFacts]:
        return [layer for layer in self.layers_that_ran if layer.is_of_te]

    @property
    def has_low(self) -> bool:
        return any(layer.low for layer in self.layers_that_ran)

    @property
    def unobserved(self) -> str:
        """The reason of the first layer that is not observed; empty without one."""
        return next((layer.refused for layer in self if layer.refused and not layer.has_run), "")

    @property
    def has_delayed_scaling(self) -> bool:
        return any(layer.recipe == "fp8_delayed_scaling" for layer in self)

    @property
    def heads(self) -> list[LayerFacts]:
        """The layers that may be the model's head: the last of Transformer Engine, and the last of torch."""
        layers = [layer for layer in self if layer.shape and layer.calls]
        observed = [layer for layer in layers if layer.forward is not None]
        torch_layers = [layer for layer in layers if layer.forward is None and not layer.is_of_te]
        return sorted(observed, key=lambda layer: -(layer.forward or 0))[:1] + torch_layers[-1:]

    def kind_of(self, name: str) -> str:
        """Return a key that is equal for layers with similar names, class and shape, in blocks with the same parts."""
        form = form_of(name)
        if name not in self.layers:
            return form
        layer = self.layers[name]
        parts = "".join(sorted(set(self._parts_of_blocks[block_of(name)])))
        return f"{form}|{layer.module_class}|{layer.shape}|{parts}"

    @functools.cached_property
    def _parts_of_blocks(self) -> Mapping[str, list[str]]:
        """Block, such as an encoder's or a decoder's -> the names of its layers without numbers."""
        return group_by_key((block_of(layer), form_of(layer)) for layer in self.layers)


def _rows_at(rows: Iterable[Row], iteration: int) -> list[Row]:
    return [
        row
        for row in rows
        if (row["since"] or 0) <= iteration <= (math.inf if row.get("until") is None else row["until"])
    ]
