"""The code of docs/rollout.md, and its outputs."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_precision_callbacks.coverage.contract_keeper import PrecisionContractError
from te_precision_callbacks.maps.alignment import read_alignment
from te_precision_callbacks.maps.precision_map import FindingKind
from tests.docs.pages import PAGES, blocks, run
from tests.docs.test_task_pages import lines
from tests.maps.test_command import command

PAGE = "docs/rollout.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("train", None)


def is_shown(number: int, printed: str) -> None:
    """Each line of the page's output begins or ends with a part of a printed line."""
    result = [" ".join(re.sub(r"[─]+", "", line).split()) for line in printed.splitlines()]
    for shown in lines(blocks(PAGE, "text")[number]):
        assert any(shown in line for line in result), (shown, printed)


@pytest.mark.slow
def test_the_page() -> None:
    script, require = blocks(PAGE, "python")
    of_run, compare, save = blocks(PAGE, "bash")
    Path("train.py").write_text(script)
    Path("config.yaml").write_text("{}")
    Path("alignment.yaml").write_text(*blocks(PAGE, "yaml"))
    assert read_alignment("alignment.yaml").allow == ["*.router", "lm_head"]
    run(script)
    is_shown(0, command(of_run.removeprefix("te-precision ")))
    printed = command(compare.removeprefix("te-precision "), 1)
    is_shown(1, printed)
    assert " ".join(blocks(PAGE, "text")[2].split()) in " ".join(printed.split())

    mapping, check = (line.removeprefix("te-precision ") for line in save.splitlines())
    mapping, _, target = mapping.partition(" > ")
    Path(target).write_text(command(mapping, 1))
    assert "8 differences" not in command(check, 1)
    for line in require.splitlines()[2:]:
        with pytest.raises(PrecisionContractError, match="in FP8 E4M3 in A, in BF16 in B"):
            run(f"from train import train\n{line}")
    importlib.import_module("train").export("healthy")
    Path(target).write_text(command("map healthy --engine vllm --json"))
    assert json.loads(Path(target).read_text())["findings"] == []
    run(require)
    assert "finding" not in command(check)


def test_the_page_names_the_kinds_of_findings() -> None:
    text = PAGES[PAGE].read_text()
    for kind in FindingKind.__args__:  # type: ignore[attr-defined]
        assert f"| `{kind}` |" in text
