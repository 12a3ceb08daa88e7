"""What a step really took: a trace of torch.profiler, by layer, pass, GEMM and kind of kernel.

    measured = measure(read_trace("trace.json.gz"), coverage)
    print(describe(measured))
    for row in measured.products:
        print(row.layer, row.gemm, row.kind, row.format, row.ms, row.inferred)

The trace may be one of a GPU, whose kernels are counted, or of a CPU, where operators take the place of kernels.
"""

from te_precision_callbacks.speed.trace.describing import as_json, describe
from te_precision_callbacks.speed.trace.errors import TraceError
from te_precision_callbacks.speed.trace.measured import Launches, MeasuredProduct, MeasuredStep, Unassigned
from te_precision_callbacks.speed.trace.measuring import measure
from te_precision_callbacks.speed.trace.reading import read_trace
from te_precision_callbacks.speed.trace.timeline import Trace

__all__ = [
    "Launches",
    "MeasuredProduct",
    "MeasuredStep",
    "Trace",
    "TraceError",
    "Unassigned",
    "as_json",
    "describe",
    "measure",
    "read_trace",
]
