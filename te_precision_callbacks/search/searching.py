"""The search: sweep, solve, confirm, write."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.optimizers import held_ids
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.vocabulary import name_of_recipe
from te_precision_callbacks.check.factory import format_failure
from te_precision_callbacks.search.measuring import (
    Closure,
    EffectMeasurement,
    GradientEffect,
    mean_over_ranks,
)
from te_precision_callbacks.search.results import Results, hashed
from te_precision_callbacks.search.solving import PRIORS, Costs, MeasuredPrior, Point, SearchBudget, choose, frontier
from te_precision_callbacks.search.state import TrainingState
from te_precision_callbacks.search.sweep import MeasuredGroup, sweep
from te_precision_callbacks.search.units import Choice, LayerGroup, SearchError, Units, merged
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
_MOST_CHANGE = 1e-3
"""Noise of repeated runs above which nothing can be measured: of the gradient's error, as a share of all-low's; and of
the loss."""


Progress = Callable[[Sequence[Any], str], Iterable[Any]]
"""Shows the progress over a sequence, with its name."""


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
        content = {**vars(self), "effect": self.effect._asdict(), "all_low": self.all_low._asdict()}
        content["measured"] = [
            {"name": entry.group.name, "level": entry.level, **entry.effect._asdict()} for entry in self.measured
        ]
        points = [dict(vars(point)) for point in self.frontier]
        for point in points:
            del point["choice"]
        content["frontier"] = points
        if self.confirmation is not None:
            content["confirmation"] = asdict(self.confirmation)
        if self.prior is not None:
            content["prior"] = {**vars(self.prior), "effect": self.prior.effect._asdict()}
        return content

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
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    for name, value, least in (("seeds", seeds, 0), ("steps", steps, 1), ("sweep_batches", sweep_batches, 1)):
        if value < least:
            raise OptionError(f"{name}={value} must be {least} or more.")
    if optimizer is None:
        seeds = 0
    elif set(held_ids(optimizer)).isdisjoint(map(id, model.parameters())):
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
    first, fresh = _draw(batches, sweep_batches, seeds, steps)
    path = None if folder is None else Path(folder)
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    if TEDebugState.debug_enabled:
        raise SearchError("A debug session is running, and would observe the search. Stop it first.")
    with _memory_errors(), contextlib.ExitStack() as stack:
        units = Units(model)
        stack.callback(units.restore)
        state = TrainingState(model, optimizer)
        stack.callback(state.restore)
        measurement = EffectMeasurement(state, units, closure, first)
        results = Results(None if path is None else path / "search.json")
        running = _Search(model, units, measurement, fresh, results, _is_late(max_time), _progress(is_shown=progress))
        return running.run(budget, target, together, tolerance)


def _draw(batches: Iterable[Any], first: int, seeds: int, steps: int) -> tuple[list[Any], list[list[Any]]]:
    """Return the batches of the sweep, and of each seed."""
    needed = first + seeds * steps
    try:
        drawn = list(itertools.islice(batches, needed))
    except Exception as error:
        raise SearchError(format_failure("batches= cannot be read", error)) from error
    if len(drawn) < needed:
        raise SearchError(
            f"batches= ended after {len(drawn)}, but the search needs {needed}: {first} for the sweep and"
            f" {steps} for each of {seeds} seeds. Give more, or lower steps= or seeds=."
        )
    return drawn[:first], [drawn[start : start + steps] for start in range(first, needed, steps)]


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SearchError(
            "The device is out of memory in the search; the state of the training was put back. A search needs memory"
            " for the gradients once more: use smaller batches, or a model with fewer layers."
        ) from error


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


@dataclass
class _Search:
    """See :func:`search` for the attributes. ``fresh``: the batches of each seed."""

    model: torch.nn.Module
    units: Units
    measurement: EffectMeasurement
    fresh: Sequence[Sequence[Any]]
    results: Results
    is_late: Callable[[], bool]
    progress: Progress
    notes: list[str] = field(default_factory=list)

    def run(
        self, budget: SearchBudget, device: Device | None, together: Sequence[str], tolerance: float
    ) -> SearchResult:
        products = self.units.products(self.measurement.measure_high)
        low = self.measurement.regions.low
        if low is None:
            raise SearchError("The closure does not enter te.autocast with enabled=True, so nothing can be switched.")
        recipe = name_of_recipe(low) or ""
        noise = self.measurement.measure(None)
        self._resume(low)
        all_low = self._effect(frozenset())
        self._require_quiet(noise, all_low)
        whole = low.delayed()
        costs = Costs(products, recipe, device)
        atoms = self.units.atoms(together, whole_modules=whole)
        prior = self._begin_with_prior(atoms, costs, recipe)
        measured = sweep(atoms, self._effects, by_gemm=not whole)
        points = frontier(measured, all_low, costs)
        choice = choose(points, budget, costs, self._effect)
        effect = self._effect(choice)
        self._write(choice, effect, low)
        measured.sort(key=lambda entry: -entry.effect.error)
        result = SearchResult(
            recipe,
            {name: gemms for name, gemms in self.units.high(choice).items() if gemms},
            costs.low_share(choice),
            costs.extra_ms(choice),
            effect,
            all_low,
            noise.error,
            tuple(measured),
            tuple(points),
            self._confirm(choice, tolerance),
            self.measurement.passes,
            tuple(self.notes),
            prior,
        )
        self.results.summary = {"result": result.as_json()}
        self.results.save()
        if self.results.path is not None and own_rank() == 0:
            content = {**result.as_json(), "confirmed": list(result.describe())}
            write_page(self.results.path.with_name(PAGE), content)
        return result

    def _resume(self, low: Any) -> None:
        high = self.measurement.high
        training = {"recipe": str(low), "layers": list(self.units.all), "optimizer": high.update is not None}
        measured = {"loss": f"{high.loss:.5g}", "gradient": f"{self.measurement.high_norm:.5g}"}
        self.results.resume({**training, **measured})

    def _effect(self, choice: Choice, operand: str = "") -> GradientEffect:
        """Measure a choice of GEMMs in high precision, unless the file has it; of the others, one operand or both."""
        key = hashed("".join(f"{name} {gemm}," for name, gemm in sorted(choice)) + operand)
        if key not in self.results.effects:
            self.results.effects[key] = self.measurement.measure(choice, operand=operand)
            self.results.save()
        return self.results.effects[key]

    def _effects(self, level: str, groups: Sequence[LayerGroup]) -> list[GradientEffect] | None:
        """Measure each group in low precision alone; None if the time is up, which ends the search at the blocks."""
        effects = []
        for group in self.progress(groups, f"{level}s"):
            if not self.is_late():
                effects.append(self._effect(self.units.switches - group.switches, group.operand))
            elif level == "block":
                path = self.results.path
                kept = f" {path} keeps {len(self.results.effects)} measurements: run again to continue." if path else ""
                raise SearchError(
                    f"max_time= was over before the blocks were measured, so nothing can be chosen.{kept}"
                )
            else:
                return None
        return effects

    def _begin_with_prior(self, atoms: list[LayerGroup], costs: Costs, recipe: str) -> MeasuredPrior | None:
        """Move the groups of a published rule to the front, and measure the rule."""
        if recipe not in PRIORS:
            return None
        text, source, share = PRIORS[recipe]
        count = max(1, round(share * len(atoms)))
        atoms[:] = [*atoms[-count:], *atoms[:-count]]
        choice = merged(text, atoms[:count]).switches
        return MeasuredPrior(text, source, costs.low_share(choice), costs.extra_ms(choice), self._effect(choice))

    def _require_quiet(self, noise: GradientEffect, low: GradientEffect) -> None:
        change = noise.loss - self.measurement.high.loss
        if noise.error > _MOST_NOISE * low.error or abs(change) > _MOST_CHANGE * abs(self.measurement.high.loss):
            raise SearchError(
                f"The closure is not deterministic: two runs in high precision from one state differ by {change:.3g} in"
                f" the loss and by {noise.error:.3g} in the squared gradient, of {low.error:.3g} by low precision. Give"
                " it no random generator, counter or data of its own: the search restores those of torch, NumPy and"
                " Python only."
            )

    def _confirm(self, choice: Choice, tolerance: float) -> Confirmation | None:
        if not self.fresh:
            self.notes.append("Not confirmed: short trainings need optimizer= and seeds=, 3 at least to decide.")
            return None
        steps = len(self.fresh[0])
        chosen = f"{hashed(repr(sorted(choice)))} {steps}"
        low = f"low {steps}"
        high = f"high {steps}"
        arms: dict[str, Choice | None] = {chosen: choice, low: frozenset(), high: None}
        losses = self.results.losses
        seeds = range(len(self.fresh))
        runs = [(arm, seed) for seed, arm in itertools.product(seeds, arms) if f"{arm} {seed}" not in losses]
        for arm, seed in self.progress(runs, "confirmation"):
            if self.is_late():
                self.notes.append("Not confirmed: max_time= was over. Search again with this folder to continue.")
                return None
            losses[f"{arm} {seed}"] = self.measurement.final_loss(self.fresh[seed], arms[arm], seed)
            self.results.save()

        def finals(arm: str) -> list[float]:
            return [losses[f"{arm} {seed}"] for seed in seeds]

        of_choice = paired_difference(finals(high), finals(chosen), tolerance)
        return Confirmation(steps, of_choice, paired_difference(finals(high), finals(low), tolerance))

    def _write(self, choice: Choice, effect: GradientEffect, low: Any) -> None:
        if self.results.path is None:
            return
        folder = self.results.path.parent if own_rank() == 0 else Path(tempfile.mkdtemp())
        write_config(folder / CONFIG, choice, self.units, self.model, low)
        written = write_recipe(folder / RECIPE, choice, self.units, low)
        written["assign_names"](self.model)
        again = self.measurement.measure(choice, written["recipe"])
        if again != effect:
            if self.measurement.measure(choice) == effect:
                raise SearchError(f"{folder / RECIPE} gives {again}, but the search measured {effect}.")
            self.notes.append(
                f"The closure is not deterministic: {RECIPE} gives a gradient error of {again.error:.3g} and a loss of"
                f" {again.loss:.5g}, the search measured {effect.error:.3g} and {effect.loss:.5g}."
            )
        rounded = write_megatron(folder / MEGATRON, choice, self.units, low)
        if rounded:
            self.notes.append(
                f"{MEGATRON} has no GEMMs: it keeps these modules wholly in high precision: {', '.join(rounded)}."
            )
