"""In a training loop: when it looks, what that costs, when it keeps quiet, and what torch's GradScaler excuses."""

import functools
import gc
import logging
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import transformer_engine.pytorch as te
from torch.amp.grad_scaler import GradScaler

from te_precision_callbacks.overflow import (
    ActivationOverflowError,
    DebugActivationOverflow,
    DetectionFailedError,
    detector,
    frames,
    hooks,
)
from tests.functions import Function
from tests.overflow.models import HostReads, hooks_on, lines_of, mini_t5, step, tokens, weights_stay

INF = float("inf")


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))


@pytest.mark.slow
def test_a_healthy_run(caplog: pytest.LogCaptureFixture) -> None:
    def run(*, watched: bool) -> dict[str, torch.Tensor]:
        model = mini_t5(dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with DebugActivationOverflow(model) if watched else nullcontext() as detector:
            for batch in range(12):
                model(input_ids=tokens(batch), labels=tokens(batch)).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if watched:
                assert detector.batch_number == 11
                assert hooks_on(model) > 0
        assert hooks_on(model) == 0
        return model.state_dict()

    with_it, without = run(watched=True), run(watched=False)
    assert all(torch.equal(value, without[name]) for name, value in with_it.items())
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("backward", [True, False])
def test_memory_does_not_grow(backward: bool) -> None:
    """Neither where an optimizer steps, nor where nobody looks: then by the limit alone."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run(steps: int) -> int:
        for _ in range(steps):
            if backward:
                step(model, optimizer)
            else:
                model(torch.ones(2, 4))
        gc.collect()
        return sys.getallocatedblocks()

    with mock.patch.object(detector, "MOST_FRAMES", 500), DebugActivationOverflow(model):
        before = run(150)
        assert run(500) - before < 1000, "an interval; five hundred batches of frames would be several thousand"


def test_frames_are_also_checked_where_nothing_steps() -> None:
    """Before the next forward, if there are too many; and those after it in the next check."""
    model = mlp()
    with mock.patch.object(detector, "MOST_FRAMES", 1), DebugActivationOverflow(model) as watching:
        model(torch.ones(1, 4))
        model(torch.full((1, 4), INF))
        with pytest.raises(ActivationOverflowError, match=r"> \[1\] 0: Linear: input\[0\] has infs") as raised:
            watching.check()
        assert [line.batch for line in lines_of(raised.value.report)] == [0] * 8 + [1], "the frames before it are known"
        model(torch.full((1, 4), INF))
        with pytest.raises(ActivationOverflowError, match=r"> \[2\] 0: Linear"):
            model(torch.ones(1, 4))


def test_one_copy_a_look_and_nothing_else() -> None:
    model = mini_t5(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = {"input_ids": tokens(), "labels": tokens()}

    def reads(*, watched: bool) -> list[tuple[int, int]]:
        """Reads of elements, and copies, until: forward and backward, the optimizer's step, an evaluation, the end."""
        counting, copies = HostReads(), mock.Mock(side_effect=frames.to_host)
        counts = []

        def note() -> None:
            counts.append((counting.count, copies.call_count))

        with mock.patch.object(frames, "to_host", copies):
            with DebugActivationOverflow(model) if watched else nullcontext(), counting:
                for _ in range(2):
                    model(**batch).loss.backward()
                note()
                optimizer.step()
                note()
                with torch.no_grad():
                    model(**batch)
                note()
        note()
        return counts

    watched, without = reads(watched=True), reads(watched=False)
    assert [elements for elements, _ in watched] == [elements for elements, _ in without]
    assert [copies for _, copies in watched] == [0, 1, 2, 2]


def test_an_optimizer_of_flat_copies_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    # One copy of all parameters in one tensor, as DeepSpeed ZeRO and Megatron have it.
    flat = torch.nn.Parameter(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    flat.grad = torch.zeros_like(flat)
    optimizer = torch.optim.SGD([flat], lr=0.1)
    with DebugActivationOverflow(model):
        for _ in range(30):
            step(model, optimizer)
    (record,) = caplog.records
    assert "call detector.check() before each of their steps" in record.getMessage()
    caplog.clear()
    with DebugActivationOverflow(model) as watching:
        for _ in range(30):
            model(torch.ones(2, 4)).sum().backward()
            watching.check()
            optimizer.step()
        model(torch.full((1, 4), INF))
        with pytest.raises(ActivationOverflowError):
            watching.check()
    assert [record.levelname for record in caplog.records] == ["ERROR"], "the report alone"


def test_a_closure() -> None:
    """As Lightning steps: forward and backward run inside of the optimizer's step, before the update; perhaps again."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    losses = []

    def closure(value: float = 1.0) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), value)).pow(2).sum()
        loss.backward()
        losses.append(loss.item())
        return loss  # type: ignore[no-any-return]

    infinite = functools.partial(closure, INF)
    with DebugActivationOverflow(model):
        assert optimizer.step(closure).item() == losses[0] > losses[-1]
        for take_step in (lambda: optimizer.step(infinite), lambda: optimizer.step(closure=infinite)):
            with weights_stay(model), pytest.raises(ActivationOverflowError, match=r"0: Linear: input\[0\] has infs"):
                take_step()


@pytest.mark.usefixtures("backward_thread")
def test_gradient_accumulation() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    DebugActivationOverflow(model)
    with weights_stay(model), pytest.raises(ActivationOverflowError, match=r"> \[2\] 0: Linear: input\[0\] has infs"):
        for value in (1.0, 2.0, INF, 3.0):
            model(torch.full((2, 4), value)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_forward_itself_raises(no_gradients: Any) -> None:
    model = mlp()
    with DebugActivationOverflow(model), no_gradients():
        model(torch.ones(1, 4))
        with pytest.raises(ActivationOverflowError, match=r"> \[1\] 0: Linear: input\[0\] has infs") as raised:
            model(torch.full((1, 4), INF))
    assert [line.batch for line in lines_of(raised.value.report)] == [0] * 8 + [1]


def test_batches_where_the_model_itself_is_not_called() -> None:
    """As Lightning does it: the trainer calls training_step, which calls modules."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with DebugActivationOverflow(model) as watching:
        for batch in range(3):
            model["b"](model["a"](torch.ones(2, 4))).sum().backward()
            optimizer.step()
            with torch.no_grad():  # an evaluation between batches is none itself, and the next one begins after it
                model["b"](model["a"](torch.ones(2, 4)))
            assert watching.batch_number == batch
    watching = DebugActivationOverflow(model)
    for batch in range(3):
        watching.begin_batch()
        model["b"](model["a"](torch.ones(2, 4))).sum().backward()
        assert watching.batch_number == batch
    optimizer.step()
    watching.begin_batch()
    with pytest.raises(ActivationOverflowError, match=r"> \[3\] b: Linear: input\[0\]"):
        model["b"](torch.full((1, 4), INF))
        watching.check()


def test_the_graph_is_let_go() -> None:
    model = mlp()
    with DebugActivationOverflow(model):
        gone = weakref.ref(model(torch.ones(2, 4)))
        assert gone() is None


# ----------------------------------------------------------------------------------------------- a detection that fails


class TwoOutputs(torch.autograd.Function):
    """Gives no gradient to its second input: None, as DistributedDataParallel's does for an unused output."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    model = Function(lambda x: sum(TwoOutputs.apply(first(x), second(x))), first=first, second=second)  # type: ignore[no-untyped-call]
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def failing(function: str = "measure") -> Any:
    module = detector if function == "read" else hooks
    return mock.patch.object(module, function, side_effect=LookupError("no slot"))


def test_a_gradient_of_none(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = made()
    with DebugActivationOverflow(model, max_frames=1000) as watching:
        for _ in range(3):
            step(model, optimizer)
        assert not caplog.records
        with pytest.raises(ActivationOverflowError, match=r"> \[3\] first: Linear: input\[0\] has infs") as raised:
            step(model, optimizer, INF)
        assert watching.batch_number == 3
    assert {line.path for line in lines_of(raised.value.report) if "grad" in line.role} == {"", "first"}


def test_the_next_step_raises() -> None:
    """Not the hook: other ranks would wait for this one. The weights are not touched; then it watches again."""
    model, optimizer = made()
    with DebugActivationOverflow(model) as watching:
        with failing():
            model(torch.ones(2, 4)).sum().backward()
        with (
            weights_stay(model),
            pytest.raises(DetectionFailedError, match=r"on rank 0 \(LookupError: no slot\)") as raised,
        ):
            optimizer.step()
        assert isinstance(raised.value.__cause__, LookupError)
        assert "remove DebugActivationOverflow" in str(raised.value)
        assert watching.reports == 0
        step(model, optimizer)
        with pytest.raises(ActivationOverflowError):
            step(model, optimizer, INF)
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (str(copied), copied.rank, copied.failure) == (str(raised.value), 0, "LookupError: no slot")


LOOKS: dict[str, Callable[[DebugActivationOverflow, torch.optim.Optimizer], object]] = {
    "check": lambda watching, optimizer: watching.check(),
    "close": lambda watching, optimizer: watching.close(),
    "step": lambda watching, optimizer: optimizer.step(),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("function", ["measure", "read"])
def test_wherever_it_fails_and_whoever_looks(look: str, function: str) -> None:
    model, optimizer = made()
    watching = DebugActivationOverflow(model)
    with failing(function), pytest.raises(DetectionFailedError):
        model(torch.ones(2, 4)).sum().backward()
        LOOKS[look](watching, optimizer)
    watching.close()
    assert hooks_on(model) == 0


def test_what_was_seen_before_the_failure_comes_first() -> None:
    model, optimizer = made()
    with DebugActivationOverflow(model), pytest.raises(ActivationOverflowError, match="first: Linear: input"):
        loss = model(torch.full((2, 4), INF)).sum()
        with failing():
            loss.backward()
        optimizer.step()


def test_it_is_not_raised_over_another_exception(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = made()
    with pytest.raises(KeyError, match="mine"), failing(), DebugActivationOverflow(model):
        model(torch.ones(2, 4))
        raise KeyError("mine")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "LookupError: no slot" in record.getMessage()


# --------------------------------------------------------------------------------------------- under torch's GradScaler


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
    """Two micro-batches a step, and clipping, which refuses non-finite norms once the scale has settled."""
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


@pytest.fixture
def no_wrapper_is_left() -> Iterator[None]:
    gc.collect()  # detectors of earlier tests
    own = {name: vars(GradScaler)[name] for name in ("unscale_", "step")}
    yield
    assert {name: vars(GradScaler)[name] for name in own} == own, "the last detector puts back what it wrapped"


@pytest.mark.few
@pytest.mark.usefixtures("no_wrapper_is_left")
@pytest.mark.parametrize(
    ("train", "name"), [(clipped, "sgd"), (by_hand, "sgd"), *((plain, name) for name in OPTIMIZERS)]
)
def test_an_overflow_once_the_scale_has_settled(train: Callable[..., None], name: str) -> None:
    """Before, there is no alarm; then the scaler leaves out every step, so that no hook of the optimizer is called."""
    model, scaler = Half(), scaler_of()
    optimizer = OPTIMIZERS[name](model.parameters())
    with DebugActivationOverflow(model) as watching:
        train(model, optimizer, scaler, 30)
        assert watching.reports == 0
        assert 2.0 < scaler.get_scale() < 2.0**20, "it has skipped ten steps, and settled"
        torch.nn.init.constant_(model.second.weight, 6e4)
        batches = 2 if train is clipped else 1
        with (
            weights_stay(model),
            pytest.raises(ActivationOverflowError, match=rf"< \[{30 * batches}\] second: Linear: output has infs"),
        ):
            train(model, optimizer, scaler, 5)
        assert watching.batch_number == 31 * batches - 1, "the batches of one step"
    assert hooks_on(model) == 0


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * float("nan")


@pytest.mark.usefixtures("no_wrapper_is_left")
def test_a_gradient_that_is_not_finite_at_any_scale() -> None:
    """The scaler would leave out every step, and halve its scale to zero; at a scale of 1 it is an overflow."""
    half = Half()
    model = Function(lambda x: NanBackward.apply(half(x)), half=half)  # type: ignore[no-untyped-call]
    optimizer, scaler = OPTIMIZERS["sgd"](model.parameters()), scaler_of(scale=2.0**4)
    with pytest.raises(ActivationOverflowError, match=r"The loss scale is only 1, so it is not") as raised:
        with DebugActivationOverflow(model):
            plain(model, optimizer, scaler, 20)
    assert (raised.value.batch, scaler.get_scale()) == (4, 1.0)
    with pytest.raises(ActivationOverflowError, match="second: Linear: output has infs"):
        with DebugActivationOverflow(model) as watching:
            watching.loss_scaled = True  # the loop looks after it
            plain(model, optimizer, scaler, 20)
            torch.nn.init.constant_(half.second.weight, 6e4)
            plain(model, optimizer, scaler, 1)


@pytest.mark.usefixtures("no_wrapper_is_left")
def test_a_scaler_that_is_disabled_excuses_nothing() -> None:
    model = Half()
    scaler = GradScaler("cpu", enabled=False)
    with DebugActivationOverflow(model), pytest.raises(ActivationOverflowError, match="grad_output has nans"):
        scaler.scale(NanBackward.apply(model(BATCH))).backward()  # type: ignore[no-untyped-call]
        scaler.step(OPTIMIZERS["sgd"](model.parameters()))


@pytest.mark.usefixtures("no_wrapper_is_left")
def test_a_scaler_costs_one_read_more_only_where_a_gradient_is_not_finite() -> None:
    def reads(scale: float, *, watched: bool) -> int:
        model = Half()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with DebugActivationOverflow(model) if watched else nullcontext(), HostReads() as counting:
            plain(model, optimizer, scaler_of(scale=scale), 1)
        return counting.count

    assert reads(1.0, watched=True) == reads(1.0, watched=False)
    assert reads(2.0**40, watched=True) == reads(2.0**40, watched=False) + 1
