"""The wgrad of a micro-batch, where Transformer Engine's GEMM adds it to a ``main_grad``.

With ``fuse_wgrad_accumulation=True`` the wgrad GEMM writes into the weight's ``main_grad``, and its result is the sum
over all micro-batches so far. The product itself exists nowhere, and a difference of two sums is not exact. So if a
feature is about to look at the product, the same GEMM runs once before, into a separate tensor of the type of
``main_grad``, without any effect on training.

Read from Transformer Engine 2.20.2 (``pytorch/cpp_extensions/gemm.py: general_gemm``, and the modules' backwards).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_CALLERS = ("cpp_extensions.gemm", "module.linear", "module.layernorm_linear", "module.layernorm_mlp")
"""The Python modules of Transformer Engine that call ``general_gemm`` for wgrad under a name of their own."""


class OwnWgrad:
    """Gives the quantizers of a session the wgrad of a micro-batch, while installed."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, Callable[..., Any]]] = []

    def follow(self, needed: bool) -> None:
        """Install this if needed, or remove it."""
        if needed and not self._saved:
            for name in _CALLERS:
                caller: Any = sys.modules[f"transformer_engine.pytorch.{name}"]
                self._saved.append((caller, caller.general_gemm))
                caller.general_gemm = _beside(caller.general_gemm)
        elif not needed:
            while self._saved:
                caller, general_gemm = self._saved.pop()
                caller.general_gemm = general_gemm


def _beside(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def general_gemm(*operands: Any, **keywords: Any) -> Any:
        take = getattr(keywords.get("quantization_params"), "take_own_wgrad", None)
        if take is not None and keywords.get("accumulate"):
            alone = {"accumulate": False, "out": None, "bias": None, "quantization_params": None}
            take(lambda: upstream(*operands, **{**keywords, **alone})[0])
        return upstream(*operands, **keywords)

    return general_gemm
