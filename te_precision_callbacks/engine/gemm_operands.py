"""Operands of GEMMs in high precision, kept until their GEMM has run."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class GemmOperands:
    """Keeps the operands of one module; the first tensor of another module drops them.

    Attributes:
        modules: layer -> id of its module.
    """

    def __init__(self) -> None:
        self.modules: Mapping[str, int] = {}
        self._kept: dict[tuple[str, str], torch.Tensor] = {}
        self._module: int | None = None

    def keep(self, layer: str, tensor: str, values: torch.Tensor) -> None:
        module = self.modules.get(layer)
        if module != self._module:
            self.forget()
            self._module = module
        self._kept[layer, tensor] = values

    def get(self, layer: str, tensor: str) -> torch.Tensor | None:
        return self._kept.get((layer, tensor))

    def drop(self, layer: str, tensor: str) -> None:
        self._kept.pop((layer, tensor), None)

    def forget(self) -> None:
        self._kept.clear()
        self._module = None
