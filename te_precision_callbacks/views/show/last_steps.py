"""The last steps before a problem: the largest magnitude of each tensor, in the order of execution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from te_precision_callbacks.base.terminal import paragraph, visible
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.summary import last_steps
from te_precision_callbacks.views.show.screen import MOST_CURVE, bars
from te_precision_callbacks.views.show.view import NothingToShowError


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
        self.data = data

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        tensors = self.data["tensors"]
        iterations: Sequence[int] = self.data["iterations"]
        first = self.data["first"]
        centre = len(tensors) - 1 if first is None else first[0]
        begin = max(0, min(centre - self._most // 2, len(tensors) - self._most))
        end = min(begin + self._most, len(tensors))
        names = [visible(" ".join(tensor)) for tensor in tensors[begin:end]]
        room = options.max_width - max(map(len, names)) - 24
        since = max(0, len(iterations) - max(8, min(room, MOST_CURVE)))
        yield paragraph(self.data["text"], "bold")
        yield paragraph(
            "Largest magnitudes (inputs of norms: RMS of a token; updates: share of the norm of the weight) in the"
            f" steps {iterations[since]} to {iterations[-1]}, from left to right, and in the last one; the tensors"
            " in the order of execution. Each row has a scale of its own, of a factor of 2 or more. !: inf or nan,"
            " blank: not read."
        )
        table = Table.grid(padding=(0, 1, 0, 0))
        for _ in range(3):
            table.add_column(no_wrap=True)
        if begin:
            table.add_row(f"{begin} before", "", "")
        for number, name in enumerate(names, begin):
            magnitudes = self.data["magnitudes"][number]
            curve = Text(_bars(magnitudes[since:]))
            if first is not None and number == first[0]:
                column = iterations.index(first[1]) - since
                curve.stylize("bold reverse red", column, column + 1)
            table.add_row(name, curve, _number(magnitudes[-1]))
        if end < len(tensors):
            table.add_row(f"{len(tensors) - end} after", "", "")
        losses = self.data["loss"][since:]
        if any(loss is not None for loss in losses):
            table.add_row("loss", _bars(losses), _number(losses[-1]))
        yield table
        if first is not None:
            layer, tensor = tensors[first[0]]
            yield paragraph(f"First inf or nan: the {tensor} of {layer}, in step {first[1]}.", "bold red")


def _number(number: float | str | None) -> str:
    if isinstance(number, float):
        return f"{number:.4g}"
    return number or ""


def _bars(numbers: Sequence[float | str | None]) -> str:
    known = [number is not None for number in numbers]
    return bars(np.array([float(number or 0) for number in numbers]), np.array(known), least_span=0.5)
