"""Rows of the parts of gpu_check.py.

    def check(settings: Settings, rows: Rows) -> None:
        with rows.of("files"):  # an exception in it is a row, and what comes after it runs all the same
            rows.equal("files", len(files), 4)

Each row is written as soon as it is found, so a part that fails later keeps its earlier rows.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from te_precision_callbacks.sinks.step_records import StepRecords

Backend = Literal["compiled", "reference"]
"""Which Transformer Engine a part runs on."""

Value = float | int | str | None

Row = dict[str, Any]
"""``ok`` is None for a measurement, which cannot be wrong, and for a check that could not be made."""


class CannotRunHereError(Exception):
    """This machine lacks a requirement of a check; the message names it."""


@dataclass(frozen=True)
class Settings:
    """Options of a part.

    Attributes:
        device: where tensors are. On a CPU, sizes are those of a test.
        backend: which Transformer Engine the part runs on.
        capability: the compute capability that the reference backend stands for; None for its own choice.
    """

    device: torch.device
    backend: Backend
    capability: str | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def backend_note(self) -> str:
        """Note for a time: empty for the compiled backend."""
        if self.backend == "compiled":
            return ""
        return f"on the reference backend on the {'GPU' if self.on_gpu else 'CPU'}, no compiled Transformer Engine"

    def transformer_engine(self) -> Any:
        """``transformer_engine.pytorch`` on the chosen backend; to be called before anything else imports it."""
        if self.backend == "reference":
            from te_precision_callbacks import reference

            major_minor = None if self.capability is None else tuple(map(int, self.capability.split(".")))
            reference.install(capability=major_minor)  # type: ignore[arg-type]
        import transformer_engine.pytorch

        return transformer_engine.pytorch


def layouts() -> str:
    """The emulated compute capability with this GPU's layouts of quantized tensors."""
    return "10.0" if torch.cuda.get_device_capability() >= (10, 0) else "9.0"


def of_all_layers(features: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A config of features, with their options, for all layers."""
    layers = {"layer_name_regex_pattern": ".*"}
    return {"of_all": {"enabled": True, "layers": layers, "transformer_engine": features}}


def values_of(records: StepRecords | None) -> dict[str, float]:
    """Return the values of a step of one layer, by ``tensor statistic``."""
    return {f"{row.tensor} {row.statistic}": row.value for row in records or ()}


class Rows:
    """Writes the rows of a part, each as a line of JSON.

    Args:
        part: the name of the part.
        path: the file.
    """

    def __init__(self, part: str, path: Path) -> None:
        self._part = part
        self._path = path

    @contextlib.contextmanager
    def of(self, check: str) -> Iterator[None]:
        """Run a check: an exception becomes a row, and the part continues with the next check."""
        print(f"in: {check}", flush=True)  # the last line of a part that is stopped
        try:
            yield
        except CannotRunHereError as why:
            self.left_out(check, brief(str(why)))
        except Exception as error:
            traceback.print_exc()
            frame = traceback.extract_tb(error.__traceback__)[-1]
            note = f"{in_one_line(error)} ({Path(frame.filename).name}:{frame.lineno})"
            self.add(check, "failed", expected="ran", ok=False, note=note)
            error.__traceback__ = None  # which holds the tensors of the check
        finally:
            gc.collect()

    def measured(self, check: str, value: Value, unit: str = "", note: str = "") -> None:
        """A number that is neither right nor wrong."""
        self.add(check, value, unit, note=note)

    def left_out(self, check: str, why: str) -> None:
        self.add(check, None, note=why)

    def equal(self, check: str, value: Value, expected: Value, unit: str = "", note: str = "") -> None:
        self.add(check, value, unit, expected, value == expected, note)

    def equal_on_gpu(self, check: str, value: Value, expected: Value, settings: Settings, note: str = "") -> None:
        """A number that must be this one on a GPU, and is only measured elsewhere."""
        if settings.on_gpu:
            self.equal(check, value, expected, note=note)
        else:
            self.measured(check, value, note=note)

    def same(self, check: str, same: bool, note: str = "") -> None:
        """Whether two things are equal to the last bit, as they must be."""
        self.equal(check, "same" if same else "other", "same", note=note)

    def at_most(self, check: str, value: float, limit: float, unit: str = "", note: str = "") -> None:
        """A number that must not be larger, nor nan."""
        self.add(check, value, unit, f"<= {limit:.3g}", value <= limit, note)

    def add(
        self,
        check: str,
        value: Value,
        unit: str = "",
        expected: Value = None,
        ok: bool | None = None,
        note: str = "",
    ) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row(self._part, check, value, unit, expected, ok, note[:400])) + "\n")


def row(
    part: str,
    check: str,
    value: Value = None,
    unit: str = "",
    expected: Value = None,
    ok: bool | None = None,
    note: str = "",
) -> Row:
    """A row. JSON has no inf and nan: they become text."""
    value, expected = (
        str(number) if isinstance(number, float) and not math.isfinite(number) else number
        for number in (value, expected)
    )
    ok = None if ok is None else bool(ok)
    return {"part": part, "check": check, "value": value, "unit": unit, "expected": expected, "ok": ok, "note": note}


def in_one_line(error: BaseException) -> str:
    """An exception for a note."""
    return brief(f"{type(error).__name__}: {error}")


def brief(text: str) -> str:
    """Text for a note: one line, not long, and no folders of this machine."""
    return re.sub(r"(?<![\w/:.])(/[\w.+@-]+)+/", "", " ".join(text.split()))[:300]
