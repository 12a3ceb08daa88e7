"""The share of rows that pad the tokens of experts to the sizes that low precision needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_precision_callbacks.instrumentation.scalars import ScalarBuffer
from te_precision_callbacks.layers.forwards import ForwardClassifier, ForwardKind


class PaddedRows:
    """Counts the rows that ``te.Fp8Padding`` adds in a collection step: the scalar ``<module>_padded_rows%``.

    Args:
        is_due: whether this is a collection step.

    Attributes:
        names: id of a module -> its name.
    """

    def __init__(self, classify: ForwardClassifier, scalars: ScalarBuffer, is_due: Callable[[], bool]) -> None:
        self.names: Mapping[int, str] = {}
        self._classify = classify
        self._scalars = scalars
        self._is_due = is_due
        self._rows: dict[str, tuple[int, int]] = {}

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def counted(module: torch.nn.Module, inp: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            padded = forward(module, inp, *arguments, **keywords)
            name = self.names.get(id(module))
            if name is not None and self._is_due() and self._classify(module) is ForwardKind.OBSERVED:
                rows, of_all = self._rows.get(name, (0, 0))
                self._rows[name] = rows + len(padded[0]) - len(inp), of_all + len(padded[0])
            return padded

        return counted

    def end_step(self) -> None:
        for name, (rows, of_all) in self._rows.items():
            self._scalars.add(f"{name}_padded_rows%", 100 * rows / max(of_all, 1))
        self._rows.clear()
