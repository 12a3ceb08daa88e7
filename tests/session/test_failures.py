"""A failure in observation never ends a run, unless that was asked for; it is reported once, with its place."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks.base.errors import FeatureError, OptionError
from te_precision_callbacks.runs import sink
from te_precision_callbacks.session import InspectSession, ObservationError, SessionError, delivery
from te_precision_callbacks.sinks import StepRecords, statistics_log, writer_thread
from tests.conftest import Keeper, feature, statistics
from tests.reference.processes import python


def train(session: InspectSession, net: torch.nn.Module, steps: int = 3) -> None:
    for _ in range(steps):
        net(torch.randn(16, 32)).sum().backward()
        session.step()


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "Precision debugging failed on" in record.message]


class BrokenSink(Keeper):
    def write(self, records: StepRecords) -> None:
        raise OSError("the disk is full")


class Clock:
    """Goes on where it is told to."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


class SlowSink(Keeper):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def write(self, records: StepRecords) -> None:
        super().write(records)
        self.clock.seconds += 0.11


@pytest.mark.parametrize(("training", "named"), [(0.44, True), (1.1, False)])
def test_a_slow_sink_is_named_once(
    tmp_path: Path,
    keeper: Keeper,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    training: float,
    named: bool,
) -> None:
    """It takes 0.11 s a step: a fifth of the time where the rest takes 0.44 s, and less than a tenth at 1.1 s."""
    clock = Clock()
    monkeypatch.setattr(delivery, "time", clock)
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper, SlowSink(clock)]) as session:
        for step in range(20):
            clock.seconds += training
            train(session, net, 1)
            assert step >= 10 or "takes" not in caplog.text, "the first write, and nine others, are not enough"
    said = [record.message for record in caplog.records if "of the training's time" in record.message]
    assert len(said) == named
    assert all(text.startswith("The sink SlowSink takes 20 % of the training's time: 110 ms") for text in said)


FILES = ("nvdlfw_inspect_logs", "nvdlfw_inspect_statistics_logs", "precision_records", "tensor_dumps")


@pytest.mark.parametrize("file", [*FILES, "precision_summary.txt", "a link"])
def test_training_goes_on_where_a_file_cannot_be_written(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    """A file stands where a folder must be, or a folder where a file must be: the superuser may write to a folder that
    is read-only. Or a link stands there, which may lead to any file. Each kind of file that is lost is said once, and
    the others are written."""
    if file == "a link":
        file = "precision_summary.txt"
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / file).symlink_to(tmp_path / "other")
    elif file.endswith(".txt"):
        (tmp_path / "run" / file).mkdir(parents=True)
    else:
        (tmp_path / "run" / file).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / file).touch()
    dumped = feature("DumpTensors", ["all"], tensors=["activation"], high_precision_tensor=True)
    config = statistics() | {"dumps": dumped}
    net = te.Linear(32, 32)
    with InspectSession(config, model=net, log_dir=tmp_path / "run", sinks=[keeper]) as session:
        train(session, net, 3)
    assert keeper.iterations == [0, 1, 2]
    said = [record.message for record in caplog.records if "failed on rank 0: " in record.message]
    assert sum(f"/{file}" in text for text in said) == 1, said
    assert not (tmp_path / "other").exists()
    written = {path.relative_to(tmp_path / "run").parts[0] for path in (tmp_path / "run").rglob("*")}
    assert written >= {*FILES, "precision_summary.txt"}


@pytest.mark.parametrize("folder", ["file", "file/run/deeper", "leads nowhere/run/deeper"])
def test_a_log_folder_that_cannot_be_made_is_said_once(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "leads nowhere").symlink_to(tmp_path / "gone" / "too")  # it is this that the error names
    log_dir, net = tmp_path / folder, te.Linear(32, 32)
    config = statistics() | {
        "dumps": feature("DumpTensors", ["all"], tensors=["activation"], high_precision_tensor=True)
    }
    with (
        caplog.at_level("INFO"),
        InspectSession(config, model=net, log_dir=log_dir, sinks=[keeper], report=True) as session,
    ):
        train(session, net, 3)
    assert keeper.iterations == [0, 1, 2]
    (said,) = [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert said.startswith(f"log_dir='{log_dir}' cannot be written to: [Errno ")
    assert not any("te-precision report" in record.message for record in caplog.records), "there is no run"


def test_a_strict_run_starts_in_no_folder_in_which_nothing_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "nvdlfw_inspect_logs").touch()
    with pytest.raises(SessionError, match=r"log_dir='.*' cannot be written to: .*File exists"):
        InspectSession(statistics(), log_dir=tmp_path, strict=True).start()


@pytest.mark.parametrize("deleted", [True, False])
def test_a_log_folder_that_fails_later_is_reported_once(
    tmp_path: Path,
    keeper: Keeper,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    deleted: bool,
) -> None:
    net, log = te.Linear(32, 32), tmp_path / "run" / "nvdlfw_inspect_statistics_logs"
    monkeypatch.setattr(writer_thread, "FLUSH_SECONDS", 0.01)
    with InspectSession(statistics(), model=net, log_dir=tmp_path / "run", sinks=[keeper], records="off") as session:
        if deleted:
            train(session, net, 1)
            wait_until(log.is_dir)
            shutil.rmtree(log)
        else:
            log.parent.mkdir(exist_ok=True)
            log.touch()
        while session.iteration < 500 and not reports(caplog):
            train(session, net, 1)
    assert keeper.iterations == list(range(session.iteration))
    assert len(reports(caplog)) == 1
    assert "writing records to StatisticsLog" in reports(caplog)[0]
    assert "nvdlfw_inspect_statistics_logs" in reports(caplog)[0]


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["write", "fsync", "mkdir", "open"])
def test_a_disk_that_hangs_neither_stops_the_training_nor_its_end(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """What the threads ask of the disk does not return; what the training's thread asks in the step would show."""
    monkeypatch.setattr(writer_thread, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(writer_thread, "LONGEST_STILL", 0.2)
    monkeypatch.setattr(statistics_log, "MOST_WAITING", 50)
    monkeypatch.setattr(sink, "MOST_WAITING", 50)
    well, net = threading.Event(), te.Linear(32, 32)

    def hanging(*arguments: Any, **keywords: Any) -> Any:
        if threading.current_thread().name.startswith("te-precision"):
            well.wait(60)
        else:
            assert not in_step, f"the training's thread has called os.{hangs}"
        return call(*arguments, **keywords)

    in_step, call = False, getattr(os, hangs)
    session = InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper], strict=True).start()
    monkeypatch.setattr(os, hangs, hanging)
    in_step = True
    train(session, net, 100)
    in_step = False
    session.stop()
    well.set()
    assert keeper.iterations == list(range(100))
    said = [text for text in caplog.messages if "The disk does not answer" in text]
    assert said, "the end has said what is lost"
    wait_until(lambda: not any(thread.name.startswith("te-precision") for thread in threading.enumerate()))


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)


def test_a_broken_sink_ends_a_strict_run(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    with pytest.raises(ObservationError, match="the disk is full"):
        with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[BrokenSink()], strict=True) as session:
            train(session, net)
    assert not session.running


def broken_feature(method: str) -> type:
    """A feature that raises in this call, and says in the one before it that it is wanted."""

    def enabled(self: Any, config: Any, layer_name: str, iteration: int) -> tuple[bool, int]:
        return True, iteration + 1

    def broken(self: Any, config: Any, layer_name: str, iteration: int) -> None:
        raise AttributeError("a slip in the feature")

    return type("Broken", (), {f"{method.removesuffix('_enabled')}_enabled": enabled, method: broken})


@pytest.mark.parametrize(
    ("method", "tensor"),
    [
        ("inspect_tensor_enabled", "activation"),
        ("inspect_tensor_enabled", "output"),
        ("inspect_tensor", "activation"),
        ("inspect_tensor", "gradient"),
        ("inspect_tensor", "output"),
        ("inspect_tensor_postquantize_enabled", "weight"),
        ("inspect_tensor_postquantize", "weight"),
    ],
)
def test_a_broken_feature_is_reported_once(
    tmp_path: Path, method: str, tensor: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"s": feature("Broken", ["linear"], tensors=[tensor])}
    net = te.Linear(32, 32)
    features = [broken_feature(method)]
    with te.autocast(enabled=True, recipe=DelayedScaling()):
        with InspectSession(config, model=net, log_dir=tmp_path / "a", features=features) as session:
            train(session, net)
        assert len(reports(caplog)) == 1
        assert f"linear {tensor}: FeatureError: The feature Broken failed in {method}" in reports(caplog)[0]
        assert "a slip in the feature" in reports(caplog)[0]
        assert "Precision debugging failed 3 times" in caplog.text
        with pytest.raises(ObservationError, match=f"linear {tensor}.*failed in {method}"):
            with InspectSession(config, model=net, log_dir=tmp_path / "b", features=features, strict=True) as session:
                train(session, net)


def test_a_failure_is_one_whatever_the_layers_are_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And it tells of which feature, call and layer it is."""
    net = torch.nn.ModuleDict({"it's": te.Linear(32, 32), 'a "b"': te.Linear(32, 32), "c": te.Linear(32, 32)})
    features = [broken_feature("inspect_tensor")]
    config = {"s": feature("Broken", ["all"], tensors=["activation"])}
    with InspectSession(config, model=net, log_dir=tmp_path, features=features) as session:
        for layer in net.values():
            layer(torch.randn(16, 32))
        session.step()
    assert len(reports(caplog)) == 1
    assert "also failed" not in caplog.text
    assert "Precision debugging failed 3 times" in caplog.text
    with pytest.raises(ObservationError) as raised:
        with InspectSession(config, model=net, log_dir=tmp_path, features=features, strict=True):
            net["it's"](torch.randn(16, 32))
    error = raised.value.__cause__
    assert isinstance(error, FeatureError)
    assert (error.feature, error.call, error.layer) == ("Broken", "inspect_tensor", "it's")
    assert error.failure == "failed in inspect_tensor: AttributeError: a slip in the feature"


@pytest.mark.parametrize("method", ["modify_tensor_enabled", "modify_tensor", "fp8_gemm_enabled"])
def test_a_failure_in_a_precision_call_ends_the_run(tmp_path: Path, method: str) -> None:
    """What runs in another precision than the config says is not the run that was asked for."""
    config = {"s": feature("Broken", ["linear"], tensors=["activation"], gemms=["fprop"])}
    net = te.Linear(32, 32)
    with te.autocast(enabled=True, recipe=DelayedScaling()):
        with pytest.raises(FeatureError, match=f"failed in {method} for the layer 'linear'.*a slip"):
            with InspectSession(config, model=net, log_dir=tmp_path, features=[broken_feature(method)]) as session:
                train(session, net)
    assert not session.running


def test_statistics_of_quantization_beside_a_gemm_in_high_precision(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    """In Transformer Engine 2.20.2 a bare AssertionError: the two GEMMs of the activation read different tensors."""
    config = {"s": feature("LogFp8TensorStats", ["linear"], tensors=["activation"], stats=["underflows%", "mse"])}
    config["s"]["transformer_engine"]["DisableFP8GEMM"] = {"enabled": True, "gemms": ["wgrad"]}
    net = te.Linear(32, 32)
    inputs = torch.linspace(-3, 3, 16 * 32).reshape(16, 32)
    inputs[0, 0] = 1e-9
    with InspectSession(config, model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        for _ in range(2):  # the second one has a scale from the amax of the first
            with te.autocast(enabled=True, recipe=DelayedScaling()):
                net(inputs).sum().backward()
            session.step()
    assert not reports(caplog)
    scale = 448.0 / inputs.abs().max()
    codes = (inputs * scale).to(torch.float8_e4m3fn)
    errors = (codes.double() / scale.double() - inputs.double()).square()
    assert keeper.values("underflows%")[1] == pytest.approx(100 / inputs.numel())
    assert keeper.values("mse")[1] == pytest.approx(errors.mean().item(), rel=1e-5)


def test_a_step_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="has no model"):
        with InspectSession(statistics(), log_dir=tmp_path) as session:
            session.step()


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
        ({"strict": "yes"}, "strict= must be True or False"),
        ({"start_step": -1}, "start_step="),
        ({"statistics_log": "rank1"}, "statistics_log= must be one of 'rank0', 'all', 'off', or .*, not 'rank1'"),
        ({"statistics_log": "off, 4GiB"}, "statistics_log= must be one of .*, not 'off, 4GiB'"),
        ({"statistics_log": "rank0, all"}, "statistics_log= must be one of .*, not 'rank0, all'"),
        ({"statistics_log": "4GiB, unlimited"}, "statistics_log= must be one of .*, not '4GiB, unlimited'"),
        ({"statistics_log": ""}, "statistics_log= must be one of .*, not ''"),
        ({"statistics_log": True}, "statistics_log= must be one of .*, not True"),
        ({"sinks": [print]}, "start, write and close"),
        ({"feature_dirs": "not/there"}, "not a folder"),
        ({"feature_dirs": 5}, "feature_dirs= must be a list"),
        ({"features": [5]}, "features= takes classes"),
        ({"features": int}, "features= must be a list"),
        ({"sinks": 5}, "sinks= must be a list"),
        ({"log_dir": 5}, "log_dir= must be a path"),
        ({"prefix": 7}, "prefix= must be a text"),
        ({"start_step": True}, "start_step="),
        ({"process_group": "world"}, "process_group="),
        ({"log_filter": 5}, "log_filter= takes"),
    ],
)
def test_bad_options_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        InspectSession(**keywords)


def test_a_later_failure_of_another_kind_is_reported_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"s": feature("Broken", ["linear"], tensors=["activation", "weight"])}
    net = te.Linear(32, 32)
    options: dict[str, Any] = {"features": [broken_feature("inspect_tensor")], "sinks": [BrokenSink()]}
    config["statistics"] = statistics()["stats"]
    with InspectSession(config, model=net, log_dir=tmp_path, **options) as session:
        train(session, net)
    assert len(reports(caplog)) == 1
    also = [record.message for record in caplog.records if "also failed on rank 0" in record.message]
    assert len(also) == 1, "the same failure on another tensor is not told again"
    assert "the disk is full" in also[0]


def test_a_statistic_that_a_layer_cannot_have_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The scale of delayed scaling comes from earlier steps, which a layer without it has not."""
    stats = ["fp8_delayed_scaling_mse", "mxfp8_mse"]
    config = {"s": feature("LogFp8TensorStats", ["linear"], tensors=["activation"], stats=stats)}
    net = te.Linear(32, 32)
    keeper = Keeper()
    with InspectSession(config, model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        train(session, net)
    assert set(keeper.values("mxfp8_mse")) == {0, 1, 2}
    assert not keeper.values("fp8_delayed_scaling_mse")
    warnings = [record for record in caplog.records if "cannot be observed" in record.message]
    assert [record.levelname for record in warnings] == ["WARNING"]
    assert "fp8_delayed_scaling_mse of linear activation" in warnings[0].message
    assert "failed" not in caplog.text


def test_a_scalar_that_is_no_number_costs_no_other(tmp_path: Path, keeper: Keeper, caplog: Any) -> None:
    class LogsWrongly:
        def inspect_tensor_enabled(self, config: Any, layer_name: str, **_: Any) -> bool:
            return True

        def inspect_tensor(self, config: Any, layer_name: str, tensor: torch.Tensor, iteration: int, **_: Any) -> None:
            from nvdlfw_inspect.logging import MetricLogger

            MetricLogger.log_scalar("mine", tensor.mean(dim=1)[:2], iteration)
            MetricLogger.log_scalar("good", tensor.mean(), iteration)

    config = {**statistics(), "own": feature("LogsWrongly", ["linear"], tensors=["activation"])}
    net = te.Linear(32, 32)
    with InspectSession(config, model=net, log_dir=tmp_path, sinks=[keeper], features=[LogsWrongly]) as session:
        train(session, net)
    assert set(keeper.values("max")) == {0, 1, 2}
    assert {row.statistic for row in keeper.steps[0]} == {"max", "l1_norm", "good"}
    assert "'mine': TypeError: it must be one number, not a tensor of shape (2,)" in reports(caplog)[0]


@pytest.mark.processes
def test_a_disk_that_takes_nothing_from_the_start(tmp_path: Path) -> None:
    """No line of nvidia-dlfw-inspect's log can be written: it is said once, and the run ends well."""
    done = python(
        f"""
        import logging, resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        logging.basicConfig(format="%(message)s")
        from te_precision_callbacks import reference
        reference.install()
        import torch, transformer_engine.pytorch as te
        from te_precision_callbacks.session import InspectSession
        net = te.Linear(32, 32)
        with InspectSession(model=net, log_dir={str(tmp_path)!r}) as session:
            for _ in range(3):
                net(torch.randn(32, 32)).sum().backward()
                session.step()
        print("ended")
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ended"
    assert done.stderr.count("nvidia-dlfw-inspect's log") == 1, done.stderr
    assert "--- Logging error ---" not in done.stderr


def test_what_one_rank_alone_does_is_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 alone logs the loss before and after a resume: with ``strict=True`` others would go on without it."""

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("te_precision_callbacks.session.resume.ResumedLoss.tell", fail)
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path, strict=True) as session:
        net(torch.ones(16, 32)).sum().backward()
        session.step()
    assert "the loss before and after the resume" in caplog.text
