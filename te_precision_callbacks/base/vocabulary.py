"""The names that all parts share: tensors, GEMMs and their operands, recipes, and Transformer Engine's quantizers.

Each of these facts is defined only here. Neither Transformer Engine, torch nor the rest of the package is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

GemmName = Literal["fprop", "dgrad", "wgrad"]
OperandName = Literal["activation", "weight", "gradient"]
TensorName = Literal["activation", "weight", "gradient", "output", "wgrad", "dgrad"]

GEMMS: tuple[GemmName, ...] = get_args(GemmName)
"""The GEMMs of a linear layer: the forward, and the gradients of its input and of its weight."""

OPERANDS: Mapping[GemmName, tuple[OperandName, OperandName]] = {
    "fprop": ("activation", "weight"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("gradient", "activation"),
}
"""The two tensors that each GEMM multiplies: the operands B and A of Transformer Engine's GEMMs."""

RESULT: Mapping[GemmName, TensorName] = {"fprop": "output", "dgrad": "dgrad", "wgrad": "wgrad"}
"""The tensor that each GEMM makes."""

ROWWISE: Mapping[str, GemmName] = {"activation": "fprop", "weight": "fprop", "gradient": "dgrad"}
"""The GEMM that reads the rowwise data of a tensor; the other one reads its columnwise data."""

COLUMNWISE: Mapping[str, GemmName] = {"activation": "wgrad", "weight": "dgrad", "gradient": "wgrad"}
"""The GEMM that reads the columnwise data of a tensor."""

TENSORS: tuple[TensorName, ...] = get_args(TensorName)
"""The tensors of a layer that can be watched: what the GEMMs read, and what they make."""

RECIPES = ("fp8_delayed_scaling", "fp8_current_scaling", "mxfp8", "fp8_block_scaling", "nvfp4")
"""The recipes, as spelled in statistics' names."""

ONE_SCALE = ("fp8_delayed_scaling", "fp8_current_scaling")
"""The recipes with one scale for a tensor; the others have one for each block."""

ELEMENT_FORMATS = ("e4m3", "e5m2")
"""The formats of FP8 elements, as spelled in statistics' names."""

WITH_ELEMENT_FORMAT = ("fp8_current_scaling", "mxfp8", "fp8_block_scaling")
"""The recipes whose elements can be either of :data:`ELEMENT_FORMATS`, and which can be simulated."""

LOW_PRECISION: Mapping[str, frozenset[str]] = {
    "fp8": frozenset({"fp8", "mxfp8"}),
    "mxfp8": frozenset({"mxfp8"}),
    "nvfp4": frozenset({"nvfp4"}),
    "quantized": frozenset({"fp8", "mxfp8", "nvfp4"}),
}
"""The words for low precision -> the precisions that they mean: MXFP8 is FP8 too, with a scale for each block."""

HIGH_PRECISION = ("bf16", "fp16", "fp32", "fp64")

PRECISIONS: Mapping[str, frozenset[str]] = {**LOW_PRECISION, **{name: frozenset({name}) for name in HIGH_PRECISION}}
"""The words for a precision that a coverage's ``share`` takes -> the values of ``Product.precision``."""

SUBJECTS = (
    "parameter",
    "gradient",
    "main_grad",
    "reduce",
    "optimizer_state",
    "master_weight",
    "norm",
    "softmax",
    "residual",
    "logits",
)
"""What is kept: ``parameter``, ``gradient``: those of the model. ``main_grad``: Megatron's gradients, which accumulate
over micro-batches. ``reduce``: what ranks sum of the gradients. ``optimizer_state``: tensors of the optimizer as large
as a parameter. ``master_weight``: those of them, or of its parameters, that hold a weight in another type than the
model does. ``norm``, ``softmax``: results of torch's norms and of softmax. ``residual``: what goes from block to block.
``logits``: what the model returns, or what cross entropy takes."""

LayerNames = Literal["path", "upstream"]
"""The names of layers: ``"path"``, their path in the module tree; ``"upstream"``, the names and numbers of
nvidia-dlfw-inspect's ``infer_and_assign_layer_names``."""

Observe = Literal["debug", "fused", "auto"]
"""The path that layers take while features look at their tensors."""


class QuantizerClass(NamedTuple):
    """One of Transformer Engine's quantizers.

    Attributes:
        recipe: one of :data:`RECIPES`.
        storage: the base class of all tensors that the quantizer makes.
        format: the name of their format; for FP8 elements the element format follows the name.
    """

    recipe: str
    storage: str
    format: str


QUANTIZERS: Mapping[str, QuantizerClass] = {
    "Float8Quantizer": QuantizerClass("fp8_delayed_scaling", "Float8TensorStorage", "FP8"),
    "Float8CurrentScalingQuantizer": QuantizerClass("fp8_current_scaling", "Float8TensorStorage", "FP8"),
    "MXFP8Quantizer": QuantizerClass("mxfp8", "MXFP8TensorStorage", "MXFP8"),
    "Float8BlockQuantizer": QuantizerClass("fp8_block_scaling", "Float8BlockwiseQTensorStorage", "FP8 block"),
    "NVFP4Quantizer": QuantizerClass("nvfp4", "NVFP4TensorStorage", "NVFP4"),
}
"""Transformer Engine's quantizers by the names of their classes (2.20.2, ``pytorch/tensor``)."""

_FORMATS = {name: row.format for quantizer, row in QUANTIZERS.items() for name in (quantizer, row.storage)}

_ASKED_OF_RECIPE: Mapping[str, str] = {
    "fp8_delayed_scaling": "delayed",
    "fp8_current_scaling": "float8_current_scaling",
    "mxfp8": "mxfp8",
    "fp8_block_scaling": "float8_block_scaling",
    "nvfp4": "nvfp4",
}
"""The method that is true for each recipe (Transformer Engine 2.20.2, ``common/recipe: Recipe``)."""

IDENTITY_QUANTIZER = "IdentityQuantizer"
"""Transformer Engine's quantizer that leaves a tensor unchanged."""

HYBRID_QUANTIZER = "HybridQuantizer"
"""Transformer Engine's quantizer with a separate quantizer for each direction."""


def class_names(thing: Any) -> tuple[str, ...]:
    """The names of an object's class and of its base classes, the most derived first.

    Transformer Engine's classes are recognised by these names, so a user's subclass counts as its parent, and
    Transformer Engine is not imported.
    """
    kind: type = type(thing)
    return _names_of_class(kind)


@functools.cache
def _names_of_class(kind: type) -> tuple[str, ...]:
    return tuple(base.__name__ for base in kind.__mro__)


def recipe_of(quantizer: Any) -> str | None:
    """The recipe (of :data:`RECIPES`) that one of Transformer Engine's quantizers belongs to; None for no recipe."""
    kind: type = type(quantizer)
    return _recipe_of_class(kind)


@functools.cache
def _recipe_of_class(quantizer: type) -> str | None:
    names = _names_of_class(quantizer)
    return next((QUANTIZERS[name].recipe for name in names if name in QUANTIZERS), None)


def name_of_format(thing: Any) -> str | None:
    """The format of one of Transformer Engine's quantized tensors or storages, or of a quantizer's results.

    The name is that of :class:`QuantizerClass`; None for any other class.
    """
    kind: type = type(thing)
    return _format_of_class(kind)


@functools.cache
def _format_of_class(kind: type) -> str | None:
    return next((_FORMATS[name] for name in _names_of_class(kind) if name in _FORMATS), None)


def name_of_recipe(recipe: Any) -> str | None:
    """The name (of :data:`RECIPES`) of one of Transformer Engine's recipes; None for a user's own."""
    return next((name for name, question in _ASKED_OF_RECIPE.items() if getattr(recipe, question)()), None)
