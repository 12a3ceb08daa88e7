"""Planned GEMMs: a session measures a GEMM like an earlier one by its plan, with the results that listeners have."""

import functools
import gc
import random
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from hypothesis import given
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.kernels.columns import Again, Pending
from te_precision_callbacks.instrumentation.planned import GemmPlans
from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.conftest import Keeper
from tests.instrumentation.gemm_spy import (
    BF16,
    BLACKWELL,
    CHECKPOINTS,
    GEMM_OF,
    INSIDE,
    MODULES,
    RECIPES,
    ROWS,
    at_the_entries,
)
from tests.instrumentation.test_fused import EVERY, OF_QUANTIZED, OF_TENSOR, logging_of, tensors_of
from tests.properties import examples, randoms

pytestmark = pytest.mark.usefixtures("any_gpu")

Net = torch.nn.Module
Step = Callable[[int, Net], None]


def statistics_of(module: str, recipe: str, **options: int) -> dict[str, Any]:
    has = tensors_of(module)
    config = logging_of(has, OF_TENSOR, "LogTensorStats")
    if recipe != "none":
        operands = {end: [tensor for tensor in tensors if tensor in EVERY[:3]] for end, tensors in has.items()}
        config |= logging_of(operands, OF_QUANTIZED, "LogFp8TensorStats", **options)
    return config


def plans_of(session: InspectSession) -> GemmPlans:
    run: Any = session._run
    plans: GemmPlans = run.hooks.plans
    return plans


class Trained:
    """Everything that a training and its session have to show, and the session's plans."""

    def __init__(self, module: str, config: Any, steps: int, step: Step, *, planned: bool) -> None:
        torch.manual_seed(0)
        FP8GlobalStateManager.reset()
        self.net = MODULES[module][0]()
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        keeper = Keeper()
        options: dict[str, Any] = {"sinks": [keeper], "observe": "fused", "records": "off", "strict": True}
        with (
            pytest.MonkeyPatch.context() as patch,
            TemporaryDirectory() as folder,
            InspectSession(config, model=self.net, log_dir=Path(folder), **options) as session,
        ):
            if not planned:
                patch.setattr(GemmPlans, "add_module", lambda *_: None)
            for number in range(steps):
                step(number, self.net)
                optimizer.step()
                optimizer.zero_grad()
                session.step()
            self.plans = plans_of(session)
            order = [(info.name, info.exec_fwd, info.exec_bwd) for info in session.layers]
        rows = [sorted(repr(row) for row in records) for records in keeper.steps]
        facts = [str(session.precision), str(session.coverage()), [str(finding) for finding in session.findings]]
        weights = [parameter.detach().clone() for parameter in self.net.parameters()]
        self.shown = repr((rows, order, facts, [weight.tolist() for weight in weights]))


def forward(net: Net, recipe: Any, rows: int = ROWS, checkpoint: str = "none", *, needs: bool = True) -> torch.Tensor:
    is_layer = isinstance(net, te.TransformerLayer)
    x = torch.randn((rows, 2, 32) if is_layer else (rows, 32), dtype=BF16, requires_grad=needs)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return CHECKPOINTS[checkpoint](net, x)


def train(net: Net, recipe: Any, rows: int = ROWS, checkpoint: str = "none", *, needs: bool = True) -> None:
    out = forward(net, recipe, rows, checkpoint, needs=needs)
    # torch's checkpoints recompute in the autocast of the backward.
    with te.autocast(enabled=recipe is not None and checkpoint in INSIDE, recipe=recipe):
        out.float().pow(2).mean().backward()


def both(module: str, config: Any, steps: int, step: Step) -> GemmPlans:
    planned, by_events = (Trained(module, config, steps, step, planned=planned) for planned in (True, False))
    assert planned.shown == by_events.shown
    assert not by_events.plans.followed
    return planned.plans


NETS = ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"]
SHOWN = ["none", "delayed", "current", "block", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("recipe", SHOWN)
def test_planned_results_are_those_of_events(recipe: str) -> None:
    """Of the layer that has all other modules of ``NETS`` in it."""
    stand_for((10, 0) if recipe in BLACKWELL else (9, 0))
    made = RECIPES[recipe]()
    config = statistics_of("TransformerLayer", recipe)
    plans = both("TransformerLayer", config, 4, lambda number, net: train(net, made))
    assert plans.followed >= 2 * plans.declined["new"] > 0
    assert set(plans.declined) == {"new"}


@pytest.mark.slow
@given(draw=randoms())
@examples(8, shrink=False)
def test_planned_results_are_those_of_events_in_any_training(draw: random.Random) -> None:
    with any_capability():
        module, recipe = draw.choice(NETS), draw.choice(SHOWN)
        stand_for((10, 0) if recipe in BLACKWELL else (9, 0))
        made = RECIPES[recipe]()
        steps = draw.randint(3, 6)
        of_steps = [
            [
                (
                    draw.choice([made, made, None]),
                    draw.choice([ROWS, ROWS, 2 * ROWS]),
                    draw.choice(["none", "none", *CHECKPOINTS]),
                    draw.choice([True, True, False]),
                )
                for _ in range(draw.choice([1, 1, 2]))
            ]
            for _ in range(steps)
        ]
        config = statistics_of(module, recipe, freq=draw.randint(1, 2))

        def step(number: int, net: Net) -> None:
            for micro_batch, rows, checkpoint, needs in of_steps[number]:
                needs |= checkpoint != "none"  # a reentrant one has no backward otherwise
                train(net, micro_batch, rows, checkpoint, needs=needs)

        both(module, config, steps, step)


def test_plans_fit_any_number_of_rows() -> None:
    made, rows = RECIPES["delayed"](), (ROWS, ROWS, 2 * ROWS, 2 * ROWS, 3 * ROWS, 3 * ROWS)
    plans = both(
        "LayerNormMLP", statistics_of("LayerNormMLP", "delayed"), 6, lambda number, net: train(net, made, rows[number])
    )
    assert (plans.followed, plans.declined) == (5 * 6, Counter(new=6))


def test_an_empty_tensor_goes_to_the_listeners() -> None:
    rows = (ROWS, ROWS, 0, 0, ROWS)
    plans = both("Linear", statistics_of("Linear", "none"), 5, lambda number, net: train(net, None, rows[number]))
    assert plans.declined.keys() == {"new", "empty"}
    assert plans.followed >= 3


def test_another_dtype_has_another_plan() -> None:
    def step(number: int, net: Net) -> None:
        if number in (2, 4):
            net.to(torch.float32 if number == 2 else BF16)
        x = torch.randn(ROWS, 32, dtype=torch.float32 if number in (2, 3) else BF16)
        net(x).float().pow(2).mean().backward()

    plans = both("Linear", statistics_of("Linear", "none"), 6, step)
    assert (plans.followed, plans.declined) == (4 * 2, Counter(new=2, dtype=2))


def test_another_recipe_has_another_plan() -> None:
    made = [RECIPES[name]() for name in ("delayed", "delayed", "current", "delayed", "current", "none", "delayed")]
    plans = both("Linear", statistics_of("Linear", "delayed"), 7, lambda number, net: train(net, made[number]))
    assert (plans.followed, plans.declined) == (4 * 3, Counter(new=3, recipe=6))


def test_other_features_have_another_plan() -> None:
    made = RECIPES["current"]()
    config = statistics_of("Linear", "current", freq=2)
    plans = both("Linear", config, 6, lambda number, net: train(net, made))
    assert (plans.followed, plans.declined) == (4 * 3, Counter(new=3, features=3))


def test_another_dtype_of_the_result_has_another_plan() -> None:
    """Operands in FP8 are the same."""
    made = RECIPES["current"]()

    def step(number: int, net: Net) -> None:
        x = torch.randn(ROWS, 32, dtype=BF16, requires_grad=True)
        dtype = torch.float16 if 3 <= number < 8 else BF16
        with torch.autocast("cpu", dtype=dtype), te.autocast(enabled=True, recipe=made):
            net(x).float().pow(2).mean().backward()

    plans = both("Linear", statistics_of("Linear", "current"), 10, step)
    assert (plans.followed, plans.declined) == (7 * 3, Counter(new=3, dtype=2 * 3))


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_the_weight_is_measured_in_the_first_micro_batch(recipe: str) -> None:
    stand_for((10, 0))
    made = RECIPES[recipe]()

    def step(number: int, net: Net) -> None:
        for _ in range(3):
            train(net, made)

    plans = both("LayerNormLinear", statistics_of("LayerNormLinear", recipe), 3, step)
    assert plans.declined == Counter(new=3)
    assert plans.followed == 3 * 9 - 3


def test_the_same_tensors_are_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton's launches, which the first micro-batch has for the weight too."""
    made, counts = RECIPES["delayed"](), Counter[int]()

    def again(first: Sequence[Pending]) -> Again:
        expected = [(one.values.dtype, one.codes is None, one.places) for one in first]

        def launch(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor, stream: int) -> list[Pending]:
            assert [(one.values.dtype, one.codes is None, one.places) for one in pending] == expected
            counts[len(pending)] += 1
            kernels.add(pending, sums, maxima)
            return []

        return launch

    def step(number: int, net: Net) -> None:
        for _ in range(2):
            train(net, made)

    monkeypatch.setattr(kernels, "again", again)
    plans = both("LayerNormMLP", statistics_of("LayerNormMLP", "delayed"), 4, step)
    assert sum(counts.values()) == plans.followed - 8, "all but the first of 6 GEMMs, and of 2 without the weight"
    assert counts.keys() == {1, 2, 3}


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant", "te"])
def test_recomputed_forwards_go_to_the_listeners(checkpoint: str) -> None:
    made = RECIPES["current"]()

    def step(number: int, net: Net) -> None:
        with te.autocast(enabled=True, recipe=made):
            x = torch.randn(ROWS, 32, dtype=BF16, requires_grad=True)
            CHECKPOINTS[checkpoint](net, x).float().pow(2).mean().backward()

    plans = both("LayerNormMLP", statistics_of("LayerNormMLP", "current"), 4, step)
    assert plans.followed >= 2 * plans.declined["new"] > 0
    assert set(plans.declined) == {"new"}


def test_a_forward_recomputed_in_its_own_backward_goes_to_the_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RECIPES["current"]()
    build = functools.partial(te.LayerNormMLP, 32, 64, params_dtype=BF16, checkpoint=True)
    monkeypatch.setitem(MODULES, "checkpointed", (build, {}, {}))
    plans = both("checkpointed", statistics_of("LayerNormMLP", "current"), 4, lambda number, net: train(net, made))
    assert plans.followed >= 2 * plans.declined["new"] > 0
    assert set(plans.declined) == {"new", "recomputed"}


def test_evaluation_and_frozen_weights_between_steps() -> None:
    made = RECIPES["delayed"]()

    def step(number: int, net: Net) -> None:
        with torch.no_grad():
            forward(net, made)
        for parameter in net.parameters():
            parameter.requires_grad_(number not in (3, 4) or parameter.ndim == 1)
        train(net, made)

    plans = both("LayerNormLinear", statistics_of("LayerNormLinear", "delayed"), 6, step)
    assert plans.followed == 3 + 3 + 2 + 2 + 3


def test_a_step_that_failed_leaves_plans_as_they_were() -> None:
    """A failed loss, and a failed measurement with the same report as a GEMM without a plan."""
    made = RECIPES["delayed"]()

    def step(number: int, net: Net) -> None:
        if number == 2:
            forward(net, made)
        train(net, made)

    plans = both("LayerNormMLP", statistics_of("LayerNormMLP", "delayed"), 4, step)
    assert plans.declined == Counter(new=6)
    reports = [failures(planned=planned) for planned in (True, False)]
    assert reports[0] == reports[1] != []


def failures(*, planned: bool) -> list[Any]:
    torch.manual_seed(0)
    net, keeper, made = MODULES["Linear"][0](), Keeper(), RECIPES["current"]()
    config = statistics_of("Linear", "current")
    options: dict[str, Any] = {"sinks": [keeper], "observe": "fused", "records": "off"}
    with (
        pytest.MonkeyPatch.context() as patch,
        TemporaryDirectory() as folder,
        InspectSession(config, model=net, log_dir=Path(folder), **options) as session,
    ):
        if not planned:
            patch.setattr(GemmPlans, "add_module", lambda *_: None)
        for number in range(4):
            with pytest.MonkeyPatch.context() as failing:
                if number == 2:
                    failing.setattr(kernels, "add", fail)
                train(net, made)
            session.step()
        assert plans_of(session).followed == (9 if planned else 0)
        shown = [sorted(repr(row) for row in records) for records in keeper.steps]
        run: Any = session._run
        return [shown, run.context.failures.take()]


def fail(*_: Any) -> None:
    raise RuntimeError("the kernel failed")


def test_threads_share_plans() -> None:
    made = RECIPES["current"]()

    def run(*, planned: bool) -> list[Any]:
        torch.manual_seed(0)
        net, keeper = torch.nn.Sequential(*(te.Linear(32, 32, params_dtype=BF16) for _ in range(2))), Keeper()
        inputs = [torch.randn(ROWS, 32, dtype=BF16) for _ in range(2)]
        options: dict[str, Any] = {"sinks": [keeper], "observe": "fused", "records": "off", "strict": True}
        config = logging_of({"0": EVERY, "1": EVERY}, OF_TENSOR, "LogTensorStats")

        def half(number: int) -> None:
            with te.autocast(enabled=True, recipe=made):
                out = net[number](inputs[number])
            out.float().pow(2).mean().backward()

        with TemporaryDirectory() as folder, InspectSession(config, model=net, log_dir=Path(folder), **options) as s:
            for step in range(5):
                threads = [threading.Thread(target=half, args=(number,)) for number in range(2)]
                for thread in threads:
                    thread.start()
                    if step < 3 or not planned:
                        thread.join()
                for thread in threads:
                    thread.join()
                s.step()
            assert not planned or plans_of(s).followed >= 2 * 2 * 2
        return [sorted(repr(row) for row in records) for records in keeper.steps]

    assert run(planned=True) == run(planned=False)


def test_nothing_of_a_step_is_kept() -> None:
    made = RECIPES["delayed"]()
    kept: list[weakref.ref[torch.Tensor]] = []

    def note(a: Any, transa: bool, b: Any, transb: bool, result: Any) -> None:
        ends = (a, b) if GEMM_OF[transa, transb] == "wgrad" else (b,)
        buffers = [tensor._transpose if tensor._data is None else tensor._data for tensor in ends]
        kept.extend(map(weakref.ref, buffers))

    def step(number: int, net: Net) -> None:
        gc.collect()
        gc.disable()
        with at_the_entries(note):
            train(net, made)

    try:
        trained = Trained("LayerNormLinear", statistics_of("LayerNormLinear", "delayed"), 3, step, planned=True)
    finally:
        gc.enable()
    assert trained.plans.followed == 2 * 3
    assert len(kept) == 3 * 4
    assert [reference for reference in kept if reference() is not None] == []


FUNCTIONS_PER_TENSOR = 17
"""Most Python functions from a layer's forward to the launch of the kernel, for each observed tensor, beside the
queries of features, which are as many for any number of layers."""

BEFORE_THE_LAUNCH = re.compile(
    "/te_precision_callbacks/(instrumentation|engine/engine|engine/slots|coverage/step_table|layers|session)"
    "(?!/parameters)"
)


def test_functions_per_tensor() -> None:
    made, calls = RECIPES["delayed"](), Counter[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and BEFORE_THE_LAUNCH.search(frame.f_code.co_filename):
            calls[f"{frame.f_code.co_name} {frame.f_code.co_firstlineno}"] += 1

    def step(number: int, net: Net) -> None:
        calls.clear()
        sys.setprofile(count)
        train(net, made)
        sys.setprofile(None)

    config = statistics_of("TransformerLayer", "delayed")
    trained = Trained("TransformerLayer", config, 3, step, planned=True)
    assert trained.plans.followed
    assert sum(calls.values()) < FUNCTIONS_PER_TENSOR * 22, calls.most_common()
