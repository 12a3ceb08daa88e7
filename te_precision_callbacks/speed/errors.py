"""The exceptions of speed models.

PrecisionDebugError
    TraceError                   a file that is not a trace of torch.profiler, is cut off, or is of another run
    SpeedError                   what was asked cannot be estimated: a shape, a recipe, a run without products
        DeviceError              a device that is not known, or a device file that cannot be used
        CalibrationError         measured times that cannot be used, or cannot be measured here
"""

from __future__ import annotations

from te_precision_callbacks.base.errors import PrecisionDebugError


class SpeedError(PrecisionDebugError, ValueError):
    """What was asked cannot be estimated: a shape, a recipe that the device does not run, a run without products."""


class DeviceError(SpeedError):
    """A device that is not known, or a device file that cannot be used."""


class CalibrationError(SpeedError):
    """A table of measured times that cannot be used, or times that cannot be measured on this machine."""


class TraceError(PrecisionDebugError, ValueError):
    """A file is not a trace of torch.profiler, is cut off, or is of another run."""


def why_unreadable(error: OSError | ValueError) -> str:
    """Why a file of a user's cannot be read, in words."""
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "it is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else f"it is no JSON ({error})"
