"""Measured times of a model's shapes, on the device, as Transformer Engine runs them.

Three kinds of times: ``high`` is ``torch.matmul`` in BF16, ``gemm`` Transformer Engine's GEMM of quantized operands,
and ``cast`` the quantizer of an operand in the directions that its GEMMs read. On a CPU the same code runs on the
reference backend; those times are never used for a GPU.
"""

from __future__ import annotations

import functools
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pydantic.dataclasses
from pydantic import Field, TypeAdapter, ValidationError

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.vocabulary import GEMMS, RECIPES
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.costs import Shape, cast_users, operand_sizes, shape_of
from te_precision_callbacks.speed.devices import Device, SpeedError

logger = logging.getLogger(__name__)

DEFAULT_FILE = Path("speed_calibration.json")

_REPEATS = 7
_CALLS = 10


class CalibrationError(SpeedError):
    """An invalid table of measured times, or times that cannot be measured on this machine."""


@pydantic.dataclasses.dataclass(frozen=True)
class Time:
    """A measured time: the median in milliseconds per call, and the relative standard deviation of its measurements."""

    ms: float = Field(gt=0, allow_inf_nan=False)
    spread: float = Field(ge=0)


@pydantic.dataclasses.dataclass
class Calibration:
    """Measured times of one device.

    Attributes:
        device: its name in ``torch.cuda.get_device_name``; ``cpu`` for the reference backend.
        versions: the versions of torch and Transformer Engine.
        times: by the keys of :func:`high_key`, :func:`gemm_key` and :func:`cast_key`.
    """

    device: str
    versions: dict[str, str] = Field(default_factory=dict)
    times: dict[str, Time] = Field(default_factory=dict)

    def check_device(self, device: Device) -> None:
        """Raise a CalibrationError if the times were measured on another device."""
        if not device.is_called(self.device):
            raise CalibrationError(
                f"The times in the table were measured on {self.device!r}, not on {device.title}. Run --calibrate on"
                " that device, or omit --table."
            )

    def write(self, path: Path) -> None:
        """Write the table as JSON, replacing the file; raises CalibrationError."""
        try:
            new = path.with_name(f".{path.name}.new")
            new.write_bytes(_TABLE.dump_json(self, indent=1) + b"\n")
            new.replace(path)
        except OSError as error:
            raise CalibrationError(f"The measured times cannot be written to {path}: {error}") from None

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read a table; raises CalibrationError for an unreadable or invalid one."""
        try:
            return _TABLE.validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise CalibrationError(f"The table of measured times {path} cannot be read: {error}") from None


_TABLE = TypeAdapter(Calibration)


def high_key(shape: Shape) -> str:
    return f"high {shape}"


def gemm_key(shape: Shape, recipe: str) -> str:
    return f"gemm {recipe} {shape}"


def cast_key(recipe: str, operand: str, rows: int, columns: int, directions: tuple[bool, bool]) -> str:
    words = "+".join(itertools.compress(("rowwise", "columnwise"), directions))
    return f"cast {recipe} {operand} {rows}x{columns} {words}"


def calibrate(
    products: Iterable[tuple[Product, str]],
    *,
    device: str = "cuda",
    table: Calibration | None = None,
    report: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Measure the times of products that are missing from a table.

    Args:
        products: products with their recipes, from :func:`~te_precision_callbacks.speed.expected.with_recipes`.
        device: ``cuda``, or ``cpu`` for the reference backend.
        table: the table to extend.
        report: called before each measurement with its key, its index and the number of measurements.

    Raises:
        CalibrationError: this machine does not have the device, or the table is for another device.
    """
    from te_precision_callbacks import reference

    reference.install_where_needed()
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise CalibrationError(
            "--calibrate needs a GPU, but torch finds none. Run it on the training machine, and copy the table"
            f" ({DEFAULT_FILE})."
        )
    import transformer_engine
    import transformer_engine.pytorch

    name = "cpu"
    if device != "cpu":
        name = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "transformer_engine": transformer_engine.__version__}
    measured = table or Calibration(name, versions)
    if measured.device != name:
        raise CalibrationError(
            f"The table was measured on {measured.device!r}, but this GPU is {name!r}. Choose another file."
        )
    wanted = {key: make for key, make in _measurements(products, device).items() if key not in measured.times}
    for number, (key, make) in enumerate(wanted.items(), 1):
        if report is not None:
            report(key, number, len(wanted))
        try:
            measured.times[key] = _time_of(make(), device)
        except (RuntimeError, AssertionError, ValueError, PrecisionDebugError) as error:  # an unsupported shape
            text = str(error).partition("\n")[0]
            logger.warning("%s was not measured, so the cost model is used: %s", key, text)
    return measured


def _time_of(run: Callable[[], object], device: str) -> Time:
    import torch

    run()
    samples = []
    for _ in range(_REPEATS):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            run()  # keeps the GPU busy during the launches of the timed calls
            start.record()
            for _ in range(_CALLS):
                run()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / _CALLS)
        else:
            begun = time.perf_counter()
            run()
            samples.append((time.perf_counter() - begun) * 1e3)
    median = statistics.median(samples)
    if not median:
        return Time(median, 0.0)
    return Time(median, statistics.stdev(samples) / median)


def _measurements(
    products: Iterable[tuple[Product, str]], device: str
) -> dict[str, Callable[[], Callable[[], object]]]:
    wanted: dict[str, Callable[[], Callable[[], object]]] = {}
    low: dict[str, dict[str, tuple[Shape, str]]] = {}
    for product, recipe in products:
        shape = shape_of(product)
        if product.batch > 1 or product.gemm not in GEMMS:
            continue
        wanted.setdefault(high_key(shape), functools.partial(_matmul, shape, device))
        if recipe in RECIPES:
            wanted.setdefault(gemm_key(shape, recipe), functools.partial(_gemm, shape, recipe, device))
            low.setdefault(product.layer, {})[product.gemm] = shape, recipe
    for of_layer in low.values():
        for operand, first, directions in cast_users({gemm: recipe for gemm, (_, recipe) in of_layer.items()}):
            shape, recipe = of_layer[first]
            of = recipe, operand, *operand_sizes(operand, first, shape), directions
            wanted.setdefault(cast_key(*of), functools.partial(_cast, *of, device))
    return wanted


def _matmul(shape: Shape, device: str) -> Callable[[], object]:
    import torch

    a = torch.randn(*shape[:2], dtype=torch.bfloat16, device=device)
    b = torch.randn(*shape[1:3], dtype=torch.bfloat16, device=device)
    return lambda: torch.matmul(a, b)


def _quantizer(recipe: str, operand: str, directions: tuple[bool, bool]) -> Any:
    from transformer_engine.common import recipe as recipes

    from te_precision_callbacks.te.state import make_quantizers

    chosen = getattr(recipes, RECIPES[recipe].recipe_class)()
    if operand == "gradient":
        (quantizer,) = make_quantizers(chosen, "backward", 1)
    else:
        quantizer = make_quantizers(chosen, "forward", 2)[operand == "weight"]
    quantizer.set_usage(rowwise=directions[0], columnwise=directions[1])
    return quantizer


def _cast(
    recipe: str, operand: str, rows: int, columns: int, directions: tuple[bool, bool], device: str
) -> Callable[[], object]:
    import torch

    quantizer = _quantizer(recipe, operand, directions)
    tensor = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
    return lambda: quantizer(tensor)


def _gemm(shape: Shape, recipe: str, device: str) -> Callable[[], object]:
    import torch
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    weight = _cast(recipe, "weight", shape.n, shape.k, (True, False), device)()
    activation = _cast(recipe, "activation", shape.m, shape.k, (True, False), device)()
    return lambda: general_gemm(weight, activation, out_dtype=torch.bfloat16, layout="TN")
