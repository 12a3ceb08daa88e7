"""Devices, as data: peaks, bandwidth and compute capability, each with its source.

    device = device_named("h200")              # an H200 SXM
    device_named("my_device.yaml")             # a file of one's own, with the same keys
    device_reported("NVIDIA B300 SXM6 AC")     # as torch.cuda.get_device_name() has it; None for an unknown one

A device file has the keys of :class:`Device`, without those that have a default if they are not known::

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

from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.speed.errors import DeviceError, SpeedError, why_unreadable

HIGH = "bf16"
"""The kernels of products in high precision."""

KERNEL_OF_RECIPE: Mapping[str, str] = {
    "fp8_delayed_scaling": "fp8",
    "fp8_current_scaling": "fp8",
    "fp8_block_scaling": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""Recipe -> the kernels that multiply its operands, as ``Constants.kernel`` names them."""


class Scatter(BaseModel):
    """How far a time can be from the model's, as a relative standard deviation.

    Attributes:
        kernel: of the time of one shape's kernel.
        cast: of the time of its casts and their launches.
        run: of everything in one run, such as its clocks.
        transfer: of a speed-up on another device like the one that was measured.
        quantile: the quantile of Student's t for an interval of 95 %, at the degrees of freedom of the estimate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: float = Field(ge=0)
    cast: float = Field(ge=0)
    run: float = Field(ge=0)
    transfer: float = Field(ge=0)
    quantile: float = Field(gt=0)


class Constants(BaseModel):
    """What was measured on one device, and is taken for all devices like it.

    Attributes:
        measured_on: the title of that device.
        kernel: kernels (:data:`KERNEL_OF_RECIPE`, and ``bf16``) -> the share of the peak that they reach.
        cast: recipe -> the share of the memory's bandwidth that its casts reach.
        launch_ms: what each kernel of a cast takes apart from its bytes, in milliseconds.
        bandwidth: the share of the memory's bandwidth that other kernels reach.
        scatter: how far times are from the model's.
        source: where the measured times are published.
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
    """A device. Figures are of one GPU, dense, and without sparsity.

    Attributes:
        title: its full name.
        other_names: further names that ``--device`` takes.
        reported_as: what ``torch.cuda.get_device_name`` says on it.
        capability: its compute capability.
        bf16_tflops, fp8_tflops, fp4_tflops: peaks in 10^12 operations a second; None: there are no such tensor cores.
        bandwidth_tbs: of its memory, in 10^12 bytes a second.
        constants: the set of constants.yaml that it takes, or a set of its own.
        sources: what the figures come from.
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
        """Its constants."""
        return constants()[self.constants] if isinstance(self.constants, str) else self.constants

    @property
    def is_measured(self) -> bool:
        """Whether its constants were measured on it, and not on a device like it."""
        return self.fitted.measured_on == self.title

    def peak_tflops(self, kernel: str) -> float | None:
        """The peak of some kernels: ``bf16``, or one of the values of :data:`KERNEL_OF_RECIPE`."""
        return {HIGH: self.bf16_tflops, "nvfp4": self.fp4_tflops}.get(kernel, self.fp8_tflops)

    def is_called(self, name: str) -> bool:
        """Return whether a name, as a trace or ``torch.cuda.get_device_name`` reports it, is of this device."""
        return name in (self.title, *self.reported_as)

    def check_recipe(self, recipe: str) -> None:
        """Check that the device runs a recipe.

        Raises:
            SpeedError: there is no such recipe, the device does not run it, or nothing is known of its speed.
        """
        if recipe not in RECIPES:
            from te_precision_callbacks.config.problems import suggestion  # readers load no configs

            raise SpeedError(f"There is no recipe {recipe!r}.{suggestion(recipe, RECIPES)}")
        why = _why_not(recipe, self.capability)
        if why:
            raise SpeedError(
                f"{self.title} does not run {recipe}: {why}. Choose another recipe with --recipe, or another device"
                " with --device."
            )
        kernel = KERNEL_OF_RECIPE[recipe]
        if self.peak_tflops(kernel) is None:
            key = "fp4_tflops" if recipe == "nvfp4" else "fp8_tflops"
            raise SpeedError(
                f"The device {self.title!r} has no {key}, which {recipe} needs. Add it to the device file."
            )
        if kernel not in self.fitted.kernel or recipe not in self.fitted.cast:
            raise SpeedError(
                f"Nothing is known of {recipe} on devices like {self.title}, whose constants were measured on"
                f" {self.fitted.measured_on}. Measure it there with --calibrate."
            )


def _why_not(recipe: str, capability: tuple[int, int]) -> str:
    """Why no GPU of a compute capability runs a recipe; empty if it does. As ``pytorch/quantization.py`` of Transformer
    Engine 2.20.2 has it."""
    if recipe in ("mxfp8", "nvfp4") and capability < (10, 0):
        return f"it needs compute capability 10.0, and this device has {capability[0]}.{capability[1]}"
    if recipe == "mxfp8" and capability >= (12, 0):
        return "Transformer Engine does not run MXFP8 on compute capability 12.0 and later"
    if recipe == "fp8_block_scaling" and capability < (9, 0):
        return "it needs compute capability 9.0"
    if capability < (8, 9):
        return "FP8 needs compute capability 8.9"
    return ""


@functools.cache
def known_devices() -> Mapping[str, Device]:
    """Name -> device, of all that come with this package."""
    return {name: Device.model_validate(fields) for name, fields in _read("devices.yaml").items()}


@functools.cache
def constants() -> Mapping[str, Constants]:
    """Name -> the constants that were measured."""
    return {name: Constants.model_validate(fields) for name, fields in _read("constants.yaml").items()}


def device_named(name: str) -> Device:
    """A device by its name, or by the path of a device file.

    Raises:
        DeviceError: there is no such device, or the file cannot be used.
    """
    if name.endswith((".yaml", ".yml")):
        return _from_file(Path(name).expanduser())
    word = name.lower().replace("-", "_").replace(" ", "_").removeprefix("nvidia_")
    known = known_devices()
    if word in known:
        return known[word]
    found = next((device for device in known.values() if word in device.other_names), None)
    if found is None:
        from te_precision_callbacks.config.problems import suggestion

        names = [*known, *(other for device in known.values() for other in device.other_names)]
        raise DeviceError(
            f"There is no device {name!r}.{suggestion(word, names)} The path of a YAML file with your own device works,"
            " too; docs/speed.md shows one."
        )
    return found


def device_reported(name: str) -> Device | None:
    """The device of a name that ``torch.cuda.get_device_name`` gives; None if it is not known."""
    return next((device for device in known_devices().values() if name in device.reported_as), None)


def _from_file(path: Path) -> Device:
    from te_precision_callbacks.config.problems import suggestion

    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DeviceError(f"The device file {path} cannot be read: {why_unreadable(error)}.") from None
    except yaml.YAMLError as error:
        raise DeviceError(f"The device file {path} is no YAML: {error}") from None
    if not isinstance(read, dict):
        raise DeviceError(
            f"The device file {path} holds no keys. It needs those of docs/speed.md, such as bf16_tflops."
        )
    unknown = read.get("constants")
    if isinstance(unknown, str) and unknown not in constants():
        raise DeviceError(f"{path}: constants: there is no set {unknown!r}.{suggestion(unknown, constants())}")
    try:
        return Device.model_validate(read)
    except ValidationError as error:
        raise DeviceError(f"The device file {path} cannot be used: {_in_words(error)}") from None


def _in_words(error: ValidationError) -> str:
    from te_precision_callbacks.config.problems import suggestion

    found = []
    for one in error.errors():
        key = ".".join(str(part) for part in one["loc"] if part != "Constants")
        if one["type"] == "missing":
            found.append(f"field {key} is missing")
        elif one["type"] == "extra_forbidden":
            found.append(f"{key} is no key of a device.{suggestion(key, Device.model_fields)}")
        else:
            found.append(f"field {key} is {one['input']!r}, and {one['msg'].removeprefix('Input ')}")
    return "; ".join(dict.fromkeys(found))


def _read(name: str) -> dict[str, Any]:
    text = resources.files("te_precision_callbacks.speed").joinpath(name).read_text(encoding="utf-8")
    read: dict[str, Any] = yaml.safe_load(text)
    return read
