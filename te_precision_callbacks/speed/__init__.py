"""Expected times of GEMMs in BF16 and in low precision, on a device that need not be on this machine.

    from te_precision_callbacks.speed import device_named, estimate_step
    step = estimate_step(session.coverage(), "fp8_current_scaling", device_named("b300"))
    step.total.interval, step.without_gain

docs/check.md describes the model and its agreement with measured times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.speed.devices import Device, SpeedError, device_named, known_devices
    from te_precision_callbacks.speed.expected import ProductTime, Times
    from te_precision_callbacks.speed.step import StepTimes, estimate_step

__all__ = [
    "Device",
    "ProductTime",
    "SpeedError",
    "StepTimes",
    "Times",
    "device_named",
    "estimate_step",
    "known_devices",
]

__getattr__, __dir__ = lazy_names(__name__)
