"""Run a way to end, and read each view's account of it. ``python -m tests.endings.results`` writes endings.md."""

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.runs import list_runs
from te_precision_callbacks.runs.reading import chosen_run
from te_precision_callbacks.views.report.data import page_data
from tests.endings.ways import WAYS, Way
from tests.forked import Running, launched

SCRIPT = Path(__file__).with_name("script.py")
TABLE = Path(__file__).with_name("endings.md")

_HEADING = """<!-- Written by python -m tests.endings.results; the test compares each row with a new run. -->

| ending | exit status | first line of the summary | `diagnose` | `session.healthy` | `show`, page |
|---|---|---|---|---|---|
"""


def row(way: Way, folder: Path) -> str:
    """Return the row of a way in the table."""
    command = [str(SCRIPT), way.mode, str(folder), way.code]
    if way.ranks > 1:
        ended = launched(SCRIPT, command[1:], world=way.ranks)
    elif way.mode in ("watch", "watched plain"):
        ended = [Running(Path("-m"), ["te_precision_callbacks.startup", *command]).end()]
    else:
        ended = [Running(SCRIPT, command[1:]).end()]
    if way.resumed:
        ended.append(Running(SCRIPT, ["resume", str(folder), ""]).end())
    printed = ended[-1 if way.resumed else 0].stderr.splitlines()
    first_line = next((line for line in printed if line.startswith("te-precision: ")), "none")
    healthy = folder / "healthy"
    statuses = ", ".join(str(one.returncode) for one in ended)
    seen = json_of("diagnose", folder)
    cells = [
        way.name,
        statuses,
        first_line,
        f"{seen['exit code']}: {'; '.join(verdicts(seen))}",
        healthy.read_text() if healthy.exists() else "",
        shown(folder, seen),
    ]
    return "| " + " | ".join(masked(cell) for cell in cells) + " |"


def masked(text: str) -> str:
    text = re.sub(r" ?\(\d+ of \d+ rules checked", " (... rules checked", text.removeprefix("te-precision: "))
    return text.replace(" (... rules checked)", "").replace("|", "/")


def json_of(command: str, folder: Path) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, [command, str(folder), "--json"])
    if isinstance(result.exception, cli.PrecisionDebugError):
        return {"exit code": 2, "verdict": str(result.exception).replace(str(folder), "FOLDER").partition(".")[0]}
    return {**json.loads(result.stdout), "exit code": result.exit_code}


def verdicts(seen: Mapping[str, Any]) -> list[str]:
    """The verdicts on the runs of a folder, each with its outcome."""
    return [" ".join([*run.get("outcome", ()), run["verdict"]]) for run in seen.get("runs", [seen])]


def shown(folder: Path, seen: Mapping[str, Any]) -> str:
    """Return the status that ``show`` prints, if ``show`` and the page agree with ``diagnose`` in all else."""
    if not list_runs(folder):
        return ""
    view = json_of("show", folder)
    if view["exit code"] == 2:
        return str(view["verdict"])
    last = seen.get("runs", [seen])[-1]
    page = page_data(chosen_run(folder)[0], 10**7)[0]
    for name in ("verdict", "healthy", "outcome"):
        assert view[name] == last[name]
    assert page["run"]["outcome"] == last["outcome"]
    assert page["verdict"]["summary"] == last["summary"]
    return str(view["status"])


def main() -> None:
    rows = []
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(way, Path(folder)))
            print(rows[-1], flush=True)
    TABLE.write_text(_HEADING + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
