"""Measures losses and gradients of a closure with chosen GEMMs in high precision, from one state of the training."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.ranks import is_initialized, world_size
from te_precision_callbacks.base.replaced import Replacements
from te_precision_callbacks.check.factory import format_failure
from te_precision_callbacks.search.results import GradientEffect
from te_precision_callbacks.search.units import Choice, SearchError, Units
from te_precision_callbacks.te.custom_recipe import custom_recipe
from te_precision_callbacks.te.state import Fp8State

Closure = Callable[[Any], torch.Tensor]

Make = Callable[[Any], Any]
"""Makes a recipe from the recipe in low precision."""

_LOST = 1e9
"""The error of a gradient with inf or nan."""

_UNRELATED = 2.0
"""The error of an unrelated gradient of the same norm. A larger one, of one parameter, would hide all other errors."""


class TrainingState:
    """The state of a model, its random generators, and an optimizer.

    Copies are in the memory of the host.

    Args:
        optimizer: if given, its parameters and its state may change until :meth:`restore`.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        self._optimizer_state: dict[Any, Any] = {}
        self._groups: list[dict[str, Any]] = []
        everything = list(model.parameters())
        tensors = list(model.buffers())
        if optimizer is not None:
            for group in optimizer.param_groups:
                everything += group["params"]
                self._groups.append({name: copy.deepcopy(value) for name, value in group.items() if name != "params"})
            self._optimizer_state = {key: dict(entry) for key, entry in optimizer.state.items()}
            tensors += everything
            tensors += [leaf for leaf in tree_leaves(self._optimizer_state) if isinstance(leaf, torch.Tensor)]
        self._gradients = {parameter: parameter.grad for parameter in everything}
        tensors += [gradient for gradient in self._gradients.values() if gradient is not None]
        self._tensors = {tensor: tensor.detach().to("cpu", copy=True) for tensor in tensors}
        self._generators: dict[Callable[[Any], object], Any] = {
            random.setstate: random.getstate(),
            np.random.set_state: np.random.get_state(),
            torch.set_rng_state: torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            self._generators[torch.cuda.set_rng_state_all] = torch.cuda.get_rng_state_all()
        self._fp8 = Fp8State(model)

    def begin(self) -> None:
        """Go back to the state, without gradients, and with a copy of the FP8 state to change."""
        self._put_back()
        for parameter in self._gradients:
            parameter.grad = None
        self._fp8.lend_copy()

    def step(self) -> None:
        """Step the optimizer, and forget the gradients."""
        assert self.optimizer is not None  # noqa: S101
        try:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise SearchError(format_failure("The step of optimizer= failed", error)) from error

    def restore(self) -> None:
        """Go back to the state, bit for bit, with the same tensors."""
        self._put_back()
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._fp8.restore()

    def _put_back(self) -> None:
        for buffers, former_values in self._buffers:
            buffers.update(former_values)
        with torch.no_grad():
            for tensor, value in self._tensors.items():
                tensor.copy_(value)
        if self.optimizer is not None:
            self.optimizer.state.clear()
            self.optimizer.state.update({key: dict(entry) for key, entry in self._optimizer_state.items()})
            for group, options in zip(self.optimizer.param_groups, self._groups, strict=True):
                group.update(copy.deepcopy(options))
        for put_back, state in self._generators.items():
            put_back(state)


class EffectMeasurement:
    """Runs the closure on the batches of the sweep, each time from the same state.

    Attributes:
        low: the recipe that the model uses; None before a run.
        passes: forwards with backward so far.
        high: the effect of high precision, against which others are measured.
    """

    def __init__(self, state: TrainingState, units: Units, closure: Closure, batches: Sequence[Any]) -> None:
        self.low: Any = None
        self.passes = 0
        self.high = GradientEffect(math.nan, 0.0, 1.0)
        self._state = state
        self._units = units
        self._closure = closure
        self._batches = batches
        self._high: list[torch.Tensor | None] = []

    def measure_high(self) -> None:
        loss, gradients = self._run(None)
        if not math.isfinite(loss):
            raise SearchError(f"The loss is {loss} in high precision, so no effect of low precision can be seen.")
        # DistributedDataParallel may write later gradients into the same memory.
        self._high = [None if gradient is None else gradient.clone() for gradient in gradients]
        self.high = self._compare(loss, self._high)
        if math.isnan(self.high.error):
            raise SearchError("The loss has no gradient in high precision, so no effect of low precision can be seen.")

    def measure(self, make: Make | None) -> GradientEffect:
        """Measure a recipe, made from the model's recipe; None for high precision, without any quantizer."""
        return self._compare(*self._run(make))

    def recipe(self, choice: Choice) -> Make:
        """Return a recipe with a choice of GEMMs in high precision."""
        high = self._units.high(choice)
        return lambda low: custom_recipe(low, high)

    def final_loss(self, batches: Sequence[Any], make: Make | None, seed: int) -> float:
        """Train from the state with a seed; returns the mean loss of the last quarter of the steps."""
        self._state.begin()
        torch.manual_seed(seed)
        np.random.seed(seed)
        losses = []
        with self._switched(make):
            for batch in batches:
                losses.append(self._loss_with_backward(batch))
                self._state.step()
        last = losses[-max(1, len(losses) // 4) :]
        return float(mean_over_ranks(sum(last) / len(last)))

    def _run(self, make: Make | None) -> tuple[float, list[torch.Tensor | None]]:
        """Return the mean loss, and the gradients of the parameters."""
        self._state.begin()
        with self._switched(make):
            losses = [self._loss_with_backward(batch) for batch in self._batches]
        self.passes += len(losses)
        return sum(losses) / len(losses), [parameter.grad for parameter in self._state.parameters]

    @contextlib.contextmanager
    def _switched(self, make: Make | None) -> Iterator[None]:
        """Run in another recipe, made from ``low``; None for high precision, without any quantizer."""
        from te_precision_callbacks.te import recipes, seams

        replaced = Replacements()
        upstream = seams.state_manager.autocast_enter
        custom_recipe: Any = None

        def autocast_enter(
            enabled: bool = False, calibrating: bool = False, fp8_recipe: Any = None, *rest: Any, **keywords: Any
        ) -> None:
            nonlocal custom_recipe
            recipe = fp8_recipe
            if enabled and (recipe is None or recipe is not custom_recipe):
                self._note(recipe or recipes.default_recipe())
                if custom_recipe is None and make is not None:
                    custom_recipe = make(self.low)
                recipe = custom_recipe
            upstream(enabled and make is not None, calibrating, recipe, *rest, **keywords)

        replaced.replace(seams.state_manager, "autocast_enter", staticmethod(autocast_enter))
        try:
            yield
        finally:
            replaced.restore()

    def _note(self, recipe: Any) -> None:
        """Note the recipe that the model uses; a search can change only one, and no CustomRecipe."""
        if self.low is None:
            if recipe.custom():
                raise SearchError("The model runs in a CustomRecipe. Search with the recipe of its quantizers instead.")
            if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
                raise SearchError("A search leaves attention in high precision: set fp8_dpa=False and fp8_mha=False.")
            self.low = recipe
        elif recipe != self.low:
            raise SearchError(f"The model runs in several recipes, {self.low} and {recipe}. A search needs one.")

    def _loss_with_backward(self, batch: Any) -> float:
        try:
            loss = self._closure(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())
        except (torch.OutOfMemoryError, PrecisionDebugError):
            raise
        except Exception as error:
            failure = format_failure("The closure, or the backward of its loss, failed", error)
            raise SearchError(
                f"{failure} Return the loss of the batch, a tensor with one element; the search runs the backward and,"
                " to confirm, steps optimizer=."
            ) from error

    def _compare(self, loss: float, gradients: Sequence[torch.Tensor | None]) -> GradientEffect:
        rows = [_sums(ours, high) for ours, high in zip(gradients, self._high, strict=True)]
        shared = mean_over_ranks(torch.stack([*rows, torch.full_like(rows[0], loss)]))
        loss = float(shared[-1, 0])
        if not bool(shared.isfinite().all()):
            return GradientEffect(loss, _LOST, 0.0)
        # Parameters without a gradient in high precision do not count.
        difference, product, ours_square, high_square, weight = shared[:-1][shared[:-1, 3] > 0].T
        error = (difference / high_square).clamp(max=_UNRELATED)
        cosine = (product / (ours_square * high_square).sqrt()).nan_to_num(0.0)
        means = ((weight * values).sum() / weight.sum() for values in (error, cosine))
        return GradientEffect(loss, *map(float, means))


def _sums(ours: torch.Tensor | None, high: torch.Tensor | None) -> torch.Tensor:
    """Return sums over a parameter's elements: squared difference, product, squares, and the number of elements."""
    if high is None:
        return torch.zeros(5, dtype=torch.float64)
    h = _local(high)
    g = torch.zeros_like(h) if ours is None else _local(ours)
    parts = ((g - h).square(), g * h, g.square(), h.square(), torch.ones_like(h))
    return torch.stack([part.sum(dtype=torch.float64) for part in parts]).cpu()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)  # of a DTensor: the shards of all ranks add up
    return (tensor if to_local is None else to_local()).float()


def mean_over_ranks(values: Any) -> torch.Tensor:
    """Return values in float64, on the CPU; equal on all ranks, so that all take the same decisions."""
    shared = torch.as_tensor(values, dtype=torch.float64)
    if not is_initialized():
        return shared
    if "gloo" not in torch.distributed.get_backend():
        shared = shared.cuda()
    torch.distributed.all_reduce(shared)
    return shared.cpu() / world_size()
