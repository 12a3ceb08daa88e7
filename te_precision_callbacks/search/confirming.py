"""Confirms a choice: short trainings from one state with paired seeds, of the choice, all-low and all-high."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from te_precision_callbacks.search.measuring import Closure, Regions, mean_over_ranks, run_closure
from te_precision_callbacks.search.state import TrainingState
from te_precision_callbacks.search.units import Choice
from te_precision_callbacks.views.compare.paired import PairedDifference, paired_difference


@dataclass(frozen=True)
class Confirmation:
    """Paired differences of final losses, each the mean of the last quarter of the steps.

    Attributes:
        choice, low: against all-high.
        gain: all-low against the choice.
    """

    steps: int
    choice: PairedDifference
    low: PairedDifference
    gain: PairedDifference


class Trainings:
    """Short trainings, each from the same state.

    Args:
        batches: of each seed, as many as steps.
    """

    def __init__(
        self,
        state: TrainingState,
        regions: Regions,
        closure: Closure,
        optimizer: torch.optim.Optimizer,
        batches: Sequence[Sequence[Any]],
    ) -> None:
        self._state = state
        self._regions = regions
        self._closure = closure
        self._optimizer = optimizer
        self._batches = batches

    def final_loss(self, choice: Choice | None, seed: int) -> float:
        """Train with a seed, which sets the batches and the random numbers."""
        self._state.begin()
        torch.manual_seed(seed)
        np.random.seed(seed)
        losses = []
        with self._regions.switched(choice):
            for batch in self._batches[seed]:
                self._optimizer.zero_grad(set_to_none=True)
                loss = run_closure(self._closure, batch, self._state.parameters)
                loss.backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()
                losses.append(float(loss.detach()))
        last = losses[-max(1, len(losses) // 4) :]
        (mean,) = mean_over_ranks(torch.tensor([sum(last) / len(last)], dtype=torch.float64))
        return float(mean)


def confirm(final_loss: Callable[[str, int], float], seeds: int, steps: int, tolerance: float) -> Confirmation:
    """Compare the final losses of the arms ``choice``, ``low`` and ``high``."""
    losses = {arm: [final_loss(arm, seed) for seed in range(seeds)] for arm in ("choice", "low", "high")}
    return Confirmation(
        steps,
        paired_difference(losses["high"], losses["choice"], tolerance),
        paired_difference(losses["high"], losses["low"], tolerance),
        paired_difference(losses["choice"], losses["low"], tolerance),
    )
