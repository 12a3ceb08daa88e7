"""Rows of the parts of gpu_check.py, and the main function of a part.

    def check(settings: Settings, rows: Rows) -> None:
        with rows.of("files"):  # an exception in it is a row, and what comes after it runs all the same
            rows.equal("files", len(files), 4)

    if __name__ == "__main__":
        run_part("dumps", check)

A part is started as ``python -m gpu_parts.parity --rows FILE --device cuda``. Each row is written as soon as it is
found, so a part that fails later keeps its earlier rows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import torch

from te_precision_callbacks.sinks.step_records import StepRecords

Backend = Literal["compiled", "reference"]
"""Which Transformer Engine a part runs on."""

Value = float | int | str | None


class CannotRunHereError(Exception):
    """This machine lacks a requirement of a check; the message names it."""


class Row(TypedDict):
    """Result of a check.

    ``ok`` is None for a measurement, which cannot be wrong, and for a check that could not be made.
    """

    part: str
    check: str
    value: Value
    unit: str
    expected: Value
    ok: bool | None
    note: str


@dataclass(frozen=True)
class Settings:
    """Options of a part.

    Attributes:
        device: where tensors are.
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
    def small(self) -> bool:
        """Whether to use the sizes of a test."""
        return not self.on_gpu

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

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def values_of(records: StepRecords | None) -> dict[str, float]:
    """Return the values of a step of one layer, by ``tensor statistic``."""
    return {f"{row.tensor} {row.statistic}": row.value for row in records or ()}


class Rows:
    """Writes the rows of a part.

    Args:
        part: the name of the part.
        path: the file; each row is appended as a line of JSON.
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
            self.add(check, "failed", expected="ran", ok=False, note=f"{in_one_line(error)} {_where(error)}".strip())
            error.__traceback__ = None  # which holds the tensors of the check
        finally:
            gc.collect()

    def measured(self, check: str, value: Value, unit: str = "", note: str = "") -> None:
        """A number that is neither right nor wrong."""
        self.add(check, value, unit, note=note)

    def left_out(self, check: str, note: str) -> None:
        """A check that could not be made, and why."""
        self.add(check, None, note=note)

    def equal(self, check: str, value: Value, expected: Value, unit: str = "", note: str = "") -> None:
        """A number that must be this one."""
        self.add(check, value, unit, expected, value == expected, note)

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
        """Any row."""
        entry = row(self._part, check, value, unit, expected, ok, note)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


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
    return Row(
        part=part,
        check=check,
        value=_plain(value),
        unit=unit,
        expected=_plain(expected),
        ok=None if ok is None else bool(ok),
        note=note,
    )


def read_rows(path: Path) -> list[Row]:
    """The rows that a part has written; a line that it was killed in is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def in_one_line(error: BaseException) -> str:
    """An exception for a note."""
    return brief(f"{type(error).__name__}: {error}")


def _where(error: BaseException) -> str:
    """File and line of the innermost frames, without folders."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return f"({', '.join(f'{Path(frame.filename).name}:{frame.lineno}' for frame in frames)})" if frames else ""


def brief(text: str) -> str:
    """Text for a note: one line, not long, and no folders of this machine."""
    return re.sub(r"(?<![\w/:.])(/[\w.+@-]+)+/", "", " ".join(text.split()))[:300]


def run_part(name: str, check: Callable[[Settings, Rows], None]) -> None:
    """The main function of a part."""
    parser = argparse.ArgumentParser(prog=f"python -m gpu_parts.{name}")
    parser.add_argument("--rows", type=Path, required=True, help="the file that rows are appended to")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=get_args(Backend), default="reference")
    parser.add_argument("--capability")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("te_precision_callbacks").setLevel(logging.ERROR)
    torch.manual_seed(0)
    settings = Settings(torch.device(options.device), options.backend, options.capability)
    rows = Rows(name, options.rows)
    try:
        check(settings, rows)
    except CannotRunHereError as why:
        rows.left_out("all", brief(str(why)))


def _plain(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
