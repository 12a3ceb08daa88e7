"""Measured time of a step, from a trace of torch.profiler: by layer, pass, GEMM and kind of kernel.

In a CPU trace, operators take the place of kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.speed.trace.measuring import MeasuredProduct, MeasuredStep, measure, show
    from te_precision_callbacks.speed.trace.reading import Trace, TraceError, read_trace

__all__ = ["MeasuredProduct", "MeasuredStep", "Trace", "TraceError", "measure", "read_trace", "show"]

__getattr__, __dir__ = lazy_names(__name__)
