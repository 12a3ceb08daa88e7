"""Off means off: where nothing is due, nothing of a session is called inside of a step, but a note of each region of
autocast, and the evidence of coverage."""

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import nvdlfw_inspect.base
import pytest
import torch
import transformer_engine.pytorch as te

import te_precision_callbacks
from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper, feature, statistics

HERE = str(Path(te_precision_callbacks.__path__[0]))
FEATURES = str(Path(HERE).parent / "features")
NOTES = f"{HERE}/instrumentation/regions.py", f"{HERE}/coverage/", f"{HERE}/layers/forwards.py"
BACKEND = tuple(f"{HERE}/{part}" for part in ("reference/", "base/numerics/", "base/vocabulary.py"))
INSPECT = str(Path(nvdlfw_inspect.base.__file__).parent)


@contextmanager
def calls() -> Iterator[Counter[str]]:
    """Counts the calls of functions of nvidia-dlfw-inspect and of this package, but for the reference backend and the
    notes of regions of autocast and of the calls of the model."""
    counted: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        own = file.startswith((HERE, FEATURES)) and not file.startswith((*BACKEND, *NOTES))
        own = own and frame.f_code.co_name != "<lambda>"  # whether the session is paused
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
    net = te.Linear(32, 32)
    with InspectSession(statistics(freq=3), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
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
    with InspectSession(statistics(layers=["0"]), model=net, log_dir=tmp_path) as session:
        for _ in range(2):
            run(net)
            session.step()
        with calls() as counted:
            run(other)
        of_the_tap = {"GemmTap", "Running", "Forward", "unobserved", "UnfusedTensors", "_with_own_wgrad"}
        assert {name.partition(".")[0] for name in counted} <= of_the_tap, "the GEMMs of layer 0 are seen"
        with calls() as counted:
            run(watched)
        assert counted["StatisticsFeature.look"] or counted["look"], "what is counted can be seen"


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
    net = te.Linear(32, 32)
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
