"""Lets ranks that share no process group find the segment of rank 0 of their launch."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from te_precision_callbacks.runs.input_files import read_json
from te_precision_callbacks.runs.run_files import RUN_FILE, rank_name, segments_of

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
"""Variables that are equal on all ranks of a launch, by torchrun and other launchers."""

_AHEAD = 120.0
"""Seconds by which rank 0 may start earlier than another rank."""


def launch_key() -> str:
    return "|".join(os.environ.get(name, "") for name in _VARIABLES)


def find_segment(runs: Path, rank: int, since: float) -> tuple[str, int] | None:
    """Return the run and the segment of rank 0 of this launch, or None before it has begun.

    A segment with files of this rank belongs to an earlier launch. ``since`` is the start of this rank, in seconds
    since the epoch.
    """
    if not runs.is_dir():
        return None
    for run in sorted((entry for entry in runs.iterdir() if entry.is_dir()), reverse=True):
        for number, segment in reversed(segments_of(run).items()):
            if not (segment / rank_name(rank)).exists() and _is_of_launch(segment / RUN_FILE, since):
                return run.name, number
    return None


def _is_of_launch(path: Path, since: float) -> bool:
    try:
        facts = read_json(path)
        begun = datetime.fromisoformat(facts["started_at"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return False
    return bool(facts.get("launch") == launch_key() and begun > since - _AHEAD)
