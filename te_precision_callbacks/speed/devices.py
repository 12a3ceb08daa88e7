"""Devices, as data: peaks, bandwidth and compute capability, each with its source.

    device = device_named("h200")              # an H200 SXM
    device_named("my_device.yaml")             # a custom device file
    device_reported("NVIDIA B300 SXM6 AC")     # by the name of torch.cuda.get_device_name(); None if unknown

A device file has the keys of :class:`Device`; keys with a default are optional::

    title: My accelerator
    capability: [9, 0]
    bf16_tflops: 500
    fp8_tflops: 1000
    bandwidth_tbs: 2.5
    constants: h200_nvl
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.suggestions import suggestion
from te_precision_callbacks.base.vocabulary import RECIPES

HIGH = "bf16"


class SpeedError(PrecisionDebugError, ValueError):
    """Times cannot be estimated: an invalid shape, a recipe the device does not run, a run without products."""


class DeviceError(SpeedError):
    """An unknown device, or an invalid device file."""


KERNEL_OF_RECIPE: Mapping[str, str] = {
    "fp8_delayed_scaling": "fp8",
    "fp8_current_scaling": "fp8",
    "fp8_block_scaling": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""Recipe -> the kernels that multiply its operands, as in ``Constants.kernel``."""


class Scatter(BaseModel):
    """Relative standard deviations of measured times from the model's times.

    Attributes:
        kernel: of the kernel of one shape.
        cast: of its casts, including launches.
        run: of all times in a run, for example by its clocks.
        transfer: of a speed-up on a similar device without measurements.
        quantile: quantile of Student's t for a 95 % interval, at the degrees of freedom of the estimate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: float = Field(ge=0)
    cast: float = Field(ge=0)
    run: float = Field(ge=0)
    transfer: float = Field(ge=0)
    quantile: float = Field(gt=0)


class Constants(BaseModel):
    """Constants measured on one device, and used for similar devices.

    Attributes:
        kernel: kernels (:data:`KERNEL_OF_RECIPE`, and ``bf16``) -> share of the peak.
        cast: recipe -> share of the memory bandwidth reached by its casts.
        launch_ms: milliseconds for each kernel of a cast, in addition to the time of its bytes.
        bandwidth: share of the memory bandwidth reached by other kernels.
        source: the publication of the measured times.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    measured_on: str
    kernel: dict[str, float]
    cast: dict[str, float]
    launch_ms: float = Field(ge=0)
    bandwidth: float = Field(gt=0, le=1)
    scatter: Scatter
    source: str


class Device(BaseModel):
    """A device. Figures are for one GPU, dense, without sparsity.

    Attributes:
        title: its full name.
        other_names: further names for ``--device``.
        reported_as: its names in ``torch.cuda.get_device_name``.
        capability: its compute capability.
        bf16_tflops, fp8_tflops, fp4_tflops: peaks in 10^12 operations per second; None without such tensor cores.
        bandwidth_tbs: memory bandwidth in 10^12 bytes per second.
        constants: the name of a set in constants.yaml, or the device's own constants.
        sources: sources of the figures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    other_names: tuple[str, ...] = ()
    reported_as: tuple[str, ...] = ()
    capability: tuple[int, int]
    bf16_tflops: float = Field(gt=0, allow_inf_nan=False)
    fp8_tflops: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    fp4_tflops: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    bandwidth_tbs: float = Field(gt=0, allow_inf_nan=False)
    constants: str | Constants
    sources: dict[str, str] = Field(default_factory=dict)

    @property
    def fitted(self) -> Constants:
        if isinstance(self.constants, str):
            return constants()[self.constants]
        return self.constants

    @property
    def is_measured(self) -> bool:
        """True if its constants were measured on this device, not on a similar one."""
        return self.fitted.measured_on == self.title

    def peak_tflops(self, kernel: str) -> float | None:
        """Return the peak of kernels: ``bf16``, or a value of :data:`KERNEL_OF_RECIPE`."""
        return {HIGH: self.bf16_tflops, "nvfp4": self.fp4_tflops}.get(kernel, self.fp8_tflops)

    def is_called(self, name: str) -> bool:
        return name in (self.title, *self.reported_as)

    def check_recipe(self, recipe: str) -> None:
        """Raise a SpeedError if the recipe is unknown, the device does not run it, or its speed is unknown."""
        if recipe not in RECIPES:
            raise SpeedError(f"There is no recipe {recipe!r}.{suggestion(recipe, RECIPES)}")
        why = _why_not(recipe, self.capability)
        if why:
            raise SpeedError(
                f"{self.title} does not run {recipe}: {why}. Choose another recipe, or another device with --device."
            )
        kernel = KERNEL_OF_RECIPE[recipe]
        if self.peak_tflops(kernel) is None:
            key = "fp8_tflops"
            if recipe == "nvfp4":
                key = "fp4_tflops"
            raise SpeedError(
                f"The device {self.title!r} has no {key}, which {recipe} needs. Add it to the device file."
            )
        if kernel not in self.fitted.kernel or recipe not in self.fitted.cast:
            raise SpeedError(
                f"The speed of {recipe} on {self.title} is unknown: its constants were measured on"
                f" {self.fitted.measured_on}. Measure it with --calibrate."
            )


def _why_not(recipe: str, capability: tuple[int, int]) -> str:
    """Return why a compute capability does not run a recipe; empty if it does.

    From ``pytorch/quantization.py`` of Transformer Engine 2.20.2.
    """
    if recipe in ("mxfp8", "nvfp4") and capability < (10, 0):
        return f"it needs compute capability 10.0, but this device has {capability[0]}.{capability[1]}"
    if recipe == "mxfp8" and capability >= (12, 0):
        return "Transformer Engine does not run MXFP8 on compute capability 12.0 and later"
    if recipe == "fp8_block_scaling" and capability < (9, 0):
        return "it needs compute capability 9.0"
    if capability < (8, 9):
        return "FP8 needs compute capability 8.9"
    return ""


@functools.cache
def known_devices() -> Mapping[str, Device]:
    """Return the devices of this package by name."""
    return {name: Device.model_validate(fields) for name, fields in _read("devices.yaml").items()}


@functools.cache
def constants() -> Mapping[str, Constants]:
    return {name: Constants.model_validate(fields) for name, fields in _read("constants.yaml").items()}


def device_named(name: str) -> Device:
    """Return a device by its name or the path of a device file; raises DeviceError."""
    if name.endswith((".yaml", ".yml")):
        return _from_file(Path(name).expanduser())
    word = name.lower().replace("-", "_").replace(" ", "_").removeprefix("nvidia_")
    known = dict(known_devices())
    for device in known_devices().values():
        known |= dict.fromkeys(device.other_names, device)
    if word in known:
        return known[word]
    raise DeviceError(
        f"There is no device {name!r}.{suggestion(word, known)} Or give the path of a YAML file that describes a"
        " device: see docs/speed.md."
    )


def device_reported(name: str) -> Device | None:
    """Return the device with this name in ``torch.cuda.get_device_name``; None if unknown."""
    for device in known_devices().values():
        if name in device.reported_as:
            return device
    return None


def _from_file(path: Path) -> Device:
    try:
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DeviceError(f"The device file {path} cannot be read: {error}") from None
    name = None
    if isinstance(keys, dict):
        name = keys.get("constants")
    if isinstance(name, str) and name not in constants():
        raise DeviceError(f"{path}: constants: there is no set {name!r}.{suggestion(name, constants())}")
    try:
        return Device.model_validate(keys)
    except ValidationError as error:
        problems = dict.fromkeys(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        )
        raise DeviceError(
            f"The device file {path} is not valid: {'; '.join(problems)}. docs/speed.md shows a device file."
        ) from None


def _read(name: str) -> Any:
    return yaml.safe_load(resources.files("te_precision_callbacks.speed").joinpath(name).read_text(encoding="utf-8"))
