"""The search: sweep, solve, confirm, write."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.vocabulary import name_of_recipe
from te_precision_callbacks.search.errors import SearchError
from te_precision_callbacks.search.measuring import (
    Closure,
    EffectMeasurement,
    GradientEffect,
    Regions,
    mean_over_ranks,
)
from te_precision_callbacks.search.results import Results, is_first_rank
from te_precision_callbacks.search.solving import PRIORS, Costs, MeasuredPrior, Point, SearchBudget, choose, frontier
from te_precision_callbacks.search.state import TrainingState
from te_precision_callbacks.search.sweep import MeasuredGroup, Progress, Sweep
from te_precision_callbacks.search.units import Choice, LayerGroup, Units, merged
from te_precision_callbacks.search.writing import (
    CONFIG,
    MEGATRON,
    PAGE,
    RECIPE,
    write_config,
    write_megatron,
    write_page,
    write_recipe,
)
from te_precision_callbacks.speed.devices import Device, device_named
from te_precision_callbacks.views.compare.paired import TOLERANCE, PairedDifference, paired_difference
from te_precision_callbacks.views.compare.wording import describe_pairs

_MOST_NOISE = 0.1
"""Noise of repeated runs, as a share of the effect of all-low, above which nothing can be measured."""


@dataclass(frozen=True)
class Confirmation:
    """Paired differences of final losses, each the mean of the last quarter of the steps.

    Attributes:
        choice, low: against all-high.
    """

    steps: int
    choice: PairedDifference
    low: PairedDifference


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
        frontier: costs and expected errors.
        confirmation: None without an optimizer or seeds, and if the time was up.
        passes: forwards with backward of the sweep and the solution.
        notes: limits of the result.
        prior: a published rule for the recipe, for comparison; None without one.
    """

    recipe: str
    high: dict[str, tuple[str, ...]]
    low_share: float
    extra_ms: float | None
    effect: GradientEffect
    all_low: GradientEffect
    noise: float
    measured: tuple[MeasuredGroup, ...]
    frontier: tuple[Point, ...]
    confirmation: Confirmation | None
    passes: int
    notes: tuple[str, ...]
    prior: MeasuredPrior | None

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
        prior = None if self.prior is None else {**vars(self.prior), "effect": self.prior.effect._asdict()}
        shown = {"measured": measured, "frontier": points, "confirmation": confirmation, "prior": prior}
        return {**vars(self), **effects, **shown}

    def describe(self) -> Iterator[str]:
        """Yield the confirmation's lines: of the choice and of all-low, against all-high."""
        if self.confirmation is not None:
            yield from describe_pairs(self.confirmation.choice, "loss", "all-high", "choice")
            yield from describe_pairs(self.confirmation.low, "loss", "all-high", "all-low")


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
        model: with Transformer Engine's layers. The closure runs them in ``te.autocast``.
        closure: returns the loss of a batch. It runs no backward and no optimizer.
        batches: the first ``sweep_batches`` are for the sweep; to confirm, each seed takes ``steps`` more.
        optimizer: steps the short trainings that confirm the choice, and a step in each pass, for the cosine of the
            update; without, nothing is confirmed.
        low_share, extra_ms, cosine: the budget; see :class:`SearchBudget`. A step has the batches of the sweep.
        device: a GPU's name, for planned milliseconds, such as ``h200``.
        together: regular expressions of whole layer names. Layers that match one, with equal captures, are chosen
            together: ``layers\\\\.(\\\\d+)\\\\.(?:q|k|v)``.
        seeds: pairs of short trainings; 3 at least to decide, 0 for none.
        tolerance: see ``te-precision compare --tolerance``.
        max_time: seconds after which no measurement starts; the choice then follows from the measurements so far.
        folder: where the config, the recipe, Megatron's file and ``search.json`` are written. A later search with the
            same state continues from this file.

    Raises:
        SearchError: the search cannot run; BudgetError, if no choice meets the budget.
        OptionError: an option has a wrong value.
    """
    for name, value, least in (("seeds", seeds, 0), ("steps", steps, 1), ("sweep_batches", sweep_batches, 1)):
        if value < least:
            raise OptionError(f"{name}={value} must be {least} or more.")
    if optimizer is None:
        seeds = 0
    elif not {id(p) for group in optimizer.param_groups for p in group["params"]} & set(map(id, model.parameters())):
        raise SearchError("optimizer= has no parameter of the model, so short trainings would change nothing.")
    for pattern in together:
        try:
            re.compile(pattern)
        except re.error as error:
            raise OptionError(f"together={pattern!r} is not a regular expression: {error}.") from None
    budget = SearchBudget(low_share, extra_ms, cosine)
    target = None if device is None else device_named(device)
    if extra_ms is not None and target is None:
        raise OptionError("extra_ms= needs a device, such as device='h200'.")
    needed = sweep_batches + seeds * steps
    drawn = list(itertools.islice(batches, needed))
    if len(drawn) < needed:
        raise SearchError(
            f"batches= ended after {len(drawn)}, but the search needs {needed}: {sweep_batches} for the sweep and"
            f" {steps} for each of {seeds} seeds. Give more, or lower steps= or seeds=."
        )
    path = None if folder is None else Path(folder)
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    _require_no_session()
    with _memory_errors(), contextlib.ExitStack() as stack:
        units = Units(model)
        stack.callback(units.restore)
        state = TrainingState(model, optimizer)
        stack.callback(state.restore)
        fresh = [drawn[start : start + steps] for start in range(sweep_batches, needed, steps)]
        measurement = EffectMeasurement(state, Regions(units), closure, drawn[:sweep_batches])
        running = _Search(model, units, measurement, fresh, path, _is_late(max_time), _progress(is_shown=progress))
        return running.run(budget, target, together, tolerance)


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SearchError(
            "The device is out of memory in the search; the state of the training was put back. A search needs memory"
            " for the gradients once more: use smaller batches, or a model with fewer layers."
        ) from error


def _require_no_session() -> None:
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    if TEDebugState.debug_enabled:
        raise SearchError("A debug session is running, and would observe the search. Stop it first.")


def _progress(*, is_shown: bool) -> Progress:
    """Return a function that shows a bar on a terminal's stderr."""
    console = Console(stderr=True)
    hidden = not is_shown or not console.is_terminal
    return lambda items, what: track(items, f"search: {what}", console=console, disable=hidden, transient=True)


def _is_late(max_time: float | None) -> Callable[[], bool]:
    """Return a function that returns whether the time is up on any rank."""
    end = math.inf if max_time is None else time.monotonic() + max_time

    def is_late() -> bool:
        (share,) = mean_over_ranks(torch.tensor([float(time.monotonic() > end)], dtype=torch.float64))
        return bool(share > 0)

    return is_late


class _Search:
    """See :func:`search` for the arguments. ``fresh``: the batches of each seed."""

    def __init__(
        self,
        model: torch.nn.Module,
        units: Units,
        measurement: EffectMeasurement,
        fresh: Sequence[Sequence[Any]],
        folder: Path | None,
        is_late: Callable[[], bool],
        progress: Progress,
    ) -> None:
        self._model = model
        self._units = units
        self._measurement = measurement
        self._fresh = fresh
        self._folder = folder
        self._is_late = is_late
        self._progress = progress
        self._results = Results(None if folder is None else folder / "search.json")
        self._notes: list[str] = []

    def run(
        self,
        budget: SearchBudget,
        device: Device | None,
        together: Sequence[str],
        tolerance: float,
    ) -> SearchResult:
        products = self._units.products(self._measurement.measure_high)
        high = self._measurement.high
        low = self._measurement.regions.low
        if low is None:
            raise SearchError("The closure does not enter te.autocast with enabled=True, so nothing can be switched.")
        recipe = name_of_recipe(low) or ""
        noise = self._measurement.measure(None)
        state: dict[str, Any] = {
            "recipe": str(low),
            "layers": list(self._units.all),
            "steps": [*map(len, self._fresh)][:1],
        }
        state |= {"loss": f"{high.loss:.5g}", "gradient": f"{self._measurement.high_norm:.5g}"}
        state["optimizer"] = high.update is not None
        self._results.resume(state)
        sweep = Sweep(self._units, self._measurement, self._results, self._progress, self._is_late)
        all_low = sweep.effect(frozenset())
        self._require_quiet(noise, high, all_low)
        whole = low.delayed()
        costs = Costs(products, recipe, device)
        atoms = self._units.atoms(together, whole_modules=whole)
        prior = self._begin_with_prior(atoms, sweep, costs, recipe)
        measured = sweep.run(atoms, by_gemm=not whole)
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
            self._confirm(choice, tolerance),
            self._measurement.passes,
            tuple(self._notes),
            prior,
        )
        self._results.summary = {"result": result.as_json()}
        self._results.save()
        if self._folder is not None and is_first_rank():
            write_page(self._folder / PAGE, {**result.as_json(), "confirmed": list(result.describe())})
        return result

    @staticmethod
    def _begin_with_prior(atoms: list[LayerGroup], sweep: Sweep, costs: Costs, recipe: str) -> MeasuredPrior | None:
        """Move the groups of a published rule to the front, and measure the rule."""
        if recipe not in PRIORS:
            return None
        text, source, share = PRIORS[recipe]
        count = max(1, round(share * len(atoms)))
        atoms[:] = [*atoms[-count:], *atoms[:-count]]
        choice = merged(text, atoms[:count]).switches
        return MeasuredPrior(text, source, costs.low_share(choice), costs.extra_ms(choice), sweep.effect(choice))

    def _require_quiet(self, noise: GradientEffect, high: GradientEffect, low: GradientEffect) -> None:
        change = noise.loss - high.loss
        if noise.error > _MOST_NOISE * low.error:
            raise SearchError(
                f"The closure is not deterministic: two runs in high precision from one state differ by {change:.3g} in"
                f" the loss and by {noise.error:.3g} in the squared gradient, of {low.error:.3g} by low precision. Give"
                " it no random generator, counter or data of its own: the search restores those of torch, NumPy and"
                " Python only."
            )

    def _confirm(self, choice: Choice, tolerance: float) -> Confirmation | None:
        if not self._fresh:
            self._notes.append("Not confirmed: short trainings need optimizer= and seeds=, 3 at least to decide.")
            return None
        key = hashlib.sha256(repr(sorted(choice)).encode()).hexdigest()[:16]
        arms: dict[str, Choice | None] = {key: choice, "low": frozenset(), "high": None}
        losses = self._results.losses
        runs = [(arm, seed) for seed in range(len(self._fresh)) for arm in arms if f"{arm} {seed}" not in losses]
        for arm, seed in self._progress(runs, "confirmation"):
            if self._is_late():
                self._notes.append("Not confirmed: max_time= was over. Search again with this folder to continue.")
                return None
            losses[f"{arm} {seed}"] = self._measurement.final_loss(self._fresh[seed], arms[arm], seed)
            self._results.save()
        of_choice, low, high = ([losses[f"{arm} {seed}"] for seed in range(len(self._fresh))] for arm in arms)
        return Confirmation(
            len(self._fresh[0]), paired_difference(high, of_choice, tolerance), paired_difference(high, low, tolerance)
        )

    def _write(self, choice: Choice, effect: GradientEffect, low: Any) -> None:
        if self._folder is None:
            return
        folder = self._folder if is_first_rank() else Path(tempfile.mkdtemp())
        write_config(folder / CONFIG, choice, self._units, self._model, low)
        written = write_recipe(folder / RECIPE, choice, self._units, low)
        written["assign_names"](self._model)
        again = self._measurement.measure(choice, lambda low, high: written["recipe"](low))
        if again != effect:
            raise SearchError(f"{folder / RECIPE} gives {again}, but the search measured {effect}.")
        rounded = write_megatron(folder / MEGATRON, choice, self._units, low)
        if rounded:
            self._notes.append(
                f"{MEGATRON} has no GEMMs: it keeps these modules wholly in high precision: {', '.join(rounded)}."
            )
