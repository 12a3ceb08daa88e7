"""The search: sweep, solve, confirm, write."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.vocabulary import name_of_recipe
from te_precision_callbacks.search.confirming import Confirmation, Trainings, confirm
from te_precision_callbacks.search.costs import Costs
from te_precision_callbacks.search.errors import SearchError
from te_precision_callbacks.search.measuring import Closure, Effect, Measurement, Regions, mean_over_ranks
from te_precision_callbacks.search.progress import Progress
from te_precision_callbacks.search.results import Results
from te_precision_callbacks.search.solving import Budget, Point, choose, frontier
from te_precision_callbacks.search.state import TrainingState
from te_precision_callbacks.search.sweep import Measured, Sweep
from te_precision_callbacks.search.units import Choice, Units
from te_precision_callbacks.search.writing import CONFIG, MEGATRON, RECIPE, write_config, write_megatron, write_recipe
from te_precision_callbacks.speed.devices import device_named
from te_precision_callbacks.views.compare.paired import TOLERANCE

_MOST_NOISE = 0.1
"""Noise of repeated runs, as a share of the effect of all-low, above which nothing can be measured."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        recipe: the name of the recipe in low precision.
        high: layer -> its GEMMs to keep in high precision; without layers wholly in low precision.
        low_share: the share of the searched layers' multiply-adds in low precision.
        extra_ms: planned milliseconds of a step over all-low; None without a device.
        effect, all_low: against high precision: the choice, and all-low.
        noise: the error between two identical runs in high precision.
        measured: the groups of the sweep, the largest effect first.
        frontier: cost against expected error.
        confirmation: None if it was not asked for, or not reached in time.
        passes: forwards with backward of the sweep and the solution.
        notes: limits of the result.
    """

    recipe: str
    high: dict[str, tuple[str, ...]]
    low_share: float
    extra_ms: float | None
    effect: Effect
    all_low: Effect
    noise: float
    measured: tuple[Measured, ...]
    frontier: tuple[Point, ...]
    confirmation: Confirmation | None
    passes: int
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        measured = [
            {"name": entry.group.name, "level": entry.level, **entry.effect._asdict()} for entry in self.measured
        ]
        points = [
            {field.name: getattr(point, field.name) for field in fields(Point) if field.name != "choice"}
            for point in self.frontier
        ]
        effects = {"effect": self.effect._asdict(), "all_low": self.all_low._asdict()}
        confirmation = None if self.confirmation is None else asdict(self.confirmation)
        return {**vars(self), **effects, "measured": measured, "frontier": points, "confirmation": confirmation}


@dataclass(frozen=True)
class Options:
    """Options of :func:`search`, which documents them."""

    together: Sequence[str]
    seeds: int
    steps: int
    sweep_batches: int
    tolerance: float

    def __post_init__(self) -> None:
        for name, least in (("seeds", 0), ("steps", 1), ("sweep_batches", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name}={getattr(self, name)} must be {least} or more.")


def search(
    model: torch.nn.Module,
    closure: Closure,
    batches: Iterable[Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    low_share: float | None = None,
    extra_ms: float | None = None,
    cosine: float | None = None,
    device: str | None = None,
    together: Sequence[str] = (),
    sweep_batches: int = 1,
    seeds: int = 3,
    steps: int = 20,
    tolerance: float = TOLERANCE,
    max_time: float | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> SearchResult:
    """Choose the layers and GEMMs to keep in high precision, and put all state of the training back.

    Args:
        model: with Transformer Engine's layers, which the closure runs in ``te.autocast``.
        closure: returns the loss of a batch. It runs no backward and no optimizer.
        batches: the first ``sweep_batches`` are for the sweep; to confirm, each seed takes ``steps`` more.
        optimizer: steps the short trainings that confirm the choice; without, nothing is confirmed.
        low_share, extra_ms, cosine: the budget; see :class:`Budget`.
        device: the name of a GPU for planned milliseconds, such as ``h200``.
        together: regular expressions of whole layer names. Layers that match one, with equal captures, are chosen
            together: ``layers\\\\.(\\\\d+)\\\\.(?:q|k|v)``.
        seeds: pairs of short trainings; 3 at least to decide, 0 for none.
        tolerance: see ``te-precision compare --tolerance``.
        max_time: seconds after which no measurement starts; the choice then follows from what was measured.
        folder: where the config, the recipe, Megatron's file and ``search.json`` are written. A later search with the
            same state continues from this file.

    Raises:
        SearchError: the search cannot run; BudgetError, if no choice meets the budget.
        OptionError: an option has a wrong value.
    """
    options = Options(together, seeds if optimizer is not None else 0, steps, sweep_batches, tolerance)
    budget = Budget(low_share, extra_ms, cosine)
    target = None if device is None else device_named(device)
    if extra_ms is not None and target is None:
        raise OptionError("extra_ms= needs a device, such as device='h200'.")
    drawn = _draw(batches, options)
    path = None if folder is None else Path(folder)
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    _require_no_session()
    units = Units(model)
    state = TrainingState(model, optimizer if options.seeds else None)
    running = _Search(model, units, state, closure, drawn, options, path, _Clock(max_time), Progress(is_shown=progress))
    try:
        result = running.run(budget, optimizer, target)
    except torch.OutOfMemoryError as error:
        raise SearchError(
            "The device is out of memory in the search; the state of the training was put back. A search needs memory"
            " for the gradients once more: use smaller batches, or a model with fewer layers."
        ) from error
    finally:
        state.restore()
        units.restore()
    return result


def _draw(batches: Iterable[Any], options: Options) -> list[Any]:
    needed = options.sweep_batches + options.seeds * options.steps
    drawn = list(itertools.islice(batches, needed))
    if len(drawn) < needed:
        raise SearchError(
            f"batches= ended after {len(drawn)}, but the search needs {needed}: {options.sweep_batches} for the sweep"
            f" and {options.steps} for each of {options.seeds} seeds. Give more, or lower steps= or seeds=."
        )
    return drawn


def _require_no_session() -> None:
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    if TEDebugState.debug_enabled:
        raise SearchError("A debug session is running, and would observe the search. Stop it first.")


class _Clock:
    """Whether the time is up, on any rank."""

    def __init__(self, max_time: float | None) -> None:
        self._end = None if max_time is None else time.monotonic() + max_time

    def is_late(self) -> bool:
        late = self._end is not None and time.monotonic() > self._end
        (late_ranks,) = mean_over_ranks(torch.tensor([float(late)], dtype=torch.float64))
        return bool(late_ranks > 0)


class _Search:
    """See :func:`search` for the arguments."""

    def __init__(
        self,
        model: torch.nn.Module,
        units: Units,
        state: TrainingState,
        closure: Closure,
        batches: Sequence[Any],
        options: Options,
        folder: Path | None,
        clock: _Clock,
        progress: Progress,
    ) -> None:
        self._model = model
        self._units = units
        self._state = state
        self._closure = closure
        self._batches = batches
        self._options = options
        self._folder = folder
        self._clock = clock
        self._progress = progress
        self._regions = Regions(units)
        self._measurement = Measurement(state, self._regions, closure, batches[: options.sweep_batches])
        self._results = Results(None if folder is None else folder / "search.json")
        self._notes: list[str] = []

    def run(self, budget: Budget, optimizer: torch.optim.Optimizer | None, device: Any) -> SearchResult:
        sizes = self._units.watch_sizes()
        try:
            high = self._measurement.measure_high()
        finally:
            products = sizes.close()
        low = self._regions.low
        if low is None:
            raise SearchError("The closure does not enter te.autocast with enabled=True, so nothing can be switched.")
        recipe = name_of_recipe(low) or ""
        noise = self._measurement.measure(None)
        state = {"recipe": str(low), "layers": list(self._units.all), "steps": self._options.steps}
        state |= {"loss": f"{high.loss:.5g}", "gradient": f"{self._measurement.high_norm:.5g}"}
        self._results.resume(state)
        sweep = Sweep(self._units, self._measurement, self._results, self._progress, self._clock.is_late)
        all_low = sweep.effect(frozenset())
        self._require_quiet(noise, high, all_low)
        whole = low.delayed()
        measured = sweep.run(self._units.atoms(self._options.together, whole_modules=whole), by_gemm=not whole)
        costs = Costs(products, recipe, device)
        points = frontier(measured, all_low, costs)
        choice = choose(points, budget, costs, sweep.effect)
        effect = sweep.effect(choice)
        self._write(choice, effect, low)
        measured.sort(key=lambda entry: -entry.effect.error)
        result = SearchResult(
            recipe,
            {name: gemms for name, gemms in self._units.high(choice).items() if gemms},
            costs.low_share(choice),
            costs.extra_ms(choice),
            effect,
            all_low,
            noise.error,
            tuple(measured),
            tuple(points),
            self._confirm(choice, optimizer),
            self._measurement.passes,
            tuple(self._notes),
        )
        self._results.summary = {"result": result.as_json()}
        self._results.save()
        return result

    def _require_quiet(self, noise: Effect, high: Effect, low: Effect) -> None:
        change = noise.loss - high.loss
        if noise.error > _MOST_NOISE * low.error:
            raise SearchError(
                f"The closure is not deterministic: two runs in high precision from one state differ by {change:.3g} in"
                f" the loss and by {noise.error:.3g} in the squared gradient, of {low.error:.3g} by low precision. Give"
                " it no random generator, counter or data of its own: the search restores those of torch, NumPy and"
                " Python only."
            )

    def _confirm(self, choice: Choice, optimizer: torch.optim.Optimizer | None) -> Confirmation | None:
        options = self._options
        if optimizer is None or not options.seeds:
            self._notes.append("Not confirmed: short trainings need optimizer= and seeds=3 or more.")
            return None
        fresh = self._batches[options.sweep_batches :]
        of_seed = [fresh[seed * options.steps : (seed + 1) * options.steps] for seed in range(options.seeds)]
        trainings = Trainings(self._state, self._regions, self._closure, optimizer, of_seed)
        arms: dict[str, Choice | None] = {"choice": choice, "low": frozenset(), "high": None}
        key = hashlib.sha256(repr(sorted(choice)).encode()).hexdigest()[:16]
        runs = [(arm, seed) for seed in range(options.seeds) for arm in arms]
        for arm, seed in self._progress.over(runs, "confirmation"):
            name = f"{key if arm == 'choice' else arm} {seed}"
            if name in self._results.losses:
                continue
            if self._clock.is_late():
                self._notes.append("Not confirmed: max_time= was over. Search again with this folder to continue.")
                return None
            self._results.losses[name] = trainings.final_loss(arms[arm], seed)
            self._results.save()

        def final_loss(arm: str, seed: int) -> float:
            return self._results.losses[f"{key if arm == 'choice' else arm} {seed}"]

        return confirm(final_loss, options.seeds, options.steps, options.tolerance)

    def _write(self, choice: Choice, effect: Effect, low: Any) -> None:
        if self._folder is None:
            return
        self._state.begin()
        write_config(self._folder / CONFIG, choice, self._units, self._model, low)
        written = write_recipe(self._folder / RECIPE, choice, self._units, low)
        written["assign_names"](self._model)
        make: Callable[..., Any] = self._regions.make
        self._regions.make = lambda low, high: written["recipe"](low)
        again = self._measurement.measure(choice)
        self._regions.make = make
        if again != effect:
            raise SearchError(f"{self._folder / RECIPE} gives {again}, but the search measured {effect}.")
        rounded = write_megatron(self._folder / MEGATRON, choice, self._units, self._model, low)
        if rounded:
            self._notes.append(
                f"{MEGATRON} has no GEMMs: it keeps these modules wholly in high precision: {', '.join(rounded)}."
            )
