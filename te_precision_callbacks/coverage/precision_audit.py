"""Records the observed precision of each GEMM.

Formats are read from the two tensors passed to the GEMM (``tap.py``). A GEMM that a backward skips has a reason in
``not_run`` instead.

The classes of storages and quantizers were read from Transformer Engine 2.20.2 (``pytorch/tensor``). An unknown class
appears by its name.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

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
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.state import recipe_of_module

MODIFIED = " (modified)"

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


Call: TypeAlias = tuple[str, GemmName, str, object, object]
"""A GEMM of a step: its layer, name and recipe (empty in high precision), and the formats of operands A and B, each as
a dtype or a key of :attr:`PrecisionAudit.formats`."""


class PrecisionAudit:
    """Counts the GEMMs of a step by layer and formats, and writes what differs from the step before to the history.

    Attributes:
        formats: key of an operand's format -> its text; a dtype is a key by itself.
        calls: GEMM of the step -> the number of its calls.
        forwards: id of a module with a training forward in the step -> whether its input needs a gradient.
        excluded: the layers with a forward inside ``te.autocast(enabled=False)``.
        modules: id of a module -> the module and its layers.
    """

    def __init__(self, iterations: Iterations) -> None:
        self.formats: dict[object, str] = {}
        self.calls: defaultdict[Call, int] = defaultdict(int)
        self.forwards: dict[int, bool] = {}
        self.excluded: set[str] = set()
        self.modules: Mapping[int, tuple[torch.nn.Module, Sequence[str]]] = {}
        self._order: tuple[dict[str, int], dict[str, int]] = {}, {}
        self._history = PrecisionHistory(iterations)
        self._iteration: int | None = None
        self._had_backward = False
        self._written: tuple[object, ...] | None = None
        self._is_mixed = False
        self._size: tuple[object, ...] | None = None  # of what the step had at the last call of write()

    def enter(self, iteration: int) -> None:
        if iteration == self._iteration:
            return
        self.write()
        if self._iteration is not None and iteration < self._iteration:
            self._written = None  # the history is truncated at this iteration
        self._iteration = iteration
        self.abandon()

    def leave(self, iteration: int) -> None:
        """End an iteration, perhaps without a forward."""
        self.enter(iteration)
        self._history.ran(iteration)
        self._size = None  # the numbers of calls may have changed alone
        self.write()
        self.abandon()

    def abandon(self) -> None:
        """Forget the GEMMs of the step so far."""
        self.calls = defaultdict(int)
        self.forwards = {}
        self.excluded = set()
        self._had_backward = False
        self._size = None

    @property
    def lacks_backward(self) -> bool:
        return bool(self.calls) and not self._has_backward

    @property
    def _has_backward(self) -> bool:
        # The last GEMM of most steps is one of the backward.
        return self._had_backward or any(gemm != "fprop" for _, gemm, *_ in reversed(self.calls))

    def note_backward(self) -> None:
        self._had_backward = True

    @property
    def order(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Layer -> position of its first forward, and of its first backward."""
        self.write()
        return self._order

    @property
    def changes(self) -> int:
        return self._history.changes

    @property
    def history(self) -> PrecisionHistory:
        self.write()
        return self._history

    def trained_in_fp8(self, layer: str) -> bool | None:
        """Return whether a layer ran under a recipe when it last trained; None if it is not known to have trained."""
        fact = self.history.last_facts(layer)[0]
        if fact is None or not fact.operands:
            return None
        return any(form.recipe for form in itertools.chain(*dict(fact.operands).values()))

    def write(self) -> None:
        """Write the step so far, which may continue, to the history, unless it is like the last one written."""
        size = len(self.calls), len(self.forwards), len(self.excluded), self._had_backward
        if self._iteration is None or not self.calls or size == self._size:
            return
        self._size = size
        self._history.ran(self._iteration)
        counts = tuple(self.calls.values()) if self._is_mixed else ()  # else only what ran counts
        now = self.calls.keys(), self.forwards, self.excluded, counts, self._has_backward
        if now == self._written:
            return
        self._written = dict(self.calls).keys(), dict(self.forwards), set(self.excluded), counts, self._has_backward
        self._is_mixed = False
        for layer, gemm, *_ in self.calls:
            order = self._order[gemm != "fprop"]
            order.setdefault(layer, len(order))
        left_out = self._left_out() if self._has_backward else {}
        for layer, gemms in self._by_layer().items():
            facts = {gemm: GemmFact((), reason) for gemm, reason in left_out.get(layer, {}).items()}
            for gemm, operands in gemms.items():
                formats = [(tensor, tuple(of_tensor)) for tensor, of_tensor in operands.items()]
                facts[gemm] = GemmFact(tuple(formats), outside=_share_outside(operands[formats[0][0]]))
                self._is_mixed |= facts[gemm].is_mixed
            self._history.put(layer, self._iteration, facts, excluded=layer in self.excluded)

    def _by_layer(self) -> dict[str, dict[GemmName, dict[str, dict[Format, int]]]]:
        """Return layer -> GEMM -> operand -> format -> number of calls."""
        by_layer: dict[str, dict[GemmName, dict[str, dict[Format, int]]]] = {}
        for (layer, gemm, recipe, a, b), count in self.calls.items():
            gemms = by_layer.setdefault(layer, {})
            operands = gemms.setdefault(gemm, {tensor: {} for tensor in OPERANDS[gemm]})
            for formats, key in zip(operands.values(), (b, a), strict=True):
                made = Format(dtype_name(key) if isinstance(key, torch.dtype) else self.formats[key], recipe)
                formats[made] = formats.get(made, 0) + count
        return by_layer

    def _left_out(self) -> dict[str, dict[GemmName, str]]:
        """Return layer -> GEMM that the backward of the step did not run -> the reason."""
        reasons: dict[str, dict[GemmName, str]] = {}
        for key, needs_gradient in self.forwards.items():
            module, layers = self.modules.get(key, (None, ()))
            for layer in layers:
                reasons[layer] = {"dgrad": NO_BACKWARD, "wgrad": NO_BACKWARD}
            if module is not None:
                for (layer, gemm), reason in gemms_left_out(
                    module, layers, input_needs_gradient=needs_gradient
                ).items():
                    reasons[layer][gemm] = reason
        return reasons


def _share_outside(calls: Mapping[Format, int]) -> float:
    """Return the share of a step's calls that no recipe was around, if some had one; else 0."""
    outside = sum(count for made, count in calls.items() if not made.recipe)
    whole = sum(calls.values())
    return outside / whole if 0 < outside < whole else 0.0


def format_of_operand(given: Any, *, columnwise: bool) -> str:
    """The format that a GEMM reads from an operand, with :data:`MODIFIED` if a feature has changed it."""
    text = format_of(given, columnwise=columnwise)
    if not hasattr(given, "rowwise_gemm_tensor"):  # not of the debug path
        return text
    from te_precision_callbacks.te.debug import debug_quantization

    quantizer = given.quantizer
    plan = quantizer.columnwise_tensor_plan if columnwise else quantizer.rowwise_tensor_plan
    return f"{text}{MODIFIED}" if plan == debug_quantization.API_CALL_MODIFY else text


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
