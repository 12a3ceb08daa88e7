"""The code of docs/search.md, and its output."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.search import SearchError
from tests.docs.pages import ROOT, blocks, run
from tests.docs.test_task_pages import lines

PAGE = "docs/search.md"


def words(text: str) -> str:
    """Without figures, which depend on the Python that provides the model's library."""
    return re.sub(r"[-+]?\d[\d.]*", "#", " ".join(text.replace("─", "").split()))


@pytest.mark.slow
@pytest.mark.extended
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    setup, call, *_ = blocks(PAGE, "python")
    (command,) = blocks(PAGE, "bash")
    Path("lm_search.py").write_text(setup)
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:])
    assert result.exit_code in (0, 1), result.output
    printed = words(result.output)
    (output,) = blocks(PAGE, "text")
    for line in lines(output):
        assert line == "..." or words(line) in printed, (line, result.output)
    assert Path("search/config.yaml").exists()

    found = run(call)["result"]
    assert found.effect.cosine >= 0.995
    assert len(found.confirmation.choice.interval) == 2
    assert Path("by_cosine/precision_recipe.py").exists()
    del sys.modules["lm_search"]


def test_wrong_setups_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong_setup.py").write_text("def nothing(): return {'model': None}\n")
    result = CliRunner().invoke(cli.app, ["search", "wrong_setup:nothing", "--cosine", "0.9"])
    assert "The mapping of 'wrong_setup:nothing' lacks batches, closure. Give package" in str(result.exception)
    assert "a mapping with model, closure, batches, and optimizer to confirm" in str(result.exception)


@pytest.mark.extended
def test_every_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flags_setup.py").write_text("from tests.search.models import setup\n")
    arguments = ["flags_setup:setup", "--low-share", "0.5", "--extra-ms", "1", "--device", "h200", "--cosine", "0.9"]
    arguments += ["--together", r"blocks\.\d+\.up", "--sweep-batches", "2", "--seeds", "2", "--steps", "2"]
    arguments += ["--tolerance", "0.5", "--max-time", "600", "--output", "found", "--json"]
    result = CliRunner().invoke(cli.app, ["search", *arguments])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["low_share"] >= 0.5
    assert found["extra_ms"] <= 1
    assert found["effect"]["cosine"] >= 0.9
    assert found["confirmation"]["steps"] == found["confirmation"]["choice"]["pairs"] == 2
    assert found["confirmation"]["choice"]["tolerance"] == 0.5
    assert "blocks.0.up + blocks.1.up" in {entry["name"] for entry in found["measured"]}
    assert Path("found/megatron.yaml").exists()


def test_a_closure_that_fails_is_said_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "from tests.search import models\n\ndef setup():\n"
    Path("failing.py").write_text(f"{text}    return {{**models.setup(), 'closure': lambda batch: losss(batch)}}\n")
    result = CliRunner().invoke(cli.app, ["search", "failing:setup", "--cosine", "0.9"])
    assert isinstance(result.exception, SearchError), result.exception
    failed = "The closure, or the backward of its loss, failed: NameError: name 'losss' is not defined ("
    assert failed in str(result.exception)
    assert "failing.py, line 4: return" in str(result.exception)
    assert "losss(batch)" in str(result.exception)


def test_long_tables_say_how_many_rows_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("long_setup.py").write_text("from tests.search.models import setup\n")
    result = CliRunner().invoke(cli.app, ["search", "long_setup:setup", "--low-share", "0.5", "--seeds", "0"])
    found = json.loads(Path("search/search.json").read_text())
    left = [str(len(found[table]) - 12) for table in ("measured", "frontier")]
    assert re.findall(r"^and (\d+) more, which --json has\.$", result.output, re.M) == left, result.output
