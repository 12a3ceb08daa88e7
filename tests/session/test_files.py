"""Which rank makes which files, and how often it waits for the disk, in runs of several gloo ranks."""

import ast
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from te_precision_callbacks.runs import open_run
from tests.forked import Running
from tests.lightning.models import log_of, logged_lines
from tests.session.files_script import CASES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    done = Running(Path(__file__).with_name("files_script.py"), [str(folder)]).end()
    assert done.returncode == 0, done.stderr
    return folder


def made(folder: Path, case: str) -> Mapping[int, list[str]]:
    return {rank: (folder / case / f"{rank}.txt").read_text().splitlines() for rank in range(CASES[case][0])}


@pytest.mark.parametrize(("case", "status"), [("normal", 0), ("sigterm", -signal.SIGTERM)])
def test_rank_0_alone_makes_files(runs: Path, case: str, status: int) -> None:
    """Also at a SIGTERM in the middle of a step, at which all ranks have gathered a remainder."""
    result = made(runs, case)
    assert ast.literal_eval((runs / case / "ended.txt").read_text()) == [status] * len(result)
    assert not any(result[rank] for rank in result if rank)
    assert {"nvdlfw_inspect_logs", "nvdlfw_inspect_statistics_logs", "precision_records"} <= set(result[0])
    assert open_run(runs / case / "run").steps["iteration"].to_pylist() == [0, 1, 2]
    assert {name for name, _ in logged_lines(runs / case / "run", 0)} >= {"linear_activation_max"}


@pytest.mark.parametrize(("case", "wanted"), [("default", {"steps", "values"}), ("failure", {"events", "values"})])
def test_what_another_rank_writes_is_its_own(runs: Path, case: str, wanted: set[str]) -> None:
    """With the default config its numbers of the optimizer's step; what it alone has where it fails."""
    result = made(runs, case)
    files = {path for path in result[1] if Path(path).suffix}
    in_records = {path for path in files if "/seg-000/rank-00001/" in path}
    assert files - in_records == {"nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-1.log"}
    assert {Path(path).name.partition("-")[0] for path in in_records if "incomplete" not in path} >= wanted
    run = open_run(runs / case / "run")
    if case == "default":
        assert {row["statistic"] for row in run.series.to_pylist() if row["rank"] == 1} == {"gradients_below_eps%"}
    else:
        assert result[2] == result[3] == []
        assert result[1].count("fsync") < 10
        assert {row["rank"] for row in run.series.to_pylist()} == {None, 0, 1}
        assert [event["text"] for event in run.events.to_pylist() if event["rank"] == 1] == ["ValueError: bad batch"]


def test_all_ranks_write_if_they_are_told_to(runs: Path) -> None:
    for rank in range(2):
        assert log_of(runs / "all" / "run", rank).exists()
        assert (runs / "all" / "run" / "nvdlfw_inspect_logs" / f"nvdlfw_inspect_globalrank-{rank}.log").exists()
