"""Measures losses and gradients of a closure with chosen GEMMs in high precision."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.ranks import is_initialized, world_size
from te_precision_callbacks.base.replaced import Replacements
from te_precision_callbacks.check.factory import format_failure
from te_precision_callbacks.search.factory import custom_recipe
from te_precision_callbacks.search.state import TrainingState
from te_precision_callbacks.search.units import Choice, SearchError, Units

Closure = Callable[[Any], torch.Tensor]

Make = Callable[[Any], Any]
"""Makes a recipe from the recipe in low precision."""

LOST = 1e9
"""The error of a gradient with inf or nan."""

_UNRELATED = 2.0
"""The error of an unrelated gradient of the same norm. A larger one, of one parameter, would hide all other errors."""


class GradientEffect(NamedTuple):
    """A measurement against high precision, over the batches of the sweep.

    Gradients are compared parameter by parameter, whatever their scale, as an optimizer such as Adam sees them. Means
    are weighted by the number of elements.

    Attributes:
        loss: the mean loss.
        error: mean of |g - h|^2 / |h|^2, of the gradient g and the gradient h in high precision; at most 2 of each
            parameter.
        cosine: mean cosine of both gradients.
        norm: mean of |g| / |h|.
        update: mean cosine of both changes of the parameters in a step of the optimizer; None without an optimizer, and
            if it changes nothing in high precision.
    """

    loss: float
    error: float
    cosine: float
    norm: float
    update: float | None = None


class Regions:
    """Replaces the recipe of each ``te.autocast`` while it is entered.

    Attributes:
        low: the recipe that the model uses; None before the model was seen.
    """

    low: Any = None

    @contextlib.contextmanager
    def switched(self, make: Make | None) -> Iterator[None]:
        """Run in another recipe, made from ``low``; None for high precision, without any quantizer."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as manager
        from transformer_engine.pytorch.quantization import get_default_fp8_recipe

        replaced = Replacements()
        upstream = manager.autocast_enter
        made: Any = None

        def autocast_enter(
            enabled: bool = False, calibrating: bool = False, fp8_recipe: Any = None, *rest: Any, **keywords: Any
        ) -> None:
            nonlocal made
            recipe = fp8_recipe
            if enabled and (recipe is None or recipe is not made):
                self._require(recipe or get_default_fp8_recipe())
                if made is None and make is not None:
                    made = make(self.low)
                recipe = made
            upstream(enabled and make is not None, calibrating, recipe, *rest, **keywords)

        replaced.replace(manager, "autocast_enter", staticmethod(autocast_enter))
        try:
            yield
        finally:
            replaced.restore()

    def _require(self, recipe: Any) -> None:
        if self.low is None:
            if recipe.custom():
                raise SearchError("The model runs in a CustomRecipe. Search with the recipe of its quantizers instead.")
            if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
                raise SearchError("A search leaves attention in high precision: set fp8_dpa=False and fp8_mha=False.")
            self.low = recipe
        elif recipe != self.low:
            raise SearchError(f"The model runs in several recipes, {self.low} and {recipe}. A search needs one.")


class EffectMeasurement:
    """Runs the closure on the batches of the sweep, each time from the same state.

    Attributes:
        passes: forwards with backward so far.
        high: the effect of high precision, against which others are measured.
        high_norm: the norm of its gradient.
    """

    def __init__(self, state: TrainingState, units: Units, closure: Closure, batches: Sequence[Any]) -> None:
        self.passes = 0
        self.high = GradientEffect(math.nan, 0.0, 1.0, 1.0)
        self.high_norm = 0.0
        self._state = state
        self._units = units
        self.regions = Regions()
        self._closure = closure
        self._batches = batches
        self._high: list[torch.Tensor | None] = []

    def measure_high(self) -> None:
        loss, results = self._run(None)
        if not math.isfinite(loss):
            raise SearchError(f"The loss is {loss} in high precision, so no effect of low precision can be seen.")
        # DistributedDataParallel may write later gradients into the same memory.
        for result in results:
            self._high.append(None if result is None else result.clone())
        self.high = self._compare(loss, self._high)
        if self.high_norm == 0:
            raise SearchError("The loss has no gradient in high precision, so no effect of low precision can be seen.")

    def measure(self, choice: Choice | None, make: Make | None = None, operand: str = "") -> GradientEffect:
        """Measure a choice of GEMMs in high precision, of the others one operand or both; None for all in high."""
        return self._compare(*self._run(make or self._make(choice, operand)))

    def _make(self, choice: Choice | None, operand: str = "") -> Make | None:
        if choice is None:
            return None
        high = self._units.high(choice)
        if not operand:
            return lambda low: custom_recipe(low, high)
        from te_precision_callbacks.search.operands import operand_recipe

        return lambda low: operand_recipe(low, high, operand)

    def final_loss(self, batches: Sequence[Any], choice: Choice | None, seed: int) -> float:
        """Train from the state with a seed; returns the mean loss of the last quarter of the steps."""
        optimizer = self._state.optimizer
        assert optimizer is not None  # noqa: S101
        self._state.begin()
        torch.manual_seed(seed)
        np.random.seed(seed)
        losses = []
        with self.regions.switched(self._make(choice)):
            for batch in batches:
                optimizer.zero_grad(set_to_none=True)
                losses.append(self._loss_with_backward(batch))
                self._state.step()
        last = losses[-max(1, len(losses) // 4) :]
        (mean,) = mean_over_ranks(torch.tensor([sum(last) / len(last)], dtype=torch.float64))
        return float(mean)

    def _run(self, make: Make | None) -> tuple[float, list[torch.Tensor | None]]:
        """Return the mean loss, and the gradients of the parameters, followed by their updates with an optimizer."""
        self._state.begin()
        with self.regions.switched(make):
            losses = [self._loss_with_backward(batch) for batch in self._batches]
        self.passes += len(losses)
        gradients = [parameter.grad for parameter in self._state.parameters]
        updates = self._state.updates()
        for parameter in self._state.parameters:
            parameter.grad = None
        return sum(losses) / len(losses), [*gradients, *updates]

    def _loss_with_backward(self, batch: Any) -> float:
        loss = run_closure(self._closure, batch, self._state.parameters)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _compare(self, loss: float, results: Sequence[torch.Tensor | None]) -> GradientEffect:
        rows = [_sums(ours, high) for ours, high in zip(results, self._high, strict=True)]
        rows.insert(0, torch.full_like(rows[0], loss))
        shared = torch.tensor(mean_over_ranks(torch.stack(rows)), dtype=torch.float64)
        loss = float(shared[0, 0])
        count = len(self._state.parameters) + 1
        gradients = shared[1:count]
        self.high_norm = float(gradients[:, 3].sum().sqrt())
        update = _means(shared[count:].nan_to_num())[1] if bool(shared[count:, 3].any()) else None
        if not bool(gradients.isfinite().all()) or not math.isfinite(loss):
            return GradientEffect(loss, LOST, 0.0, LOST, update)
        return GradientEffect(loss, *_means(gradients), update)


def _sums(ours: torch.Tensor | None, high: torch.Tensor | None) -> torch.Tensor:
    """Return sums over a parameter's elements: squared difference, product, squares, and the number of elements."""
    if high is None:
        return torch.zeros(5, dtype=torch.float64)
    h = _local(high)
    g = torch.zeros_like(h) if ours is None else _local(ours)
    parts = [part.sum(dtype=torch.float64) for part in ((g - h).square(), g * h, g.square(), h.square())]
    return torch.stack([*parts, torch.full_like(parts[0], h.numel())]).cpu()


def _means(sums: torch.Tensor) -> tuple[float, float, float]:
    """Return the means over parameters of the relative squared error, the cosine, and the norm's ratio."""
    difference, product, ours_square, high_square, weight = sums.T
    has_values = high_square > 0
    weight = weight * has_values
    size = high_square.where(has_values, torch.ones(()))
    cosine = (product / (ours_square * size).sqrt()).nan_to_num(0.0)
    error = (difference / size).clamp(max=_UNRELATED)
    error, cosine, norm = (
        (weight * values).sum() / weight.sum() for values in (error, cosine, (ours_square / size).sqrt())
    )
    return float(error), float(cosine), float(norm)


def _gradient_versions(parameters: Iterable[torch.nn.Parameter]) -> list[tuple[int, int] | None]:
    versions: list[tuple[int, int] | None] = []
    for parameter in parameters:
        gradient = parameter.grad
        versions.append(None if gradient is None else (id(gradient), gradient._version))
    return versions


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)  # of a DTensor: the shards of all ranks add up
    return (tensor if to_local is None else to_local()).float()


def mean_over_ranks(values: torch.Tensor) -> Any:
    """Return equal values on all ranks, so that all take the same decisions."""
    if is_initialized():
        on_cpu = "gloo" in torch.distributed.get_backend()
        shared = values if on_cpu else values.cuda()
        torch.distributed.all_reduce(shared)
        values = shared.cpu() / world_size()
    return values.tolist()


def run_closure(closure: Closure, batch: Any, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Call the closure; raises a SearchError if it fails, steps the optimizer, runs the backward, or gives no loss."""
    before = [parameter._version for parameter in parameters]
    gradients = _gradient_versions(parameters)
    try:
        loss = closure(batch)
    except (torch.OutOfMemoryError, PrecisionDebugError):
        raise
    except Exception as error:
        raise SearchError(format_failure("The closure failed", error)) from error
    changed = [p for p, version in zip(parameters, before, strict=True) if p._version != version]
    if changed:
        raise SearchError(
            f"The closure changed {len(changed)} of {len(parameters)} parameters: it must not step the optimizer."
            " Return the loss of the batch; the search runs the backward and, to confirm, steps optimizer=."
        )
    if gradients != _gradient_versions(parameters):
        raise SearchError("The closure ran the backward. Return the loss of the batch; the search runs the backward.")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise SearchError(
            "The closure must return the loss of a batch, a tensor with one element that needs a gradient. The search"
            " runs the backward."
        )
    return loss
