"""Shared names: tensors, GEMMs and operands, recipes, and Transformer Engine's quantizers.

Imports neither Transformer Engine nor torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

GemmName = Literal["fprop", "dgrad", "wgrad"]
OperandName = Literal["activation", "weight", "gradient"]
TensorName = Literal["activation", "weight", "gradient", "output", "wgrad", "dgrad"]

GEMMS: tuple[GemmName, ...] = get_args(GemmName)

OPERANDS: Mapping[GemmName, tuple[OperandName, OperandName]] = {
    "fprop": ("activation", "weight"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("gradient", "activation"),
}
"""GEMM -> the tensors of its operands B and A, in Transformer Engine's terms."""

GEMM_OF_LAYOUT: Mapping[str, GemmName] = {"TN": "fprop", "NN": "dgrad", "NT": "wgrad"}
"""Layout of Transformer Engine's GEMM call (whether A and B are transposed, as in BLAS) -> GEMM."""

RESULT: Mapping[GemmName, TensorName] = {"fprop": "output", "dgrad": "dgrad", "wgrad": "wgrad"}

ROWWISE: Mapping[str, GemmName] = {"activation": "fprop", "weight": "fprop", "gradient": "dgrad"}
"""Tensor -> the GEMM that reads its rowwise data; the other GEMM reads the columnwise data."""

COLUMNWISE: Mapping[str, GemmName] = {"activation": "wgrad", "weight": "dgrad", "gradient": "wgrad"}


TENSORS: tuple[TensorName, ...] = get_args(TensorName)

PER_TENSOR = "per_tensor"
MXFP8 = "mxfp8"
BLOCK_1D = "fp8_block_1d"
BLOCK_2D = "fp8_block_2d"
NVFP4 = "nvfp4"
"""The scaling modes of quantized tensors."""

ELEMENT_FORMATS = ("e4m3", "e5m2")


class RecipeRow(NamedTuple):
    """A recipe, with the names of Transformer Engine 2.20.2.

    Attributes:
        other_names: other accepted spellings.
        elements: the default element format.
        fixed: why a statistic's name cannot select the element format; empty if it can.
        recipe_class: the class in ``common/recipe``.
        check: the function in ``pytorch/quantization.py`` that tests hardware support.
        quantizer: the quantizer class in ``pytorch/tensor``.
        storage: the base class of the quantized tensors.
        format: the name of the tensor format; for FP8, the element format follows.
        scaling: the scaling mode of its activations and gradients, one of the constants above.
    """

    name: str
    other_names: tuple[str, ...]
    elements: str
    fixed: str
    recipe_class: str
    check: str
    quantizer: str
    storage: str
    format: str
    scaling: str


_ROWS = (
    RecipeRow(
        "fp8_delayed_scaling",
        ("delayed_scaling",),
        elements="E4M3; gradients E5M2",
        fixed="fp8_delayed_scaling is read where a layer runs it, with the elements that it has there",
        recipe_class="DelayedScaling",
        check="check_fp8_support",
        quantizer="Float8Quantizer",
        storage="Float8TensorStorage",
        format="FP8",
        scaling=PER_TENSOR,
    ),
    RecipeRow(
        "fp8_current_scaling",
        ("current_scaling", "fp8_current"),
        elements="E4M3; gradients E5M2",
        fixed="",
        recipe_class="Float8CurrentScaling",
        check="check_fp8_support",
        quantizer="Float8CurrentScalingQuantizer",
        storage="Float8TensorStorage",
        format="FP8",
        scaling=PER_TENSOR,
    ),
    RecipeRow(
        "mxfp8",
        (),
        elements="E4M3",
        fixed="",
        recipe_class="MXFP8BlockScaling",
        check="check_mxfp8_support",
        quantizer="MXFP8Quantizer",
        storage="MXFP8TensorStorage",
        format="MXFP8",
        scaling=MXFP8,
    ),
    RecipeRow(
        "fp8_block_scaling",
        ("block_scaling", "fp8_block"),
        elements="E4M3",
        fixed="",
        recipe_class="Float8BlockScaling",
        check="check_fp8_block_scaling_support",
        quantizer="Float8BlockQuantizer",
        storage="Float8BlockwiseQTensorStorage",
        format="FP8 block",
        scaling=BLOCK_1D,
    ),
    RecipeRow(
        "nvfp4",
        (),
        elements="E2M1",
        fixed="nvfp4 has E2M1 elements only",
        recipe_class="NVFP4BlockScaling",
        check="check_nvfp4_support",
        quantizer="NVFP4Quantizer",
        storage="NVFP4TensorStorage",
        format="NVFP4",
        scaling=NVFP4,
    ),
)

RECIPES: Mapping[str, RecipeRow] = {row.name: row for row in _ROWS}
"""The recipes by name. See ``engine/simulation.py`` for their arithmetic, ``te/gemm_shapes.py`` for the sizes that
their GEMMs accept."""

ONE_SCALE = tuple(row.name for row in _ROWS if row.scaling == PER_TENSOR)
"""Recipes with one scale per tensor; the others have a scale per block."""

WITH_ELEMENT_FORMAT = tuple(row.name for row in _ROWS if not row.fixed)
"""Recipes that can be simulated, with any of :data:`ELEMENT_FORMATS`."""

LOW_PRECISION: Mapping[str, frozenset[str]] = {
    "fp8": frozenset({"fp8", "mxfp8"}),
    "mxfp8": frozenset({"mxfp8"}),
    "nvfp4": frozenset({"nvfp4"}),
    "quantized": frozenset({"fp8", "mxfp8", "nvfp4"}),
}
"""Word for low precision -> precisions; ``fp8`` includes MXFP8."""

HIGH_PRECISION = ("bf16", "fp16", "fp32", "fp64")

PRECISIONS: Mapping[str, frozenset[str]] = {**LOW_PRECISION, **{name: frozenset({name}) for name in HIGH_PRECISION}}
"""Word that a coverage's ``share`` accepts -> values of ``Product.precision``."""

SUBJECTS = ("parameter", "gradient", "main_grad", "reduce", "optimizer_state", "master_weight")
"""Kinds of training state. ``parameter``, ``gradient``: of the model. ``main_grad``: Megatron's gradients, which
accumulate over micro-batches. ``reduce``: gradients that ranks sum. ``optimizer_state``: tensors of the optimizer as
large as a parameter. ``master_weight``: weights in another dtype than the model's, in the optimizer's state or
parameters."""

LayerNames = Literal["path", "upstream"]
"""How layers are named: by their path in the module tree, or as by nvidia-dlfw-inspect's
``infer_and_assign_layer_names``."""

Observe = Literal["debug", "fused", "auto"]
"""Transformer Engine's path that layers take while features observe their tensors."""

_ROW_OF_CLASS = {name: row for row in _ROWS for name in (row.recipe_class, row.quantizer, row.storage)}

LEAST_PRESENT = 16
LEAST_ABSENT = 8
"""The least steps in a row with a GEMM of a layer or a gradient other than 0, and of those after them without it, for a
change.
"""

IDENTITY_QUANTIZER = "IdentityQuantizer"
"""Transformer Engine's quantizer that leaves a tensor unchanged."""

HYBRID_QUANTIZER = "HybridQuantizer"
"""Transformer Engine's quantizer with separate rowwise and columnwise quantizers."""


def direction_name(columnwise: bool) -> str:
    if columnwise:
        return "columnwise"
    return "rowwise"


def class_names(obj: Any) -> tuple[str, ...]:
    """Return the class names in an object's MRO, to recognize Transformer Engine's classes without importing it."""
    kind: type = type(obj)
    return _names_of_class(kind)


@functools.cache
def _names_of_class(kind: type) -> tuple[str, ...]:
    return tuple(base.__name__ for base in kind.__mro__)


@functools.cache
def _row_of_class(kind: type) -> RecipeRow | None:
    return next(filter(None, map(_ROW_OF_CLASS.get, _names_of_class(kind))), None)


def recipe_of(recipe_or_quantizer: Any) -> str | None:
    """Return the name in :data:`RECIPES` of one of Transformer Engine's recipes or quantizers; None for custom ones."""
    kind: type = type(recipe_or_quantizer)
    row = _row_of_class(kind)
    return row and row.name


def format_of_class(kind: type) -> str | None:
    """Return the format of a class of quantized tensors, storages or quantizers; None for other classes."""
    row = _row_of_class(kind)
    return row and row.format


def name_of_format(obj: Any) -> str | None:
    return format_of_class(type(obj))
