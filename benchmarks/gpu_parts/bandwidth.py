"""Time of one large tensor's statistics here and in Transformer Engine, and the share of the GPU's bandwidth.

``stats.py`` measures the same.
"""

from __future__ import annotations

import torch
from in_turn import Interval
from measuring import FP8_STATISTICS, TENSOR_STATISTICS, as_in_a_long_run
from stats import CURRENT, Case, Measured

from gpu_parts.rows import Rows, Settings, run_part

UNITS = {
    "ours_ms": "ms",
    "ours_reads": "times",
    "te_ms": "ms",
    "te_eager_ms": "ms",
    "te_compile_ms": "ms",
    "ratio": "times",
    "read_once_ms": "ms",
    "flush_ms": "ms",
    "pass_ms": "ms",
    "peak_gb_per_s": "GB/s",
    "bandwidth_share": "of the peak",
}


def check(settings: Settings, rows: Rows) -> None:
    settings.transformer_engine()
    size, least = (160, 1) if settings.small else (8192, 8)
    for case in (Case(torch.bfloat16, TENSOR_STATISTICS), Case(torch.bfloat16, (), FP8_STATISTICS, CURRENT)):
        with as_in_a_long_run():
            found = Measured(case, size, settings.device).run(0.0 if settings.small else 20.0, least)
        name = f"{case.name}, {size} x {size}"
        if settings.on_gpu:
            rows.equal(f"{name}: path", found["path"], "triton")
        else:
            rows.measured(f"{name}: path", found["path"])
        for key, unit in UNITS.items():
            if found.get(key) is not None:
                value, notes = found[key], [found["te_mode"]] if key in ("te_ms", "ratio") else []
                if isinstance(value, Interval):
                    notes.append(f"{value.low:.3g} to {value.high:.3g}")
                    value = value.value
                rows.measured(f"{name}: {key}", value, unit, ", ".join(notes))


if __name__ == "__main__":
    run_part("bandwidth", check)
