"""Memory that low precision adds to a model's layers or saves, planned from the modules without running them.

The saved tensors were read from Transformer Engine 2.20.2. M: tokens of a forward, K: in_features, N: out_features,
F: in_features of fc2, b: bytes of an element in high precision.

================ ======================================================= ============================================
class            saved from the forward to the backward                  in high precision
================ ======================================================= ============================================
Linear           columnwise codes of the input [M, K]                    M K b
LayerNormLinear  norm input M K b; 1 or 2 float32 a row; columnwise      2 M K b, and the statistics
                 codes of the norm output [M, K]
LayerNormMLP     norm input M K b; 1 or 2 float32 a row; codes of the    (2 K + F' + F) M b, and the statistics
                 norm output [M, K] in both directions; input of the
                 activation function M F' b (F' = N of fc1); codes of
                 its output [M, F] in both directions, with one scale a
                 tensor rowwise
GroupedLinear    columnwise codes of each group's input                  M K b
================ ======================================================= ============================================

Codes of weights have both directions. Each forward creates them and saves them for the backward; keeping them in
``_fp8_workspaces`` by ``is_first_microbatch`` is not planned. Primary quantized weights replace the parameter. Sources:
``_linear_forward_impl`` (``pytorch/module/linear.py``), ``_LayerNormLinear.forward``, ``_LayerNormMLP._forward``,
``_GroupedLinear.forward``; ``quantize_weight`` (``pytorch/module/base.py``); ``DelayedScalingRecipeState``
(``pytorch/quantization.py``); ``Quantizer.inner_tensor_specs`` (``pytorch/quantized_tensor.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import group_by_key, size
from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.base.numerics.layouts import is_quantized
from te_precision_callbacks.base.vocabulary import ONE_SCALE, recipe_of
from te_precision_callbacks.coverage.precision_audit import recipe_text
from te_precision_callbacks.layers.folding import fold_names
from te_precision_callbacks.layers.naming import (
    Model,
    NamedModule,
    module_names,
    modules_of,
    named_operations,
    parameters_of,
)
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.state import MadeQuantizers

__all__ = ["Memory", "MemoryRow", "plan_memory", "show"]

KINDS: Mapping[str, str] = {
    "parameter": "parameters in high precision",
    "weight_codes": "codes and scales of weights",
    "gradient": "gradients of parameters",
    "saved_high": "activations saved in high precision",
    "saved_codes": "codes and scales of saved activations",
    "scaling_state": "scales and amax history of delayed scaling",
    "gradient_codes": "codes and scales of the gradient of the output",
}

Lives = Literal["always", "to_backward", "in_backward"]
"""Lifetime of bytes: from step to step; from a layer's forward to its backward; only in its backward."""

_LIVES: Mapping[Lives, str] = {
    "always": "Always",
    "to_backward": "From the forward to the backward",
    "in_backward": "In the backward of a layer",
}

_FLOAT32 = torch.float32.itemsize
_MOST_NAMES = 4


class UnknownMemoryError(PrecisionDebugError, TypeError):
    """The bytes of a layer are unknown, for example because of a custom recipe's quantizer."""


class Bytes(NamedTuple):
    low: int
    high: int


@dataclass(frozen=True)
class MemoryRow:
    layer: str
    kind: str
    low: int
    high: int
    lives: Lives


@dataclass(frozen=True)
class Memory:
    """Memory of a model's layers on one rank.

    Attributes:
        recipe: as in :data:`~te_precision_callbacks.base.vocabulary.RECIPES`; empty for none or several.
        capability: compute capability of the planned GPU.
        tokens: tokens of one forward; None if unknown.
        not_planned: layers with unknown memory -> the reason.
        notes: assumptions and limits.
    """

    rows: tuple[MemoryRow, ...]
    recipe: str
    capability: tuple[int, int]
    tokens: int | None
    not_planned: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[MemoryRow]:
        return iter(self.rows)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.layer for row in self.rows))

    def bytes(self, kind: str | None = None, *, lives: Lives | None = None, layer: str | None = None) -> Bytes:
        """Return the bytes of a kind, lifetime or layer; None for all.

        Bytes that live only within a layer's backward count once, for the layer with the most such bytes.
        """
        low = 0
        high = 0
        largest = 0
        for row in self.rows:
            if kind not in (None, row.kind) or lives not in (None, row.lives) or layer not in (None, row.layer):
                continue
            if row.lives == "in_backward":
                largest = max(largest, row.low)
            else:
                low += row.low
                high += row.high
        return Bytes(low + largest, high)

    def added(self, *, lives: Lives | None = None) -> int:
        """Return the bytes that low precision adds; negative: it saves."""
        low, high = self.bytes(lives=lives)
        return low - high

    def by_kind(self) -> dict[str, Bytes]:
        kinds = {row.kind for row in self.rows}
        return {kind: self.bytes(kind) for kind in KINDS if kind in kinds}


def plan_memory(
    model: Model,
    modules: Sequence[NamedModule],
    recipe: Any,
    *,
    tokens: int | None = None,
    recipes: Mapping[str, Any] | None = None,
    calls: Mapping[str, Sequence[int]] | None = None,
) -> Memory:
    """Plan the memory of a training step on this rank.

    Each layer is assumed to run on its fused path, with a separate input that needs a gradient; experts of a
    GroupedLinear share the tokens equally.

    Args:
        recipe: one of Transformer Engine's recipes; None for high precision.
        tokens: tokens of one forward on this rank; None if unknown.
        recipes: layer -> its recipe, if it differs from ``recipe``.
        calls: layer -> the rows of its input in each call, instead of ``tokens``.

    Raises:
        OptionError: ``tokens`` is not positive.
    """
    if tokens is not None and tokens < 1:
        raise OptionError(f"tokens={tokens} must be 1 or more: the tokens of one forward on one rank.")
    trains = any(parameter.requires_grad for parameter in parameters_of(model))
    planner = _MemoryPlanner(recipe, tokens, recipes or {}, calls, trains)
    for named in modules:
        planner.plan(named.module, named.names)
    paths = module_names(model)
    for module in modules_of(model):
        if isinstance(module, torch.nn.Linear):
            planner.plan_torch_linear(paths[id(module)], module)
    for operation in named_operations(model):
        planner.not_planned |= dict.fromkeys(operation.names, "operations of te.ops are not planned.")
    texts = set(map(recipe_text, (recipe, *planner.recipes.values()))) - {""}
    notes = []
    if tokens is None and calls is None:
        notes.append(
            "Saved activations are not planned: give the tokens of a forward with --tokens (tokens= in Python)."
        )
    if trains:
        notes.append(
            "Not planned: optimizer state and master weights, attention, norms and dropout, which do not depend on"
            " the recipe; activation recompute; outputs of layers; cuBLAS workspaces."
        )
    from transformer_engine.pytorch.utils import get_device_compute_capability

    name = ""
    if len(texts) == 1:
        (name,) = texts
    capability = get_device_compute_capability()
    return Memory(tuple(planner.rows), name, capability, tokens, planner.not_planned, tuple(notes))


@dataclass(frozen=True)
class _Linear:
    """A layer with GEMMs.

    Attributes:
        quantizers: tensor -> its quantizer; empty in high precision.
        shape: the shape of its weight, [N, K].
        rows: the rows of its input in each call; empty if unknown.
        trained: whether its weight needs a gradient.
        primary: whether its weight is a quantized parameter.
    """

    layer: str
    recipe: Any
    quantizers: Mapping[str, Any]
    shape: tuple[int, int]
    itemsize: int
    rows: Sequence[int]
    trained: bool
    primary: bool

    @property
    def override(self) -> str | None:
        return getattr(self.recipe, "backward_override", None)


@dataclass
class _MemoryPlanner:
    """Adds up the memory of the layers, in low and in high precision.

    Attributes:
        recipe: the recipe of layers without one in ``recipes``.
        tokens: of a step; None if unknown.
        recipes: layer -> its own recipe.
        calls: layer -> rows of each call, from a dry run; None without one.
        trains: whether backwards run.
        rows: the result.
        not_planned: layer -> why it is not part of the result.
        quantizers: makes the quantizers of a recipe.
    """

    recipe: Any
    tokens: int | None
    recipes: Mapping[str, Any]
    calls: Mapping[str, Sequence[int]] | None
    trains: bool
    rows: list[MemoryRow] = field(default_factory=list)
    not_planned: dict[str, str] = field(default_factory=dict)
    quantizers: MadeQuantizers = field(default_factory=MadeQuantizers)

    def plan(self, module: Any, layers: Sequence[str]) -> None:
        before = len(self.rows)
        try:
            linears = self._linears(module, layers)
            self._parameters(module, layers, linears)
            recomputed = te_modules.of(module).is_mlp and bool(module.checkpoint)
            for linear in linears:
                self._add_codes(linear, recomputed=recomputed)
            if self.trains:
                self._add_saved(module, linears, recomputed=recomputed)
        except UnknownMemoryError as error:
            del self.rows[before:]
            self.not_planned |= dict.fromkeys(layers, str(error))

    def plan_torch_linear(self, path: str, module: torch.nn.Linear) -> None:
        for parameter in module.parameters(recurse=False):
            self._parameter(path, parameter)
        if self.trains and module.weight.requires_grad:
            count = sum(self._rows_of(path, 1)) * module.in_features * module.weight.dtype.itemsize
            self._add_high(path, "saved_high", count)

    def _linears(self, module: Any, layers: Sequence[str]) -> list[_Linear]:
        row = te_modules.of(module)
        recipe = self.recipes.get(layers[0], self.recipe)
        quantizers = self.quantizers.of(module, recipe)
        groups = 1
        if row.groups:
            groups = len(layers)
        linears = []
        for number, (layer, (inputs, outputs)) in enumerate(zip(layers, row.features(module), strict=True)):
            weights = [weight for weight in row.weights(module, number) if isinstance(weight, torch.nn.Parameter)]
            if not weights:
                raise UnknownMemoryError(
                    "its weight is not a parameter, for example because FSDP flattens all parameters."
                )
            linears.append(
                _Linear(
                    layer,
                    recipe,
                    quantizers[number],
                    (outputs, inputs),
                    weights[0].dtype.itemsize,
                    self._rows_of(layer, groups),
                    any(part.requires_grad for part in weights),
                    bool(module.primary_weights_in_fp8) or is_quantized(weights[0]),
                )
            )
        return linears

    def _parameters(self, module: torch.nn.Module, layers: Sequence[str], linears: Sequence[_Linear]) -> None:
        row = te_modules.of(module)
        of_layer = {linear.layer: linear for linear in linears}
        for name, parameter in module.named_parameters(recurse=False):
            linear = of_layer[row.layer_of(name, layers)]
            if parameter.ndim < 2 or "bias" in name or not linear.primary:
                self._parameter(linear.layer, parameter)
                continue
            quantizer: Any = getattr(parameter, "_quantizer", None) or linear.quantizers.get("weight")
            if quantizer is None:
                self.not_planned[linear.layer] = "its weights are quantized with an unknown recipe: give the recipe."
                continue
            columnwise = not is_quantized(parameter) or quantizer.columnwise_usage
            shape = parameter.shape[0], parameter.shape[1]
            self._parameter(linear.layer, parameter, planned_bytes(quantizer, shape, columnwise=columnwise))

    def _parameter(self, layer: str, parameter: torch.Tensor, codes: int = 0) -> None:
        high = parameter.numel() * parameter.dtype.itemsize
        self._add(layer, "parameter", high * (not codes), high, "always")
        self._add(layer, "weight_codes", codes, 0, "always")
        if parameter.requires_grad:
            self._add_high(layer, "gradient", high, "always")

    def _add_codes(self, linear: _Linear, *, recomputed: bool) -> None:
        if not linear.quantizers:
            return
        if linear.recipe.delayed():
            self._add(linear.layer, "scaling_state", 5 * (1 + linear.recipe.amax_history_len) * _FLOAT32, 0, "always")
        low_backward = self.trains and linear.override is None
        if not linear.primary and self.trains and not recomputed:
            codes = planned_bytes(linear.quantizers["weight"], linear.shape, columnwise=low_backward)
            self._add(linear.layer, "weight_codes", codes, 0, "to_backward")
        if low_backward and linear.rows:
            shape = max(linear.rows), linear.shape[0]
            codes = planned_bytes(linear.quantizers["gradient"], shape, columnwise=linear.trained)
            self._add(linear.layer, "gradient_codes", codes, 0, "in_backward")

    def _add_saved(self, module: Any, linears: Sequence[_Linear], *, recomputed: bool) -> None:
        first = linears[0]
        row = te_modules.of(module)
        if row.has_norm:
            row_bytes = first.shape[1] * first.itemsize
            if not recomputed:
                row_bytes += _FLOAT32 * {"RMSNorm": 1, "LayerNorm": 2}[module.normalization]
            self._add_high(first.layer, "saved_high", sum(first.rows) * row_bytes)
        if recomputed:
            return
        if row.is_mlp:
            fc1, fc2 = linears
            self._add_saved_operand(fc1, rowwise=True)
            self._add_high(fc2.layer, "saved_high", sum(fc1.rows) * fc1.shape[0] * fc1.itemsize)
            has_one_scale = bool(fc2.quantizers) and recipe_of(fc2.quantizers["activation"]) in ONE_SCALE
            self._add_saved_operand(fc2, rowwise=True, columnwise=not has_one_scale)
            return
        for linear in linears:
            original = getattr(module, "save_original_input", False) and linear.override is None
            self._add_saved_operand(linear, original=bool(original))

    def _add_saved_operand(
        self, linear: _Linear, *, original: bool = False, rowwise: bool = False, columnwise: bool = True
    ) -> None:
        if not linear.trained:
            return
        inputs = linear.shape[1]
        high = sum(linear.rows) * inputs * linear.itemsize
        if not linear.quantizers or original or linear.override == "high_precision":
            self._add_high(linear.layer, "saved_high", high)
            return
        if linear.override is not None:
            rowwise = True
            columnwise = False
        quantizer = linear.quantizers["activation"]
        codes = sum(
            planned_bytes(quantizer, (rows, inputs), rowwise=rowwise, columnwise=columnwise) for rows in linear.rows
        )
        self._add(linear.layer, "saved_high", 0, high, "to_backward")
        self._add(linear.layer, "saved_codes", codes, 0, "to_backward")

    def _rows_of(self, layer: str, groups: int) -> Sequence[int]:
        if self.calls is not None:
            return self.calls.get(layer, ())
        if self.tokens is None:
            return []
        return [max(1, self.tokens // groups)]

    def _add_high(self, layer: str, kind: str, count: int, lives: Lives = "to_backward") -> None:
        self._add(layer, kind, count, count, lives)

    def _add(self, layer: str, kind: str, low: int, high: int, lives: Lives) -> None:
        if low or high:
            self.rows.append(MemoryRow(layer, kind, low, high, lives))


def planned_bytes(quantizer: Any, shape: tuple[int, int], *, rowwise: bool = True, columnwise: bool) -> int:
    """Return the bytes of codes and scales of a quantized tensor, in the given directions.

    Raises:
        UnknownMemoryError: the quantizer does not describe its buffers.
    """
    if not rowwise and not columnwise:
        return 0
    if recipe_of(quantizer) in ONE_SCALE:  # Float8Quantizer of delayed scaling does not describe its buffers
        from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

        copies = rowwise + columnwise
        if is_non_tn_fp8_gemm_supported():
            copies = 1
        return math.prod(shape) * copies + _FLOAT32
    usage = quantizer.rowwise_usage, quantizer.columnwise_usage
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    try:
        specs = quantizer.inner_tensor_specs(shape)
    except (NotImplementedError, AttributeError) as error:
        raise UnknownMemoryError(
            f"{type(quantizer).__name__}: the buffers of this quantizer of a custom recipe are unknown."
        ) from error
    finally:
        quantizer.set_usage(rowwise=usage[0], columnwise=usage[1])
    return sum(math.prod(sizes) * dtype.itemsize for sizes, dtype in specs.values())


def show(memory: Memory) -> None:
    """Print the bytes by kind, compared with high precision, and notes."""
    tokens = "unknown tokens"
    if memory.tokens is not None:
        tokens = f"{memory.tokens:,} tokens a forward"
    elif memory.bytes(lives="to_backward").high:
        tokens = "the tokens of a batch"
    terminal.show_text(
        f"Memory of {len(memory.layers)} layers on one rank: {memory.recipe or 'no recipe, or several'}, compute"
        f" capability {memory.capability[0]}.{memory.capability[1]}, {tokens}."
    )
    table = terminal.table("", "planned", "in high precision", "added")
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, (low, high) in {**memory.by_kind(), "all on the device": memory.bytes()}.items():
        added = size(low - high)
        if low > high:
            added = f"+{added}"
        table.add_row(*map(terminal.cell, (KINDS.get(kind, kind), size(low), size(high), added)))
    terminal.show(table)
    for lives, text in _LIVES.items():
        change = memory.added(lives=lives)
        if change > 0:
            terminal.show_text(f"{text}: low precision adds {size(change)}.")
        elif change:
            terminal.show_text(f"{text}: low precision saves {size(-change)}.")
    for why, layers in group_by_key((why, layer) for layer, why in memory.not_planned.items()).items():
        names = ", ".join(fold_names(layers, most=_MOST_NAMES))
        terminal.show_text(f"Not planned: {names}: {why}", hanging=2)
    terminal.show_notes(memory.notes)
