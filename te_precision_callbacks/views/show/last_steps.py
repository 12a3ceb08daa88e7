"""The last steps before a problem: the largest magnitude of each tensor, in the order of execution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from te_precision_callbacks.base.terminal import paragraph, visible
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.summary import last_steps
from te_precision_callbacks.views.show.view import NothingToShowError

_LEVELS = "▁▂▃▄▅▆▇█"
_BAD = {"inf": "∞", "-inf": "∞", "nan": "N"}


class LastStepsView:
    """The last steps that a run has recorded, as rich draws them.

    Args:
        most: the number of tensors; those around the first one with inf or nan, or else the last ones.

    Raises:
        NothingToShowError: the run has recorded none.
    """

    def __init__(self, run: RecordedRun, most: int) -> None:
        data = last_steps(run)
        if data is None:
            why = "it has not ended, it ran with every_step=False, or no GEMM of its layers is watched"
            if run.segments and run.segments[-1].status == "stopped without an end":
                why = "its process was killed (SIGKILL), or crashed, without recording its end"
            why = (run.segments and run.segments[-1].lost) or why
            raise NothingToShowError(f"{run.run_id} has recorded no last steps: {why}.")
        self._most = most
        self.data: Mapping[str, Any] = data

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        tensors = self.data["tensors"]
        iterations: Sequence[int] = self.data["iterations"]
        first = self.data["first"]
        centre = len(tensors) - 1 if first is None else first[0]
        begin = max(0, min(centre - self._most // 2, len(tensors) - self._most))
        shown = range(begin, min(begin + self._most, len(tensors)))
        names = {number: visible(" ".join(tensors[number])) for number in shown}
        width = max(8, options.max_width - max(map(len, names.values())) - 24)
        since = max(0, len(iterations) - width)
        yield paragraph(visible(self.data["text"]), "bold")
        yield paragraph(
            "Largest magnitudes (inputs of norms: RMS of a token; updates: share of the norm of the weight) in the"
            f" steps {iterations[since]} to {iterations[-1]}, from left to right, and in the last one; the tensors"
            " in the order of execution. Each row has a scale of its own, by powers of two."
            " N: nan, ∞: inf, blank: not read."
        )
        table = Table.grid(padding=(0, 1, 0, 0))
        for _ in range(3):
            table.add_column(no_wrap=True)
        if begin:
            table.add_row(f"{begin} before", "", "")
        for number, name in names.items():
            magnitudes = self.data["magnitudes"][number]
            curve = Text("".join(_levels(magnitudes[since:])))
            if first is not None and number == first[0]:
                column = iterations.index(first[1]) - since
                curve.stylize("bold reverse red", column, column + 1)
            table.add_row(name, curve, _number(magnitudes[-1]))
        if shown.stop < len(tensors):
            table.add_row(f"{len(tensors) - shown.stop} after", "", "")
        losses = self.data["loss"][since:]
        if any(loss is not None for loss in losses):
            table.add_row("loss", "".join(_levels(losses)), _number(losses[-1]))
        yield table
        if first is not None:
            layer, tensor = tensors[first[0]]
            yield paragraph(visible(f"First inf or nan: the {tensor} of {layer}, in step {first[1]}."), "bold red")


def _number(number: float | str | None) -> str:
    if isinstance(number, float):
        return f"{number:.4g}"
    return number or ""


def _levels(numbers: Sequence[float | str | None]) -> Iterator[str]:
    bits = [math.log2(number) for number in numbers if isinstance(number, float) and number > 0]
    least = min(bits, default=0.0)
    span = max(max(bits, default=0.0) - least, 1.0)
    for number in numbers:
        if number is None:
            yield " "
        elif isinstance(number, str):
            yield _BAD[number]
        elif number <= 0:
            yield "_"
        else:
            yield _LEVELS[min(int((math.log2(number) - least) / span * len(_LEVELS)), len(_LEVELS) - 1)]
