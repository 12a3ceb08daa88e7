"""The memory of a model's layers, planned from its modules: nothing runs, and the model may be on ``meta``.

    memory = plan_memory(model, modules, recipe, tokens=4096)
    memory.by_kind()["weight_columnwise"]     # Bytes(low, high)

What each class keeps was read from Transformer Engine 2.20.2. M are the tokens of a forward, K a layer's inputs, N its
outputs, F the inputs of fc2, b the bytes of a number in high precision:

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
te.ops           columnwise codes of the input, and of the weight        M K b
================ ======================================================= ============================================

Codes of weights have both directions. With ``is_first_microbatch`` they are in ``_fp8_workspaces`` all the time;
otherwise each forward makes them, and they are saved for the backward; primary quantized weights take the place of the
parameter. Sources: ``_linear_forward_impl`` (``pytorch/module/linear.py``), ``_LayerNormLinear.forward``,
``_LayerNormMLP._forward``, ``_GroupedLinear.forward``, ``BasicLinear._functional_forward``
(``pytorch/ops/basic/basic_linear.py``); ``quantize_weight`` and ``reset_parameters`` (``pytorch/module/base.py``);
``DelayedScalingRecipeState`` (``pytorch/quantization.py``); ``Quantizer.inner_tensor_specs``
(``pytorch/quantized_tensor.py`` and ``pytorch/tensor/*_tensor.py``), which describes the buffers of a quantized tensor;
per-tensor FP8 as ``Float8CurrentScalingQuantizer`` has it, since Float8Quantizer of delayed scaling does not describe
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.base.vocabulary import (
    HYBRID_QUANTIZER,
    IDENTITY_QUANTIZER,
    ONE_SCALE,
    class_names,
    recipe_of,
)
from te_precision_callbacks.coverage.planned_products import MadeQuantizers
from te_precision_callbacks.coverage.precision_audit import quantizers_of_layers, recipe_text
from te_precision_callbacks.coverage.shapes import layer_features
from te_precision_callbacks.layers.naming import Model, NamedModule, module_names, named_operations, named_roots
from te_precision_callbacks.speed.memory.rows import Lives, Memory, MemoryRow

WEIGHT, INPUT, NORM_INPUT, NORM_STATISTICS, NORM_OUTPUT = (
    "weight",
    "input",
    "norm input",
    "norm statistics",
    "norm output",
)
ACTIVATION_INPUT, ACTIVATION_OUTPUT = "input of the activation function", "output of the activation function"
OTHER_PARAMETERS, OUTPUT_GRADIENT = "biases and norm weights", "gradient of the output"
"""The tensors of :attr:`MemoryRow.what`."""

_FLOAT32 = torch.float32.itemsize

_ROWWISE = ("_data", "_rowwise_data", "rowwise_data")
_COLUMNWISE = ("_transpose", "_columnwise_data", "columnwise_data")
"""Attributes of the storages in ``pytorch/tensor/storage`` that hold codes; all others hold scales."""


class UnknownMemoryError(PrecisionDebugError, TypeError):
    """A layer whose bytes are not known, such as one with a quantizer of a user's own recipe."""


class CodeBytes(NamedTuple):
    """The bytes of a quantized tensor.

    Attributes:
        rowwise: its rowwise codes, which on some GPUs serve both directions.
        columnwise: its columnwise codes.
        scales: scales and amaxes of both directions.
        high: what is kept in high precision.
    """

    rowwise: int = 0
    columnwise: int = 0
    scales: int = 0
    high: int = 0

    def plus(self, other: CodeBytes) -> CodeBytes:
        """The sum of two."""
        return CodeBytes(*(a + b for a, b in zip(self, other, strict=True)))


def plan_memory(
    model: Model,
    modules: Sequence[NamedModule],
    recipe: Any,
    *,
    tokens: int | None = None,
    cached: bool = False,
    recipes: Mapping[str, Any] | None = None,
    calls: Mapping[str, Sequence[int]] | None = None,
) -> Memory:
    """Plan the memory of a training step on this rank.

    It is assumed that each layer runs on its fused path, that its input needs a gradient and is no other layer's input
    too, that high precision has the dtype of the layer's weight, and that the experts of a GroupedLinear share the
    tokens equally. What modules do not know is not planned: activation recompute, but for LayerNormMLP's own;
    attention; the state of the optimizer.

    Args:
        model: the model, on any device.
        modules: its modules of Transformer Engine.
        recipe: one of Transformer Engine's recipes; None for high precision.
        tokens: the tokens of one forward on this rank; None if unknown.
        cached: whether quantized weights are kept over micro-batches, with ``is_first_microbatch``.
        recipes: layer -> its recipe, where that is another one.
        calls: layer -> the rows of its input in each call, in place of ``tokens``.

    Raises:
        OptionError: ``tokens`` is not positive.
    """
    if tokens is not None and tokens < 1:
        raise OptionError(f"tokens={tokens} must be 1 or more: the tokens of one forward on one rank.")
    roots = [root for _, root in named_roots(model) or ()]
    trains = any(parameter.requires_grad for root in roots for parameter in root.parameters())
    planner = _MemoryPlanner(recipe, tokens, recipes or {}, calls, cached, trains)
    named = {id(found.module): [layer.name for layer in found.layers] for found in modules}
    operations = {id(found.module): list(found.layers) for found in named_operations(model)}
    below = {id(module): module for root in roots for module in root.modules()}
    for key, path in module_names(model).items():
        module = below[key]
        if key in named:
            planner.plan(module, named[key])
        elif key in operations:
            planner.plan(module, operations[key], is_operation=True)
        elif isinstance(module, torch.nn.Linear):
            planner.plan_torch_linear(path, module)
    texts = {recipe_text(each) for each in (recipe, *planner.recipes.values())} - {""}
    notes = []
    if tokens is None and calls is None:
        notes.append(
            "Saved activations are not planned, since the tokens of a forward are unknown. --tokens (tokens= in Python)"
            " gives them."
        )
    if trains:
        notes.append(
            "Not planned: the state of the optimizer and its master weights, attention, norms and dropout, which no"
            " recipe changes; activations that activation recompute drops; the layers' outputs; cuBLAS workspaces."
        )
    from transformer_engine.pytorch.utils import get_device_compute_capability

    return Memory(
        tuple(planner.rows),
        texts.pop() if len(texts) == 1 else "",
        get_device_compute_capability(),
        tokens,
        cached,
        planner.not_planned,
        tuple(notes),
    )


@dataclass(frozen=True)
class _Linear:
    """A layer with GEMMs.

    Attributes:
        layer: its name.
        recipe: its recipe; None for high precision.
        quantizers: tensor -> its quantizer; empty in high precision.
        shape: of its weight: N outputs, K inputs.
        itemsize: bytes of a number in high precision.
        rows: of its input in each call; None if unknown.
        trained: whether its weight needs a gradient.
        cached: whether its weight's codes are kept from step to step.
        primary: whether its weight is a quantized parameter.
        gathers: whether sequence parallelism gathers its input, of which the rows are this rank's.
    """

    layer: str
    recipe: Any
    quantizers: Mapping[str, Any]
    shape: tuple[int, int]
    itemsize: int
    rows: Sequence[int] | None
    trained: bool
    cached: bool
    primary: bool
    gathers: bool

    @property
    def is_low(self) -> bool:
        """Whether a recipe is in force."""
        return bool(self.quantizers)

    @property
    def override(self) -> str | None:
        """The high precision that the recipe has for the backward; None for none."""
        return None if self.recipe is None else self.recipe.backward_override


@dataclass
class _MemoryPlanner:
    """Plans one module after the other. The first attributes are the arguments of :func:`plan_memory`.

    Attributes:
        trains: whether there is a backward.
        rows, not_planned: as in :class:`Memory`.
        quantizers: those that modules make.
        sizes: bytes of quantized tensors, by quantizer, shape and directions.
    """

    recipe: Any
    tokens: int | None
    recipes: Mapping[str, Any]
    calls: Mapping[str, Sequence[int]] | None
    cached: bool
    trains: bool
    rows: list[MemoryRow] = field(default_factory=list)
    not_planned: dict[str, str] = field(default_factory=dict)
    quantizers: MadeQuantizers = field(default_factory=MadeQuantizers)
    sizes: dict[object, CodeBytes] = field(default_factory=dict)

    def plan(self, module: Any, layers: Sequence[str], *, is_operation: bool = False) -> None:
        """Plan a module of Transformer Engine, or an operation of te.ops."""
        before = len(self.rows)
        try:
            linears = self._operation_linears(module, layers) if is_operation else self._linears(module, layers)
            self._parameters(module, layers, linears)
            if is_operation:
                self._operation(linears)
            else:
                self._module(module, linears)
        except UnknownMemoryError as error:
            del self.rows[before:]
            self.not_planned |= dict.fromkeys(layers, str(error))

    # ------------------------------------------------------------------ modules

    def _linears(self, module: Any, layers: Sequence[str]) -> list[_Linear]:
        recipe = self.recipes.get(layers[0], self.recipe)
        forward, backward = self.quantizers.of(module, recipe, 3 * len(layers), 2 * len(layers))
        quantizers = list(quantizers_of_layers(forward, backward, len(layers)))
        weights = _weights(module, layers)
        gathers = module.sequence_parallel and (
            "LayerNormMLP" in class_names(module) or module.parallel_mode == "column"
        )
        return [
            _Linear(
                layer,
                recipe,
                quantizers[number],
                (sizes[1], sizes[0]),
                weights[layer][0].dtype.itemsize,
                self._rows_of(layer, len(layers) if hasattr(module, "num_gemms") else 1),
                any(part.requires_grad for part in weights[layer]),
                self.cached and not _is_fsdp2(module),
                bool(module.primary_weights_in_fp8) or is_quantized(weights[layer][0]),
                bool(gathers),
            )
            for number, (layer, sizes) in enumerate(zip(layers, layer_features(module), strict=True))
        ]

    def _module(self, module: Any, linears: Sequence[_Linear]) -> None:
        names = class_names(module)
        is_mlp = "LayerNormMLP" in names
        fsdp2 = _is_fsdp2(module)
        recomputed = is_mlp and bool(module.checkpoint)
        for linear in linears:
            self._codes_of_weight(linear, is_saved=not (fsdp2 or recomputed), columnwise=not fsdp2)
            self._scaling_state(linear, 3 + 2)
            self._codes_of_gradient(linear)
        if is_mlp:
            self._saved_of_mlp(module, *linears)
            return
        for linear in linears:
            if "LayerNormLinear" in names:
                self._saved_of_norm(module, linear)
                both = linear.is_low and linear.gathers and recipe_of(linear.quantizers["activation"]) == "nvfp4"
                self._save_operand(linear, NORM_OUTPUT, original=linear.override == "high_precision", rowwise=both)
            else:
                original = linear.override == "high_precision" or (
                    bool(getattr(module, "save_original_input", False)) and linear.override is None
                )
                self._save_operand(linear, INPUT, original=original)

    def _saved_of_mlp(self, module: Any, fc1: _Linear, fc2: _Linear) -> None:
        if fc1.rows is None or not self.trains:
            return
        self._saved_of_norm(module, fc1, statistics=not module.checkpoint)
        if module.checkpoint:  # the input alone; BF16 does the same
            return
        self._save_operand(fc1, NORM_OUTPUT, rowwise=True)
        rows = sum(fc1.rows)
        size = rows * fc1.shape[0] * fc1.itemsize
        self._add(fc2.layer, "saved_high", ACTIVATION_INPUT, size, size, "to_backward")
        of_tensor = fc2.is_low and recipe_of(fc2.quantizers["activation"]) in ONE_SCALE
        self._save_operand(fc2, ACTIVATION_OUTPUT, rowwise=True, columnwise=not of_tensor)

    def _saved_of_norm(self, module: Any, linear: _Linear, *, statistics: bool = True) -> None:
        if linear.rows is None or not self.trains:
            return
        rows = sum(linear.rows)
        size = rows * linear.shape[1] * linear.itemsize
        self._add(linear.layer, "saved_high", NORM_INPUT, size, size, "to_backward")
        if statistics:
            size = rows * _FLOAT32 * (1 if module.normalization == "RMSNorm" else 2)
            self._add(linear.layer, "saved_high", NORM_STATISTICS, size, size, "to_backward")

    def _operation_linears(self, module: Any, layers: Sequence[str]) -> list[_Linear]:
        recipe = self.recipes.get(layers[0], self.recipe)
        forward, backward = self.quantizers.of(
            module, recipe, module.num_quantizers("forward"), module.num_quantizers("backward")
        )
        weights = _weights(module, layers)
        if hasattr(module, "local_out_features"):
            shape = module.local_out_features, module.local_in_features
        else:
            shape = module.out_features, module.in_features
        gathers = getattr(module, "sequence_parallel", False) and module.tensor_parallel_mode == "column"
        linears = []
        for number, layer in enumerate(layers):
            quantizers = {}
            if forward:
                quantizers = {"activation": forward[2 * number], "weight": forward[2 * number + 1]}
                quantizers["gradient"] = backward[number]
            linears.append(
                _Linear(
                    layer,
                    recipe,
                    quantizers,
                    shape,
                    weights[layer][0].dtype.itemsize,
                    self._rows_of(layer, len(layers)),
                    any(part.requires_grad for part in weights[layer]),
                    False,
                    bool(getattr(module, "_with_quantized_weight", False)) or is_quantized(weights[layer][0]),
                    bool(gathers),
                )
            )
        return linears

    def _operation(self, linears: Sequence[_Linear]) -> None:
        for linear in linears:
            both = linear.override is not None
            self._codes_of_weight(linear, is_saved=linear.override != "high_precision", rowwise=both)
            self._scaling_state(linear, 2 + 1)
            self._codes_of_gradient(linear)
            original = linear.override == "high_precision" or linear.gathers  # what is gathered is quantized after it
            self._save_operand(linear, INPUT, original=original)

    def plan_torch_linear(self, path: str, module: torch.nn.Linear) -> None:
        """Plan a linear layer of torch."""
        for name, parameter in module.named_parameters(recurse=False):
            self._parameter(path, WEIGHT if name == "weight" else OTHER_PARAMETERS, parameter)
        rows = self._rows_of(path, 1)
        if rows is not None and self.trains and module.weight.requires_grad:
            size = sum(rows) * module.in_features * module.weight.dtype.itemsize
            self._add(path, "saved_high", INPUT, size, size, "to_backward")

    # ------------------------------------------------------------------ weights

    def _parameters(self, module: torch.nn.Module, layers: Sequence[str], linears: Sequence[_Linear]) -> None:
        """Parameters and their gradients; of a quantized parameter its codes."""
        of_layer = {linear.layer: linear for linear in linears}
        for name, parameter in module.named_parameters(recurse=False):
            layer = layer_of_parameter(name, layers)
            linear = of_layer[layer]
            if not is_weight(name, parameter):
                self._parameter(layer, OTHER_PARAMETERS, parameter)
            elif not linear.primary:
                self._parameter(layer, WEIGHT, parameter)
            else:
                self._primary(linear, parameter)

    def _parameter(self, layer: str, what: str, parameter: torch.Tensor) -> None:
        local = getattr(parameter, "_local_tensor", parameter)
        size = local.numel() * local.dtype.itemsize
        self._add(layer, "parameter", what, size, size, "always")
        self._gradient(layer, what, parameter, local)

    def _gradient(self, layer: str, what: str, parameter: torch.Tensor, local: torch.Tensor) -> None:
        if parameter.requires_grad:
            kept = getattr(parameter, "main_grad", None)
            dtype = kept.dtype if isinstance(kept, torch.Tensor) else local.dtype
            size = local.numel() * dtype.itemsize
            self._add(layer, "gradient", what, size, size, "always")

    def _primary(self, linear: _Linear, parameter: torch.Tensor) -> None:
        local: Any = getattr(parameter, "_local_tensor", parameter)
        quantizer = getattr(local, "_quantizer", None) or linear.quantizers.get("weight")
        high = local.numel() * linear.itemsize
        if quantizer is None:
            self.not_planned[linear.layer] = "its weights are quantized, and it is not known how: give the recipe"
            return
        columnwise = quantizer.columnwise_usage if is_quantized(local) else True
        codes = self._bytes(quantizer, (local.shape[0], local.shape[1]), linear, rowwise=True, columnwise=columnwise)
        self._add(linear.layer, "parameter", WEIGHT, codes.high, high, "always")
        self._add_codes(linear.layer, "weight", WEIGHT, codes, "always")
        self._gradient(linear.layer, WEIGHT, parameter, local)

    def _codes_of_weight(
        self, linear: _Linear, *, is_saved: bool, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        """The codes of a weight that is a parameter in high precision.

        Args:
            linear: the layer.
            is_saved: whether a forward that makes them saves them.
            rowwise, columnwise: the directions that it keeps.
        """
        if not linear.is_low or linear.primary:
            return
        columnwise &= self.trains and linear.override is None
        codes = self._bytes(
            linear.quantizers["weight"],
            linear.shape,
            linear,
            rowwise=rowwise or linear.cached or not columnwise,
            columnwise=columnwise,
        )
        if linear.cached:
            self._add_codes(linear.layer, "weight", WEIGHT, codes, "always")
        elif is_saved and self.trains:
            self._add_codes(linear.layer, "weight", WEIGHT, codes, "to_backward")

    def _scaling_state(self, linear: _Linear, tensors: int) -> None:
        if linear.is_low and linear.recipe.delayed():
            size = tensors * (1 + linear.recipe.amax_history_len) * _FLOAT32
            self._add(linear.layer, "scaling_state", "", size, 0, "always")

    # ------------------------------------------------------------------ activations

    def _save_operand(
        self, linear: _Linear, what: str, *, original: bool = False, rowwise: bool = False, columnwise: bool = True
    ) -> None:
        """What is saved of the operand that wgrad reads.

        Args:
            linear: the layer.
            what: which tensor that is.
            original: whether it is saved in high precision.
            rowwise, columnwise: the directions of its codes that are saved where the backward is quantized.
        """
        if linear.rows is None or not self.trains or not linear.trained:
            return
        inputs = linear.shape[1]
        high = sum(linear.rows) * inputs * linear.itemsize
        if not linear.is_low or original:
            self._add(linear.layer, "saved_high", what, high, high, "to_backward")
            return
        quantizer = linear.quantizers["activation"]
        if linear.override is not None or (linear.gathers and quantizer.supports_only_rowwise_all_gather()):
            rowwise, columnwise = True, False
        found = CodeBytes()
        for rows in linear.rows:
            found = found.plus(self._bytes(quantizer, (rows, inputs), linear, rowwise=rowwise, columnwise=columnwise))
        self._add(linear.layer, "saved_high", what, found.high, high, "to_backward")
        self._add_codes(linear.layer, "saved", what, found, "to_backward")

    def _codes_of_gradient(self, linear: _Linear) -> None:
        """The quantized gradient of the output, which a backward makes for dgrad and wgrad."""
        if linear.rows is None or not linear.is_low or not self.trains or linear.override is not None:
            return
        shape = (max(linear.rows, default=0), linear.shape[0])
        codes = self._bytes(linear.quantizers["gradient"], shape, linear, rowwise=True, columnwise=linear.trained)
        self._add(linear.layer, "gradient_codes", OUTPUT_GRADIENT, sum(codes) - codes.high, 0, "in_backward")

    # ------------------------------------------------------------------ shared

    def _rows_of(self, layer: str, groups: int) -> Sequence[int] | None:
        if self.calls is not None:
            return self.calls.get(layer, ())
        return None if self.tokens is None else [max(1, self.tokens // groups)]

    def _bytes(
        self, quantizer: Any, shape: tuple[int, int], linear: _Linear, *, rowwise: bool, columnwise: bool
    ) -> CodeBytes:
        key = id(quantizer), shape, rowwise, columnwise, linear.itemsize
        if key not in self.sizes:
            usage = quantizer.rowwise_usage, quantizer.columnwise_usage
            try:
                self.sizes[key] = planned_bytes(
                    quantizer, shape, rowwise=rowwise, columnwise=columnwise, itemsize=linear.itemsize
                )
            finally:
                quantizer.set_usage(rowwise=usage[0], columnwise=usage[1])
        return self.sizes[key]

    def _add_codes(self, layer: str, of: Literal["weight", "saved"], what: str, codes: CodeBytes, lives: Lives) -> None:
        for part in ("rowwise", "columnwise", "scales"):
            self._add(layer, f"{of}_{part}", what, getattr(codes, part), 0, lives)

    def _add(self, layer: str, kind: str, what: str, low: int, high: int, lives: Lives) -> None:
        if low or high:
            self.rows.append(MemoryRow(layer, kind, what, low, high, lives))


def _weights(module: torch.nn.Module, layers: Sequence[str]) -> Mapping[str, Sequence[Any]]:
    """The weights of each layer of a module: several, where its parameters are split."""
    found: dict[str, list[Any]] = {layer: [] for layer in layers}
    for name, parameter in module.named_parameters(recurse=False):
        if is_weight(name, parameter):
            found[layer_of_parameter(name, layers)].append(getattr(parameter, "_local_tensor", parameter))
    first = next((weights for weights in found.values() if weights), None)  # one parameter may hold all groups'
    if first is None:
        raise UnknownMemoryError("its weight is no parameter of it, as where FSDP keeps all parameters flat.")
    return {layer: weights or first for layer, weights in found.items()}


def _is_fsdp2(module: Any) -> bool:
    """Whether FSDP2 shards a module, which keeps the first answer: not ours, since a plan may come before FSDP2."""
    is_known = "_is_fsdp2" in vars(module)
    found = bool(module.is_fsdp2)
    if not is_known:
        del module._is_fsdp2
    return found


def layer_of_parameter(name: str, layers: Sequence[str]) -> str:
    """The layer of a module that a parameter belongs to, by its name in the module."""
    if len(layers) == 1:
        return layers[0]
    if name.startswith("fc2"):
        return layers[1]
    number = name.removeprefix("weight").removeprefix("bias")
    return layers[int(number)] if number.isdigit() and int(number) < len(layers) else layers[0]


def is_weight(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter of a module is the weight of a GEMM, by its name and dimensions."""
    return parameter.ndim > 1 and "bias" not in name


def planned_bytes(
    quantizer: Any, shape: tuple[int, int], *, rowwise: bool, columnwise: bool, itemsize: int = 2
) -> CodeBytes:
    """What a tensor has that a quantizer makes, once the directions that are not needed are dropped.

    Args:
        quantizer: one of Transformer Engine's; its usage is set to the directions.
        shape: rows and columns of the tensor.
        rowwise, columnwise: the directions that are kept.
        itemsize: bytes of a number in high precision.

    Raises:
        UnknownMemoryError: it does not describe its buffers.
    """
    names = class_names(quantizer)
    if not rowwise and not columnwise:
        return CodeBytes()
    if HYBRID_QUANTIZER in names:
        sides = [(quantizer.rowwise_quantizer, rowwise, False), (quantizer.columnwise_quantizer, False, columnwise)]
        found = CodeBytes()
        for part, in_rows, in_columns in sides:
            if part is not None:
                found = found.plus(
                    planned_bytes(part, shape, rowwise=in_rows, columnwise=in_columns, itemsize=itemsize)
                )
        return found
    if IDENTITY_QUANTIZER in names:
        return CodeBytes(high=math.prod(shape) * itemsize)
    if recipe_of(quantizer) in ONE_SCALE:
        in_both = takes_any_layout()
        codes = math.prod(shape)
        return CodeBytes(codes * (rowwise or in_both), codes * (columnwise and not in_both), torch.float32.itemsize)
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    try:
        specs = quantizer.inner_tensor_specs(shape)
    except (NotImplementedError, AttributeError) as error:
        raise UnknownMemoryError(
            f"{type(quantizer).__name__}: it is not known which buffers this quantizer of a recipe of your own makes."
        ) from error
    return _summed((name, math.prod(size) * dtype.itemsize) for name, (size, dtype) in specs.items())


def takes_any_layout() -> bool:
    """Whether per-tensor FP8 keeps one copy of codes for both directions on this GPU."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    return bool(is_non_tn_fp8_gemm_supported())


def is_quantized(tensor: Any) -> bool:
    """Whether this is one of Transformer Engine's quantized tensors, or a storage of several."""
    return tensor is not None and any(
        name in ("QuantizedTensorStorage", "GroupedTensorStorage") for name in class_names(tensor)
    )


def _summed(sizes: Iterable[tuple[str, int]]) -> CodeBytes:
    found = {"rowwise": 0, "columnwise": 0, "scales": 0}
    for name, size in sizes:
        found["rowwise" if name in _ROWWISE else "columnwise" if name in _COLUMNWISE else "scales"] += size
    return CodeBytes(**found)
