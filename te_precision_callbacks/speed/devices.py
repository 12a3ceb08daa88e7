"""GPUs of the cost model, as data: peaks, bandwidth, compute capability, and constants fitted to measured times."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.suggestions import suggestion

HIGH = "bf16"


class SpeedError(PrecisionDebugError, ValueError):
    """Times cannot be estimated: an unknown device, a recipe that it does not run, or a plan without products."""


KERNEL_OF_RECIPE: Mapping[str, str] = {
    "": HIGH,
    "fp8_delayed_scaling": "fp8",
    "fp8_current_scaling": "fp8",
    "fp8_block_scaling": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""Recipe, or an empty string for BF16 -> the kernels that multiply its operands, as in ``Constants.kernel``."""


@dataclass(frozen=True)
class Constants:
    """Constants measured on one device, and used for similar devices.

    Attributes:
        kernel: kernels (:data:`KERNEL_OF_RECIPE`) -> share of the peak.
        cast: recipe -> share of the memory bandwidth reached by its casts.
        launch_ms: milliseconds for each kernel of a cast, in addition to the time of its bytes.
        bandwidth: share of the memory bandwidth reached by other kernels.
    """

    measured_on: str
    kernel: Mapping[str, float]
    cast: Mapping[str, float]
    launch_ms: float
    bandwidth: float


@dataclass(frozen=True)
class Device:
    """A GPU. Figures are dense, without sparsity; devices.yaml names their sources.

    Attributes:
        title: its full name.
        capability: its compute capability.
        bf16_tflops, fp8_tflops, fp4_tflops: peaks in 10^12 operations per second; nan without such tensor cores.
        bandwidth_tbs: memory bandwidth in 10^12 bytes per second.
    """

    title: str
    capability: tuple[int, int]
    bf16_tflops: float
    fp8_tflops: float
    fp4_tflops: float
    bandwidth_tbs: float
    constants: Constants

    def peak_tflops(self, kernel: str) -> float:
        """Return the peak of kernels, a value of :data:`KERNEL_OF_RECIPE`."""
        return {HIGH: self.bf16_tflops, "nvfp4": self.fp4_tflops}.get(kernel, self.fp8_tflops)

    def check_recipe(self, recipe: str) -> None:
        """Raise a SpeedError if the device does not run the recipe.

        The conditions are from ``pytorch/quantization.py`` of Transformer Engine 2.20.2; all devices run FP8.
        """
        if recipe in ("mxfp8", "nvfp4") and self.capability < (10, 0):
            why = "it needs compute capability 10.0, but this device has {}.{}".format(*self.capability)
        elif recipe == "mxfp8" and self.capability >= (12, 0):
            why = "Transformer Engine does not run MXFP8 on compute capability 12.0 and later"
        else:
            return
        raise SpeedError(f"{self.title} does not run {recipe}: {why}. Choose another recipe, or another device.")


@functools.cache
def known_devices() -> Mapping[str, Device]:
    """Return the devices by name."""
    constants = {name: Constants(**fields) for name, fields in _read("constants.yaml").items()}
    devices = {}
    for name, fields in _read("devices.yaml").items():
        fields = {**fields, "capability": tuple(fields["capability"]), "constants": constants[fields["constants"]]}
        devices[name] = Device(**fields)
    return devices


def device_named(name: str) -> Device:
    """Return a device by its name, such as ``h200`` or ``NVIDIA H200 NVL``; raises SpeedError."""
    word = name.lower().replace("-", "_").replace(" ", "_").removeprefix("nvidia_")
    if word not in known_devices():
        raise SpeedError(f"There is no device {name!r}.{suggestion(word, known_devices())}")
    return known_devices()[word]


def _read(name: str) -> Any:
    return yaml.safe_load(resources.files("te_precision_callbacks.speed").joinpath(name).read_text(encoding="utf-8"))
