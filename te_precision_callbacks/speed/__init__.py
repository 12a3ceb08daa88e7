"""What low precision costs and saves, expected and measured: times of matrix products, layer by layer, and memory.

    from te_precision_callbacks.speed import Shape, call_cost, device_named, estimate_step, high_ms, step_of_run
    device = device_named("b300")
    shape = Shape.parse("15872x4096x12288")      # tokens x in_features x out_features
    high_ms(shape, device), call_cost(shape, "fp8_current_scaling", device).low_ms
    speed = estimate_step(step_of_run(open_run("logs")), device)
    speed.times, speed.total, speed.advice

docs/speed.md has the model, its constants, and how well it agrees with published times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.speed.advice import Advice
    from te_precision_callbacks.speed.calibrating import calibrate
    from te_precision_callbacks.speed.calibration import Calibration, Time
    from te_precision_callbacks.speed.costs import Cast, Cost, Shape, break_even, call_cost, cast_of, high_ms
    from te_precision_callbacks.speed.devices import (
        Constants,
        Device,
        Scatter,
        device_named,
        device_reported,
        known_devices,
    )
    from te_precision_callbacks.speed.errors import CalibrationError, DeviceError, SpeedError
    from te_precision_callbacks.speed.estimate import Step, StepSpeed, estimate_step
    from te_precision_callbacks.speed.expected import ProductTime, Total
    from te_precision_callbacks.speed.recorded import step_of_run

__all__ = [
    "Advice",
    "Calibration",
    "CalibrationError",
    "Cast",
    "Constants",
    "Cost",
    "Device",
    "DeviceError",
    "ProductTime",
    "Scatter",
    "Shape",
    "SpeedError",
    "Step",
    "StepSpeed",
    "Time",
    "Total",
    "break_even",
    "calibrate",
    "call_cost",
    "cast_of",
    "device_named",
    "device_reported",
    "estimate_step",
    "high_ms",
    "known_devices",
    "step_of_run",
]

__getattr__, __dir__ = lazy_names(__name__)
