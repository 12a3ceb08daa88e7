"""Transformer Engine's modules with GEMMs: one row for each class and its subclasses.

A module with several GEMMs in its forward has a *layer* for each. Read from Transformer Engine 2.20.2:
``pytorch/module``, where ``_get_debug_quantizers`` has the names of the layers, and ``pytorch/ops/basic``.

:func:`of` returns the row of a module. Its functions take the module::

    te_modules.of(module).features(module)
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch

from te_precision_callbacks.base.vocabulary import TENSORS

ResultT = TypeVar("ResultT")

_ALL = frozenset(TENSORS)

_MLP_ORDER = {("fprop", -1): 0, ("fprop", 2): 0, ("fprop", 0): 1, ("fprop", 1): 1}
_MLP_ORDER |= {("dgrad", -1): 1, ("dgrad", 2): 1, ("dgrad", 0): 1, ("dgrad", 1): 0}
_MLP_ORDER |= {("wgrad", index): index for index in (-1, 0, 1, 2)}


class ModuleRow(NamedTuple):
    """A class of modules.

    Attributes:
        name, file: of the class, and of its file below ``transformer_engine/pytorch``.
        parts: the ends of its layers' names.
        groups: the attribute with the number of groups: its layers, which share its tokens.
        parameters: weights of the layers, if each has its own attribute.
        modes: tensor parallelism of the layers, if it differs from the module's. Weights are always split;
            ``set_parallel_mode`` only adds communication.
        is_mlp: whether it has two layers around an activation function. Its backward begins with the second.
        has_norm: whether it has a norm in front, so that its backward always computes dgrad and saves the norm's input.
        checks_operands: whether it checks its operands before fprop.
        high_precision: for each layer, the tensors that its fused path has in high precision. LayerNormMLP may fuse
            the activation function and its derivative into the GEMMs that write the other ones.
        is_operation: whether it is an operation of ``te.ops``, without a debug path.
        quantizers: how many quantizers a layer has in the forward and in the backward.
    """

    name: str
    file: str
    parts: tuple[str, ...] = ("",)
    groups: str = ""
    parameters: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    is_mlp: bool = False
    has_norm: bool = False
    checks_operands: bool = False
    high_precision: tuple[frozenset[str], ...] = (_ALL,)
    is_operation: bool = False
    quantizers: tuple[int, int] = (3, 2)

    def function(self) -> Any:
        """Return its autograd Function."""
        return getattr(importlib.import_module(f"{_PACKAGE}pytorch.{self.file}"), f"_{self.name}")

    def arguments(self) -> Mapping[str, tuple[int, str]]:
        """Return argument of its autograd Function -> layer and tensor before quantization; not of groups."""
        weights = {name: (number, "weight") for number, name in enumerate(self.parameters or ("weight",))}
        return weights if self.has_norm else {**weights, "inp": (0, "activation")}

    def layers(self, module: Any) -> tuple[str, ...]:
        """Return the ends of its layers' names."""
        if self.groups:
            return tuple(f".gemm_{index}" for index in range(getattr(module, self.groups)))
        return self.parts

    def features(self, module: Any) -> list[tuple[int, int]]:
        """Return in_features and out_features of each layer on this rank."""
        if self.parameters:
            sizes = []
            for name in self.parameters:
                out_features, in_features = getattr(module, name).shape
                sizes.append((in_features, out_features))
            return sizes
        return [(module.in_features, module.out_features)] * len(self.layers(module))

    def tokens(self, module: Any, rows: int, splits: Sequence[Any] | None, *, in_backward: bool = False) -> list[int]:
        """Return the tokens of each layer's GEMMs, for an input or gradient with ``rows``; 0 if unknown.

        Args:
            splits: the tokens of each group.
        """
        count = len(self.layers(module))
        if self.groups:
            return list(map(int, splits or [0] * count))
        # With sequence parallelism, the operand that is not split over features is split over tokens.
        is_split = module.sequence_parallel and (
            self.is_mlp or module.parallel_mode == ("row" if in_backward else "column")
        )
        return [rows * (module.tp_size if is_split else 1)] * count

    def before_quantization(self, module: Any) -> tuple[frozenset[str], ...]:
        """Return for each layer the tensors that its fused path has in high precision."""
        if getattr(module, "gemm_gelu_fusion", False):  # NVTE_GEMM_GELU_FUSION=1
            fc1, fc2 = self.high_precision
            return fc1, fc2 - {"activation"}
        return self.high_precision if self.is_mlp else self.high_precision * len(self.layers(module))

    def parallel_modes(self, module: Any) -> Sequence[str | None]:
        """Return ``column``, ``row`` or None for each layer."""
        return self.modes or [module.parallel_mode] * len(self.layers(module))

    def weights(self, module: Any, number: int) -> list[Any]:
        """Return the weights of a layer: several if it is split. One may hold the weights of all groups."""
        names = self.parameters[number : number + 1] or getattr(module, "weight_names", (f"weight{number}", "weight"))
        return [weight for name in names if (weight := getattr(module, name, None)) is not None]

    def layer_of(self, parameter: str, layers: Sequence[str]) -> str:
        """Return the layer, of a module's ``layers``, with a parameter."""
        if self.is_mlp and parameter.startswith("fc2"):
            return layers[1]
        number = parameter.removeprefix("weight").removeprefix("bias")
        if self.groups and number.isdigit():
            return layers[int(number)]
        return layers[0]

    @property
    def gemm_order(self) -> Mapping[tuple[str, int], int] | None:
        """GEMM, and index of the layer before it -> index of its layer; None if the layers do not run in turn.

        LayerNormMLP's forward, also when recomputed, runs fc1 before fc2; its backward runs fc2 before fc1, and dgrad
        before wgrad in each. A forward starts with -1, a backward with 2.
        """
        return _MLP_ORDER if self.is_mlp else None

    def in_backward_order(self, layers: Sequence[ResultT]) -> Sequence[ResultT]:
        return layers[::-1] if self.is_mlp else layers

    def frozen(self, module: Any) -> list[bool]:
        """Return which layers have no wgrad. In a grouped module, the first weight decides for all."""
        frozen = []
        for number in range(len(self.layers(module))):
            weights = self.weights(module, number if self.parameters else 0)
            frozen.append(not any(weight.requires_grad for weight in weights))
        return frozen


def _by_name(*rows: ModuleRow) -> Mapping[str, ModuleRow]:
    return {row.name: row for row in rows}


MODULES = _by_name(
    ModuleRow("Linear", "module.linear", checks_operands=True),
    ModuleRow("GroupedLinear", "module.grouped_linear", groups="num_gemms"),
    ModuleRow("LayerNormLinear", "module.layernorm_linear", has_norm=True, checks_operands=True),
    ModuleRow(
        "LayerNormMLP",
        "module.layernorm_mlp",
        parts=(".fc1", ".fc2"),
        parameters=("fc1_weight", "fc2_weight"),
        modes=("column", "row"),
        is_mlp=True,
        has_norm=True,
        checks_operands=True,
        high_precision=(_ALL - {"output"}, _ALL - {"dgrad"}),
    ),
)
"""Class -> row, of the modules that Transformer Engine's debug path observes."""

OPERATIONS = _by_name(
    ModuleRow("BasicLinear", "ops.basic.basic_linear", is_operation=True, quantizers=(2, 1)),
    ModuleRow("GroupedLinear", "ops.basic.grouped_linear", groups="num_groups", is_operation=True, quantizers=(2, 1)),
)
"""The same of the operations of ``te.ops``."""

_PACKAGE = "transformer_engine."
_ROWS = {f"{_PACKAGE}pytorch.{row.file}.{row.name}": row for row in (*MODULES.values(), *OPERATIONS.values())}


def _cached(function: Callable[[type], ResultT]) -> Callable[[type], ResultT]:
    return functools.cache(function)


@_cached
def find(kind: type) -> ModuleRow | None:
    """Return the row of a class; None for a class without known GEMMs."""
    for base in kind.__mro__:
        row = _ROWS.get(f"{base.__module__}.{base.__name__}")
        if row is not None:
            return row
    return None


def of(module: torch.nn.Module) -> ModuleRow:
    """Return the row of a module; raises LookupError if its GEMMs are unknown."""
    row = find(type(module))
    if row is None:
        raise LookupError(f"{type(module).__name__} has no row in te/modules.py")
    return row


@_cached
def te_classes(kind: type) -> tuple[str, ...]:
    """Return the names of the classes of Transformer Engine that a class inherits from."""
    return tuple(base.__name__ for base in kind.__mro__ if base.__module__.startswith(_PACKAGE))


def may_delay_wgrad(module: Any) -> bool:
    """Return whether its wgrads may run after its backward (``delay_wgrad_compute``)."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.context is not None


def attention_class() -> Any:
    return importlib.import_module(f"{_PACKAGE}pytorch.attention").DotProductAttention


def is_attention(module: torch.nn.Module) -> bool:
    return "DotProductAttention" in te_classes(type(module))


@_cached
def is_unknown(kind: type) -> bool:
    """Return whether modules of a class of Transformer Engine have a recipe's state, but no row for their GEMMs."""
    classes = te_classes(kind)
    return "TransformerEngineBaseModule" in classes and "DotProductAttention" not in classes and find(kind) is None


def tensor_parallel_group(module: Any) -> torch.distributed.ProcessGroup | None:
    """Return the group of a module's tensor-parallel ranks; None for a single rank."""
    if getattr(module, "tp_size", 1) > 1:
        return getattr(module, "tp_group", None)
    return None


# ---------------------------------------------------------------------- te.Linear in a graph of torch.compile

_FRAMES = 7  # wgrad is called by a function of the backward


def is_compiled_operator(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` takes a module's forward into its graph, as one operator (torch 2.14).

    Read from Transformer Engine 2.20.2: ``register_custom_op`` in ``pytorch/module/linear.py``.
    """
    from transformer_engine.pytorch.module import linear

    return linear._linear_op is not None and isinstance(module, linear.Linear)


def arguments_of_operator() -> Any:
    """Return the arguments of the operator of a ``te.Linear`` that is running a GEMM; None outside of operators."""
    from transformer_engine.pytorch.module import linear

    codes = linear._linear_forward_impl.__code__, linear._linear_backward_impl.__code__
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            break
        if frame.f_code in codes:
            return frame.f_locals["args"]
        frame = frame.f_back
    return None
