"""``te-precision compare``, and comparisons of real trainings."""

import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import nvdlfw_inspect.api as debug_api
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformer_engine.debug.features
import transformer_engine.pytorch as te
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from typer.testing import CliRunner, Result

from benchmarks import planted
from benchmarks.planted import Drift, is_named, train
from te_precision_callbacks import cli
from te_precision_callbacks.diagnosis import Verdict, diagnose
from te_precision_callbacks.instrumentation.upstream import isolate_upstream
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.views.compare import compare, result
from te_precision_callbacks.views.compare.result import ComparedVerdicts
from tests.compare.recorded import Values, append, layers, record
from tests.conftest import feature, statistics
from tests.docs.pages import blocks
from tests.planted import BAD, defective
from tests.runs.making import RunWriter

STEPS = 20


def values(factor: float = 1.0) -> Values:
    results = {(layer, "weight", "cur_amax"): np.linspace(1, 2, STEPS) for layer in ("fc1", "fc2", "fc3")}
    results["fc2", "weight", "cur_amax"][8:] *= factor
    return results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record(tmp_path / "a", values(), order=["fc1", "fc2", "fc3"])
    record(tmp_path / "b", values(4.0), order=["fc1", "fc2", "fc3"])
    return tmp_path


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["compare", *map(str, arguments)])


def refusal(*arguments: object) -> str:
    """The message of a refusal: one of this package, which ``main`` prints with exit code 2."""
    result = command(*arguments)
    if result.exit_code == 2:
        return " ".join(result.output.split())
    assert isinstance(result.exception, cli.PrecisionDebugError), result.exception
    return str(result.exception)


def test_without_a_finding_the_code_is_0(folder: Path) -> None:
    result = command(folder / "a", folder / "a")
    assert result.exit_code == 0
    assert result.output.startswith("A and B are the same run, so nothing can differ.")
    assert "All paired values are bit-identical." in result.output
    assert not command(folder / "a", folder / "b").output.startswith("A and B are")


def test_json_has_it_all(folder: Path) -> None:
    result = command(folder / "a", folder / "b", "--json")
    assert result.exit_code == 1
    actual = json.loads(result.output)
    assert actual["findings"] is True
    (parting,) = actual["parted"]
    assert (parting["layer"], parting["tensor"], parting["iteration"]) == ("fc2", "weight", 8)
    assert parting["departures"][0]["difference"] == pytest.approx(2)
    assert actual["pairing"]["series"] == 3
    assert actual["floor"] is None


def test_a_page(folder: Path) -> None:
    page = folder / "compare.html"
    assert f"{page}: " in " ".join(command(folder / "a", folder / "b", "-o", page).output.split())
    assert page.stat().st_size > 1_000_000
    page.unlink()
    assert json.loads(command(folder / "a", folder / "b", "--report", page, "--json").output)["findings"] is True
    assert page.exists()
    (folder / "folder.html").mkdir()
    assert "cannot be written" in refusal(folder / "a", folder / "b", "--report", folder / "folder.html")
    assert "there is no folder" in refusal(folder / "a", folder / "b", "--report", folder / "new" / "compare.html")
    assert "Name it" in refusal(folder / "a", folder / "b", "--report", folder / "compare.png")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "no such file or folder"),
        ("nothing", "no recorded run in this folder"),
        ("foreign.parquet", "not a recorded run"),
        ("empty", "has no statistics and no loss yet"),
        ("other", "have no common layers"),
    ],
)
def test_what_cannot_be_compared_is_told(folder: Path, name: str, says: str) -> None:
    (folder / "nothing").mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), folder / "foreign.parquet")
    RunWriter.begin(folder / "empty").close("ended")
    record(folder / "other", {("h.0", "weight", "cur_amax"): np.ones(5)})
    assert says in refusal(folder / "a", folder / name)
    assert says in refusal(folder / "a", folder / "b", "--noise", folder / name)


def test_wrong_use_is_told(folder: Path) -> None:
    assert "give a second run to compare with" in refusal(folder / "a")
    assert "lasting= must be 1 step or more, not 0" in refusal(folder / "a", folder / "b", "--lasting", 0)


# ----------------------------------------------------------------------- docs/diverging.md, and show in docs/records.md


def curves(seed: int, factor: float = 1.0) -> dict[tuple[str, str, str], np.ndarray]:
    draw = np.random.default_rng(seed)
    results = {}
    for layer in layers(6):
        for statistic in ("cur_amax", "underflows%"):
            results[layer, "weight", statistic] = np.exp(draw.normal(0, 0.1, 60))
    results[layers(6)[3], "weight", "cur_amax"][30:] *= factor
    return results


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record(Path("bf16"), curves(0), order=layers(6), te_backend="compiled")
    record(Path("bf16_again"), curves(1), order=layers(6))
    record(Path("fp8"), curves(2, 2.0**12), order=layers(6), te_backend="reference")
    record(Path("logs"), curves(2))
    with RunWriter.begin("logs") as run:
        append(run, curves(3))
    with RunWriter.begin("run", world=2) as run:
        append(run, curves(0), rank=0)
        append(run, curves(1, 2.0**12), rank=1)


@pytest.mark.usefixtures("page_folder")
def test_the_commands() -> None:
    codes = []
    for page, begin in (("docs/diverging.md", "te-precision compare logs"), ("docs/records.md", "te-precision show")):
        for line in "".join(blocks(page, "bash", begin)).splitlines():
            program, *arguments = shlex.split(line)
            assert program == "te-precision"
            recorded = iter(sorted(path.name for path in Path("logs/precision_records").iterdir()))
            for place in (number for number, argument in enumerate(arguments) if argument == "--run"):
                arguments[place + 1] = next(recorded)  # in place of the page's example
            result = CliRunner().invoke(cli.app, arguments)
            assert result.output
            codes.append(result.exit_code)
    assert codes == [0, 1, 0, 0, 0, 0]


@pytest.mark.usefixtures("page_folder")
def test_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("docs/diverging.md", "python", "from te_precision")
    exec(code, {})
    assert Path("compare.html").stat().st_size > 1_000_000
    assert capsys.readouterr().out.splitlines() == [
        "30 layers.3.fc weight made here cur_amax",
        "te_backend compiled reference",
    ]


# ------------------------------------------------------------------------------------------------------------- findings


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return defective(tmp_path / "healthy", power=0)


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return defective(tmp_path / "bad")


def test_what_b_has_and_a_has_not_comes_first(healthy: Path, bad: Path) -> None:
    (finding,) = diagnose(bad)
    lines = command(healthy, bad).output.splitlines()
    assert lines[0] == "B has 1 finding that A does not have."
    text = " ".join(" ".join(lines).split())
    assert f"warning: gradient of {BAD}: {finding.seen_in_words}" in text
    assert finding.remedy in text
    assert f"Diagnosis of A: {diagnose(healthy).summary}" in text
    assert command(bad, healthy).output.startswith(
        "B has no finding that A does not have. A has 1 finding that B does not have."
    )


def test_what_both_have_is_not_listed(bad: Path, tmp_path: Path) -> None:
    actual = compare(open_run(bad), open_run(defective(tmp_path / "again"))).verdicts
    assert (actual.only_a, actual.only_b, actual.summary) == ((), (), "B has no finding that A does not have.")


def test_a_run_with_itself_has_none(bad: Path) -> None:
    run = open_run(bad)
    assert compare(run, run).verdicts is None


def test_findings_pair_by_rule_tensor_and_layer(healthy: Path, bad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = diagnose(bad)
    of_model = dataclasses.replace(first, rule="model", tensor="", layers=())
    a = (dataclasses.replace(first, layers=("x", "y")), of_model)
    b = (
        dataclasses.replace(first, layers=("x", "z")),
        of_model,
        dataclasses.replace(first, tensor="weight", layers=("x",)),
        dataclasses.replace(first, rule="other", layers=("x",)),
    )
    verdicts = (Verdict(findings, ("sibling",), ()) for findings in (a, b))
    monkeypatch.setattr(result, "diagnose", lambda run: next(verdicts))
    actual = ComparedVerdicts(open_run(healthy), open_run(bad))
    assert [(item.rule, item.tensor, item.layers) for item in actual.only_b] == [
        ("sibling", "gradient", ("z",)),
        ("sibling", "weight", ("x",)),
        ("other", "gradient", ("x",)),
    ]
    assert (
        actual.only_b[0].seen_in_words
        == f"in x at step {first.seen_at}, {first.seen}; A has this finding too, in other layers"
    )
    assert [(item.rule, item.layers) for item in actual.only_a] == [("sibling", ("y",))]
    assert actual.not_checked_in_a == ("other",)
    assert [" This rule was not checked in A." in text for text in actual.in_words()] == [False, False, True]


# ------------------------------------------------------------------------------------------------------- real trainings


FIRST = 16


@pytest.fixture(scope="module")
def fewer_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planted, "STEPS", 2 * FIRST)
        patch.setattr(planted, "FIRST", FIRST)
        yield


@pytest.fixture(scope="module")
def healthy_runs(fewer_steps: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedRun, RecordedRun]:
    folder = tmp_path_factory.mktemp("healthy")
    return train(0, folder / "a"), train(1, folder / "noise")


@pytest.mark.slow
def test_a_planted_drift_comes_first(healthy_runs: tuple[RecordedRun, RecordedRun], tmp_path: Path) -> None:
    drift = Drift.drawn(5)
    comparison = compare(healthy_runs[0], train(5, tmp_path, drift), noise=[healthy_runs[1]])
    assert is_named(drift, comparison), comparison.first
    assert FIRST <= comparison.first.iteration < FIRST + 6


@pytest.mark.slow
def test_a_healthy_training_has_no_finding(healthy_runs: tuple[RecordedRun, RecordedRun], tmp_path: Path) -> None:
    assert not compare(healthy_runs[0], train(1000, tmp_path), noise=[healthy_runs[1]]).has_findings


@pytest.mark.extended
@pytest.mark.slow
def test_a_planted_drift_changes_nothing_that_is_computed_and_comes_first(
    healthy_runs: tuple[RecordedRun, RecordedRun], tmp_path: Path
) -> None:
    drift = Drift("weights", 3)
    run = train(0, tmp_path, drift)
    assert run.scalars["value"].equals(healthy_runs[0].scalars["value"])
    comparison = compare(healthy_runs[0], run, noise=[healthy_runs[1]])
    assert is_named(drift, comparison), comparison.first


# --------------------------------------------------------------------------------------------- a weight that is rounded


def train_rounded(folder: Path, dtype: torch.dtype | None) -> RecordedRun:
    torch.manual_seed(0)
    layer = te.Linear(64, 64)
    of_the_tensor = ["cur_amax", "std", "mean", "l1_norm", "l2_norm", "zeros%"]
    config = {
        "plain": feature("LogTensorStats", ["all"], tensors=["weight"], stats=of_the_tensor),
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_what_mxfp8_would_lose_of_it_says_that_it_is_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its numbers fit E4M3 with a scale that is a power of two; no statistic of its magnitude changes."""
    (parting,) = compare(train_rounded(tmp_path / "a", None), train_rounded(tmp_path / "b", dtype)).parted
    (departure,) = parting.departures
    assert (parting.tensor, parting.origin, departure.statistic) == ("weight", "made here", "mxfp8_sqnr_db")
    assert 28 < departure.a < 34
    assert departure.b > 50


# ------------------------------------------------------------------------------------ logs of plain nvidia-dlfw-inspect


def train_plain(folder: Path, factor: float = 1.0) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(te.Linear(32, 32, bias=False) for _ in range(3)))
    isolated = isolate_upstream()
    try:
        debug_api.initialize(
            statistics(tensors=["activation", "weight", "gradient"], stats=["cur_amax", "std"]),
            feature_dirs=[transformer_engine.debug.features.__path__[0]],
            log_dir=str(folder),
        )
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
        isolated.close()
    return folder


@pytest.fixture
def logs(tmp_path: Path) -> tuple[Path, Path]:
    return train_plain(tmp_path / "a"), train_plain(tmp_path / "b", 2.0**10)


@pytest.mark.slow
def test_they_are_compared_in_the_order_of_the_log(logs: tuple[Path, Path]) -> None:
    result = compare(*map(open_run, logs))
    assert not result.ordered
    assert (result.first.layer, result.first.tensor, result.first.iteration) == ("model.1", "weight", 4)
    assert result.facts == (), "a log has none"
    shown = command(*logs)
    assert shown.exit_code == 1
    assert "The order of execution was not recorded" in " ".join(shown.output.split())


@pytest.mark.slow
def test_they_are_shown(logs: tuple[Path, Path]) -> None:
    shown = CliRunner().invoke(cli.app, ["show", str(logs[1])])
    assert shown.exit_code == 0
    assert " rules checked)." in " ".join(shown.output.split())
    assert "a log of nvidia-dlfw-inspect" in " ".join(shown.output.split())
