"""Times of a model's own shapes, measured on the device, and kept in a table.

    table = calibrate(times, device_name="cuda")       # what these times need, with CUDA events
    table.write(Path("speed_calibration.json"))
    table = Calibration.read(Path("speed_calibration.json"))
    expected(products, recipes, device, table=table)   # its times first, the model's where it has none

Four kinds of times are measured, as Transformer Engine runs them:

- ``high``: ``torch.matmul`` in BF16;
- ``gemm``: Transformer Engine's GEMM of operands that were quantized before;
- ``cast``: the quantizer of an operand, in the directions that its GEMMs read;
- ``call``: the forward of ``te.Linear`` under ``te.autocast``, which casts both operands.

On a CPU the same code runs on the reference backend, with the clock of the CPU: its times say nothing about a GPU, and
are never used for one.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.vocabulary import GEMMS, RECIPES, OperandName
from te_precision_callbacks.speed.costs import CallPlan, Cost, Shape, cast_users, operand_sizes
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.errors import CalibrationError, why_unreadable

if TYPE_CHECKING:
    from te_precision_callbacks.speed.expected import ProductTime

logger = logging.getLogger(__name__)

VERSION = 1
DEFAULT_FILE = Path("speed_calibration.json")

_REPEATS, _CALLS = 7, 10
"""The measurements of a time, and the calls of each of them."""


class Time(NamedTuple):
    """A measured time.

    Attributes:
        ms: the median of its measurements, in milliseconds a call.
        spread: their relative standard deviation.
    """

    ms: float
    spread: float


@dataclass
class Calibration:
    """Measured times of one device.

    Attributes:
        device: what ``torch.cuda.get_device_name`` says of it; ``cpu`` for the reference backend.
        versions: of torch and Transformer Engine.
        times: what was measured -> its time. The keys are ``high SHAPE``, ``gemm RECIPE SHAPE``, ``call RECIPE SHAPE``,
            and ``cast RECIPE OPERAND ROWSxCOLUMNS DIRECTIONS``.
    """

    device: str
    versions: dict[str, str] = field(default_factory=dict)
    times: dict[str, Time] = field(default_factory=dict)

    def high_ms(self, shape: Shape) -> float | None:
        """A GEMM in BF16, in milliseconds; None if it was not measured."""
        return self._ms(high_key(shape))

    def gemm(self, shape: Shape, recipe: str) -> Cost | None:
        """A GEMM of operands that were quantized before; None if it was not measured."""
        ms = self._ms(gemm_key(shape, recipe))
        return None if ms is None else Cost(ms)

    def call(self, shape: Shape, recipe: str) -> Cost | None:
        """A forward that casts both operands; what its GEMM does not take are casts. None if it was not measured."""
        ms = self._ms(call_key(shape, recipe))
        if ms is None:
            return None
        kernel = self._ms(gemm_key(shape, recipe))
        return Cost(ms) if kernel is None or kernel > ms else Cost(kernel, ms - kernel)

    def cast(
        self, recipe: str, operand: OperandName, rows: int, columns: int, directions: tuple[bool, bool]
    ) -> Cost | None:
        """The cast of an operand; None if it was not measured."""
        ms = self._ms(cast_key(recipe, operand, rows, columns, directions))
        return None if ms is None else Cost(0.0, ms)

    def spread(self, shape: Shape, recipe: str) -> float:
        """The relative standard deviation of a speed-up, from those of the times that it is made of."""
        keys = high_key(shape), gemm_key(shape, recipe), call_key(shape, recipe)
        return math.hypot(*(self.times[key].spread for key in keys if key in self.times))

    def check_device(self, device: Device) -> None:
        """Check that the times are of a device.

        Raises:
            CalibrationError: they are of another one.
        """
        if not device.is_called(self.device):
            raise CalibrationError(
                f"The measured times are of {self.device!r}, and times are expected for {device.title}. Measure them"
                " there with --calibrate, or leave out --table."
            )

    def _ms(self, key: str) -> float | None:
        found = self.times.get(key)
        return None if found is None else found.ms

    def write(self, path: Path) -> None:
        """Write the table as JSON, in place of the file.

        Raises:
            CalibrationError: it cannot be written.
        """
        content = {
            "version": VERSION,
            "device": self.device,
            "versions": self.versions,
            "times": {key: {"ms": one.ms, "spread": one.spread} for key, one in self.times.items()},
        }
        try:
            new = path.with_name(f".{path.name}.new")
            new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            new.replace(path)
        except OSError as error:
            raise CalibrationError(f"The measured times cannot be written to {path}: {error}") from None

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read a table.

        Raises:
            CalibrationError: it cannot be read, or is no such table.
        """
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = why_unreadable(error)
            raise CalibrationError(f"The table of measured times {path} cannot be read: {why}.") from None
        try:
            version = read["version"]
            times = {key: Time(float(one["ms"]), float(one["spread"])) for key, one in read["times"].items()}
            found = cls(str(read["device"]), dict(read["versions"]), times)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            why = f"field {error.args[0]} is missing" if isinstance(error, KeyError) else "a field has a wrong type"
            raise CalibrationError(f"{path} is no table of measured times, which --calibrate writes: {why}.") from None
        if version != VERSION:
            raise CalibrationError(
                f"{path} has version {version!r}, and this package reads {VERSION}. Measure it again."
            )
        wrong = next((key for key, one in times.items() if not (0 < one.ms < math.inf and one.spread >= 0)), None)
        if wrong is not None:
            raise CalibrationError(f"{path}: the time of {wrong!r} is {times[wrong]}. Measure it again.")
        return found


def high_key(shape: Shape) -> str:
    """The key of a GEMM in BF16."""
    return f"high {shape}"


def gemm_key(shape: Shape, recipe: str) -> str:
    """The key of a GEMM of quantized operands."""
    return f"gemm {recipe} {shape}"


def call_key(shape: Shape, recipe: str) -> str:
    """The key of a forward that casts both operands."""
    return f"call {recipe} {shape}"


def cast_key(recipe: str, operand: str, rows: int, columns: int, directions: tuple[bool, bool]) -> str:
    """The key of a cast."""
    words = [word for word, wanted in zip(("rowwise", "columnwise"), directions, strict=True) if wanted]
    return f"cast {recipe} {operand} {rows}x{columns} {'+'.join(words)}"


@dataclass(frozen=True)
class _Clock:
    """Times a function on a device."""

    device: str

    def time(self, run: Callable[[], object]) -> Time:
        """The time of a call, with all that it launches."""
        import torch

        run()
        found = []
        for _ in range(_REPEATS):
            if self.device == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                run()  # the GPU is busy with it while the timed calls are launched
                start.record()
                for _ in range(_CALLS):
                    run()
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end) / _CALLS)
            else:
                begun = time.perf_counter()
                run()
                found.append((time.perf_counter() - begun) * 1e3)
        median = statistics.median(found)
        return Time(median, statistics.stdev(found) / median if median else 0.0)


def calibrate(
    times: Iterable[ProductTime],
    *,
    plan: CallPlan = "training",
    device: str = "cuda",
    table: Calibration | None = None,
    report: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Measure the times that expected times of products need, and that a table does not have yet.

    Args:
        times: expected times, whose shapes and recipes are measured.
        plan: how often operands are cast.
        device: ``cuda``, or ``cpu`` for the reference backend.
        table: the table to add to; None for a new one.
        report: called before each measurement with what is measured, its number, and how many there are.

    Raises:
        CalibrationError: there is no such device here, or the table is of another one.
    """
    from te_precision_callbacks import reference

    reference.install_where_needed()
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise CalibrationError(
            "--calibrate measures on a GPU, and torch finds none here. Run it on the machine of the training, and carry"
            f" the table ({DEFAULT_FILE}) over."
        )
    import transformer_engine
    import transformer_engine.pytorch

    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "transformer_engine": transformer_engine.__version__}
    found = Calibration(name, versions) if table is None else table
    if found.device != name:
        raise CalibrationError(f"The table has times of {found.device!r}, and this is {name!r}. Choose another file.")
    wanted = {key: run for key, run in _wanted(list(times), plan, device).items() if key not in found.times}
    clock = _Clock(device)
    for number, (key, make) in enumerate(wanted.items(), 1):
        if report is not None:
            report(key, number, len(wanted))
        try:
            found.times[key] = clock.time(make())
        except (RuntimeError, AssertionError, ValueError, PrecisionDebugError) as error:  # a shape that a GEMM refuses
            text = str(error).partition("\n")[0]
            logger.warning("%s was not measured, so the model's time is taken: %s", key, text)
    return found


Make = Callable[[], Callable[[], object]]


def _wanted(times: Sequence[ProductTime], plan: CallPlan, device: str) -> dict[str, Make]:
    """What has to be measured -> what makes the function to time."""
    found: dict[str, Make] = {}
    low: dict[str, dict[str, ProductTime]] = {}
    for one in times:
        if one.shape.batch > 1 or one.gemm not in GEMMS:
            continue
        found.setdefault(high_key(one.shape), _matmul(one.shape, device))
        if one.recipe not in RECIPES:
            continue
        found.setdefault(gemm_key(one.shape, one.recipe), _gemm(one.shape, one.recipe, device))
        if plan == "benchmark":
            found.setdefault(call_key(one.shape, one.recipe), _call(one.shape, one.recipe, device))
        else:
            low.setdefault(one.layer, {})[one.gemm] = one
    for of_layer in low.values():
        for recipe, operand, rows, columns, directions in _casts_of(of_layer):
            key = cast_key(recipe, operand, rows, columns, directions)
            found.setdefault(key, _cast(recipe, operand, rows, columns, directions, device))
    return found


def _casts_of(low: dict[str, ProductTime]) -> Iterable[tuple[str, OperandName, int, int, tuple[bool, bool]]]:
    """The casts of a layer, from its products in low precision by GEMM: recipe, operand, rows, columns, directions."""
    for operand, first, directions in cast_users({gemm: one.recipe for gemm, one in low.items()}):
        one = low[first]
        yield one.recipe, operand, *operand_sizes(operand, first, one.shape), directions


def _matmul(shape: Shape, device: str) -> Make:
    def make() -> Callable[[], object]:
        import torch

        a, b = (torch.randn(*sizes, dtype=torch.bfloat16, device=device) for sizes in (shape[:2], shape[1:3]))
        return lambda: torch.matmul(a, b)

    return make


def _quantizers(recipe: str, operand: str) -> Any:
    """The quantizer that a te.Linear has for an operand under a recipe, with the recipe's defaults."""
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.quantization import RecipeState

    made = getattr(recipes, RECIPES[recipe].recipe_class)()
    forward = operand != "gradient"
    mode, count = ("forward", 2) if forward else ("backward", 1)
    quantizers = RecipeState.create(made, mode=mode, num_quantizers=count).make_quantizers()
    return quantizers[1 if operand == "weight" else 0]


def _cast(recipe: str, operand: str, rows: int, columns: int, directions: tuple[bool, bool], device: str) -> Make:
    def make() -> Callable[[], object]:
        import torch

        quantizer = _quantizers(recipe, operand)
        quantizer.set_usage(rowwise=directions[0], columnwise=directions[1])
        tensor = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
        return lambda: quantizer(tensor)

    return make


def _gemm(shape: Shape, recipe: str, device: str) -> Make:
    def make() -> Callable[[], object]:
        import torch
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        operands = []
        for operand, sizes in (("weight", (shape.n, shape.k)), ("activation", (shape.m, shape.k))):
            quantizer = _quantizers(recipe, operand)
            quantizer.set_usage(rowwise=True, columnwise=False)
            operands.append(quantizer(torch.randn(*sizes, dtype=torch.bfloat16, device=device)))
        weight, activation = operands
        return lambda: general_gemm(weight, activation, out_dtype=torch.bfloat16, layout="TN")

    return make


def _call(shape: Shape, recipe: str, device: str) -> Make:
    def make() -> Callable[[], object]:
        import torch
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes

        linear = te.Linear(shape.k, shape.n, bias=False, params_dtype=torch.bfloat16, device=device)
        x = torch.randn(shape.m, shape.k, dtype=torch.bfloat16, device=device)
        made = getattr(recipes, RECIPES[recipe].recipe_class)()

        def run() -> object:
            with te.autocast(enabled=True, recipe=made):
                return linear(x)

        return run

    return make
