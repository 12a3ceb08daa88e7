"""``te-precision diagnose`` and ``te-precision rules``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
from typer.testing import CliRunner, Result

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.cli import app
from te_precision_callbacks.diagnosis import RULES
from te_precision_callbacks.session import InspectSession
from tests.conftest import statistics
from tests.diagnosis.planted import train


def called(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


def refusal(*arguments: object) -> str:
    """The message of the error for which the command exits with 2."""
    error = called(*arguments).exception
    assert isinstance(error, PrecisionDebugError)
    return str(error)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    train(folder)
    return folder


def test_a_finding_with_its_remedy(planted: Path) -> None:
    result = called("diagnose", planted)
    assert result.exit_code == 1
    first, _, finding, seen, *_ = result.output.splitlines()
    assert first.startswith("1 warning in ")
    assert finding.startswith("warning: gradient of 4.fc: std is ")
    assert seen == "  seen in: steps 0 to 20; no step is known to be good"
    assert "  what to do: Look at what the first of these layers does otherwise" in result.output
    assert "Not judged:" in result.output


def test_json(planted: Path) -> None:
    told = json.loads(called("diagnose", planted, "--json").output)
    assert told["verdict"].startswith("1 warning in ")
    assert told["judged"] > 5
    (finding,) = told["findings"]
    assert (finding["rule"], finding["layers"], finding["tensor"], finding["since"]) == (
        "sibling",
        ["4.fc"],
        "gradient",
        0,
    )
    assert {"severity", "seen", "why", "remedy", "source", "disproof", "patch"} <= set(finding)
    assert all(set(each) == {"rule", "why", "collect"} for each in told["not_judged"])


def test_one_form_in_all_outputs(planted: Path) -> None:
    told = json.loads(called("diagnose", planted, "--json").output)
    names = set(told) - {"notes"}
    assert {"verdict", "judged", "findings", "not_judged"} <= names
    for command in ("show", "report"):
        other = json.loads(called(command, planted, "--json").output)
        assert {name: other[name] for name in names} == {name: told[name] for name in names}, command


def test_a_healthy_run_and_one_without_numbers(tmp_path: Path) -> None:
    train(tmp_path / "healthy", steps=11, defect=False)
    result = called("diagnose", tmp_path / "healthy")
    assert (result.exit_code, result.output.startswith("Nothing wrong in ")) == (0, True)
    assert "there is no such file or folder" in refusal("diagnose", tmp_path / "nothing")


def test_a_run_without_numbers_and_a_plain_log(tmp_path: Path) -> None:
    """A run that has only the trainer's numbers has facts; a log of nvidia-dlfw-inspect has numbers alone."""
    net = te.Linear(32, 32)
    with InspectSession(statistics(start_step=5), model=net, log_dir=tmp_path / "run") as session:
        net(torch.ones(16, 32)).sum().backward()
        session.log({"loss": 1.0})
        session.step()
    result = called("diagnose", tmp_path / "run")
    assert (result.exit_code, result.output.splitlines()[0][:13]) == (0, "Nothing wrong")
    log = tmp_path / "plain" / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log"
    log.parent.mkdir(parents=True)
    line = "2026-11-22 13:01:44,718 - INFO - net.fc1_gradient_cur_amax \t\t\t\t iteration={:06d} \t\t\t\t value=0.0000"
    log.write_text("".join(f"{line.format(10 * step)}\n" for step in range(4)))
    result = called("diagnose", log.parents[1])
    assert result.exit_code == 1
    assert "gradient of net.fc1: all elements are 0" in result.output


@pytest.mark.parametrize(
    ("line", "code"),
    [("sibling", 0), ("sibling 4.*", 0), ("sibling 5.*", 1), ("# sibling", 1), ("overflow", 1)],
)
def test_known_findings(planted: Path, tmp_path: Path, line: str, code: int) -> None:
    known = tmp_path / "known.txt"
    known.write_text(f"# known\n\n{line}\n")
    result = called("diagnose", planted, "--known", known)
    assert result.exit_code == code
    unused = "no finding is left out by" in result.output
    assert unused == (code == 1 and not line.startswith("#")), "a line for a finding that is no more is named"


def test_wrong_known_findings(planted: Path, tmp_path: Path) -> None:
    known = tmp_path / "known.txt"
    known.write_text("\nsiblings\n")
    told = refusal("diagnose", planted, "--known", known)
    assert f"{known}:2: there is no rule 'siblings'. Did you mean 'sibling'?" in told
    assert "missing.txt" in refusal("diagnose", planted, "--known", tmp_path / "missing.txt")


def test_the_rules() -> None:
    listed = called("rules")
    assert listed.exit_code == 0
    assert all(rule.id in listed.output for rule in RULES)
    explained = called("rules", "stale-scale")
    assert all(
        text in explained.output for text in ("fires when:", "source: arXiv", "what to do:", "fp8_delayed_scaling")
    )
    assert json.loads(called("rules", "hole", "--json").output)["rules"][0]["id"] == "hole"
    assert "There is no rule 'nonfinit'. Did you mean 'nonfinite'" in refusal("rules", "nonfinit")
