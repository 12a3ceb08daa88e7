"""Speed and memory of low precision: expected and measured times of matrix products by layer, and planned memory.

    from te_precision_callbacks.speed import device_named, estimate_step, step_of_run
    speed = estimate_step(step_of_run(open_run("logs")), device_named("b300"))
    speed.times, speed.total, speed.advice

docs/speed.md describes the model, its constants, and its agreement with published times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.speed.calibration import Calibration, CalibrationError, Time, calibrate
    from te_precision_callbacks.speed.costs import Shape
    from te_precision_callbacks.speed.devices import (
        Device,
        DeviceError,
        SpeedError,
        device_named,
        device_reported,
        known_devices,
    )
    from te_precision_callbacks.speed.estimate import Advice, Step, StepSpeed, estimate_step
    from te_precision_callbacks.speed.expected import ProductTime, Total
    from te_precision_callbacks.speed.recorded import step_of_run

__all__ = [
    "Advice",
    "Calibration",
    "CalibrationError",
    "Device",
    "DeviceError",
    "ProductTime",
    "Shape",
    "SpeedError",
    "Step",
    "StepSpeed",
    "Time",
    "Total",
    "calibrate",
    "device_named",
    "device_reported",
    "estimate_step",
    "known_devices",
    "step_of_run",
]

__getattr__, __dir__ = lazy_names(__name__)
