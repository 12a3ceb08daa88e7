"""A search at a step of a trainer, for the callbacks of the integrations."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.search.measuring import Closure
from te_precision_callbacks.search.searching import SearchResult, search
from te_precision_callbacks.search.solving import SearchBudget

_logger = logging.getLogger(__name__)


class SearchAtStep:
    """Searches at the beginning of a step, on the batches of the steps before; the training then goes on bit for bit.

    A search that fails is logged, and the training goes on.

    Attributes:
        result: of the search; None before it, and if it failed.

    Args:
        step: the number of optimizer steps before the search.
        folder: where the files are written.
        **options: of :func:`~te_precision_callbacks.search.search`, such as ``low_share=0.85``.

    Raises:
        OptionError: an option is unknown or invalid, or there are fewer steps than the search needs batches.
    """

    def __init__(self, step: int, folder: str | Path = "search", **options: Any) -> None:
        try:
            given = inspect.signature(search).bind(None, None, (), optimizer=None, folder=folder, **options)
        except TypeError as error:
            raise OptionError(f"PrecisionSearch: {error}.") from None
        given.apply_defaults()
        values = given.arguments
        SearchBudget(values["low_share"], values["extra_ms"], values["cosine"])
        needed = values["sweep_batches"] + values["seeds"] * values["steps"]
        if step < needed:
            raise OptionError(f"step={step}: the search needs the batches of {needed} steps before it.")
        self.result: SearchResult | None = None
        self._step = step
        self._options = {"folder": folder, **options}
        self._batches: deque[Any] = deque(maxlen=needed)
        self._has_run = False

    def keep(self, batch: Any) -> None:
        if not self._has_run:
            self._batches.append(batch)

    def is_due(self, step: int) -> bool:
        return step == self._step and not self._has_run

    def _note_end(self, step: int) -> None:
        if not self._has_run:
            due = f"it is due before step {self._step}, and the training ended after {step} steps"
            _logger.warning("The precision search has not run: %s.", due)

    def run(self, model: Any, closure: Closure, optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
        """Search, once; returns metrics to log."""
        self._has_run = True
        batches = list(self._batches)
        self._batches.clear()
        try:
            self.result = search(model, closure, batches, optimizer=optimizer, **self._options)
        except Exception as error:  # a search never ends a training
            with_trace = not isinstance(error, PrecisionDebugError)
            _logger.warning("The precision search failed; the training goes on: %s", error, exc_info=with_trace)
            return {}
        result = self.result
        for line in (f"In high precision: {', '.join(result.high) or 'nothing'}.", *result.describe()):
            _logger.info("%s", line)
        return {
            "te_search/low_share": result.low_share,
            "te_search/cosine": result.effect.cosine,
            "te_search/cosine_low": result.all_low.cosine,
        }
