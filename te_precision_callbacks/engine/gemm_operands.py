"""Operands of GEMMs in high precision, from the moment when a layer has them until their GEMM has run."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class GemmOperands:
    """Keeps the operands of one module at a time: another module's first tensor drops them.

    Attributes:
        modules: layer -> the number of its module.
    """

    def __init__(self) -> None:
        self.modules: Mapping[str, int] = {}
        self._kept: dict[tuple[str, str], torch.Tensor] = {}
        self._module: int | None = None

    def keep(self, layer: str, tensor: str, values: torch.Tensor) -> None:
        """Keep a tensor of a layer, in place of an earlier one."""
        module = self.modules.get(layer)
        if module != self._module:
            self.forget()
            self._module = module
        self._kept[layer, tensor] = values

    def get(self, layer: str, tensor: str) -> torch.Tensor | None:
        """The tensor of a layer that was kept last."""
        return self._kept.get((layer, tensor))

    def drop(self, layer: str, tensor: str) -> None:
        """Forget a tensor of a layer."""
        self._kept.pop((layer, tensor), None)

    def forget(self) -> None:
        """Forget all of them."""
        self._kept.clear()
        self._module = None
