"""What a script forgets, leaves in from upstream, or changes in the model while a session runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper, feature, statistics
from tests.training import train


def forward_and_backward(net: Any) -> None:
    net(torch.randn(16, 32)).sum().backward()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Net(torch.nn.Module):
    """Two layers under a path each; what ``extra`` holds runs after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = te.Linear(32, 32)
        self.second = te.Linear(32, 32)
        self.extra: list[torch.nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, self.second, *self.extra):
            x = part(x)
        return x


# ------------------------------------------------------------------ calls of upstream that were left in


def test_upstreams_calls_that_were_left_in_do_nothing_and_are_said(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    kept_before = debug_api.step
    net = Net()
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
    for name, text in zip((*calls, "step"), said(caplog), strict=True):
        assert f"calls debug_api.{name}() while the session is running. The call is ignored." in text


def test_a_kept_function_that_names_the_layers_anew_loses_nothing(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    rename, net = debug_api.infer_and_assign_layer_names, Net()
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        for _ in range(3):
            rename(net)
            train(session, net, 1)
    assert [{row.layer for row in records} for records in keeper.steps] == [{"first", "second"}] * 3
    assert said(caplog) == []


@pytest.mark.parametrize("kept", [True, False])
def test_an_end_of_upstream_is_ignored_and_said(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    """Whether the script calls the function of now, or one that it has kept from before."""
    end, net = debug_api.end_debug, Net()
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        for _ in range(2):
            forward_and_backward(net)
            (end if kept else debug_api.end_debug)()
            session.step()
    assert [{row.layer for row in records} for records in keeper.steps] == [{"first", "second"}] * 2
    (text,) = said(caplog)
    assert "calls debug_api.end_debug() while the session is running. The call is ignored." in text


# ------------------------------------------------------------------ a model that changes


def test_a_module_outside_of_the_tree_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        net.extra = [te.Linear(32, 32, name="in_a_list")]
        train(session, net)
    (text,) = said(caplog)
    assert "Linear 'in_a_list' trains outside the model" in text


def test_a_model_that_has_changed_is_attached_again(tmp_path: Path, keeper: Keeper) -> None:
    """A feature that changes precision acts on new modules, too."""
    net = Net()
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
    net, teacher = Net(), te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        for _ in range(2):
            with torch.no_grad():
                teacher(torch.randn(16, 32))
            train(session, net, 1)
    assert said(caplog) == []
