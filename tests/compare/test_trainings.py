"""Real trainings compared: drifts that leave what is computed unchanged, a weight that is rounded, plain logs."""

from collections.abc import Iterator
from pathlib import Path

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.debug.features
import transformer_engine.pytorch as te
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from typer.testing import CliRunner, Result

from benchmarks import planted
from benchmarks.planted import Drift, is_named, train
from te_precision_callbacks import cli
from te_precision_callbacks.instrumentation.upstream import Snapshot
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.views.compare import compare
from tests.conftest import feature, statistics

pytestmark = pytest.mark.slow

FIRST = 16


@pytest.fixture(scope="module")
def fewer_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planted, "STEPS", 2 * FIRST)
        patch.setattr(planted, "FIRST", FIRST)
        yield


@pytest.fixture(scope="module")
def healthy(fewer_steps: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedRun, RecordedRun]:
    folder = tmp_path_factory.mktemp("healthy")
    return train(0, folder / "a"), train(1, folder / "noise")


def test_a_planted_drift_comes_first(healthy: tuple[RecordedRun, RecordedRun], tmp_path: Path) -> None:
    drift = Drift.drawn(5)
    comparison = compare(healthy[0], train(5, tmp_path, drift), noise=[healthy[1]])
    assert is_named(drift, comparison), comparison.first
    assert FIRST <= comparison.first.iteration < FIRST + 6


def test_a_healthy_training_has_no_finding(healthy: tuple[RecordedRun, RecordedRun], tmp_path: Path) -> None:
    assert not compare(healthy[0], train(1000, tmp_path), noise=[healthy[1]]).has_findings


def test_a_planted_drift_changes_nothing_that_is_computed_and_comes_first(
    healthy: tuple[RecordedRun, RecordedRun], tmp_path: Path
) -> None:
    drift = Drift("weights", 3)
    run = train(0, tmp_path, drift)
    assert run.scalars["value"].equals(healthy[0].scalars["value"])
    comparison = compare(healthy[0], run, noise=[healthy[1]])
    assert is_named(drift, comparison), comparison.first


# --------------------------------------------------------------------------------------------- a weight that is rounded


OF_THE_TENSOR = ["cur_amax", "std", "mean", "l1_norm", "l2_norm", "zeros%"]


def train_rounded(folder: Path, dtype: torch.dtype | None) -> RecordedRun:
    torch.manual_seed(0)
    layer = te.Linear(64, 64)
    config = {
        "plain": feature("LogTensorStats", ["all"], tensors=["weight"], stats=OF_THE_TENSOR),
        "quantized": feature("LogFp8TensorStats", ["all"], tensors=["weight"], stats=["mxfp8_sqnr_db"]),
    }
    with InspectSession(config, model=layer, log_dir=folder) as session:
        for _ in range(6):
            with torch.no_grad():
                layer.weight.add_(torch.randn_like(layer.weight), alpha=1e-4)
                if dtype is not None:
                    layer.weight.copy_(layer.weight.to(dtype))
            layer(torch.randn(32, 64)).square().mean().backward()
            session.step()
    return open_run(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_what_mxfp8_would_lose_of_it_says_that_it_is_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its numbers fit E4M3 whose scale is a power of two; no statistic of its magnitude changes."""
    (parting,) = compare(train_rounded(tmp_path / "a", None), train_rounded(tmp_path / "b", dtype)).parted
    (departure,) = parting.departures
    assert (parting.tensor, parting.origin, departure.statistic) == ("weight", "made here", "mxfp8_sqnr_db")
    assert 28 < departure.a < 34
    assert departure.b > 50


# ------------------------------------------------------------------------------------ logs of plain nvidia-dlfw-inspect


def train_plain(folder: Path, factor: float = 1.0) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(te.Linear(32, 32, bias=False) for _ in range(3)))
    snapshot = Snapshot()
    try:
        features = [str(Path(transformer_engine.debug.features.__path__[0]))]
        config = statistics(tensors=["activation", "weight", "gradient"], stats=["cur_amax", "std"])
        debug_api.initialize(config, feature_dirs=features, log_dir=str(folder))
        TEDebugState.debug_enabled = True
        debug_api.infer_and_assign_layer_names(model)
        for step in range(12):
            if step == 4:
                with torch.no_grad():
                    model[1].weight.mul_(factor)
                    model[2].weight.div_(factor)
            model(torch.randn(32, 32)).square().mean().backward()
            debug_api.step()
        debug_api.end_debug()
    finally:
        snapshot.restore()
    return folder


@pytest.fixture
def logs(tmp_path: Path) -> tuple[Path, Path]:
    return train_plain(tmp_path / "a"), train_plain(tmp_path / "b", 2.0**10)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def test_they_are_compared_in_the_order_of_the_log(logs: tuple[Path, Path]) -> None:
    result = compare(*map(open_run, logs))
    assert not result.ordered
    assert (result.first.layer, result.first.tensor, result.first.iteration) == ("model.1", "weight", 4)
    assert result.facts == (), "a log has none"
    shown = command("compare", *logs)
    assert shown.exit_code == 1
    assert "The order of execution was not recorded" in " ".join(shown.output.split())


def test_they_are_shown(logs: tuple[Path, Path]) -> None:
    shown = command("show", logs[1])
    assert shown.exit_code == 0
    assert " rules checked)." in " ".join(shown.output.split())
    assert "a log of nvidia-dlfw-inspect" in " ".join(shown.output.split())
