"""A folder with several runs, as a second training with the same log_dir leaves it: which one the commands read."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from te_precision_callbacks import cli
from te_precision_callbacks.runs import open_run
from tests.runs.making import write_run

FOLDER = "my logs"


@pytest.fixture
def ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    return [write_run(tmp_path / FOLDER, range(steps)) for steps in (3, 6, 9)]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [*map(str, arguments)], catch_exceptions=False)


def test_the_latest_is_read_and_the_others_are_named(ids: list[str]) -> None:
    first, second, third = ids
    stated = f"{FOLDER} has 3 runs. The latest is read: {third}. The others, for --run: {second}, {first}."
    for command in ("show", "report", "compare"):
        result = call(command, FOLDER, *[FOLDER] * (command == "compare"))
        assert result.exit_code == 0
        assert " ".join(result.stdout.split()).count(stated) == 1, "once, also where it is read twice"
    shown = call("show", FOLDER, "--json")
    assert json.loads(shown.stdout)["run_id"] == third
    assert stated in " ".join(shown.stderr.split())


def test_a_run_that_was_resumed_is_later_than_an_attempt_that_came_between(ids: list[str]) -> None:
    first, *_, last = ids
    assert open_run(FOLDER, run="latest").run_id == last
    run = Path(FOLDER) / "precision_records" / first
    shutil.copytree(run / "seg-000", run / "seg-001")
    facts = run / "seg-001" / "run.json"
    later = {"segment": 1, "first_iteration": 3, "started_at": "2999-01-01T00:00:00.000+00:00"}
    facts.write_text(json.dumps(json.loads(facts.read_text()) | later))
    assert open_run(FOLDER, run="latest").run_id == first
    facts.write_text("damaged")
    assert open_run(FOLDER, run="latest").run_id == last


def test_a_run_is_chosen_by_as_much_of_its_name_as_is_needed(ids: list[str]) -> None:
    first, _, third = ids
    records = f"{FOLDER}/precision_records"
    for arguments, chosen in (
        ((FOLDER, "--run", first), first),
        ((FOLDER, "--run", first[:-1]), first),
        ((FOLDER, "--run", "latest"), third),
        ((records, "--run", first), first),
        ((f"{records}/{first}",), first),
    ):
        result = call("show", *arguments, "--json")
        assert not result.stderr, "nothing is said of a choice that was made"
        assert json.loads(result.stdout)["run_id"] == chosen
    for command in ("show", "report"):
        with pytest.raises(cli.PrecisionDebugError, match=r"there is no run 'x'\. There are: "):
            call(command, FOLDER, "--run", "x")
        with pytest.raises(cli.PrecisionDebugError, match=f"is the run {first!r}, not {third!r}"):
            call(command, f"{records}/{first}", "--run", third)


def test_two_runs_of_a_folder_are_compared(ids: list[str]) -> None:
    first, second, third = ids
    for both in ([FOLDER, FOLDER], [FOLDER]):
        actual = json.loads(call("compare", *both, "--run", first, "--run", second, "--json").stdout)
        assert (actual["a"], actual["b"]) == (f"{FOLDER} ({first})", f"{FOLDER} ({second})")
        assert (actual["pairing"]["first"], actual["pairing"]["last"]) == (0, 2)
    actual = json.loads(call("compare", FOLDER, FOLDER, "--noise", FOLDER,
                            *(part for item in ids for part in ("--run", item)), "--json").stdout)  # fmt: skip
    assert actual["floor"]["sides"] == [f"{FOLDER} ({third})"]
    result = call("compare", FOLDER, FOLDER, *("--run", first) * 3)
    assert result.exit_code == 2
    assert "3 runs are chosen" in " ".join(result.output.split())
