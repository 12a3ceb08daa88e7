"""Print the table of the section "Six walks" of docs/architecture.md: the rooms that six questions go through.

    .venv/bin/python tools/walks.py

Trains one layer for some steps on the reference backend, on its fused path and on the debug path, and makes a report.
The table has, for each station of a walk, the rooms of the calls that lead to it. tests/tools/test_walks.py compares.
"""

from __future__ import annotations

import io
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from te_precision_callbacks.base.vocabulary import Observe

CONFIG = """
statistics:
  enabled: True
  layers: {layer_types: [all]}
  transformer_engine:
    LogTensorStats: {enabled: True, tensors: [activation, weight], stats: [std], freq: 2}
"""

WALKS = """
a tensor, from the GEMM to the line of the log
    engine/engine.py:StatisticsEngine.note
    engine/engine.py:StatisticsEngine.collect
    sinks/statistics_log.py:StatisticsLog.write
    sinks/log_file.py:LogFile.append
`freq`, from the YAML to "measure now"
    statistics/schedule.py:Schedule.of
    statistics/schedule.py:Schedule.at
a statistic's name, from the config to the page
    statistics/names.py:tensor_request
    runs/writing.py:RunWriter.series
    views/report/data.py:nonempty
`observe="auto"`
    instrumentation/fused.py:choose
    instrumentation/fused.py:FusedObservation.ask
a share of the coverage, from the GEMM to the report
    coverage/precision_audit.py:PrecisionAudit.look
    coverage/history.py:in_precision
    views/report/facts.py:coverage
a command, from its words to its answer
    runs/reading.py:open_run
    views/report/page.py:write_report
"""
"""Walks, each with its stations: functions with their files."""

OBSERVE: tuple[Observe, ...] = ("auto", "debug")
ENGINE = "Transformer Engine"
FOREIGN = {"transformer_engine": ENGINE, "nvdlfw_inspect": "nvidia-dlfw-inspect", "features": "features"}


def room(code: CodeType) -> str:
    """The room of a function; empty for code that is in none."""
    parts = Path(code.co_filename).parts
    if "te_precision_callbacks" in parts:
        return parts[len(parts) - parts[::-1].index("te_precision_callbacks")].removesuffix(".py")
    return next((name for folder, name in FOREIGN.items() if folder in parts), "")


def rooms_to(frame: FrameType | None) -> list[str]:
    """The rooms of the calls that lead to a frame, the outermost first."""
    rooms: list[str] = []
    while frame is not None:
        here, frame = room(frame.f_code), frame.f_back
        if here and here not in rooms[-1:]:
            rooms.append(here)
    return rooms[::-1]


def train(observe: Observe) -> None:
    """Trains a layer for four steps in the current folder, and writes the page of the run."""
    import torch

    from te_precision_callbacks import InspectSession, cli, reference

    reference.install_where_needed()
    import transformer_engine.pytorch as te

    model = torch.nn.Sequential(te.Linear(32, 32))
    Path("config.yaml").write_text(CONFIG, encoding="utf-8")
    with InspectSession("config.yaml", model=model, log_dir="run", observe=observe) as session:
        for _ in range(4):
            with te.autocast(enabled=True):
                model(torch.randn(32, 32, requires_grad=True)).sum().backward()
            session.step()
    print(session.coverage())
    sys.argv = ["te-precision", "report", "run", "-o", "report.html"]
    with suppress(SystemExit):
        cli.main()


def ways(observe: Observe) -> dict[str, list[str]]:
    """The shortest way to each function of a run. A way through Transformer Engine goes before others, which are checks
    before the first step."""
    found: dict[str, list[str]] = {}
    functions = {line.partition(":")[2] for line in WALKS.splitlines() if line.startswith(" ")}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_qualname in functions:
            file = frame.f_code.co_filename.rpartition("te_precision_callbacks/")[2]
            station, way = f"{file}:{frame.f_code.co_qualname}", rooms_to(frame)
            found[station] = min(found.get(station, way), way, key=lambda each: (ENGINE not in each, len(each)))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(io.StringIO()):
            train(observe)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def table() -> Iterator[str]:
    """The lines of the table."""
    runs = [ways(observe) for observe in OBSERVE]
    yield from ("| walk | station | rooms on the way |", "|---|---|---|")
    walk = ""
    for line in WALKS.strip().splitlines():
        if not line.startswith(" "):
            walk = line
            continue
        station = line.strip()
        found = dict.fromkeys(", ".join(run[station]) for run in runs if station in run)
        yield f"| {walk} | `{station.partition(':')[2]}` | {'; or '.join(found) or 'not reached'} |"
        walk = ""


if __name__ == "__main__":
    print(*table(), sep="\n")
