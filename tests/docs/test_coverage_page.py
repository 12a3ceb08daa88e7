"""docs/coverage.md: its code, the output of the code, and its contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks.base.vocabulary import PRECISIONS, SUBJECTS
from te_precision_callbacks.config.contract import read_contract
from te_precision_callbacks.coverage.coverage import Reason
from te_precision_callbacks.session import PrecisionContractError
from tests.docs.pages import PAGES, blocks

PAGE = "docs/coverage.md"
SCRIPT, FRONT_DOOR, SEVERAL = blocks(PAGE, "python")
(CONTRACT,) = blocks(PAGE, "yaml")
(PRINTED,) = blocks(PAGE, "text")


def test_the_script_prints_the_output_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(SCRIPT, {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = PRINTED.splitlines()
    assert shown[-1] == "..."
    assert printed[: len(shown) - 1] == shown[:-1]


def test_the_contract_and_the_integration_accept_the_examples_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("contract.yaml").write_text(CONTRACT)
    contract = read_contract("contract.yaml")
    assert contract is not None
    assert (len(contract.share), len(contract.layers), len(contract.state)) == (2, 1, 1)
    exec(FRONT_DOOR, {})
    names: dict[str, Any] = {}
    exec(SEVERAL, names)
    several = read_contract(names["require"])
    assert several is not None
    assert [str(share) for share in several.share.values()] == names["require"]["share"]


def test_a_script_under_a_contract_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demanding = SCRIPT.replace('log_dir="run"', 'log_dir="run", require="fp8 >= 95%"')
    with pytest.raises(PrecisionContractError, match=r"fp8 >= 95%: it is 94.1 %"):
        exec(demanding, {})


def test_the_page_names_all_words() -> None:
    text = PAGES[PAGE].read_text(encoding="utf-8")
    for word in (*PRECISIONS, *(reason.name for reason in Reason)):
        assert f"`{word}`" in text, word
    for subject in SUBJECTS:
        assert subject.partition("_")[0] in text, subject
