"""Scripts that forget calls, keep calls of upstream, or change the model while a session runs."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks import PrecisionDebugCallback, PrecisionDebugger
from te_precision_callbacks.session import InspectSession
from tests.accelerate import loops
from tests.combinations import half
from tests.conftest import Keeper, feature, statistics, warnings_of
from tests.functions import Net
from tests.lightning import models as lightning
from tests.training import observed, train


def chain() -> Net:
    """Layers one after another, the last ones in a list."""

    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        for part in (net.first, net.second, *net.extra):
            x = part(x)
        return x

    return Net(forward, first=te.Linear(32, 32), second=te.Linear(32, 32), extra=[])


# ------------------------------------------------------------------ calls of upstream that were left in


def test_upstreams_calls_that_were_left_in_do_nothing_and_are_said(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    kept_before = debug_api.step
    net = chain()
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        debug_api.initialize("upstream.yaml", log_dir=str(tmp_path / "theirs"))
        debug_api.infer_and_assign_layer_names(net)
        debug_api.set_tensor_reduction_group(None)
        debug_api.initialize_training_step(40)
        for _ in range(3):
            train(session, net, 1)
            debug_api.step()
            kept_before()
    assert keeper.iterations == [0, 1, 2], "each step is counted once"
    assert {row.layer for row in keeper.steps[2]} == {"first", "second"}
    assert not (tmp_path / "theirs").exists()
    calls = ("initialize", "infer_and_assign_layer_names", "set_tensor_reduction_group", "initialize_training_step")
    for name, text in zip((*calls, "step"), warnings_of(caplog), strict=True):
        assert f"calls debug_api.{name}() while the session is running. The call is ignored." in text


@pytest.mark.parametrize(
    ("call", "is_said"),
    [
        (lambda functions, net: functions.infer_and_assign_layer_names(net), False),  # the layers are named anew
        (lambda functions, net: functions.end_debug(), True),
        (lambda functions, net: debug_api.end_debug(), True),
    ],
)
def test_other_calls_lose_nothing(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture, call: Callable[[Any, Net], None], is_said: bool
) -> None:
    """Also of a function that the script has kept from before the session."""
    functions, net = SimpleNamespace(**vars(debug_api)), chain()
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        for _ in range(2):
            call(functions, net)
            train(session, net, 1, before=lambda: call(functions, net))
    assert [{row.layer for row in records} for records in keeper.steps] == [{"first", "second"}] * 2
    words = "calls debug_api.end_debug() while the session is running. The call is ignored."
    assert [words in text for text in warnings_of(caplog)] == [True] * is_said


# ------------------------------------------------------------------ a model that changes


@pytest.mark.parametrize("is_held", [True, False])
def test_a_module_outside_of_the_tree(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_held: bool) -> None:
    net = chain()
    optimizer = None
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        net.extra = [te.Linear(32, 32, name="in_a_list")]
        if is_held:
            optimizer = torch.optim.SGD(net.extra[0].parameters())
        train(session, net)
    (text,) = warnings_of(caplog)
    reason = "trained, but not in the session's model" if is_held else "no optimizer has the parameters"
    assert text.startswith("in_a_list: ")
    assert reason in text
    assert reason in session.findings.summary
    del optimizer


@pytest.mark.parametrize("runs", [True, False])
def test_a_loop_without_any_step(tmp_path: Path, runs: bool) -> None:
    net = chain()
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        for _ in range(3 * runs):
            net(torch.randn(16, 32)).sum().backward()
    assert ("no step was counted" in session.findings.summary) == runs
    assert ("Call session.step()" in session.findings.summary) == runs


def test_a_model_that_has_changed_is_attached_again(tmp_path: Path, keeper: Keeper) -> None:
    """A feature that changes precision acts on new modules, too."""
    net = chain()
    config = {**statistics(), "high": feature("DisableFP8Layer", ["third"])}
    with InspectSession(config, model=net, log_dir=tmp_path, sinks=[keeper], allow_unmatched=True) as session:
        train(session, net, 1)
        net.third, net.first = te.Linear(32, 32), te.Linear(32, 32)
        net.extra = [net.third]
        session.attach(net)
        train(session, net, 1, recipe=DelayedScaling())
        ran = {entry.layer: entry.operands["weight"] for entry in session.precision if entry.gemm == "fprop"}
    assert [{row.layer for row in records} for records in keeper.steps] == [
        {"first", "second"},
        {"first", "second", "third"},
    ]
    assert ran["third"] == "FP32"
    assert "FP8 E4M3" in ran["second"]


def test_a_teacher_that_only_evaluates_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, teacher = chain(), te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        for _ in range(2):
            with torch.no_grad():
                teacher(torch.randn(16, 32))
            train(session, net, 1)
    assert warnings_of(caplog) == []


CONFIG = statistics(freq=100)


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


@pytest.mark.parametrize(
    ("batches", "steps", "optimizers", "warned_at"),
    [(16, 0, 1, [10]), (2, 0, 1, [2]), (1, 0, 1, []), (16, 16, 1, []), (10, 1, 1, []), (6, 6, 3, [])],
    ids=str,
)
def test_a_loop_that_never_steps_is_warned_of_once(
    batches: int, steps: int, optimizers: int, warned_at: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = te.Linear(32, 32)
    made = [torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(optimizers)]
    other = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    with InspectSession(CONFIG, model=net, log_dir=tmp_path) as session:
        for batch in range(batches):
            net(torch.ones(16, 32)).sum().backward()
            for optimizer in (*made, other):
                optimizer.step()
            if batch < steps:
                session.step()
    assert [text.partition(" times")[0] for text in warnings_of(caplog, "without a session step()")] == [
        f"SGD stepped {at}" for at in warned_at
    ]
    assert all(
        "Call session.step() after each optimizer step" in text
        for text in warnings_of(caplog, "without a session step()")
    )


AGAIN, MICRO_BATCHES = (
    "step() is called again after each step of the optimizer",
    "step() is called after each micro-batch",
)


LOOPS = [
    (("train", "nothing"), AGAIN),
    (("train", *["nothing"] * 2), AGAIN),
    (("train", *["nothing"] * 4), AGAIN),
    (("micro-batch", "train"), MICRO_BATCHES),
    ((*["micro-batch"] * 3, "train"), MICRO_BATCHES),
    (("train",), ""),
    (("train", "train", "nothing"), ""),
    (("train", "forward"), ""),  # a rollout before each training
    (("train", "forward", "forward"), ""),
    (("first net", "second net"), ""),  # a GAN
]


@pytest.mark.parametrize(("loop", "set_to_none"), half(LOOPS, [True, False]), ids=str)
def test_a_loop_that_steps_too_often(
    loop: tuple[tuple[str, ...], str], set_to_none: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds, warns = loop
    nets = torch.nn.ModuleList([te.Linear(32, 32), te.Linear(32, 32)])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with InspectSession(CONFIG, model=nets, log_dir=tmp_path) as session:
        for batch in range(4 * len(kinds) + 1):
            kind = kinds[batch % len(kinds)]
            if kind != "nothing":
                which = kind == "second net"
                with te.autocast():
                    out = nets[which](torch.ones(16, 32))
                if kind != "forward":
                    out.sum().backward()
                if kind in ("train", "first net", "second net"):
                    optimizers[which].step()
                    optimizers[which].zero_grad(set_to_none=set_to_none)
            session.step()
    results = [text for text in caplog.messages if text.startswith("step() is called")]
    assert [text.partition(":")[0] for text in results] == [warns] * bool(warns)
    assert all(f": {len(kinds)} debug iterations per optimizer step" in text for text in results)
    assert (f", {AGAIN}: " in session.findings.summary) == (warns == AGAIN)


def test_a_forgotten_step_in_accelerate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = loops.prepared(accelerator, loops.Plain(), batches=3)
    with PrecisionDebugger(accelerator, model, CONFIG, log_dir=tmp_path):
        for batch in loader:
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
    (text,) = warnings_of(caplog, "without a session step()")
    assert "SGD stepped 3 times" in text
    assert "Call debugger.step() after each batch" in text


class Manual(lightning.Plain):
    """Steps no optimizer, or torch's own, which Lightning does not count."""

    def __init__(self, *, steps: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = steps

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).pow(2).mean())
        if self.steps:
            optimizer.optimizer.step()


@pytest.mark.parametrize("steps", [False, True])
def test_a_lightning_module_without_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: bool) -> None:
    callback = PrecisionDebugCallback(CONFIG, log_dir=tmp_path)
    lightning.trainer(tmp_path, callbacks=[callback]).fit(Manual(steps=steps), lightning.loader(3))
    text = "".join(warnings_of(caplog, "without a session step()")) if steps else callback.session.findings.summary
    assert steps or "no step was counted" in text
    assert "step the optimizers from self.optimizers()" in text


def test_a_model_that_is_trained_in_evaluation_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = te.Linear(32, 32).eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = observed(tmp_path, CONFIG, net=net, steps=2, optimizers=optimizer)
    assert not session.coverage().macs()
    (text,) = warnings_of(caplog)
    assert text.startswith("In step 0 the optimizer steps, but all Transformer Engine layers are in evaluation mode")
    assert "call model.train() before the training" in text
