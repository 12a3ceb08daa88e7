"""CUDA graphs and lost GPUs, emulated: what torch.cuda would answer is put in its place."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.base import devices, scalars
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow, frames
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.statistics.names import tensor_request

ASSERTED = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that CUDA is in use: a stream that works or does not, and whether it records a graph."""

    def pretend(error: Exception | None = None, *, capturing: bool = False) -> None:
        query = mock.Mock(side_effect=error, return_value=False)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(query=query))

    return pretend


def lost() -> Exception:
    return torch.AcceleratorError(ASSERTED)


def test_a_lost_gpu_is_distinguished_from_a_failure(cuda: Callable[..., None]) -> None:
    assert not devices.is_lost(lost()), "CUDA is not in use: whoever raises this means something else"
    cuda()
    assert not devices.is_lost(RuntimeError("Triton Error [CUDA]: invalid argument")), "the stream still works"
    cuda(lost())
    for error, is_lost in (
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), True),
        (lost(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (TypeError("not about a GPU"), False),
    ):
        assert devices.is_lost(error) is is_lost, error


def test_a_lost_gpu_is_reported_once(cuda: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    cuda(lost())
    failures = ObservationFailures(strict=False, rank=0)
    stated: list[str] = []
    failures.on_report = stated.append
    with caplog.at_level(logging.WARNING):
        for doing in ("observing", "reading the statistics of", "observing"):
            failures.report(doing, "fc1 activation", lost())
        failures.summarize()
    (message,) = caplog.messages
    assert "AcceleratorError: CUDA error: device-side assert triggered)" in message
    assert "CUDA_LAUNCH_BLOCKING=1" in message
    assert "Precision debugging failed" not in message
    assert stated == []
    error = lost()
    with pytest.raises(torch.AcceleratorError) as raised:
        ObservationFailures(strict=True, rank=0).report("observing", "fc1", error)
    assert raised.value is error
    cuda()
    with pytest.raises(ObservationError):
        ObservationFailures(strict=True, rank=0).report("observing", "fc1", lost())


def test_overflow_detection_leaves_a_lost_gpu_to_training(
    cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The look before the optimizer's step is where the host waits, so an error of a kernel comes up there first."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with DebugActivationOverflow(model), caplog.at_level(logging.WARNING):
        model(torch.ones(2, 4)).sum().backward()
        cuda(lost())
        monkeypatch.setattr(frames, "to_host", mock.Mock(side_effect=lost()))
        optimizer.step()
    assert "Activation overflow detection ends" in caplog.text
    assert caplog.text.count("device-side assert") == 1


# --- a capture --------------------------------------------------------------------------------------------------------


def test_no_statistic_is_measured_in_a_capture(cuda: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    engine = StatisticsEngine()

    def note() -> None:
        engine.note(Watched("fc1", "activation", 0, torch.ones(8)), (tensor_request("max"),))
        engine.measure()

    cuda(capturing=True)
    with caplog.at_level(logging.WARNING):
        note()
        note()
    assert caplog.text.count("fc1 activation is not measured, because a CUDA graph is being captured") == 1
    assert not engine.has_news
    cuda()
    note()
    assert engine.has_news


def test_overflow_detection_rests_in_a_capture(cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up has left something to look at, and the optimizer's step is captured."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reads = mock.Mock(side_effect=frames.to_host)
    monkeypatch.setattr(frames, "to_host", reads)
    with DebugActivationOverflow(model):
        model(torch.full((2, 4), torch.inf)).sum().backward()
        cuda(capturing=True)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert not reads.called
        cuda()
        with pytest.raises(ActivationOverflowError):
            optimizer.step()


def test_a_step_in_a_capture_warns_and_collects_nothing(
    cuda: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with InspectSession(model=te.Linear(32, 32), log_dir=tmp_path) as session:
        cuda(capturing=True)
        assert [session.step(), session.step(), session.iteration] == [None, None, 0]
        cuda()
        session.step()
        assert session.iteration == 1
    assert caplog.text.count("step() has no effect during the capture of a CUDA graph") == 1


# --- streams ----------------------------------------------------------------------------------------------------------


def test_scalars_of_users_features_are_read_behind_the_streams_that_made_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log: list[tuple[str, list[float]]] = []
    streams = iter(("first", "second"))
    monkeypatch.setattr(scalars, "current_stream", lambda device: next(streams))
    monkeypatch.setattr(scalars, "follow", lambda stream, tensors: log.append((stream, list(map(float, tensors)))))
    with InspectSession(model=te.Linear(32, 32), log_dir=tmp_path) as session:
        for number in (1.0, 2.0):
            session._run._scalars.add("layer_activation_mine", torch.tensor(number))
        records = session.step()
    assert log == [("first", [1.0]), ("second", [2.0])]
    assert [row.value for row in records or ()] == [1.0, 2.0]
