"""The search: sweep, solve, confirm, write."""

from __future__ import annotations

import contextlib
import itertools
import logging
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track

from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.base.optimizers import held_ids
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.vocabulary import recipe_of
from te_precision_callbacks.check.factory import format_failure
from te_precision_callbacks.search.measuring import Closure, EffectMeasurement, TrainingState, mean_over_ranks
from te_precision_callbacks.search.results import Confirmation, GradientEffect, SearchOptions, SearchResult
from te_precision_callbacks.search.solving import Costs, choose, frontier, sweep
from te_precision_callbacks.search.units import Choice, LayerGroup, SearchError, Units
from te_precision_callbacks.search.writing import RECIPE, write_files, write_result
from te_precision_callbacks.views.compare.paired import paired_difference

_logger = logging.getLogger(__name__)

_MOST_NOISE = 0.1
_MOST_CHANGE = 1e-3
"""Noise of repeated runs above which nothing can be measured: of the gradient's error, as a share of all-low's; and of
the loss."""

ItemT = TypeVar("ItemT")


def search(
    model: torch.nn.Module,
    closure: Closure,
    batches: Iterable[Any],
    *,
    optimizer: Any = None,
    **options: Any,
) -> SearchResult:
    """Choose the layers and GEMMs to keep in high precision, and put all state of the training back.

    Args:
        model: with Transformer Engine's layers. The closure runs them in ``te.autocast``.
        closure: returns the loss of a batch. It runs no backward and no optimizer.
        batches: the first ``sweep_batches`` are for the sweep; to confirm, each seed takes ``steps`` more.
        optimizer: torch's, or a trainer's wrapper with it. Steps the short trainings that confirm the choice; without,
            nothing is confirmed.
        **options: see :class:`SearchOptions`.

    Raises:
        SearchError: the search cannot run; BudgetError, if no choice meets the budget.
        OptionError: an option has a wrong value.
    """
    return _search(model, closure, batches, optimizer, SearchOptions(**options))


class SearchAtStep:
    """Searches once, before a step of a training, on the batches before; the training then goes on bit for bit.

        search = SearchAtStep(1000, low_share=0.85)
        for step, batch in enumerate(loader):
            search(step, batch, model, closure, optimizer)

    A search that fails is logged, and the training goes on.

    Attributes:
        result: of the search; None before it, and if it failed.

    Args:
        step: the number of steps before the search.
        **options: see :class:`SearchOptions`; the folder is ``search`` by default.

    Raises:
        OptionError: an option has a wrong value, or there are fewer steps than the search needs batches.
    """

    def __init__(self, step: int, **options: Any) -> None:
        self.result: SearchResult | None = None
        self._step = step
        self._options = SearchOptions(**{"folder": "search", **options})
        needed = self._options.sweep_batches + self._options.seeds * self._options.steps
        if step < needed:
            raise OptionError(f"step={step}: the search needs the batches of {needed} steps before it.")
        self._batches: deque[Any] = deque(maxlen=needed)
        self._has_run = False

    def __call__(self, step: int, batch: Any, model: torch.nn.Module, closure: Closure, optimizer: Any = None) -> None:
        """Keep the batch of a step, or search; to be called before its forward, and not within ``torch.autocast``."""
        if self._has_run:
            return
        if step != self._step:
            self._batches.append(batch)
            return
        self._has_run = True
        try:
            self.result = _search(model, closure, self._batches, optimizer, self._options)
        except Exception as error:  # a search never ends a training
            text = "The precision search failed; the training goes on: %s"
            _logger.warning(text, error, exc_info=not isinstance(error, PrecisionDebugError))
        else:
            high = ", ".join(self.result.high) or "nothing"
            _logger.info("In high precision: %s. %s", high, " ".join(self.result.describe()))
        self._batches.clear()


def _search(
    model: torch.nn.Module, closure: Closure, batches: Iterable[Any], optimizer: Any, options: SearchOptions
) -> SearchResult:
    from te_precision_callbacks.te.debug import is_debugging

    optimizer = getattr(optimizer, "optimizer", optimizer)
    if optimizer is not None and set(held_ids(optimizer)).isdisjoint(map(id, model.parameters())):
        raise SearchError("optimizer= has no parameter of the model, so short trainings would change nothing.")
    seeds = 0 if optimizer is None else options.seeds
    needed = options.sweep_batches + seeds * options.steps
    try:
        drawn = list(itertools.islice(batches, needed))
    except Exception as error:
        raise SearchError(format_failure("batches= cannot be read", error)) from error
    if len(drawn) < needed:
        raise SearchError(
            f"batches= ended after {len(drawn)}, but the search needs {needed}: {options.sweep_batches} for the sweep"
            f" and {options.steps} for each of {seeds} seeds. Give more, or lower steps= or seeds=."
        )
    if is_debugging():
        raise SearchError("A debug session is running, and would observe the search. Stop it first.")
    if options.folder is not None:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.ExitStack() as stack:
            units = Units(model)
            stack.callback(units.restore)
            state = TrainingState(model, optimizer)
            stack.callback(state.restore)
            measurement = EffectMeasurement(state, units, closure, drawn[: options.sweep_batches])
            fresh = [drawn[i : i + options.steps] for i in range(options.sweep_batches, needed, options.steps)]
            return _Search(model, units, measurement, fresh, options).run()
    except torch.OutOfMemoryError as error:
        raise SearchError(
            "The device is out of memory in the search; the state of the training was put back. A search needs memory"
            " for the gradients once more: use smaller batches, or a model with fewer layers."
        ) from error


@dataclass
class _Search:
    """See :func:`search`. ``fresh``: the batches of each seed."""

    model: torch.nn.Module
    units: Units
    measurement: EffectMeasurement
    fresh: Sequence[Sequence[Any]]
    options: SearchOptions
    effects: dict[Choice, GradientEffect] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def run(self) -> SearchResult:
        products = self.units.products(self.measurement.measure_high)
        low = self.measurement.low
        if low is None:
            raise SearchError("The closure does not enter te.autocast with enabled=True, so nothing can be switched.")
        noise = self.measurement.measure(None)
        all_low = self._effect(frozenset())
        self._require_quiet(noise, all_low)
        recipe = recipe_of(low) or ""
        costs = Costs(products, recipe, self.options.gpu)
        atoms = self.units.atoms(self.options.together, whole_modules=low.delayed())
        measured, leaves = sweep(atoms, self._effects, by_gemm=not low.delayed())
        points = frontier(leaves, all_low, costs)
        choice = choose(points, self.options, costs, self._effect)
        effect = self._effect(choice)
        self._require_quiet(self.measurement.measure(None), all_low)  # a slow drift is seen now
        self._write(choice, effect, low)
        result = SearchResult(
            recipe=recipe,
            high={name: gemms for name, gemms in self.units.high(choice).items() if gemms},
            low_share=costs.low_share(choice),
            extra_ms=costs.extra_ms(choice),
            effect=effect,
            all_low=all_low,
            measured=tuple(sorted(measured, key=lambda group: -group.effect.error)),
            frontier=tuple(points.values()),
            confirmation=self._confirm(choice),
            passes=self.measurement.passes,
            notes=tuple(self.notes),
        )
        if self.options.folder is not None and own_rank() == 0:
            write_result(Path(self.options.folder), result)
        return result

    def _require_quiet(self, noise: GradientEffect, low: GradientEffect) -> None:
        loss = self.measurement.high.loss
        if noise.error > _MOST_NOISE * low.error or abs(noise.loss - loss) > _MOST_CHANGE * abs(loss):
            raise SearchError(
                "The closure is not deterministic: two runs in high precision from one state differ by"
                f" {noise.loss - loss:.3g} in the loss and by {noise.error:.3g} in the squared gradient, of"
                f" {low.error:.3g} by low precision. Give it no random generator, counter or data of its own: the"
                " search restores those of torch, NumPy and Python only."
            )

    def _effect(self, choice: Choice) -> GradientEffect:
        """Measure a choice of GEMMs in high precision, once."""
        if choice not in self.effects:
            self.effects[choice] = self.measurement.measure(self.measurement.recipe(choice))
        return self.effects[choice]

    def _effects(self, level: str, groups: Sequence[LayerGroup]) -> list[GradientEffect] | None:
        """Measure each group in low precision alone; None if the time is up, which ends the search at the blocks."""
        effects = []
        for group in self._track(groups, f"{level}s"):
            if self._is_late():
                if level == "block":
                    raise SearchError("max_time= was over before the blocks were measured, so nothing can be chosen.")
                return None
            effects.append(self._effect(self.units.switches - group.switches))
        return effects

    def _confirm(self, choice: Choice) -> Confirmation | None:
        if not self.fresh:
            self.notes.append("Not confirmed: short trainings need optimizer= and seeds=, 3 at least to decide.")
            return None
        arms = {"high": None, "choice": self.measurement.recipe(choice), "low": self.measurement.recipe(frozenset())}
        losses: dict[str, list[float]] = {arm: [] for arm in arms}
        for seed, arm in self._track(list(itertools.product(range(len(self.fresh)), arms)), "confirmation"):
            if self._is_late():
                self.notes.append("Not confirmed: max_time= was over.")
                return None
            losses[arm].append(self.measurement.final_loss(self.fresh[seed], arms[arm], seed))
        tolerance = self.options.tolerance
        choice_difference = paired_difference(losses["high"], losses["choice"], tolerance)
        return Confirmation(
            self.options.steps, choice_difference, paired_difference(losses["high"], losses["low"], tolerance)
        )

    def _is_late(self) -> bool:
        """Return whether the time is up on any rank."""
        return bool(mean_over_ranks(float(time.monotonic() > self.start + self.options.max_time)) > 0)

    def _track(self, items: Sequence[ItemT], what: str) -> Iterable[ItemT]:
        """Iterate with a bar on a terminal's stderr."""
        console = Console(stderr=True)
        is_shown = self.options.progress and console.is_terminal
        return track(items, f"search: {what}", console=console, disable=not is_shown, transient=True)

    def _write(self, choice: Choice, effect: GradientEffect, low: Any) -> None:
        if self.options.folder is None:
            return
        folder = Path(self.options.folder if own_rank() == 0 else tempfile.mkdtemp())
        recipe, notes = write_files(folder, choice, self.units, self.model, low)
        self.notes += notes
        again = self.measurement.measure(recipe)
        if again != effect:
            self.notes.append(
                f"{RECIPE} gives a gradient error of {again.error:.3g} and a loss of {again.loss:.5g}, the search"
                f" measured {effect.error:.3g} and {effect.loss:.5g}: the closure is not deterministic."
            )
