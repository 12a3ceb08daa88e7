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

GEMM_OF_LAYOUT: Mapping[str, GemmName] = {"TN": "fprop", "NN": "dgrad", "NT": "wgrad"}
"""The layout that Transformer Engine asks for (whether each operand is transposed, as in BLAS) -> the GEMM."""

RESULT: Mapping[GemmName, TensorName] = {"fprop": "output", "dgrad": "dgrad", "wgrad": "wgrad"}
"""The tensor that each GEMM makes."""

ROWWISE: Mapping[str, GemmName] = {"activation": "fprop", "weight": "fprop", "gradient": "dgrad"}
"""The GEMM that reads the rowwise data of a tensor; the other one reads its columnwise data."""

COLUMNWISE: Mapping[str, GemmName] = {"activation": "wgrad", "weight": "dgrad", "gradient": "wgrad"}
"""The GEMM that reads the columnwise data of a tensor."""

TENSORS: tuple[TensorName, ...] = get_args(TensorName)
"""The tensors of a layer that can be watched: what the GEMMs read, and what they make."""

ELEMENT_FORMATS = ("e4m3", "e5m2")
"""The formats of FP8 elements, as spelled in statistics' names."""


class RecipeRow(NamedTuple):
    """What is known of a recipe. Names of Transformer Engine are those of 2.20.2.

    Attributes:
        name: as spelled in statistics' names.
        other_names: other spellings: those in Transformer Engine's documentation that its code refuses, and short ones.
        shares: which elements share a factor, in words; ``all``: the recipe has one scale for a tensor.
        factor: the type of the factor, in words.
        elements: the format of the elements by default, in words.
        fixed: why a statistic's name cannot choose the format of the elements; empty if it can.
        recipe_class: its class, in ``common/recipe``.
        question: the method of such classes that is true for this recipe alone.
        check: the function of ``pytorch/quantization.py`` that decides whether the recipe runs on this GPU.
        quantizer: the class of its quantizers, in ``pytorch/tensor``.
        storage: the base class of all tensors that such a quantizer makes.
        format: the name of their format; for FP8 elements the element format follows the name.
    """

    name: str
    other_names: tuple[str, ...]
    shares: str
    factor: str
    elements: str
    fixed: str
    recipe_class: str
    question: str
    check: str
    quantizer: str
    storage: str
    format: str


_ROWS = (
    RecipeRow(
        "fp8_delayed_scaling",
        ("delayed_scaling",),
        shares="all",
        factor="float32, from the amaxes of earlier steps",
        elements="E4M3; gradients E5M2",
        fixed="fp8_delayed_scaling is read where a layer runs it, with the elements that it has there",
        recipe_class="DelayedScaling",
        question="delayed",
        check="check_fp8_support",
        quantizer="Float8Quantizer",
        storage="Float8TensorStorage",
        format="FP8",
    ),
    RecipeRow(
        "fp8_current_scaling",
        ("current_scaling", "fp8_current"),
        shares="all",
        factor="float32",
        elements="E4M3; gradients E5M2",
        fixed="",
        recipe_class="Float8CurrentScaling",
        question="float8_current_scaling",
        check="check_fp8_support",
        quantizer="Float8CurrentScalingQuantizer",
        storage="Float8TensorStorage",
        format="FP8",
    ),
    RecipeRow(
        "mxfp8",
        (),
        shares="32",
        factor="a power of two (E8M0)",
        elements="E4M3",
        fixed="",
        recipe_class="MXFP8BlockScaling",
        question="mxfp8",
        check="check_mxfp8_support",
        quantizer="MXFP8Quantizer",
        storage="MXFP8TensorStorage",
        format="MXFP8",
    ),
    RecipeRow(
        "fp8_block_scaling",
        ("block_scaling", "fp8_block"),
        shares="128; in a weight 128 x 128",
        factor="a power of two (float32)",
        elements="E4M3",
        fixed="",
        recipe_class="Float8BlockScaling",
        question="float8_block_scaling",
        check="check_fp8_block_scaling_support",
        quantizer="Float8BlockQuantizer",
        storage="Float8BlockwiseQTensorStorage",
        format="FP8 block",
    ),
    RecipeRow(
        "nvfp4",
        (),
        shares="16; in a weight 16 x 16",
        factor="E4M3 times one float32 of the tensor",
        elements="E2M1",
        fixed="nvfp4 has E2M1 elements only",
        recipe_class="NVFP4BlockScaling",
        question="nvfp4",
        check="check_nvfp4_support",
        quantizer="NVFP4Quantizer",
        storage="NVFP4TensorStorage",
        format="NVFP4",
    ),
)

RECIPES: Mapping[str, RecipeRow] = {row.name: row for row in _ROWS}
"""The recipes by their names. Their arithmetic is in ``numerics/recipes.py``, the sizes that their GEMMs take in
``numerics/gemm_shapes.py``."""

ONE_SCALE = tuple(row.name for row in _ROWS if row.shares == "all")
"""The recipes with one scale for a tensor; the others have one for each block."""

WITH_ELEMENT_FORMAT = tuple(row.name for row in _ROWS if not row.fixed)
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

SUBJECTS = ("parameter", "gradient", "main_grad", "reduce", "optimizer_state", "master_weight")
"""What is kept: ``parameter``, ``gradient``: those of the model. ``main_grad``: Megatron's gradients, which accumulate
over micro-batches. ``reduce``: gradients that ranks sum. ``optimizer_state``: tensors of the optimizer as large as a
parameter. ``master_weight``: weights in another dtype than the model's, in the optimizer's state or parameters."""

LayerNames = Literal["path", "upstream"]
"""The names of layers: ``"path"``, their path in the module tree; ``"upstream"``, the names and numbers of
nvidia-dlfw-inspect's ``infer_and_assign_layer_names``."""

Observe = Literal["debug", "fused", "auto"]
"""The path that layers take while features look at their tensors."""


_OF_QUANTIZER = {row.quantizer: row.name for row in _ROWS}
_FORMATS = {name: row.format for row in _ROWS for name in (row.quantizer, row.storage)}

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
    return next((_OF_QUANTIZER[name] for name in names if name in _OF_QUANTIZER), None)


def name_of_format(thing: Any) -> str | None:
    """The format of one of Transformer Engine's quantized tensors or storages, or of a quantizer's results.

    The name is ``RecipeRow.format``; None for any other class.
    """
    kind: type = type(thing)
    return _format_of_class(kind)


@functools.cache
def _format_of_class(kind: type) -> str | None:
    return next((_FORMATS[name] for name in _names_of_class(kind) if name in _FORMATS), None)


def name_of_recipe(recipe: Any) -> str | None:
    """The name (of :data:`RECIPES`) of one of Transformer Engine's recipes; None for a user's own."""
    return next((row.name for row in _ROWS if getattr(recipe, row.question)()), None)
