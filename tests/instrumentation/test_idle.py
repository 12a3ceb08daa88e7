"""Off means off: where nothing is due, nothing of a session is called inside of a step, but a note of each region of
autocast, and the evidence of coverage. Its cost on the host there, and at its end, hardly grows with the model.
"""

import copy
import gc
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import nvdlfw_inspect.base
import pytest
import torch
import transformer_engine.pytorch as te
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_engine.pytorch.module import linear

import te_precision_callbacks
from te_precision_callbacks.parameters.watch import is_due
from te_precision_callbacks.session import InspectSession, facts
from tests.conftest import Keeper, feature, statistics

HERE = str(Path(te_precision_callbacks.__path__[0]))
FEATURES = str(Path(HERE).parent / "features")
NOTES = f"{HERE}/coverage/", f"{HERE}/layers/forwards.py"
BACKEND = tuple(
    f"{HERE}/{part}"
    for part in ("reference/", "base/numerics/", "base/vocabulary.py", "te/tensors.py", "te/gemm_shapes.py")
)
INSPECT = str(Path(nvdlfw_inspect.base.__file__).parent)


@pytest.fixture(autouse=True)
def facts_that_never_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts' pause after a collection depends on the time that it took: a count of calls must not."""
    monkeypatch.setattr(facts, "MOST_SHARE", math.inf)


@contextmanager
def calls() -> Iterator[Counter[str]]:
    """Counts the calls of functions of nvidia-dlfw-inspect and of this package, but for the reference backend and the
    notes of regions of autocast and of the calls of the model."""
    counted: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        own = file.startswith((HERE, FEATURES)) and not file.startswith((*BACKEND, *NOTES))
        own = own and frame.f_code.co_name not in ("<lambda>", "autocast_enter")  # a lambda: is the session paused?
        if event == "call" and (own or file.startswith(INSPECT)):
            counted[frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield counted
    finally:
        sys.setprofile(before)


def run(net: torch.nn.Module, *, fp8: bool = True) -> None:
    with te.autocast(enabled=fp8):
        out = net(torch.randn(16, 32, requires_grad=True))
    out.sum().backward()


def test_steps_in_which_nothing_is_due(tmp_path: Path, keeper: Keeper) -> None:
    net = te.LayerNormLinear(32, 32)
    options: dict[str, Any] = {"log_dir": tmp_path, "sinks": [keeper], "every_step": False}
    with InspectSession(statistics(freq=3), model=net, **options) as session:
        counts = []
        for _ in range(7):
            with calls() as counted:
                run(net)
            counts.append(sum(counted.values()))
            session.step()
    assert keeper.iterations == [0, 3, 6]
    assert [bool(count) for count in counts] == [True, False, False, True, False, False, True]


def test_layers_without_features(tmp_path: Path) -> None:
    watched, other = te.Linear(32, 32), te.LayerNormMLP(32, 64)
    net = torch.nn.Sequential(watched, other)
    with InspectSession(statistics(layers=["0"]), model=net, log_dir=tmp_path, every_step=False) as session:
        for _ in range(2):
            run(net)
            session.step()
        with calls() as counted:
            run(other)
        of_the_tap = {"GemmTap", "EveryStep", "Running", "UnfusedTensors", "recipe_in_use"}
        assert {name.partition(".")[0] for name in counted} <= of_the_tap, "the GEMMs of layer 0 are seen"
        with calls() as counted:
            run(watched)
        assert counted["StatisticsConsumer.repeat"] or counted["repeat"], "what is counted can be seen"


def test_a_precision_feature_acts_in_every_step(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    config = {"s": feature("FakeQuant", ["all"], gemms=["fprop"], tensors=["weight"], quant_format="FP8E5M2")}
    x = torch.randn(16, 32)
    plain = net(x)
    with InspectSession(config, model=net, log_dir=tmp_path) as session:
        for _ in range(3):
            assert not torch.equal(net(x), plain)
            session.step()
    assert torch.equal(net(x), plain)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_copy_of_a_watched_module_is_not_watched(tmp_path: Path, keeper: Keeper, steps: int) -> None:
    """As an exponential moving average of the weights takes one."""
    net = te.LayerNormLinear(32, 32)
    with InspectSession(statistics(freq=2), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        for _ in range(steps):
            run(net)
            session.step()
        twin = copy.deepcopy(net)
        assert twin.is_debug_iter.args[0] is twin
        with torch.no_grad():
            twin(torch.ones(16, 32))
        run(net)
    run(twin)
    assert "is_debug_iter" not in net.__dict__


FEW, MANY, MOST = 16, 24, 56

MOST_AT_THE_END = 340
"""The most calls of Python and of C in ``stop()`` for a layer with statistics of three tensors."""


class Stack(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(te.Linear(16, 16) for _ in range(count))
        self.in_high_precision: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            with te.autocast(enabled=False) if number in self.in_high_precision else nullcontext():
                x = layer(x)
        return x


@contextmanager
def called_functions() -> Iterator[list[str]]:
    names: list[str] = []

    def profile(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_call"):
            names.append(frame.f_code.co_qualname if event == "call" else called.__name__)

    gc.collect()
    gc.disable()  # callbacks of objects that earlier tests left would be counted
    sys.setprofile(profile)
    try:
        yield names
    finally:
        sys.setprofile(None)
        gc.enable()


def train(net: torch.nn.Module) -> None:
    with te.autocast(enabled=True):
        out = net(torch.randn(16, 16))
    out.sum().backward()


def session_of(net: torch.nn.Module, folder: Path, freq: int = 1000, *, every_step: bool = True) -> InspectSession:
    options: dict[str, Any] = {"log_dir": folder, "records": "off", "every_step": every_step}
    return InspectSession(statistics(freq=freq), model=net, **options)


def calls_of(folder: Path, count: int) -> tuple[int, int]:
    """The most calls in a step without a forward, and the calls in ``stop()``.

    Without the few steps that are followed by another listing of the model's parameters.
    """
    net = Stack(count)
    session = session_of(net, folder).start()
    for _ in range(2):
        train(net)
        session.step()
    session.step()  # without a forward: other autocast regions than before
    counts = []
    for _ in range(6):
        samples_parameters = is_due(session.iteration)
        with called_functions() as result:
            session.step()
        if not samples_parameters:
            counts.append(len(result))
    with called_functions() as result:
        session.stop()
    return max(counts, default=0), len(result)


def test_the_calls_of_a_step_and_of_the_end_hardly_grow_with_the_model(tmp_path: Path) -> None:
    """Twenty thousand layers end in seconds."""
    calls_of(tmp_path / "first", 1)  # imports the modules that the end of a session imports
    few, many = calls_of(tmp_path / "few", FEW), calls_of(tmp_path / "many", MOST)
    assert many[0] == few[0]
    assert (many[1] - few[1]) / (MOST - FEW) < MOST_AT_THE_END


@pytest.mark.parametrize("every_step", [False, True])
def test_a_forward_calls_hardly_more_than_without_a_session(tmp_path: Path, every_step: bool) -> None:
    """For the evidence of coverage a few calls for each layer, and for the model."""
    x = torch.randn(16, 16)

    def forward(net: Stack) -> int:
        with called_functions() as result:
            net(x)
        return len(result)

    more = []
    for count in (2, 4):
        net = Stack(count)
        forward(net)
        without = forward(net)
        with session_of(net, tmp_path / str(count), every_step=every_step) as session:
            for _ in range(2):
                net(x).sum().backward()
                session.step()
            more.append(forward(net) - without)
    few, many = more
    # A te.Linear that torch may compile into a graph calls is_debug_iter of its class.
    of_layer = (9 if linear._linear_op is None else 13) + 81 * every_step  # with calls of C, for two tensors
    assert many - few <= 2 * of_layer
    assert few <= 150 + 2 * 80 * every_step


class Operations(TorchDispatchMode):
    """Counts the operations that compute something: a GPU launches a kernel for each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def test_sampled_weights_take_no_operation_each(tmp_path: Path) -> None:
    """The 60 parameters have two shapes."""
    net = Stack(30)
    optimizer = torch.optim.Adam(net.parameters())
    counts: dict[bool, int] = {}
    with session_of(net, tmp_path) as session:
        for _ in range(6):
            due = is_due(session.iteration)
            train(net)
            with Operations() as counter:
                optimizer.step()
                session.step()
            counts[due] = max(counts.get(due, 0), counter.count) if session.iteration > 1 else 0
    assert 0 < counts[True] - counts[False] < 90


def test_sampled_weights_take_few_calls_each(tmp_path: Path) -> None:
    """In the optimizer's step and at the end of the step, and at the end of the next, which reads the samples."""

    def calls_by_step(count: int) -> list[int]:
        torch.manual_seed(0)  # weights that have hardly changed are sampled on
        net, counts = Stack(count), []
        optimizer = torch.optim.Adam(net.parameters())
        with session_of(net, tmp_path / str(count)) as session:
            for _ in range(11):
                train(net)
                with called_functions() as result:
                    optimizer.step()
                    optimizer.zero_grad()
                    session.step()
                counts.append(len(result))
        return counts

    few, many = calls_by_step(FEW), calls_by_step(MANY)
    before, sampled, after, idle = [(many[step] - few[step]) / (MANY - FEW) for step in (7, 8, 9, 10)]
    assert [is_due(step) for step in (7, 8, 9, 10)] == [False, True, False, False]
    assert sampled - before < 2 * 88, "a layer has two parameters"
    assert 0 < after - idle < 2 * 13


# ------------------------------------------------------------------ observations nevertheless


def in_high_precision(session: InspectSession, layer: str) -> list[int]:
    return [
        at
        for at in range(session.iteration)
        for entry in session.precision(at=at)
        if (entry.layer, entry.gemm) == (layer, "fprop") and entry.operands["weight"] == "FP32"
    ]


def test_a_layer_in_an_autocast_region_of_its_own_and_a_frozen_one_are_seen_at_once(tmp_path: Path) -> None:
    net = Stack(MANY)
    with session_of(net, tmp_path) as session:
        for step in range(6):
            net.in_high_precision = {MANY - 1} if step >= 3 else set()
            net.layers[MANY - 2].requires_grad_(step < 3)
            train(net)
            session.step()
    assert in_high_precision(session, f"layers.{MANY - 1}") == [3, 4, 5]
    assert in_high_precision(session, "layers.0") == []
    not_run = [{(e.layer, e.gemm) for e in session.precision(at=at) if e.not_run} for at in (2, 3)]
    assert (f"layers.{MANY - 2}", "wgrad") not in not_run[0]
    assert (f"layers.{MANY - 2}", "wgrad") in not_run[1]
