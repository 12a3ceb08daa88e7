"""In a training loop: when it looks, what that costs, and when it keeps quiet."""

import copy
import gc
import logging
import pickle
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from te_precision_callbacks.overflow import (
    ActivationOverflowError,
    DebugActivationOverflow,
    DetectionFailedError,
    extreme_slots,
    looking,
)
from te_precision_callbacks.overflow.extreme_slots import Slots
from tests.functions import Function
from tests.overflow.models import HostReads, hooks_on, lines_of, mini_t5, step, tokens

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
            for batch in range(30):
                model(input_ids=tokens(batch), labels=tokens(batch)).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if watched:
                assert detector.batch_number == 29
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

    with mock.patch.object(looking, "MOST_SLOTS", 500), DebugActivationOverflow(model):
        before = run(150)
        assert run(500) - before < 1000, "an interval; five hundred batches of frames would be several thousand"


def test_one_copy_a_look_and_nothing_else() -> None:
    model = mini_t5(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = {"input_ids": tokens(), "labels": tokens()}

    def reads(*, watched: bool) -> list[tuple[int, int]]:
        """Reads of elements, and copies, until: forward and backward, the optimizer's step, an evaluation, the end."""
        counting, copies = HostReads(), mock.Mock(side_effect=extreme_slots.to_host)
        counts = []

        def note() -> None:
            counts.append((counting.count, copies.call_count))

        with mock.patch.object(extreme_slots, "to_host", copies):
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


def flat_copy(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer of a copy of all parameters in one tensor, as DeepSpeed ZeRO and Megatron have it."""
    flat = torch.nn.Parameter(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    flat.grad = torch.zeros_like(flat)
    return torch.optim.SGD([flat], lr=0.1)


def test_an_optimizer_of_flat_copies_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = flat_copy(model)
    with DebugActivationOverflow(model):
        for _ in range(30):
            step(model, optimizer)
    (record,) = caplog.records
    assert "call look() of the detector before each of their steps" in record.getMessage()
    caplog.clear()
    with DebugActivationOverflow(model) as watching:
        for _ in range(30):
            model(torch.ones(2, 4)).sum().backward()
            watching.look()
            optimizer.step()
        model(torch.full((1, 4), INF))
        with pytest.raises(ActivationOverflowError):
            watching.look()
    assert [record.levelname for record in caplog.records] == ["ERROR"], "the report alone"


def test_parameters_that_an_optimizer_gets_later() -> None:
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    DebugActivationOverflow(model)
    step(model, optimizer)
    optimizer.add_param_group({"params": list(model.parameters())})
    with pytest.raises(ActivationOverflowError):
        step(model, optimizer, INF)


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure(keyword: bool) -> None:
    """As Lightning steps: forward and backward run inside of the optimizer's step, before the update."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())

    def closure() -> float:
        optimizer.zero_grad()
        model(torch.full((2, 4), INF)).sum().backward()
        return 0.0

    DebugActivationOverflow(model)
    with pytest.raises(ActivationOverflowError, match=r"> \[0\] 0: Linear: input\[0\] has infs"):
        optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_closure_that_is_called_again() -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).pow(2).sum()
        loss.backward()
        calls.append(loss.item())
        return loss  # type: ignore[no-any-return]

    with DebugActivationOverflow(model):
        assert optimizer.step(closure).item() == calls[0] > calls[-1]


@pytest.mark.usefixtures("backward_thread")
def test_gradient_accumulation() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    DebugActivationOverflow(model)
    with pytest.raises(ActivationOverflowError, match=r"> \[2\] 0: Linear: input\[0\] has infs"):
        for value in (1.0, 2.0, INF, 3.0):
            model(torch.full((2, 4), value)).sum().backward()
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_forward_itself_raises(no_gradients: Any) -> None:
    model = mlp()
    with DebugActivationOverflow(model), no_gradients():
        model(torch.ones(1, 4))
        with pytest.raises(ActivationOverflowError, match=r"> \[1\] 0: Linear: input\[0\] has infs") as raised:
            model(torch.full((1, 4), INF))
    assert [line.batch for line in lines_of(raised.value.report)] == [0] * 8 + [1]


def test_an_evaluation_between_micro_batches_is_looked_at_by_itself() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    DebugActivationOverflow(model)
    model(torch.full((1, 4), INF))
    with torch.no_grad():
        model(torch.ones(1, 4))
    with pytest.raises(ActivationOverflowError, match=r"\[0\] 0: Linear: input\[0\] has infs"):
        optimizer.step()


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
        watching.look()


def test_the_graph_is_let_go() -> None:
    model = mlp()
    with DebugActivationOverflow(model):
        output = model(torch.ones(2, 4))
        gone = weakref.ref(output)
        del output
        assert gone() is None


# ----------------------------------------------------------------------------------------------- a detection that fails


INF = float("inf")


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


def failing(method: str = "measure") -> Any:
    return mock.patch.object(Slots, method, side_effect=LookupError("no slot"))


def test_a_gradient_of_none(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = made()
    with DebugActivationOverflow(model, max_frames=1000) as watching:
        for _ in range(3):
            step(model, optimizer)
        assert not caplog.records
        with pytest.raises(ActivationOverflowError, match=r"> \[3\] first: Linear: input\[0\] has infs") as raised:
            step(model, optimizer, INF)
        assert watching.batch_number == 3
    gradients = {line.path for line in lines_of(raised.value.report) if "grad" in line.role}
    assert gradients == {"", "first"}


def test_the_next_step_raises() -> None:
    """Not the hook: other ranks would wait for this one. The weights are not touched; then it watches anew."""
    model, optimizer = made()
    before = copy.deepcopy(model.state_dict())
    with DebugActivationOverflow(model) as watching:
        with failing():
            model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(DetectionFailedError, match=r"on rank 0 \(LookupError: no slot\)") as raised:
            optimizer.step()
        assert isinstance(raised.value.__cause__, LookupError)
        assert "make no DebugActivationOverflow" in str(raised.value)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert watching.reports == 0
        step(model, optimizer)
        with pytest.raises(ActivationOverflowError):
            step(model, optimizer, INF)
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (str(copied), copied.rank, copied.failure) == (str(raised.value), 0, "LookupError: no slot")


LOOKS: dict[str, Callable[[DebugActivationOverflow, torch.optim.Optimizer], object]] = {
    "look": lambda watching, optimizer: watching.look(),
    "close": lambda watching, optimizer: watching.close(),
    "step": lambda watching, optimizer: optimizer.step(),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("method", ["measure", "read"])
def test_wherever_it_fails_and_whoever_looks(look: str, method: str) -> None:
    model, optimizer = made()
    watching = DebugActivationOverflow(model)
    with failing(method), pytest.raises(DetectionFailedError):
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
