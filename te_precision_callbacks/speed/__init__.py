"""Expected times of GEMMs in BF16 and in low precision, on a device that need not be on this machine.

    from te_precision_callbacks.speed import device_named, estimate_step
    step = estimate_step(session.coverage(), device_named("b300"))
    step.total.speedup, step.without_gain

docs/check.md describes the model and its agreement with measured times.
"""

from te_precision_callbacks.speed.devices import Device, SpeedError, device_named, known_devices
from te_precision_callbacks.speed.expected import ProductTime, StepTimes, Times, estimate_step

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
