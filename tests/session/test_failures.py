"""A failure in observation never ends a run, unless that was asked for; it is reported once, with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.errors import FeatureError, OptionError
from te_precision_callbacks.records import StepRecords
from te_precision_callbacks.session import InspectSession, ObservationError, SessionError
from tests.conftest import Keeper, feature, statistics


def train(session: InspectSession, net: torch.nn.Module, steps: int = 3) -> None:
    for _ in range(steps):
        net(torch.randn(16, 32)).sum().backward()
        session.step()


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "Precision debugging failed on" in record.message]


class BrokenSink(Keeper):
    def write(self, records: StepRecords) -> None:
        raise OSError("the disk is full")


def test_a_broken_sink_is_dropped_and_the_others_go_on(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    net = te.Linear(32, 32)
    sinks = [BrokenSink(), keeper]
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=sinks) as session:
        train(session, net)
    assert keeper.iterations == [0, 1, 2]
    assert len(reports(caplog)) == 1
    assert "writing records to BrokenSink: OSError: the disk is full" in reports(caplog)[0]


def test_a_broken_sink_ends_a_strict_run(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    with pytest.raises(ObservationError, match="the disk is full"):
        with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[BrokenSink()], strict=True) as session:
            train(session, net)
    assert not session.running


@pytest.mark.parametrize(
    "options",
    [
        {"stats": ["no such statistic"]},
        {"freq": 0},
        {"stats": ["max"], "end_step": "soon"},
        {"freq": 0, "tensors": ["output"]},
    ],
)
def test_a_broken_feature_is_reported_once(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = statistics(**options)
    net = te.Linear(32, 32)
    with InspectSession(config, model=net, log_dir=tmp_path / "a") as session:
        train(session, net)
    assert len(reports(caplog)) == 1
    tensor = options.get("tensors", ["activation"])[0]
    assert f"linear {tensor}" in reports(caplog)[0]
    assert "Precision debugging failed 3 times" in caplog.text
    with pytest.raises(ObservationError, match=f"linear {tensor}"):
        with InspectSession(config, model=net, log_dir=tmp_path / "b", strict=True) as session:
            train(session, net)


def test_an_assert_of_upstream_without_a_text_still_says_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LogFp8TensorStats beside a GEMM in high precision: a bare AssertionError in Transformer Engine 2.20.2."""
    config = {
        "s": {
            **feature("LogFp8TensorStats", ["linear"], tensors=["activation"], stats=["underflows%"]),
        }
    }
    config["s"]["transformer_engine"]["DisableFP8GEMM"] = {"enabled": True, "gemms": ["wgrad"]}
    net = te.Linear(32, 32)
    with InspectSession(config, model=net, log_dir=tmp_path) as session:
        with te.autocast(enabled=True):
            net(torch.randn(16, 32)).sum().backward()
        session.step()
    assert len(reports(caplog)) == 1
    assert "observing linear activation: AssertionError" in reports(caplog)[0]


def broken_feature(method: str) -> type:
    from nvdlfw_inspect.registry import api_method
    from transformer_engine.debug.features.api import TEConfigAPIMapper

    def enabled(self: Any, *_: Any, iteration: int, **__: Any) -> tuple[bool, int]:
        return True, iteration + 1

    def broken(self: Any, *_: Any, **__: Any) -> None:
        raise AttributeError("a slip in the feature")

    enabling = "modify_tensor_enabled" if method.startswith("modify") else "inspect_tensor_enabled"
    for name, function in ((enabling, enabled), (method, broken)):
        function.__name__ = name
    methods = {enabling: api_method(enabled), method: api_method(broken)}
    return type("Broken", (TEConfigAPIMapper,), methods)


def test_an_attribute_error_in_a_feature_does_not_end_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = te.Linear(32, 32)
    config = {"s": feature("Broken", ["linear"], tensors=["activation"])}
    observing = {"model": net, "log_dir": tmp_path, "features": [broken_feature("inspect_tensor")]}
    with InspectSession(config, **observing) as session:
        train(session, net)
    assert len(reports(caplog)) == 1
    assert "a slip in the feature" in reports(caplog)[0]
    config = {"s": feature("Broken", ["linear"], tensors=["activation"], gemms=["fprop"])}
    modifying = {"model": net, "log_dir": tmp_path, "features": [broken_feature("modify_tensor")]}
    with pytest.raises(FeatureError, match=r"failed in modify_tensor for the layer 'linear'.*a slip"):
        with InspectSession(config, **modifying) as session:
            train(session, net)


def test_a_step_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="has no model"):
        with InspectSession(statistics(), log_dir=tmp_path) as session:
            session.step()
    with pytest.raises(SessionError, match=r"torch\.nn\.Module or a list"):
        InspectSession(statistics(), model="abc", log_dir=tmp_path).start()  # type: ignore[arg-type]


def test_a_config_that_does_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    off = {"s": {**feature("LogTensorStats", ["all"]), "enabled": False}}
    net = te.Linear(32, 32)
    with InspectSession(off, model=net, log_dir=tmp_path) as session:
        train(session, net)
    assert "no enabled section" in caplog.text


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"log_dirs": "x"}, "Did you mean 'log_dir'"),
        ({"strict": "yes"}, "strict= is True or False"),
        ({"start_step": -1}, "start_step="),
        ({"sinks": [print]}, "start, write and close"),
        ({"feature_dirs": "not/there"}, "not a folder"),
        ({"feature_dirs": 5}, "feature_dirs= is a list"),
        ({"features": [5]}, "features= takes classes"),
        ({"features": int}, "features= is a list"),
        ({"sinks": 5}, "sinks= is a list"),
        ({"log_dir": 5}, "log_dir= is a path"),
        ({"prefix": 7}, "prefix= is a text"),
        ({"start_step": True}, "start_step="),
        ({"process_group": "world"}, "process_group="),
        ({"log_filter": 5}, "log_filter takes"),
    ],
)
def test_bad_options_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        InspectSession(**keywords)
