"""Exceptions of speed models."""

from __future__ import annotations

from te_precision_callbacks.base.errors import PrecisionDebugError


class SpeedError(PrecisionDebugError, ValueError):
    """Times cannot be estimated: an invalid shape, a recipe the device does not run, a run without products."""


class DeviceError(SpeedError):
    """An unknown device, or an invalid device file."""


class CalibrationError(SpeedError):
    """An invalid table of measured times, or times that cannot be measured on this machine."""


class TraceError(PrecisionDebugError, ValueError):
    """A file is not a trace of torch.profiler, is truncated, or has no layer ranges."""
