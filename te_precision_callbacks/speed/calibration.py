"""Times of a model's own shapes, measured on the device: the table, and its file.

    table = Calibration.read(Path("speed_calibration.json"))
    expected(products, recipes, device, table=table)   # its times first, the model's where it has none

Four kinds of times: ``high``, a GEMM in BF16; ``gemm``, a GEMM of quantized operands; ``cast``, the quantizer of an
operand in the directions that its GEMMs read; ``call``, a forward that casts both operands.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from te_precision_callbacks.base.vocabulary import OperandName
from te_precision_callbacks.speed.costs import Cost, Shape
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.errors import CalibrationError, why_unreadable

VERSION = 1
DEFAULT_FILE = Path("speed_calibration.json")


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
