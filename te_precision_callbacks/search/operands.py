"""One operand of a GEMM in low precision, the other in high precision, by fake quantization.

Transformer Engine's GEMM takes no such operands, so the operand is cast to low precision and back, and the GEMM runs in
high precision.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

from te_precision_callbacks.search.factory import QuantizerFactory, high_quantizer

_ROLES = {"activation": "input", "weight": "weight", "gradient": "grad_output"}
"""Operand -> the type of the tensor in the roles of quantizers."""


class _FakeQuantizer(IdentityQuantizer):  # type: ignore[misc]
    """Casts to low precision and back, along the dimension that the GEMM adds up.

    Columnwise data are the rowwise data of the transposed matrix, after a random Hadamard transform if there is one;
    here, its inverse follows.
    """

    def __init__(self, low: Any) -> None:
        super().__init__(dtype=high_quantizer().dtype)
        self._low = low
        self._rotation = low.rht_matrix if getattr(low, "with_rht", False) else None
        low.with_rht = False
        low.set_usage(rowwise=True, columnwise=False)

    def copy(self) -> _FakeQuantizer:
        return copy.copy(self)

    def _maybe_cast(self, tensor: torch.Tensor) -> torch.Tensor:
        source: torch.Tensor = super()._maybe_cast(tensor)
        matrix = source.reshape(-1, source.shape[-1])
        if self.rowwise_usage:
            return self._there_and_back(matrix).view(source.shape)
        matrix = matrix.T.contiguous()
        if self._rotation is None:
            matrix = self._there_and_back(matrix)
        else:
            rotation = self._rotation.to(matrix)
            rotated = (matrix.view(-1, len(rotation)) @ rotation).view_as(matrix)
            matrix = (self._there_and_back(rotated).view(-1, len(rotation)) @ rotation.T).view_as(matrix)
        return matrix.T.contiguous().view(source.shape)

    def _there_and_back(self, matrix: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._low(matrix).dequantize(dtype=matrix.dtype)
        return made


class _OperandFactory(QuantizerFactory):
    def __init__(self, low: Any, high: Mapping[str, Collection[str]], operand: str) -> None:
        super().__init__(low, high)
        self._tensor = _ROLES[operand]

    def _mixed(self, tensor: str, rowwise: bool, columnwise: bool) -> Any:
        if tensor != self._tensor or (rowwise and columnwise):
            return high_quantizer()
        rows = self._direction(tensor, rowwise)
        return HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=self._direction(tensor, columnwise))

    def _direction(self, tensor: str, is_high: bool) -> Any:
        return high_quantizer() if is_high else _FakeQuantizer(self._quantizer(tensor))


def operand_recipe(low: Any, high: Mapping[str, Collection[str]], operand: str) -> Any:
    """Return a recipe in which only one operand of the GEMMs that are not in ``high`` is in low precision."""
    return CustomRecipe(qfactory=_OperandFactory(low, high, operand), backward_override=low.backward_override)
