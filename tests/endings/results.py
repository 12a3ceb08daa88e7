"""Run a way to end, and read what each view says of it."""

import json
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from te_precision_callbacks import cli
from tests.endings.ways import Way
from tests.forked import Running

SCRIPT = Path(__file__).with_name("script.py")


class Result(NamedTuple):
    status: int
    first_line: str
    code: int
    state: str
    outcome: str
    healthy: str
    show: str


def result(way: Way, folder: Path) -> Result:
    ended = Running(SCRIPT, [way.mode, str(folder), way.code]).end()
    first = next(
        (line for line in ended.stderr.splitlines() if line.startswith("te-precision: ")), ended.stderr[-3000:]
    )
    called = CliRunner().invoke(cli.app, ["diagnose", str(folder), "--json"])
    seen = json.loads(called.stdout)
    shown = json.loads(CliRunner().invoke(cli.app, ["show", str(folder), "--json"]).stdout)
    healthy = folder / "healthy"
    return Result(
        ended.returncode,
        first,
        called.exit_code,
        seen["verdict"],
        " ".join(seen["outcome"]),
        healthy.read_text() if healthy.exists() else "",
        shown["status"],
    )
