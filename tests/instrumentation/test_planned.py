"""Prepared launches: a session measures a GEMM like an earlier one by its launch, with the results that events have."""

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
from te_precision_callbacks.engine.kernels.columns import Pending, Repeat
from te_precision_callbacks.instrumentation.statistics import StatisticsConsumer
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


def consumer_of(session: InspectSession) -> StatisticsConsumer:
    run: Any = session._run
    consumer: StatisticsConsumer = run.hooks.statistics
    return consumer


class Trained:
    """Everything that a training and its session have to show, and the session's prepared launches."""

    def __init__(self, module: str, config: Any, steps: int, step: Step, *, prepared: bool) -> None:
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
            if not prepared:
                patch.setattr(StatisticsConsumer, "repeat", lambda *_: ())
            for number in range(steps):
                step(number, self.net)
                optimizer.step()
                optimizer.zero_grad()
                session.step()
            consumer = consumer_of(session)
            self.repeated = consumer.repeated
            self.prepared = len(consumer.prepared)
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


def both(module: str, config: Any, steps: int, step: Step) -> tuple[int, int]:
    """The numbers of GEMMs that prepared launches have measured, and of these launches."""
    prepared, by_events = (Trained(module, config, steps, step, prepared=prepared) for prepared in (True, False))
    assert prepared.shown == by_events.shown
    assert (by_events.repeated, by_events.prepared) == (0, 0)
    return prepared.repeated, prepared.prepared


NETS = ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"]
SHOWN = ["none", "delayed", "current", "block", "mxfp8", "nvfp4"]
SELECTED = {
    "errors": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "transformer_engine": {"LogGemmError": {"enabled": True, "gemms": ["wgrad"], "freq": 2}},
    }
}
IN_TURN = ["delayed", "delayed", "current", "delayed", "current", "none", "delayed"]
LAUNCHES: dict[str, tuple[str, dict[str, Any], list[tuple[str, int]], tuple[int, int]]] = {
    # module, config, recipe and rows of each step, GEMMs by prepared launches and these launches
    "any number of rows": (
        "LayerNormMLP",
        statistics_of("LayerNormMLP", "delayed"),
        [("delayed", rows) for rows in (ROWS, ROWS, 2 * ROWS, 2 * ROWS, 3 * ROWS, 3 * ROWS)],
        (5 * 6, 6),
    ),
    # The wgrad is not empty.
    "an empty tensor goes by events": (
        "Linear",
        statistics_of("Linear", "none"),
        [("none", rows) for rows in (ROWS, ROWS, 0, 0, ROWS)],
        (3 + 1 + 1 + 3, 3),
    ),
    # Without a recipe, its quantization is simulated.
    "another recipe": ("Linear", statistics_of("Linear", "delayed"), [(name, ROWS) for name in IN_TURN], (4 * 3, 7)),
    "other features": ("Linear", statistics_of("Linear", "current", freq=2), [("current", ROWS)] * 6, (4 * 3, 6)),
    "a GEMM that a feature selects has events in its steps only": (
        "Linear",
        statistics_of("Linear", "current") | SELECTED,
        [("current", ROWS)] * 6,
        (2 * 3, 3),
    ),
    # Of the layer that has all other modules of ``NETS`` in it.
    **{
        recipe: (
            "TransformerLayer",
            statistics_of("TransformerLayer", recipe),
            [(recipe, ROWS)] * 3,
            (2 * 12, 12),
        )
        for recipe in SHOWN
    },
}
FURTHER = {"delayed", "current", "mxfp8"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended if name in FURTHER else ()) for name in LAUNCHES]
)
def test_results_are_those_of_events(name: str) -> None:
    module, config, steps, expected = LAUNCHES[name]
    stand_for((10, 0) if name in BLACKWELL else (9, 0))
    made = {recipe: RECIPES[recipe]() for recipe, _ in steps}

    def step(number: int, net: Net) -> None:
        recipe, rows = steps[number]
        train(net, made[recipe], rows)

    assert both(module, config, len(steps), step) == expected


@pytest.mark.extended
@pytest.mark.slow
@given(draw=randoms())
@examples(5, shrink=False)
def test_results_are_those_of_events_in_any_training(draw: random.Random) -> None:
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


def test_another_dtype_has_another_launch() -> None:
    def step(number: int, net: Net) -> None:
        if number in (2, 4):
            net.to(torch.float32 if number == 2 else BF16)
        x = torch.randn(ROWS, 32, dtype=torch.float32 if number in (2, 3) else BF16)
        net(x).float().pow(2).mean().backward()

    assert both("Linear", statistics_of("Linear", "none"), 6, step) == (4 * 2, 4)


def test_another_dtype_of_the_result_has_another_launch() -> None:
    """Operands in FP8 are the same."""
    made = RECIPES["current"]()

    def step(number: int, net: Net) -> None:
        x = torch.randn(ROWS, 32, dtype=BF16, requires_grad=True)
        dtype = torch.float16 if 3 <= number < 8 else BF16
        with torch.autocast("cpu", dtype=dtype), te.autocast(enabled=True, recipe=made):
            net(x).float().pow(2).mean().backward()

    assert both("Linear", statistics_of("Linear", "current"), 10, step) == (8 * 3, 6)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_the_weight_is_measured_in_the_first_micro_batch(recipe: str) -> None:
    stand_for((10, 0))
    made = RECIPES[recipe]()

    def step(number: int, net: Net) -> None:
        for _ in range(3):
            train(net, made)

    config = statistics_of("LayerNormLinear", recipe)
    assert both("LayerNormLinear", config, 3, step) == (3 * 9 - 3, 3)


def test_the_same_tensors_are_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton's launches, which the first micro-batch has for the weight too."""
    made, counts, add = RECIPES["delayed"](), Counter[int](), kernels.add

    def add_and_repeat(first: Sequence[Pending], *vectors: torch.Tensor) -> Repeat:
        expected = [(one.values.dtype, one.codes is None, one.places) for one in first]

        def repeat(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor, stream: int) -> list[Pending]:
            assert [(one.values.dtype, one.codes is None, one.places) for one in pending] == expected
            counts[len(pending)] += 1
            add(pending, sums, maxima)
            return []

        add(first, *vectors)
        return repeat

    def step(number: int, net: Net) -> None:
        for _ in range(2):
            train(net, made)

    monkeypatch.setattr(kernels, "add", add_and_repeat)
    repeated, _ = both("LayerNormMLP", statistics_of("LayerNormMLP", "delayed"), 4, step)
    # Twice, since events repeat launches too. All but the first of 6 GEMMs, and of 2 without the weight.
    assert sum(counts.values()) >= repeated - 2
    assert counts.keys() == {1, 2, 3}


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant", "te"])
def test_recomputed_forwards_go_by_events(checkpoint: str) -> None:
    made = RECIPES["current"]()

    def step(number: int, net: Net) -> None:
        with te.autocast(enabled=True, recipe=made):
            x = torch.randn(ROWS, 32, dtype=BF16, requires_grad=True)
            CHECKPOINTS[checkpoint](net, x).float().pow(2).mean().backward()

    repeated, prepared = both("LayerNormMLP", statistics_of("LayerNormMLP", "current"), 4, step)
    assert repeated >= 2 * prepared > 0


def test_a_forward_recomputed_in_its_own_backward_goes_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RECIPES["current"]()
    build = functools.partial(te.LayerNormMLP, 32, 64, params_dtype=BF16, checkpoint=True)
    monkeypatch.setitem(MODULES, "checkpointed", (build, {}, {}))
    repeated, prepared = both(
        "checkpointed", statistics_of("LayerNormMLP", "current"), 4, lambda number, net: train(net, made)
    )
    assert repeated >= 2 * prepared > 0


def test_evaluation_and_frozen_weights_between_steps() -> None:
    made = RECIPES["delayed"]()

    def step(number: int, net: Net) -> None:
        with torch.no_grad():
            forward(net, made)
        for parameter in net.parameters():
            parameter.requires_grad_(number not in (3, 4) or parameter.ndim == 1)
        train(net, made)

    repeated, _ = both("LayerNormLinear", statistics_of("LayerNormLinear", "delayed"), 6, step)
    assert repeated == 3 + 3 + 2 + 2 + 3


def test_a_step_that_failed_leaves_launches_as_they_were() -> None:
    """A failed loss, and a failed measurement with the same report as an event."""
    made = RECIPES["delayed"]()

    def step(number: int, net: Net) -> None:
        if number == 2:
            forward(net, made)
        train(net, made)

    _, prepared = both("LayerNormMLP", statistics_of("LayerNormMLP", "delayed"), 4, step)
    assert prepared == 6
    reports = [failures(prepared=prepared) for prepared in (True, False)]
    assert reports[0] == reports[1] != []


def failures(*, prepared: bool) -> list[Any]:
    torch.manual_seed(0)
    net, keeper, made = MODULES["Linear"][0](), Keeper(), RECIPES["current"]()
    config = statistics_of("Linear", "current")
    options: dict[str, Any] = {"sinks": [keeper], "observe": "fused", "records": "off"}
    with (
        pytest.MonkeyPatch.context() as patch,
        TemporaryDirectory() as folder,
        InspectSession(config, model=net, log_dir=Path(folder), **options) as session,
    ):
        if not prepared:
            patch.setattr(StatisticsConsumer, "repeat", lambda *_: ())
        for number in range(4):
            with pytest.MonkeyPatch.context() as failing:
                if number == 2:
                    failing.setattr(kernels, "add", fail)
                train(net, made)
            session.step()
        assert consumer_of(session).repeated == (9 if prepared else 0)
        shown = [sorted(repr(row) for row in records) for records in keeper.steps]
        run: Any = session._run
        return [shown, run.context.failures.take()]


def fail(*_: Any) -> None:
    raise RuntimeError("the kernel failed")


def test_threads_share_launches() -> None:
    made = RECIPES["current"]()

    def run(*, prepared: bool) -> list[Any]:
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
                    if step < 3 or not prepared:
                        thread.join()
                for thread in threads:
                    thread.join()
                s.step()
            assert not prepared or consumer_of(s).repeated >= 2 * 2 * 2
        return [sorted(repr(row) for row in records) for records in keeper.steps]

    assert run(prepared=True) == run(prepared=False)


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
        trained = Trained("LayerNormLinear", statistics_of("LayerNormLinear", "delayed"), 3, step, prepared=True)
    finally:
        gc.enable()
    assert trained.repeated == 2 * 3
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
    trained = Trained("TransformerLayer", config, 3, step, prepared=True)
    assert trained.repeated
    assert sum(calls.values()) < FUNCTIONS_PER_TENSOR * 22, calls.most_common()
