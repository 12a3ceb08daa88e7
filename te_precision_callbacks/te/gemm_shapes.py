"""The shapes that GEMMs with quantized operands accept, by recipe and compute capability.

A linear layer runs three GEMMs. In the column-major terms of cuBLAS, the result is m x n, and each element is a sum of
k products:

======= ====== ============ ============ ============ ========== ==========
GEMM    layout m            n            k            operand A  operand B
======= ====== ============ ============ ============ ========== ==========
fprop   TN     out_features tokens       in_features  weight     activation
dgrad   NN     in_features  tokens       out_features weight     gradient
wgrad   NT     in_features  out_features tokens       activation gradient
======= ====== ============ ============ ============ ========== ==========

Sources: ``common/gemm/cublaslt_gemm.cu`` (CanonicalizeGemmInput), ``pytorch/csrc/extensions/gemm.cpp``,
``pytorch/csrc/quantizer.cpp`` and ``pytorch/utils.py`` (assert_dim_for_fp8_exec) of Transformer Engine 2.20.2; cuBLAS's
documentation, "Tensor Core Usage", which requires rows of 16 bytes in the operands and the result of FP8 and FP4 GEMMs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from te_precision_callbacks.base.vocabulary import (
    BLOCK_1D,
    BLOCK_2D,
    GEMMS,
    MXFP8,
    NVFP4,
    PER_TENSOR,
    RECIPES,
    GemmName,
)

Dimension = Literal["tokens", "in_features", "out_features"]
Size = Literal["m", "n", "k", "lda", "ldb"]

ROW_BYTES = 16
"""Rows of operands and results must be multiples of this number of bytes."""

_CUBLAS = "cuBLAS, which reads and writes rows of 16 bytes"
_GEMM = "Transformer Engine's FP8 GEMM (leading dimension requirement)"
_BLOCK_GEMM = "Transformer Engine's GEMM of FP8 blocks (outer dimension requirement)"
_MODULE = "Transformer Engine's modules (assert_dim_for_fp8_exec)"


def layer_sizes(gemm: str, rows: int, columns: int, summed: int) -> tuple[int, int, int]:
    """Return tokens, in_features and out_features of the layer of a GEMM, or their equivalents for other products.

    Args:
        rows, columns: size of the result, as ``Product.n`` and ``Product.m``.
        summed: number of terms of each sum, ``k``.
    """
    if gemm == "dgrad":
        return rows, columns, summed
    if gemm == "wgrad":
        return (summed, columns, rows)
    return (rows, summed, columns)


@dataclass(frozen=True)
class ShapeRule:
    """A size of a GEMM must be a multiple of a number of elements.

    Attributes:
        size: ``m``, ``n`` or ``k``, or the leading dimension of an operand in memory: ``lda``, ``ldb``.
        asked_by: the software that requires it.
    """

    size: Size
    multiple: int
    asked_by: str


@dataclass(frozen=True)
class Refusal:
    """A dimension of a layer that prevents a GEMM from running; ``asked_by`` is the software that requires it."""

    gemm: GemmName
    dimension: Dimension
    size: int
    multiple: int
    asked_by: str

    @property
    def next_size(self) -> int:
        return -(-self.size // self.multiple) * self.multiple

    def __str__(self) -> str:
        return (
            f"{self.gemm}: {self.dimension} is {self.size}, but must be a multiple of {self.multiple} (next:"
            f" {self.next_size}) for {self.asked_by}"
        )


def takes_any_layout(capability: tuple[int, int]) -> bool:
    """Return whether GPUs of this capability multiply per-tensor FP8 in any layout, not only with A transposed.

    ``nvte_is_non_tn_fp8_gemm_supported`` (``common/transformer_engine.cpp``).
    """
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def rules(
    scaling: str | None, capability: tuple[int, int], *, result_bytes: int, b_in_rows: bool = True
) -> tuple[ShapeRule, ...]:
    """Return the rules for the sizes of a GEMM.

    Args:
        scaling: a scaling mode of :mod:`te_precision_callbacks.base.vocabulary`; None for high precision, which
            accepts any size.
        result_bytes: bytes per element of the result.
        b_in_rows: for FP8 blocks, whether operand B has 1D blocks, as activations and gradients do.
    """
    result = ShapeRule("m", max(1, ROW_BYTES // result_bytes), _CUBLAS)
    if scaling == PER_TENSOR:
        if takes_any_layout(capability):
            return ShapeRule("lda", ROW_BYTES, _GEMM), ShapeRule("ldb", ROW_BYTES, _GEMM), result
        return ShapeRule("k", ROW_BYTES, _GEMM), result
    if scaling in (BLOCK_1D, BLOCK_2D):
        if capability >= (10, 0):  # multiplied as MXFP8, with A transposed
            return ShapeRule("k", ROW_BYTES, _CUBLAS), result
        return (
            ShapeRule("k", ROW_BYTES, _GEMM),
            ShapeRule("m", 8, _BLOCK_GEMM),
            *((ShapeRule("n", 8, _BLOCK_GEMM),) if b_in_rows else ()),
        )
    if scaling == MXFP8:
        return tuple(ShapeRule(size, 32, "MXFP8's blocks, in both directions") for size in ("m", "n", "k"))
    if scaling == NVFP4:
        blocks = "NVFP4's blocks, in both directions"
        return ShapeRule("k", 2 * ROW_BYTES, _CUBLAS), ShapeRule("m", 16, blocks), ShapeRule("n", 16, blocks)
    return ()


def refusals(
    recipe: str,
    capability: tuple[int, int],
    *,
    tokens: int,
    in_features: int,
    out_features: int,
    gemms: Collection[GemmName] = GEMMS,
    result_bytes: int = 2,
    asserted: bool = True,
) -> list[Refusal]:
    """Return the dimensions that prevent a layer's GEMMs from running, each with its largest required multiple.

    Args:
        recipe: a key of :data:`~te_precision_callbacks.base.vocabulary.RECIPES`.
        tokens: the product of all dimensions of the layer's input except the last. Without tokens, no GEMM runs.
        in_features, out_features: sizes of the layer on this rank.
        gemms: the GEMMs that run in the recipe.
        result_bytes: bytes per element of the results.
        asserted: whether the layer checks its operands before fprop, under any recipe and even with all GEMMs in high
            precision, as ``Linear``, ``LayerNormLinear`` and ``LayerNormMLP`` do; ``GroupedLinear`` and ``te.ops`` do
            not.
    """
    sizes: dict[Dimension, int] = {"tokens": tokens, "in_features": in_features, "out_features": out_features}
    if 0 in sizes.values():
        return []
    required: list[tuple[GemmName, Dimension, int, str]] = []
    for rule in rules(RECIPES[recipe].scaling, capability, result_bytes=result_bytes):
        required += [(gemm, _DIMENSIONS[gemm][rule.size], rule.multiple, rule.asked_by) for gemm in gemms]
    if asserted:
        required += [("fprop", dimension, multiple, _MODULE) for dimension, multiple in _ASSERTED.items()]
    refused: dict[tuple[GemmName, Dimension], Refusal] = {}
    for gemm, dimension, multiple, asked_by in required:
        former_refusal = refused.get((gemm, dimension))
        if sizes[dimension] % multiple and (former_refusal is None or former_refusal.multiple < multiple):
            refused[gemm, dimension] = Refusal(gemm, dimension, sizes[dimension], multiple, asked_by)
    return sorted(refused.values(), key=lambda refusal: GEMMS.index(refusal.gemm))


_ASSERTED: Mapping[Dimension, int] = {"tokens": 8, "in_features": 16, "out_features": 8}

_DIMENSIONS: Mapping[GemmName, Mapping[Size, Dimension]] = {
    # lda is k if A is transposed, else m; ldb is n if B is transposed, else k.
    "fprop": {"m": "out_features", "n": "tokens", "k": "in_features", "lda": "in_features", "ldb": "in_features"},
    "dgrad": {"m": "in_features", "n": "tokens", "k": "out_features", "lda": "in_features", "ldb": "out_features"},
    "wgrad": {"m": "in_features", "n": "out_features", "k": "tokens", "lda": "in_features", "ldb": "out_features"},
}
