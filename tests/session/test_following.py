"""What a script forgets, leaves in from upstream, or changes in the model while a session runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.config import ConfigError
from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper, feature, statistics


def train(net: Any) -> None:
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
    functions = {name: getattr(debug_api, name) for name in ("initialize", "infer_and_assign_layer_names")}
    net = Net()
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        debug_api.initialize("upstream.yaml", log_dir=str(tmp_path / "theirs"))
        debug_api.infer_and_assign_layer_names(net)
        debug_api.set_tensor_reduction_group(None)
        debug_api.initialize_training_step(40)
        for _ in range(3):
            train(net)
            session.step()
            debug_api.step()
            kept_before()
    assert keeper.iterations == [0, 1, 2], "each step is counted once"
    assert {row.layer for row in keeper.steps[2]} == {"first", "second"}
    assert not (tmp_path / "theirs").exists()
    calls = ("initialize", "infer_and_assign_layer_names", "set_tensor_reduction_group", "initialize_training_step")
    for name, text in zip((*calls, "step"), said(caplog), strict=True):
        assert f"calls debug_api.{name}() while the session is running. The call is ignored." in text
    assert {name: getattr(debug_api, name) for name in functions} == functions


def test_a_kept_function_that_names_the_layers_anew_loses_nothing(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    rename, net = debug_api.infer_and_assign_layer_names, Net()
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        for _ in range(3):
            rename(net)
            train(net)
            session.step()
    assert [{row.layer for row in records} for records in keeper.steps] == [{"first", "second"}] * 3
    assert said(caplog) == []


def test_a_scripts_end_of_upstream_is_ignored_and_said(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        for _ in range(2):
            train(net)
            debug_api.end_debug()
            session.step()
    assert keeper.iterations == [0, 1]
    assert [{row.layer for row in records} for records in keeper.steps] == [{"first", "second"}] * 2
    (text,) = said(caplog)
    assert "calls debug_api.end_debug() while the session is running. The call is ignored." in text


def test_a_kept_function_that_ends_upstream_does_not_end_the_session(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    kept, net = debug_api.end_debug, Net()
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        for step in range(3):
            if step == 1:
                kept()
            train(net)
            session.step()
    assert [{row.layer for row in records} for records in keeper.steps] == [{"first", "second"}] * 3
    (text,) = said(caplog)
    assert "calls debug_api.end_debug() while the session is running. The call is ignored." in text


# ------------------------------------------------------------------ a model that changes


def test_a_shared_module_has_its_first_path(tmp_path: Path, keeper: Keeper) -> None:
    net = torch.nn.Module()
    net.body = torch.nn.Sequential(te.Linear(32, 32), te.LayerNormMLP(32, 64))
    net.tied = net.body
    net.head = net.body[0]
    with InspectSession(statistics(layers=["body.0"]), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        assert [layer.name for layer in session.layers] == ["body.0", "body.1.fc1", "body.1.fc2"]
        train(net.body)
        session.step()
    assert {row.layer for row in keeper.steps[-1]} == {"body.0"}
    with pytest.raises(ConfigError, match=r"matches none .* Similar names: 'body.0'"):
        InspectSession(statistics(layers=["tied.0"]), model=net, log_dir=tmp_path).start()


def test_a_module_outside_of_the_tree_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        net.extra = [te.Linear(32, 32, name="in_a_list")]
        for _ in range(3):
            train(net)
            session.step()
    (text,) = said(caplog)
    assert "Linear 'in_a_list' trains outside the model" in text


def test_a_model_that_has_changed_is_attached_again(tmp_path: Path, keeper: Keeper) -> None:
    """A feature that changes precision acts on new modules, too."""
    net = Net()
    config = {**statistics(), "high": feature("DisableFP8Layer", ["third"])}
    with InspectSession(config, model=net, log_dir=tmp_path, sinks=[keeper], allow_unmatched=True) as session:
        train(net)
        session.step()
        net.third, net.first = te.Linear(32, 32), te.Linear(32, 32)
        net.extra = [net.third]
        session.attach(net)
        with te.autocast(enabled=True):
            train(net)
        session.step()
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
            train(net)
            with torch.no_grad():
                teacher(torch.randn(16, 32))
            session.step()
    assert said(caplog) == []
