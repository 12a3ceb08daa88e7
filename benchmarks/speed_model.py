"""Fit the constants of the speed model to published times, and compare the model with other published times.

    python benchmarks/speed_model.py            # prints the agreement with times that nothing was fitted to
    python benchmarks/speed_model.py --write    # writes constants.yaml

The times come from Transformer Engine's GEMM profiling tutorial (docs/examples/gemm_profiling, commit d0067d0): its
benchmark_gemm.py on a B300 and on an H200 NVL, in milliseconds, at hidden 4096, intermediate 16384 and 31 x 512 tokens.
BF16 is torch.matmul. Low precision is the forward of te.Linear, which casts both operands in each call, or a GEMM of
operands that were quantized before. The benchmark's "dgrad" and "wgrad" are such forwards on swapped shapes.

Fitted constants, in this order, and their data:

- the share of the peak that kernels reach: the sums of fprop, dgrad and wgrad with operands quantized before;
- the share of the bandwidth that each recipe's casts reach, and one time of a launch for all recipes: the sums of dgrad
  and wgrad with casts, by least squares of relative errors, with shares of at most 1.

FP8 block scaling has no times quantized before: the bandwidth's share is taken from current scaling, and the kernels'
share is fitted to dgrad and wgrad. The 20 times of single shapes of the fprop on the B300 are used in no fit.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from te_precision_callbacks.speed.devices import KERNEL_OF_RECIPE, Constants, Device, device_named
from te_precision_callbacks.speed.expected import cast_bytes, cast_time, gemm_ms

TOKENS = 15872


class Shape(NamedTuple):
    """Shape of a GEMM: the result has m rows of n elements, each a sum of k products."""

    m: int
    k: int
    n: int

    @property
    def operations(self) -> int:
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


Shapes = tuple[Shape, ...]

LAYERS = {"QKV": (4096, 12288), "attention output": (4096, 4096), "MLP up": (4096, 16384), "MLP down": (16384, 4096)}
SHAPES: Mapping[str, Shapes] = {
    "fprop": tuple(Shape(TOKENS, k, n) for k, n in LAYERS.values()),
    "dgrad": tuple(Shape(TOKENS, n, k) for k, n in LAYERS.values()),
    "wgrad": tuple(Shape(k, TOKENS, n) for k, n in LAYERS.values()),
}
CURRENT, DELAYED, BLOCK = "fp8_current_scaling", "fp8_delayed_scaling", "fp8_block_scaling"
HIGH = "bf16"

CELLS: Mapping[str, Sequence[float]] = {  # B300, fprop of each of LAYERS, with casts
    HIGH: (1.071, 0.307, 1.393, 1.426),
    CURRENT: (0.605, 0.317, 0.924, 1.033),
    DELAYED: (0.503, 0.231, 0.850, 0.901),
    "mxfp8": (0.579, 0.269, 0.924, 1.076),
    "nvfp4": (0.392, 0.256, 0.635, 0.649),
}
SUMS: Mapping[str, Mapping[str, Mapping[str, float]]] = {  # device -> recipe -> pass -> the sum over LAYERS, with casts
    "b300": {
        HIGH: {"fprop": 4.196, "dgrad": 4.290, "wgrad": 4.272},
        CURRENT: {"fprop": 2.879, "dgrad": 3.063, "wgrad": 3.205},
        DELAYED: {"fprop": 2.486, "dgrad": 2.621, "wgrad": 2.695},
        "mxfp8": {"fprop": 2.847, "dgrad": 3.045, "wgrad": 3.092},
        "nvfp4": {"fprop": 1.932, "dgrad": 2.189, "wgrad": 2.331},
    },
    "h200_nvl": {
        HIGH: {"fprop": 10.653, "dgrad": 10.813, "wgrad": 10.548},
        CURRENT: {"fprop": 6.503, "dgrad": 6.795, "wgrad": 6.987},
        DELAYED: {"fprop": 6.188, "dgrad": 6.306, "wgrad": 6.484},
        BLOCK: {"fprop": 7.425, "dgrad": 7.636, "wgrad": 7.821},
    },
}
QUANTIZED_BEFORE: Mapping[str, Mapping[str, Mapping[str, float]]] = {  # device -> kernels -> pass -> the sum
    "b300": {
        HIGH: {"fprop": 4.250, "dgrad": 4.434, "wgrad": 4.418},
        "fp8": {"fprop": 2.158, "dgrad": 2.329, "wgrad": 2.325},
        "mxfp8": {"fprop": 2.365, "dgrad": 2.397, "wgrad": 2.400},
        "nvfp4": {"fprop": 1.254, "dgrad": 1.305, "wgrad": 1.205},
    },
    "h200_nvl": {
        HIGH: {"fprop": 10.632, "dgrad": 10.747, "wgrad": 10.530},
        "fp8": {"fprop": 5.577, "dgrad": 5.661, "wgrad": 5.547},
    },
}
ERROR_FACTOR = 1.3
"""Speed-ups are within this factor of the model's: the bound that docs/check.md states."""

BANDWIDTH = {"b300": 0.84, "h200_nvl": 0.92}
"""The share that kernels of plain memory traffic reach: torchao's roofline_utils.py, of B300 and of Hopper."""

FITTED = ("dgrad", "wgrad")
_LAUNCHES = np.linspace(0, 0.03, 601)

HERE = Path(__file__).resolve().parent
CONSTANTS = HERE.parent / "te_precision_callbacks" / "speed" / "constants.yaml"


def call_cost(shape: Shape, recipe: str, device: Device) -> tuple[float, float]:
    """Return the time of a forward that casts both operands, as Transformer Engine's benchmark_gemm.py measures: its
    input in both directions, for a later wgrad, its weight rowwise alone, since the input needs no gradient.

    Returns:
        Milliseconds of the GEMM and of the casts.
    """
    activation = cast_time(recipe, "activation", shape.m * shape.k, device)
    weight = cast_time(recipe, "weight", shape.k * shape.n, device, columnwise=False)
    return gemm_ms(*shape, recipe, device), activation + weight


def _operations(shapes: Iterable[Shape]) -> float:
    return sum(shape.operations for shape in shapes)


def fit(name: str) -> Constants:
    device = device_named(name)
    before = QUANTIZED_BEFORE[name]
    kernel = {}
    for kernels, sums in before.items():
        operations = _operations(s for which in sums for s in SHAPES[which])
        kernel[kernels] = operations / (sum(sums.values()) * device.peak_tflops(kernels) * 1e9)
    recipes = [recipe for recipe in SUMS[name] if recipe != HIGH and KERNEL_OF_RECIPE[recipe] in kernel]
    fits = (_casts(name, kernel, recipes, float(launch)) for launch in _LAUNCHES)
    _, launch, cast = min(fits, key=lambda fit: fit[0])
    if BLOCK in SUMS[name]:
        cast[BLOCK] = cast[CURRENT]
        kernel["fp8_block"] = _share_of_block(name, kernel, cast, launch)
    elif "mxfp8" in kernel:  # Blackwell emulates block scaling by MXFP8
        cast[BLOCK], kernel["fp8_block"] = cast["mxfp8"], kernel["mxfp8"]
    return Constants(
        measured_on=device.title,
        kernel={key: round(value, 4) for key, value in kernel.items()},
        cast={key: round(value, 4) for key, value in cast.items()},
        launch_ms=round(launch, 5),
        bandwidth=BANDWIDTH[name],
    )


def _with(device: Device, kernel: Mapping[str, float], cast: Mapping[str, float], launch: float) -> Device:
    return replace(device, constants=Constants(device.title, kernel, cast, launch, 1.0))


def _casts(
    name: str, kernel: Mapping[str, float], recipes: Sequence[str], launch: float
) -> tuple[float, float, dict[str, float]]:
    """The sum of squared relative errors with a launch of that time, the launch, and the best shares of the casts."""
    device = device_named(name)
    errors, shares = list[float](), dict[str, float]()
    for recipe in recipes:
        _, activation_launches = cast_bytes(recipe, "activation", device.capability)
        _, weight_launches = cast_bytes(recipe, "weight", device.capability, columnwise=False)
        launches = len(LAYERS) * (activation_launches + weight_launches) * launch
        at_once = _with(device, kernel, {recipe: 1.0}, launch)
        costs = [[call_cost(shape, recipe, at_once) for shape in SHAPES[gemm]] for gemm in FITTED]
        sums = np.array([SUMS[name][recipe][gemm] for gemm in FITTED])
        rest, moved = np.moveaxis(np.array(costs).sum(axis=1), 1, 0)
        moved = moved - launches
        a, y = moved / sums, (sums - rest - launches) / sums
        slower = max(float(a @ y / (a @ a)), 1.0)
        shares[recipe] = 1 / slower
        errors += list(a * slower - y)
    return sum(error**2 for error in errors), launch, shares


def _share_of_block(name: str, kernel: dict[str, float], cast: dict[str, float], launch: float) -> float:
    """The share of the peak that reproduces block scaling's sums of dgrad and wgrad."""
    at_once = _with(device_named(name), {**kernel, "fp8_block": 1.0}, cast, launch)
    sums = SUMS[name][BLOCK]
    costs = [call_cost(shape, BLOCK, at_once) for gemm in FITTED for shape in SHAPES[gemm]]
    kernels, casts = map(sum, zip(*costs, strict=True))
    return kernels / (sum(sums[gemm] for gemm in FITTED) - casts)


def expected(shape: Shape, recipe: str, device: Device) -> float:
    """The model's time with both operands cast."""
    return gemm_ms(*shape, "", device) if recipe == HIGH else sum(call_cost(shape, recipe, device))


def fitted() -> dict[str, Constants]:
    """Name -> the constants of each measured device."""
    return {name: fit(name) for name in SUMS}


def transferred(constants: Constants) -> dict[str, dict[str, list[float]]]:
    """Recipe -> of each pass on the H200 NVL, with the constants of the B300: expected over measured times, and the
    same of speed-ups."""
    device = replace(device_named("h200_nvl"), constants=constants)
    sums = SUMS["h200_nvl"]
    results: dict[str, dict[str, list[float]]] = {}
    for recipe in (HIGH, CURRENT, DELAYED):
        times = [sum(expected(s, recipe, device) for s in SHAPES[gemm]) / sums[recipe][gemm] for gemm in SHAPES]
        high = results[HIGH]["time"] if results else times
        results[recipe] = {"time": times, "speed-up": [h / t for h, t in zip(high, times, strict=True)]}
    return results


class Cell(NamedTuple):
    """A single shape of the fprop on the B300.

    Attributes:
        layer, recipe: which.
        measured, expected: milliseconds.
        measured_speedup, speedup: of BF16 over it.
    """

    layer: str
    recipe: str
    measured: float
    expected: float
    measured_speedup: float
    speedup: float

    @property
    def error(self) -> float:
        return self.expected / self.measured - 1

    @property
    def is_within(self) -> bool:
        """Whether the measured speed-up is within :data:`ERROR_FACTOR` of the expected one."""
        return 1 / ERROR_FACTOR < self.speedup / self.measured_speedup < ERROR_FACTOR


def cells(constants: Constants) -> list[Cell]:
    device = replace(device_named("b300"), constants=constants)
    results = []
    for recipe, measured in CELLS.items():
        for name, shape, time, high in zip(LAYERS, SHAPES["fprop"], measured, CELLS[HIGH], strict=True):
            low = expected(shape, recipe, device)
            results.append(Cell(name, recipe, time, low, high / time, expected(shape, HIGH, device) / low))
    return results


def agreement() -> list[str]:
    """Return the lines of a table: the 20 single shapes, expected / measured milliseconds."""
    in_no_fit = cells(fitted()["b300"])
    lines = [f"| shape | {' | '.join(CELLS)} |", "|---" * (1 + len(CELLS)) + "|"]
    for layer, shape in zip(LAYERS, SHAPES["fprop"], strict=True):
        row = [cell for cell in in_no_fit if cell.layer == layer]
        texts = (f"{cell.expected:.3f} / {cell.measured:.3f}, {100 * cell.error:+.0f} %" for cell in row)
        lines.append(f"| {layer} {shape} | {' | '.join(texts)} |")
    low = [cell for cell in in_no_fit if cell.recipe != HIGH]
    inside = sum(cell.is_within for cell in low)
    worst = max(in_no_fit, key=lambda cell: abs(cell.error))
    median = statistics.median(abs(cell.error) for cell in in_no_fit)
    return [
        *lines,
        "",
        f"The median error is {100 * median:.1f} %, the worst {100 * abs(worst.error):.1f} % ({worst.layer},"
        f" {worst.recipe}). The measured speed-up is within a factor of {ERROR_FACTOR} in {inside} of {len(low)}"
        " cells.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the constants")
    if parser.parse_args().write:
        CONSTANTS.write_text(constants_text(), encoding="utf-8")
    else:
        print("\n".join(agreement()))


def constants_text() -> str:
    sets = {name: asdict(constants) for name, constants in fitted().items()}
    text = yaml.safe_dump(sets, sort_keys=False, width=110)
    return f"# Made by benchmarks/speed_model.py --write, whose docstring says from what.\n{text}"


if __name__ == "__main__":
    main()
