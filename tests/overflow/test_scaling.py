"""Under torch's GradScaler: an overflow of a forward stops the run, and an inf in a gradient is the scaler's affair."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.amp.grad_scaler import GradScaler

from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow
from tests.functions import Function
from tests.overflow.models import HostReads, hooks_on

Train = Callable[[torch.nn.Module, torch.optim.Optimizer, GradScaler, int], None]


class Half(torch.nn.Module):
    """Two layers in float16, which overflow with a weight of 6e4, and float32 outside."""

    def __init__(self, weight: float = 0.1) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, 0.1)
        torch.nn.init.constant_(self.second.weight, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return self.second(self.first(x)).float().sum()  # type: ignore[no-any-return]


BATCH = torch.ones(4, 16)


def scaler_of(scale: float = 2.0**30) -> GradScaler:
    return GradScaler("cpu", init_scale=scale, growth_interval=1000)


def plain(model: Any, optimizer: Any, scaler: Any, steps: int) -> None:
    for _ in range(steps):
        scaler.scale(model(BATCH)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def clipped(model: Any, optimizer: Any, scaler: Any, steps: int) -> None:
    """Two micro-batches a step, and clipping, which refuses what is not finite once the scale has settled."""
    for _ in range(steps):
        for _ in range(2):
            scaler.scale(model(BATCH) / 2).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def by_hand(model: Any, optimizer: Any, scaler: Any, steps: int) -> None:
    for _ in range(steps):
        scaler.scale(model(BATCH)).backward()
        scaler.unscale_(optimizer)
        if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
            optimizer.step()
        scaler.update()
        optimizer.zero_grad()


LOOPS: tuple[Train, ...] = (plain, clipped, by_hand)


class Wrapper:
    """A user's own around an optimizer: no optimizer of torch, and like any other wrapper."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.step, self.zero_grad = optimizer.param_groups, optimizer.step, optimizer.zero_grad

    def __eq__(self, other: object) -> bool:
        return True


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "transformer engine": lambda parameters: te.optimizers.FusedAdam(parameters, lr=1e-3),
    "wrapper": lambda parameters: Wrapper(torch.optim.Adam(parameters, lr=1e-3)),
}


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    gc.collect()  # detectors of earlier tests
    own = {name: vars(GradScaler)[name] for name in ("scale", "unscale_", "step")}
    yield
    assert {name: vars(GradScaler)[name] for name in own} == own, "the last detector puts back what it wrapped"


@pytest.mark.parametrize("train", LOOPS)
def test_a_forward_that_overflows_stops_at_the_first_step(train: Train) -> None:
    """The scaler leaves out every step, so that no hook of the optimizer is called."""
    model = Half(6e4)
    before = copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with DebugActivationOverflow(model) as watching:
        with pytest.raises(ActivationOverflowError, match=r"< \[0\] second: Linear: output has infs"):
            train(model, optimizer, scaler_of(scale=1.0), 5)
        assert watching.batch_number == (1 if train is clipped else 0), "the batches of one step"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert hooks_on(model) == 0


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sgd"])
def test_with_any_optimizer(name: str) -> None:
    model = Half()
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = scaler_of()
    with DebugActivationOverflow(model) as watching:
        plain(model, optimizer, scaler, 30)
        assert scaler.get_scale() < 2.0**20
        assert watching.reports == 0
        torch.nn.init.constant_(model.second.weight, 6e4)
        with pytest.raises(ActivationOverflowError, match="second: Linear: output has infs"):
            plain(model, optimizer, scaler, 1)


@pytest.mark.parametrize("train", LOOPS)
def test_no_alarm_while_the_scale_settles(train: Train) -> None:
    """As in the README's "in any loop": nothing is said of a scaler, and nothing is set."""
    model = Half()
    scaler = scaler_of()
    with DebugActivationOverflow(model) as watching:
        train(model, OPTIMIZERS["sgd"](model.parameters()), scaler, 30)
    assert watching.reports == 0
    assert 2.0 < scaler.get_scale() < 2.0**20, "it has skipped ten steps, and settled"


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * float("nan")


def test_a_gradient_that_is_not_finite_at_any_scale() -> None:
    """The scaler would leave out every step, and halve its scale to zero; at a scale of 1 it is an overflow."""
    half = Half()
    model = Function(lambda x: NanBackward.apply(half(x)), half=half)  # type: ignore[no-untyped-call]
    optimizer, scaler = OPTIMIZERS["sgd"](model.parameters()), scaler_of(scale=2.0**4)
    with pytest.raises(ActivationOverflowError, match=r"The loss was scaled by only 1, so the scale is not") as raised:
        with DebugActivationOverflow(model):
            plain(model, optimizer, scaler, 20)
    assert (raised.value.batch, scaler.get_scale()) == (4, 1.0)
    with pytest.raises(ActivationOverflowError, match="second: Linear: output has infs"):
        with DebugActivationOverflow(model) as watching:
            watching.loss_scaled = True  # the loop looks after it
            plain(model, optimizer, scaler, 20)
            torch.nn.init.constant_(half.second.weight, 6e4)
            plain(model, optimizer, scaler, 1)


def test_a_scaler_that_is_disabled_excuses_nothing() -> None:
    model = Half()
    scaler = GradScaler("cpu", enabled=False)
    with DebugActivationOverflow(model), pytest.raises(ActivationOverflowError, match="grad_output has nans"):
        scaler.scale(NanBackward.apply(model(BATCH))).backward()  # type: ignore[no-untyped-call]
        scaler.step(OPTIMIZERS["sgd"](model.parameters()))


def test_a_scaler_costs_one_read_more_only_where_a_gradient_is_not_finite() -> None:
    def reads(scale: float, *, watched: bool) -> int:
        model = Half()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with DebugActivationOverflow(model) if watched else nullcontext(), HostReads() as counting:
            plain(model, optimizer, scaler_of(scale=scale), 1)
        return counting.count

    assert reads(1.0, watched=True) == reads(1.0, watched=False)
    assert reads(2.0**40, watched=True) == reads(2.0**40, watched=False) + 1
