"""te-precision report on the files of a run, and the page of a real run."""

import logging
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks import InspectSession, PrecisionDebugCallback
from te_precision_callbacks.cli import main
from te_precision_callbacks.runs import RecordedRun, list_runs, open_run
from te_precision_callbacks.runs.run_files import FOLDER
from te_precision_callbacks.runs.tables import STEP0
from te_precision_callbacks.views.report import write_report
from te_precision_callbacks.views.report.data import duration
from tests.conftest import feature, statistics
from tests.docs.pages import blocks
from tests.lightning.models import Plain, loader, trainer
from tests.planted import defective
from tests.report.conftest import Look
from tests.training import observed, train

pytestmark = pytest.mark.slow  # pages, fits and browsers


@pytest.fixture
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return defective(tmp_path_factory.mktemp("logs"), scalars={"loss": np.ones(40)})


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], log_dir: Path) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["te-precision", "report", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code or 0, *capsys.readouterr())

    return call


def test_a_page(report: Any, log_dir: Path, tmp_path: Path) -> None:
    code, out, _ = report(str(log_dir))
    assert code == 0
    assert re.fullmatch(r"report\.html: 2\.\d MB\n", out)
    text = (tmp_path / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


@pytest.mark.few
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "/proc/no/report.html"), "cannot be written: there is no folder /proc/no"),
        (("-o", "new/report.html"), "cannot be written: there is no folder new"),
        (("-o", "."), ". cannot be written: it is a folder. Give the name of a file, such as report.html."),
        (("-o", ""), ". cannot be written: it is a folder."),
        (("-o", "report.json"), "not a .json file. Name it report.html"),
    ],
)
def test_what_there_is_not(
    report: Any, log_dir: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, error = report(str(log_dir), *arguments)
    assert code == 2
    assert message in " ".join(error.replace("│", " ").split())
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_a_damaged_part_is_told(report: Any, log_dir: Path) -> None:
    (part,) = log_dir.rglob("values-*.parquet")
    part.write_bytes(part.read_bytes()[:100])
    code, out, _ = report(str(log_dir))
    assert code == 2, "the page is written, but not of the whole run"
    assert re.search(rf"note:.*{part.name}", out, re.DOTALL)


# ------------------------------------------------------------------------------------------------------ docs/records.md


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    config = statistics(tensors=["activation", "weight"], stats=["min", "max", "std"])
    observed(Path("logs"), config, net=torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32)))
    return tmp_path


def test_the_commands(logs: Path, report: Any) -> None:
    lines = [line for block in blocks("docs/records.md", "bash", "te-precision report") for line in block.splitlines()]
    assert len(lines) == 2
    for line in lines:
        code, _, error = report(*shlex.split(line)[2:])
        assert code == 0, error
    assert (logs / "report.html").stat().st_size > 100


def test_the_code(logs: Path) -> None:
    (code,) = blocks("docs/records.md", "python", "from te_precision_callbacks.views")
    exec(code, {})
    assert (logs / "report.html").stat().st_size > 1_000_000


# ------------------------------------------------------------------------------------------------------------ real runs


CONFIG = {
    **statistics(tensors=["activation", "weight", "gradient"], stats=["max", "min", "std", "exponent_histogram"]),
    "fp8": feature(
        "LogFp8TensorStats", ["all"], tensors=["activation"], stats=["underflows%", "scale_inv_max"], freq=1
    ),
}


def fit(log_dir: Path, **keywords: Any) -> PrecisionDebugCallback:
    callback = PrecisionDebugCallback(statistics(), log_dir=log_dir, **keywords)
    trainer(log_dir, max_steps=3, callbacks=[callback]).fit(Plain(), loader(4))
    return callback


def test_the_command_is_named_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "te_precision_callbacks")
    folder = tmp_path / "a folder"
    fit(folder)
    (line,) = [record.message for record in caplog.records if "te-precision report" in record.message]
    (run,) = list_runs(folder)
    assert line == f"te-precision report '{folder / FOLDER / run}' makes one page of this run."
    assert not (folder / "report.html").exists()


def test_a_run_that_failed_names_the_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "te_precision_callbacks")
    model = te.Linear(32, 32)
    with pytest.raises(ZeroDivisionError):
        with InspectSession(statistics(), model=model, log_dir=tmp_path) as session:
            train(session, model, 1)
            raise ZeroDivisionError
    assert any("te-precision report" in record.message for record in caplog.records)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.extended
def test_the_page_of_a_real_run(look: Look, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.LayerNormLinear(32, 64), te.Linear(64, 64), torch.nn.Linear(64, 64))
    session = observed(tmp_path, CONFIG, net=model, steps=6, recipe=DelayedScaling())
    write_report(open_run(tmp_path), tmp_path / "report.html")
    look.open(tmp_path / "report.html", "page=nowhere")
    for page in ("heatmap", "layer&layer=0", "profile&tensor=gradient", "config", "summary"):
        look.everything_drawn(f"page={page}")
    shares = dict(look.plot("plot.data.map((trace) => [trace.name, trace.x[2]])"))
    assert shares["FP8"] == pytest.approx(100 * session.coverage().share("fp8"))
    look.turn("page=layer&layer=1")
    assert "FP8 E4M3" in look.page.locator("table").first.inner_text()
    look.everything_drawn("page=profile&tensor=activation&format=E4M3&step=5")
    (top,) = look.plot("plot.data.filter((t) => t.name === 'E4M3: largest').map((t) => [...t.x])")
    scales = open_run(tmp_path).grid("scale_inv_max", "activation").values[:, 5]
    assert top[::2] == pytest.approx(torch.tensor(448 * scales).log2().tolist(), abs=1e-5)


# ----------------------------------------------------------------------------------------------- a run that was resumed


FREQ = 4
LOSSES = {
    "lost": feature(
        "LogFp8TensorStats", ["all"], tensors=["gradient", "weight"], stats=["underflows%", "sqnr_db"], freq=FREQ
    )
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """Ten steps; eight more from the state of step 8; and twelve from step 4's, which replace all later ones. No
    start has scales."""
    folder = tmp_path_factory.mktemp("resumed")
    states: dict[int, dict[str, Any]] = {}
    for begin, steps in ((0, 10), (8, 8), (4, 12)):
        torch.manual_seed(0)
        model = torch.nn.ModuleList(te.Linear(32, 32) for _ in range(3))
        with InspectSession(LOSSES, model=model, log_dir=folder) as session:
            if begin:
                session.load_state_dict(states[begin])
            for _ in range(steps):
                with te.autocast(enabled=True, recipe=DelayedScaling()):
                    outs = [layer(torch.randn(16, 32, requires_grad=True)) for layer in model]
                sum((out * torch.randn_like(out) * 7e-6).sum() for out in outs).backward()
                session.step()
                states.setdefault(session.iteration, session.state_dict())
    return open_run(folder)


def test_the_run_is_one_with_three_segments(resumed: RecordedRun) -> None:
    assert resumed.steps["iteration"].to_pylist() == [0, 4, 8, 12]
    assert resumed.steps["segment"].to_pylist() == [0, 2, 2, 2]
    values = resumed.values()
    assert set(values.filter(values["flags"].to_numpy() & STEP0 != 0)["iteration"].to_pylist()) == {0, 4}


def test_a_step_takes_what_a_step_takes(resumed: RecordedRun) -> None:
    """Not what lies between two steps with records."""
    took = duration(resumed)
    times = resumed.steps["wall_time"].to_pylist()
    assert took["median_step_seconds"] == pytest.approx((times[3] - times[1]).total_seconds() / 2 / FREQ)


@pytest.mark.extended
def test_first_steps_have_no_cell_and_no_point(resumed: RecordedRun, look: Look) -> None:
    """In a page with whole curves, and in one with heat maps alone."""
    for most in (10**7, 1):
        page = write_report(resumed, resumed.path / f"{most}.html", most=most)
        look.open(page, "page=heatmap&statistic=underflows%&tensor=gradient")
        look.everything_drawn()
        assert look.plot("plot.data[0].x") == [7.5, 10, 12.5]
        assert look.plot("plot.data[0].z.map((row) => row.map((cell) => cell === null))") == [[False, False]] * 3
        look.turn("page=layer&layer=0")
        card = look.page.locator(".card", has_text="underflows%").last
        card.scroll_into_view_if_needed()
        card.locator(".plot[data-drawn=yes]").wait_for()
        assert ("from the overview" in card.inner_text()) == (most == 1)
        drawn = card.locator(".plot").evaluate("plot => plot.data.map(({name, x}) => [name, [...x]])")
        assert next(item for item in drawn if item[0] == "gradient")[1] == [8, 12]
