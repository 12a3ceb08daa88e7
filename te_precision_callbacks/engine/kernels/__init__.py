"""One pass over a tensor, in three ways: a Triton kernel on a GPU, C++ on a CPU, blocks of plain torch.

    sums, maxima = measure(tensor)                                                  # MOMENT_SUMS, MAXIMA
    sums, maxima = measure(tensor, codes, scale_inv, e5m2=False)                    # and those of the codes, the scale
    sums, maxima = measure(tensor, histogram=True)                                  # and EXPONENT_BINS counts

All give the columns of :mod:`te_precision_callbacks.engine.kernels.columns`, on the tensor's device, and none waits for
the device. Which way is taken follows from the tensor: see :func:`measure`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

import torch

from te_precision_callbacks.engine.kernels import eager, native
from te_precision_callbacks.engine.kernels.columns import (
    COMPARISON_SUMS,
    EXPONENT_BINS,
    MAXIMA,
    MOMENT_SUMS,
    NOTHING,
    SCALE_MAXIMA,
    SCALE_SUMS,
)

__all__ = [
    "COMPARISON_SUMS",
    "EXPONENT_BINS",
    "MAXIMA",
    "MOMENT_SUMS",
    "NOTHING",
    "SCALE_MAXIMA",
    "SCALE_SUMS",
    "measure",
]

logger = logging.getLogger(__name__)

Pass = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_on_gpu: Pass | None = None


def measure(
    values: torch.Tensor,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    *,
    e5m2: bool = False,
    histogram: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure a tensor, and what quantization made of it, in one pass.

    Args:
        values: any shape and strides; float64, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        codes: uint8, the shape of ``values``: the FP8 codes of the quantized tensor.
        scale_inv: float32, one element: the quantized values are the decoded codes times this factor.
        e5m2: whether the codes are E5M2, not E4M3.
        histogram: whether the exponents are counted.

    Returns:
        sums: float64, 1-D: MOMENT_SUMS, then COMPARISON_SUMS and SCALE_SUMS with codes, then EXPONENT_BINS counts with
            histogram.
        maxima: float64, 1-D: MAXIMA, then SCALE_MAXIMA with codes.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return measure(values, codes, scale_inv, e5m2=e5m2, histogram=histogram)
    return _pass_for(values)(values.detach(), codes, scale_inv, e5m2=e5m2, histogram=histogram)


def _pass_for(values: torch.Tensor) -> Pass:
    if values.device.type == "cuda" and values.element_size() <= 4:
        return _gpu_pass()
    if native.takes(values):
        return native.measure
    native.leaves(values)
    return eager.measure


def _gpu_pass() -> Pass:
    global _on_gpu
    if _on_gpu is None:
        _on_gpu = eager.measure if importlib.util.find_spec("triton") is None else _with_triton
        if _on_gpu is eager.measure:
            _say("Triton is not installed. Install it with: pip install triton")
    return _on_gpu


def _with_triton(
    values: torch.Tensor,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    *,
    e5m2: bool = False,
    histogram: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure with the Triton kernel, or with plain torch once the kernel cannot be made."""
    global _on_gpu
    try:
        from te_precision_callbacks.engine.kernels import triton_kernel

        return triton_kernel.measure(values, codes, scale_inv, e5m2=e5m2, histogram=histogram)
    except (TypeError, ValueError, torch.OutOfMemoryError):
        raise  # not the kernel's fault
    except Exception as error:
        _on_gpu = eager.measure
        _say(f"The Triton kernel cannot be used ({type(error).__name__}: {error}).")
        return eager.measure(values, codes, scale_inv, e5m2=e5m2, histogram=histogram)


def _say(why: str) -> None:
    logger.warning("Statistics on the GPU are computed by plain torch operations: slower, but equally exact. %s", why)
