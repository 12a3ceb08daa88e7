"""Compare the quantizers of all recipes on the GPU and on the CPU, bit for bit, and their GEMMs.

The reference backend quantizes the same tensors on both devices, once for each compute capability that it emulates.
A compiled Transformer Engine's quantizers are compared too, in the recipes of the GPU. On a CPU the
backend is compared with itself, in two processes.

A GEMM is compared with the product in float64 of the dequantized operands. Its error is given as a share of the sum of
the magnitudes of the products: float32 rounds each of them and each addition by at most 2^-24; the tensor cores of a
GPU keep some 13 bits of the larger addend in FP8.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_parts.parity_dump import ACTIVATION, COLUMNS, WEIGHT
from gpu_parts.rows import Rows, Settings
from te_precision_callbacks.reference.inherited import ENVIRONMENT_VARIABLE

CAPABILITIES = ("9.0", "10.0")
IN_FLOAT32 = COLUMNS * 2.0**-24
IN_TENSOR_CORES = 2.0**-10


class Side(NamedTuple):
    """Device and backend of a process.

    Attributes:
        device: ``cuda`` or ``cpu``.
        backend: ``reference`` or ``compiled``.
    """

    device: str
    backend: str

    @property
    def name(self) -> str:
        what = "compiled" if self.backend == "compiled" else "backend"
        return f"{what} on the {'GPU' if self.device == 'cuda' else 'CPU'}"


def dumped(sides: Sequence[Side], capability: str, folder: Path) -> list[dict[str, Any]]:
    """Quantize on all sides, in parallel processes.

    Raises:
        RuntimeError: a process failed; the message has the end of its output.
    """
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    started = []
    for number, side in enumerate(sides):
        path = folder / f"{capability}-{number}.pt"
        options = ["--device", side.device, "--backend", side.backend, "--capability", capability]
        command = [sys.executable, "-m", "gpu_parts.parity_dump", str(path), *options]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        started.append((side, path, process))
    results, failures = [], []
    for side, path, process in started:
        _, errors = process.communicate()
        if process.returncode:
            failures.append(f"{side.name} at {capability}: {(errors.strip().splitlines() or ['?'])[-1]}")
        else:
            results.append(torch.load(path, weights_only=True))
    if failures:
        raise RuntimeError("; ".join(failures))
    return results


def compare(sides: Sequence[Side], made: Sequence[dict[str, Any]], capability: str, rows: Rows) -> None:
    """Rows for each quantizer: the bytes that differ, and the errors of the GEMM."""
    (side, other), (ours, theirs) = sides, made
    for name, right in theirs.items():
        results = ours[name]
        check = f"{name}, {capability}: {side.name} and {other.name}"
        refused = results.get("refused") or right.get("refused")
        if refused is not None:
            rows.left_out(check, refused)
            continue
        differing, total, where = 0, 0, []
        for part, expected in right["parts"].items():
            value = results["parts"].get(part)
            total += expected.nbytes
            here = expected.nbytes if value is None else _differing(value, expected)
            differing += here
            where += [f"{part}: {here}"] if here else []
        more = results["parts"].keys() - right["parts"].keys()
        where += [f"only {side.name}: {part}" for part in sorted(more)]
        for place, made_there in ((side, results), (other, right)):
            where += [f"{place.name}, {key}: {why}" for key, why in made_there["failures"].items()]
        rows.add(f"{check}, bytes that differ", differing, f"of {total}", 0, not where, "; ".join(where)[:400])
        if "product" in right and "product" in results:
            exact, magnitudes = _product(right)
            limit = IN_TENSOR_CORES if side.backend == "compiled" else IN_FLOAT32
            error = float(((results["product"].double() - exact).abs() / magnitudes).max())
            rows.at_most(f"{name}, {capability}: GEMM, {side.name}", error, limit, "of the magnitudes")
            apart = float((results["product"].double() - right["product"].double()).abs().max())
            largest = float(exact.abs().max())
            rows.measured(
                f"{name}, {capability}: GEMM, largest difference", apart, note=f"of numbers up to {largest:.3g}"
            )


def _differing(value: torch.Tensor, expected: torch.Tensor) -> int:
    """Count the bytes that differ: all of them if the shapes differ."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return expected.nbytes
    return int((_bytes(value) != _bytes(expected)).sum())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _product(made: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the dequantized operands in float64, and the sums of the magnitudes of its terms."""
    weight, activation = made[WEIGHT].double(), made[ACTIVATION].double()
    return activation @ weight.t(), activation.abs() @ weight.abs().t()


def check(settings: Settings, rows: Rows) -> None:
    on_cpu = Side("cpu", "reference")
    with tempfile.TemporaryDirectory() as folder:
        for capability in CAPABILITIES:
            sides = [Side(settings.device.type, "reference"), on_cpu]
            if settings.backend == "compiled" and capability == _layouts_of_this_gpu(settings):
                sides.append(Side("cuda", "compiled"))
            made = dumped(sides, capability, Path(folder))
            compare(sides[:2], made[:2], capability, rows)
            if len(sides) > 2:
                compare([sides[2], on_cpu], [made[2], made[1]], capability, rows)
    if not settings.on_gpu:
        rows.left_out("the backend on a GPU", "needs a GPU")
    if settings.backend != "compiled":
        rows.left_out("the compiled Transformer Engine", "there is none that can be used on this device")


def _layouts_of_this_gpu(settings: Settings) -> str:
    """Return the emulated capability with this GPU's layouts."""
    return "10.0" if torch.cuda.get_device_capability(settings.device) >= (10, 0) else "9.0"
