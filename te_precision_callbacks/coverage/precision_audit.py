"""Records the observed precision of each GEMM.

In steps that observe a layer, formats are read from the two tensors passed to the GEMM (``tap.py``); in other steps,
from the layer's quantizers after the step. A GEMM that a backward skips has a reason in ``not_run`` instead.

The classes of storages and quantizers were read from Transformer Engine 2.20.2 (``pytorch/tensor``). An unknown class
appears by its name.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.numerics.layouts import fp8_dtype, fp8_format_of, gemm_operand
from te_precision_callbacks.base.spans import Iterations
from te_precision_callbacks.base.vocabulary import (
    GEMMS,
    HYBRID_QUANTIZER,
    IDENTITY_QUANTIZER,
    OPERANDS,
    ROWWISE,
    GemmName,
    class_names,
    format_of_class,
    name_of_recipe,
    recipe_of_quantizer,
)
from te_precision_callbacks.coverage.gemm_precision import (
    FROZEN,
    NO_BACKWARD,
    NO_GRADIENT,
    NO_INPUT_GRADIENT,
    Format,
    GemmFact,
    PrecisionHistory,
)
from te_precision_callbacks.layers.forwards import ForwardKind, is_in_backward
from te_precision_callbacks.layers.gemm_events import OUTSIDE, GemmEvent, GemmOperand
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.state import (
    backward_override,
    is_in_autocast,
    quantizers_of_layers,
    quantizers_of_module,
    recipe_of_module,
)

MODIFIED = " (modified)"

MOST_WAITING = 10_000

_DTYPES = {
    torch.float32: "FP32",
    torch.bfloat16: "BF16",
    torch.float16: "FP16",
    torch.float64: "FP64",
    torch.float8_e4m3fn: "FP8 E4M3",
    torch.float8_e5m2: "FP8 E5M2",
}


class LayerOperand(NamedTuple):
    layer: str
    gemm: GemmName
    tensor: str


class LayerGemm(NamedTuple):
    layer: str
    gemm: GemmName


class ExpectedGemms(NamedTuple):
    """The GEMMs that a forward and its backward will run.

    Attributes:
        run: the GEMMs that will run.
        left_out: GEMM that the backward skips -> the reason.
        formats: of the operands, if no GEMM of a layer is seen.
    """

    run: Sequence[LayerGemm]
    left_out: Mapping[LayerGemm, str]
    formats: Mapping[LayerOperand, Format]


class SeenGemm(NamedTuple):
    """A GEMM that ran; ``recipe`` is empty without one."""

    layer: str
    gemm: GemmName
    recipe: str
    operands: Sequence[tuple[LayerOperand, Format]]


@dataclass(eq=False)
class _Notes:
    """Observations of one layer in one iteration.

    Attributes:
        formats: operand -> format -> the number of GEMMs with it that were seen; 0 if it is derived from quantizers.
        expected: the GEMMs that the forward announced.
        left_out: GEMM that the backward skips -> the reason.
        had_backward: without a backward, as for a skipped batch, an expected GEMM may be missing.
    """

    formats: dict[LayerOperand, dict[Format, int]] = field(default_factory=dict)
    expected: dict[GemmName, None] = field(default_factory=dict)
    left_out: dict[GemmName, str] = field(default_factory=dict)
    excluded: bool = False
    had_backward: bool = False

    def facts(self) -> tuple[dict[GemmName, GemmFact], list[GemmName]]:
        reasons: dict[GemmName, str] = {}
        if self.had_backward:
            reasons = dict.fromkeys(self.expected, NO_BACKWARD)
        facts = {gemm: GemmFact((), reason) for gemm, reason in (reasons | self.left_out).items()}
        by_gemm: dict[GemmName, dict[str, dict[Format, int]]] = {}
        for operand, formats in self.formats.items():
            by_gemm.setdefault(operand.gemm, {})[operand.tensor] = formats
        seen: list[GemmName] = []
        for gemm, operands in by_gemm.items():
            of_tensors = []
            is_seen = True
            for tensor in OPERANDS[gemm]:
                formats = operands.get(tensor, {})
                is_seen = is_seen and bool(formats) and all(formats.values())
                if formats:
                    of_tensors.append((tensor, tuple(formats)))
            facts[gemm] = GemmFact(tuple(of_tensors), outside=_share_outside(operands[of_tensors[0][0]]))
            if is_seen:
                seen.append(gemm)
        return facts, seen


def _share_outside(calls: Mapping[Format, int]) -> float:
    """Return the share of a step's calls that no recipe was around, if some had one; else 0."""
    outside = sum(count for made, count in calls.items() if not made.recipe)
    whole = sum(calls.values())
    return outside / whole if 0 < outside < whole else 0.0


class PrecisionAudit:
    """Notes the formats of all operands in a step, of GEMMs that ran and of expected ones, and writes their changes to
    the history.

    Attributes:
        seen: GEMMs that ran.
        expected: GEMMs that forwards have announced, by id.
            Both wait for :meth:`take_waiting`, since all at once take less time.
    """

    def __init__(self, iterations: Iterations) -> None:
        self.seen: list[SeenGemm] = []
        self.expected: dict[int, ExpectedGemms] = {}
        self._unseen: dict[str, dict[LayerOperand, Format]] = {}
        self._history = PrecisionHistory(iterations)
        self._iteration: int | None = None
        self._now: defaultdict[str, _Notes] = defaultdict(_Notes)
        self._had_backward = False
        self._in_history: dict[str, _Notes] = {}  # layer -> the notes of its last facts in the history

    def enter(self, iteration: int) -> None:
        if iteration == self._iteration:
            return
        self._end()
        if self._iteration is not None and iteration < self._iteration:
            self._in_history.clear()  # the history is truncated at this iteration
        self._iteration = iteration
        self._had_backward = False

    def leave(self, iteration: int) -> None:
        self.enter(iteration)
        self._history.ran(iteration)
        self._end()

    def _end(self) -> None:
        self.take_waiting()
        for layer, formats in self._unseen.items():
            if not self._now[layer].formats:  # in a compiled model the tap does not know the layer of a GEMM
                self.plan(formats)
        self._unseen.clear()
        self._write()
        self._in_history.update(self._now)
        self._now.clear()

    def abandon(self) -> None:
        self.seen.clear()
        self.expected.clear()
        self._unseen.clear()
        self._now.clear()

    @property
    def lacks_backward(self) -> bool:
        self.take_waiting()
        return bool(self._now) and not self._had_backward

    def note_backward(self) -> None:
        self._had_backward = True

    @property
    def changes(self) -> int:
        return self._history.changes

    @property
    def history(self) -> PrecisionHistory:
        self._write()
        return self._history

    def _write(self) -> None:
        """Copy the notes of this iteration, which may continue, to the history; cheap, since they rarely change."""
        self.take_waiting()
        if self._iteration is None or not self._now:
            return
        self._history.ran(self._iteration)
        for layer, notes in self._now.items():
            notes.had_backward = self._had_backward
            known = self._in_history.get(layer)
            if known is None or vars(notes) != vars(known):
                self._in_history.pop(layer, None)
                facts, seen = notes.facts()
                self._history.put(layer, self._iteration, facts, seen, excluded=notes.excluded)

    def newly_mixed(self, iteration: int) -> set[str]:
        """Return the layers that have begun to run both inside and outside of ``te.autocast``."""
        self._write()
        return {layer for layer in self._now if self._history.begins_mixture(layer, iteration)}

    def holds(self, formats: Mapping[LayerOperand, Format]) -> bool:
        """Return whether the last iteration had these formats. GEMMs that a backward skips do not count."""
        for operand, made in formats.items():
            fact = self._last_fact(operand)
            if fact is None or not (fact.is_left_out or made in dict(fact.operands).get(operand.tensor, ())):
                return False
        return True

    def _last_fact(self, operand: LayerOperand) -> GemmFact | None:
        return self._history.last_facts(operand.layer)[GEMMS.index(operand.gemm)]

    def trained_in_fp8(self, layer: str) -> bool | None:
        """Return whether a layer ran under a recipe when it last trained; None if it is not known to have trained."""
        fact = self.history.last_facts(layer)[0]
        if fact is None or not fact.operands:
            return None
        return any(form.recipe for form in itertools.chain(*dict(fact.operands).values()))

    def select_running(self, formats: Mapping[LayerOperand, Format]) -> dict[LayerOperand, Format]:
        running = {}
        for operand, form in formats.items():
            fact = self._last_fact(operand)
            if fact is None or not fact.is_left_out:
                running[operand] = form
        return running

    def plan(self, formats: Mapping[LayerOperand, Format], *, excluded: bool = False) -> None:
        for operand, made in formats.items():
            notes = self._now[operand.layer]
            notes.excluded |= excluded and not made.recipe
            notes.formats.setdefault(operand, {}).setdefault(made, 0)

    def note(self, event: GemmEvent) -> None:
        if event.layer == OUTSIDE or event.kind not in (ForwardKind.OBSERVED, ForwardKind.SILENT):
            return
        self.note_seen(seen_gemm(event))

    def note_seen(self, seen: SeenGemm) -> None:
        if seen.gemm == "fprop" and not (seen.recipe or is_in_backward()) and is_in_autocast():
            self._now[seen.layer].excluded = True
        self.seen.append(seen)

    def take_waiting(self) -> None:
        """Note what waits: before the notes are read, and before more than :data:`MOST_WAITING` GEMMs wait."""
        for run, left_out, unseen in self.expected.values():
            for (layer, gemm), reason in left_out.items():
                self._now[layer].left_out[gemm] = reason
            for layer, gemm in run:
                self._now[layer].expected[gemm] = None
            for operand, made in unseen.items():
                self._unseen.setdefault(operand.layer, {})[operand] = made
        self.expected.clear()
        for layer, gemm, _, operands in self.seen:
            self._had_backward |= gemm != "fprop"
            formats = self._now[layer].formats
            for operand, made in operands:
                calls = formats.setdefault(operand, {})
                calls[made] = calls.get(made, 0) + 1
        self.seen.clear()


def seen_gemm(event: GemmEvent) -> SeenGemm:
    operands = []
    for operand in event.operands:
        text = format_of_data(operand.data) + MODIFIED * _is_modified(operand)
        operands.append((LayerOperand(event.layer, event.gemm, operand.tensor), Format(text, event.recipe)))
    return SeenGemm(event.layer, event.gemm, event.recipe, operands)


def _is_modified(operand: GemmOperand) -> bool:
    if not operand.on_debug_path:
        return False
    from te_precision_callbacks.te.debug import debug_quantization

    quantizer = operand.given.quantizer
    if operand.columnwise:
        return bool(quantizer.columnwise_tensor_plan == debug_quantization.API_CALL_MODIFY)
    return bool(quantizer.rowwise_tensor_plan == debug_quantization.API_CALL_MODIFY)


def format_of(tensor: Any, *, columnwise: bool) -> str:
    """The format of the data, row- or columnwise, that a GEMM reads from a tensor or storage of any class."""
    return format_of_data(gemm_operand(tensor, columnwise=columnwise))


def format_of_data(data: Any) -> str:
    if type(data) is torch.Tensor:  # the most frequent type, for which attribute look-ups are slow
        return dtype_name(data.dtype)
    return _known_format(data) or _unknown_format(data)


def quantizer_format(quantizer: Any, high_precision: torch.dtype, *, columnwise: bool) -> str:
    """The format that a quantizer produces; ``high_precision`` is the dtype of a tensor that is not quantized."""
    names = class_names(quantizer)
    if HYBRID_QUANTIZER in names:
        part = quantizer.rowwise_quantizer
        if columnwise:
            part = quantizer.columnwise_quantizer
        return quantizer_format(part, high_precision, columnwise=columnwise)
    if quantizer is None or IDENTITY_QUANTIZER in names:
        return dtype_name(high_precision)
    return _known_format(quantizer) or type(quantizer).__name__


def formats_of_fused_path(module: Any, layers: Sequence[str], *, fp8: bool) -> dict[LayerOperand, Format]:
    """The formats of a module's GEMMs without features, by its state after the last forward; ``fp8``: whether that
    forward quantized.
    """
    override = None
    by_layer: Sequence[Mapping[str, Any]] = ()
    if fp8:
        override = backward_override(module)
        by_layer = quantizers_of_layers(module, *quantizers_of_module(module))
    recipe = recipe_in_force(module, fp8=fp8)
    dtype = module.activation_dtype
    formats: dict[LayerOperand, Format] = {}
    for layer, quantizers in zip(layers, by_layer or [{}] * len(layers), strict=True):
        formats |= formats_of_layer(layer, quantizers, dtype, recipe=recipe, backward_override=override)
    return formats


def formats_of_layer(
    layer: str,
    quantizers: Mapping[str, Any],
    high_precision: torch.dtype,
    *,
    recipe: str,
    backward_override: str | None,
) -> dict[LayerOperand, Format]:
    """The formats of a layer's GEMMs without features.

    ``quantizers`` has no entry for a tensor in high precision; its dtype is ``high_precision``.
    """
    formats: dict[LayerOperand, Format] = {}
    for gemm, tensors in OPERANDS.items():
        if backward_override is not None and gemm != "fprop":
            quantizers = {}
        for tensor in tensors:
            text = quantizer_format(quantizers.get(tensor), high_precision, columnwise=ROWWISE[tensor] != gemm)
            formats[LayerOperand(layer, gemm, tensor)] = Format(text, recipe)
    return formats


def select_fprop(formats: Mapping[LayerOperand, Format]) -> dict[LayerOperand, Format]:
    return {operand: made for operand, made in formats.items() if operand.gemm == "fprop"}


def gemms_left_out(
    module: torch.nn.Module, layers: Sequence[str], *, input_needs_gradient: bool
) -> dict[LayerGemm, str]:
    """Map each GEMM that the backward skips, after a forward with gradients, to the reason."""
    row = te_modules.of(module)
    if not input_needs_gradient and not any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return dict.fromkeys(itertools.starmap(LayerGemm, itertools.product(layers, GEMMS[1:])), NO_GRADIENT)
    left_out = {LayerGemm(layer, "wgrad"): FROZEN for layer in itertools.compress(layers, row.frozen(module))}
    if not input_needs_gradient and not row.has_norm:
        left_out |= {LayerGemm(layer, "dgrad"): NO_INPUT_GRADIENT for layer in layers}
    return left_out


def recipe_in_force(module: Any, *, fp8: bool) -> str:
    if fp8:
        return recipe_text(recipe_of_module(module))
    return ""


def recipe_of_operator(module: Any, arguments: Any) -> str:
    """The recipe of a compiled ``te.Linear``, given its operator's arguments.

    In the first run of a graph the module does not have its recipe yet: Dynamo sets attributes after the graph.
    """
    if not arguments.fp8 or (module.fp8 and recipe_of_module(module)):
        return recipe_in_force(module, fp8=arguments.fp8)
    return recipe_of_quantizer(arguments.weight_quantizer or arguments.input_quantizer)


def recipe_text(recipe: Any) -> str:
    if recipe is None:
        return ""
    return name_of_recipe(recipe) or type(recipe).__name__


def dtype_name(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype))


def _known_format(tensor_or_quantizer: Any) -> str | None:
    if getattr(tensor_or_quantizer, "custom", False):
        return None  # a user's own class, even a subclass of TE's, has another GEMM
    kind: type = type(tensor_or_quantizer)
    return _format_name(kind, fp8_dtype(tensor_or_quantizer))


@functools.cache
def _format_name(kind: type, dtype: Any) -> str | None:
    name = format_of_class(kind)
    if name in (None, "NVFP4"):
        return name
    return f"{name} {fp8_format_of(dtype).name}"


def _unknown_format(tensor: Any) -> str:
    if type(tensor).__module__.partition(".")[0] == "torch":
        return dtype_name(tensor.dtype)
    if "QuantizedTensorStorage" not in class_names(tensor):
        if isinstance(tensor, torch.Tensor):
            return dtype_name(tensor.dtype)
        return type(tensor).__name__
    if getattr(tensor, "custom", False):
        return type(tensor).__name__
    # Transformer Engine passes the decoded tensor to the GEMM.
    return f"{dtype_name(tensor.dequantize().dtype)} (of {type(tensor).__name__})"
