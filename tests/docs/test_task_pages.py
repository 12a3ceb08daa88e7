"""Pages on one task each: their code and its output."""

import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformer_engine.pytorch as te
from typer.testing import CliRunner

from te_precision_callbacks import InspectSession, cli
from te_precision_callbacks.base.vocabulary import PRECISIONS, SUBJECTS
from te_precision_callbacks.config.contract import read_contract
from te_precision_callbacks.coverage.coverage import Reason
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.sinks import Sink, StepRecords
from tests.conftest import Keeper
from tests.docs.pages import PAGES, blocks, run
from tests.lightning.models import board_scalars, logged_lines


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.getsignal(signal.SIGUSR1)
    yield tmp_path
    signal.signal(signal.SIGUSR1, before)
    for name in ("my_models", "large_model", "train"):
        sys.modules.pop(name, None)


def command(line: str, code: int = 0) -> str:
    program, *arguments = shlex.split(line)
    assert program == "te-precision"
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def is_shown(page: str, printed: str, start: int = 0) -> None:
    """Check that the output begins like the page's lines, from block number ``start``."""
    result = lines(printed)
    for shown in lines(blocks(page, "text")[start]):
        assert any(line.startswith(shown) for line in result), shown


@pytest.mark.slow
@pytest.mark.extended
def test_a_loss_that_diverges(capsys: pytest.CaptureFixture[str]) -> None:
    page = "docs/diverging.md"
    script, again, _ = blocks(page, "python")
    watch, fix = blocks(page, "yaml")
    Path("watch.yaml").write_text(watch)
    Path("fix.yaml").write_text(watch + fix)
    Path("train.py").write_text(script)
    run(script)
    is_shown(page, capsys.readouterr().out, 1)
    run(again)
    results, parted, losses, fixed = map(command, blocks(page, "bash")[:4], (1, 1, 0, 0))
    is_shown(page, results)
    for where in ("0 embed gradient", r"\d+ head activation", r"\d+ hidden gradient", r"\d+ loss"):
        for text in (parted, blocks(page, "text")[2]):
            assert any(re.match(where, line) for line in lines(text)), "later steps and digits may vary"
    rows = [
        [line for line in lines(text) if re.match(r"\w+ (activation|gradient) [\d.]+ ", line)]
        for text in (losses, blocks(page, "text")[3])
    ]
    assert rows[0][0].startswith("embed activation 98.4")
    assert [line.split()[:2] for line in rows[0]] == [line.split()[:2] for line in rows[1]], "digits may vary"
    assert fixed.startswith("B has no finding that A does not have.")
    assert "No difference exceeds the noise floor for 5 steps" in fixed
    assert "0.25 %, the bound for FP8 against BF16" in fixed


MODELS = """
import torch
import transformer_engine.pytorch as te


def build():
    layers = torch.nn.ModuleList(te.LayerNormMLP(64, 256) for _ in range(4))
    return torch.nn.ModuleDict({"layers": layers, "head": te.Linear(64, 32)})
"""


def test_a_layer_in_high_precision() -> None:
    page = "docs/features.md"
    Path("my_models.py").write_text(MODELS)
    check = "te-precision check config.yaml --model my_models:build --recipe fp8_current_scaling --tokens 64"
    Path("config.yaml").write_text(*blocks(page, "yaml", "# config.yaml"))
    assert "FP8 in 82.1 % of the multiply-adds (fprop 98.5, dgrad 73.8, wgrad 73.8)" in command(check)
    Path("config.yaml").write_text(*blocks(page, "yaml", "forward_in_bf16_at"))
    is_shown(page, command(check))


def test_fp8_is_not_faster() -> None:
    page = "docs/check.md"
    Path("large_model.py").write_text(*blocks(page, "python", "# large_model.py"))
    Path("statistics.yaml").write_text("{}\n")
    (check,) = blocks(page, "bash", "te-precision check statistics.yaml")
    is_shown(page, command(check), 1)


def test_a_job_that_is_preempted_and_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    _, script = blocks("docs/session.md", "python", "# train.py")
    preempted = script.replace("session.step()", "session.step(), session.iteration == 3 and signal.raise_signal(10)")
    for code, steps in ((preempted, 3), (script.replace("10_000", "6"), 6)):
        assert run(code)["session"].iteration == steps
        if steps == 3:
            assert capsys.readouterr().out == "3 None\n"
    (shown,) = blocks("docs/session.md", "text", "10000")
    expected = shown.replace("10000", "6").replace("4200", "3")
    without_names = [re.sub(r"run [\w-]+", "", text) for text in (expected, capsys.readouterr().out)]
    assert without_names[0] == without_names[1]
    recorded = open_run("run")
    assert [segment.status for segment in recorded.segments] == ["ended", "ended"]
    assert recorded.curves["loss"].iterations.tolist() == [0, 1, 2, 3, 4, 5]


# ----------------------------------------------------------------------------------------------------- docs/coverage.md


COVERAGE_SCRIPT, FRONT_DOOR, SEVERAL_CONDITIONS = blocks("docs/coverage.md", "python")


def test_the_script_prints_the_output_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    run(COVERAGE_SCRIPT)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    (text,) = blocks("docs/coverage.md", "text")
    shown = text.splitlines()
    assert shown[-1] == "..."
    assert printed[: len(shown) - 1] == shown[:-1]


def test_the_contract_and_the_integration_accept_the_examples_of_the_page() -> None:
    Path("contract.yaml").write_text(*blocks("docs/coverage.md", "yaml"))
    contract = read_contract("contract.yaml")
    assert (len(contract.share), len(contract.layers), len(contract.state)) == (2, 1, 1)
    run(FRONT_DOOR)
    several = run(SEVERAL_CONDITIONS)["require"]
    assert [str(share) for share in read_contract(several).share.values()] == several["share"]


def test_the_page_names_all_words() -> None:
    text = PAGES["docs/coverage.md"].read_text(encoding="utf-8")
    words = (*PRECISIONS, *(reason.name for reason in Reason))
    assert [word for word in words if f"`{word}`" not in text] == []
    assert [subject for subject in SUBJECTS if subject.partition("_")[0] not in text] == []


# ------------------------------------------------------------------------------------------------------ docs/session.md


SCRIPT, ACCUMULATION, PIECES, SEVERAL, KNOWN, _ = blocks("docs/session.md", "python")


def test_the_blocks_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").write_text(*blocks("docs/session.md", "yaml", "# config.yaml"))
    names = run(SCRIPT)
    assert f"print(entry.layer, entry.gemm, entry.operands)  # {capsys.readouterr().out.splitlines()[0]}\n" in SCRIPT
    assert names["session"].iteration == 4
    numbers = 2 * 2 * 2  # layers, tensors, statistics
    assert len(logged_lines(Path("run"))) == numbers * 4
    exec(ACCUMULATION, names)
    assert capsys.readouterr().out.splitlines() == [f"1 0 1 {numbers}", f"2 1 3 {numbers}"]
    exec(PIECES, names)
    assert (names["session"].running, names["session"].iteration) == (False, 4)
    exec(KNOWN, names)
    shown = capsys.readouterr().out
    assert names["session"].findings.summary in shown
    assert "of the multiply-adds" in shown
    assert any(line.startswith("0 activation max ") for line in shown.splitlines())
    exec(SEVERAL, names)
    assert names["session"].iteration == 4
    layers = [layer.name for layer in names["session"].layers]
    assert layers == ["generator.0", "generator.2", "critic.0", "critic.2"]
    results = {(statistic.layer, statistic.tensor) for statistic in names["session"].last_statistics}
    assert results == {(layer, tensor) for layer in layers for tensor in ("activation", "gradient")}
    assert {entry.operands["weight"] for entry in names["session"].precision if entry.gemm == "fprop"} == {"FP8 E4M3"}


# --------------------------------------------------------------------------------------- sinks, docs/custom-features.md


PRINTER, ALARM, BOARD = blocks("docs/custom-features.md", "python")[3:]
NUMBERS = 2 * 2 * 2  # layers, tensors, statistics


@pytest.fixture
def names(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the names and the output of the first block.

    The page's names from docs/session.md are given: a model, its optimizer, four batches, and a config.
    """
    Path("config.yaml").write_text(*blocks("docs/session.md", "yaml", "# config.yaml"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.LayerNormLinear(64, 64), te.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = run(PRINTER, te=te, model=model, optimizer=optimizer, loader=torch.randn(4, 32, 64))
    results["printed"] = capsys.readouterr().out.splitlines()
    return results


def train(names: dict[str, Any], *sinks: Any, **keywords: Any) -> InspectSession:
    with InspectSession("config.yaml", model=names["model"], log_dir="run", sinks=sinks, **keywords) as session:
        for step, batch in enumerate(names["loader"]):
            names["model"](batch).pow(2).mean().backward()
            session.step(logging_step=100 + step)
    return session


def test_the_printer(names: dict[str, Any]) -> None:
    first, *lines, last = names["printed"]
    assert (first, last) == ("rank 0 of 1, 2 layers", "done")
    assert len(lines) == 4 * NUMBERS
    assert {line.rsplit(" ", 1)[0] for line in lines} >= {f"{step} 1 gradient std" for step in range(4)}


def test_the_columns(names: dict[str, Any], keeper: Keeper) -> None:
    train(names, keeper)
    for records in keeper.steps:
        assert records.logging_step == 100 + records.iteration
        assert len(records) == len(records.series) == len(records.values) == NUMBERS
        largest = int(numpy.asarray(records.values).argmax())
        row = max(records, key=lambda row: row.value)
        assert records.table[int(records.series[largest])].layer == row.layer
        assert records.values[largest] == row.value


def test_the_logger(names: dict[str, Any], keeper: Keeper) -> None:
    exec(BOARD, names)
    train(names, names["Board"]("board"), keeper)
    logged = board_scalars(Path("board"))
    expected = {
        (row.layer, row.statistic, 100 + records.iteration): row.value
        for records in keeper.steps
        for row in records
        if row.tensor == "activation"
    }
    results = {
        (name.split("/")[0].removeprefix("te."), name.split("/")[2], step): value
        for name, points in logged.items()
        if name.startswith("te.")
        for step, value in points.items()
    }
    assert results == pytest.approx(expected)
    assert {name for name in logged if name.startswith("te/")} >= {"te/all/gradient/max/median"}


class Failing(Sink):
    def __init__(self) -> None:
        self.closed: list[BaseException | None] = []

    def write(self, records: StepRecords) -> None:
        if records.iteration == 1:
            raise OSError("disk full")

    def close(self, error: BaseException | None) -> None:
        self.closed.append(error)


def test_a_sink_that_fails_is_closed_with_its_own_exception_and_the_others_go_on(
    names: dict[str, Any],
    keeper: Keeper,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    exec(ALARM, names)
    failing = Failing()
    session = train(names, failing, names["Alarm"](), keeper)
    assert capsys.readouterr().out == "1 writing records to Failing: OSError: disk full\n"
    assert [str(error) for error in failing.closed] == ["disk full"]
    assert [record.message.count("disk full") for record in caplog.records if record.levelname == "ERROR"] == [1]
    assert keeper.iterations == list(range(session.iteration)) == [0, 1, 2, 3]
    assert keeper.closed == [None]
