"""Which findings one run has that the other one has not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from te_precision_callbacks import cli
from te_precision_callbacks.diagnosis import Verdict, diagnose
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.views.compare import compare, result
from te_precision_callbacks.views.compare.result import compare_verdicts
from tests.planted import BAD, defective


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return defective(tmp_path / "healthy", power=0)


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return defective(tmp_path / "bad")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["compare", *map(str, arguments)])


def test_what_b_has_and_a_has_not_comes_first(healthy: Path, bad: Path) -> None:
    (finding,) = diagnose(bad)
    lines = command(healthy, bad).output.splitlines()
    assert lines[0] == "B has 1 finding that A has not."
    text = " ".join(" ".join(lines).split())
    assert f"warning: gradient of {BAD}: {finding.seen_in_words}" in text
    assert finding.remedy in text
    assert f"The verdict of A: {diagnose(healthy).summary}" in text
    assert command(bad, healthy).output.startswith("B has no finding that A has not. A has 1 finding that B has not.")


def test_what_both_have_is_not_listed(bad: Path, tmp_path: Path) -> None:
    actual = compare(open_run(bad), open_run(defective(tmp_path / "again"))).verdicts
    assert (actual.only_a, actual.only_b, actual.summary) == ((), (), "B has no finding that A has not.")


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
    actual = compare_verdicts(open_run(healthy), open_run(bad))
    assert [(item.rule, item.tensor, item.layers) for item in actual.only_b] == [
        ("sibling", "gradient", ("z",)),
        ("sibling", "weight", ("x",)),
        ("other", "gradient", ("x",)),
    ]
    assert (
        actual.only_b[0].seen_in_words
        == f"in one of them at step {first.seen_at}, {first.seen}; A has it too in other layers"
    )
    assert [(item.rule, item.layers) for item in actual.only_a] == [("sibling", ("y",))]
    assert actual.not_judged_in_a == ("other",)
    assert [" This rule was not checked in A." in text for text in actual.in_words()] == [False, False, True]
