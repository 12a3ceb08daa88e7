"""Locations of traces, which ``profile=`` writes.

<log_dir>/precision_records/<run_id>/traces/seg-000.rank-00000.iterations-000010-000012.json.gz
"""

from __future__ import annotations

import re
from pathlib import Path

from te_precision_callbacks.runs.recording import Place
from te_precision_callbacks.runs.run_files import FOLDER, rank_name, segment_name

_TRACES = "traces"
_WITHOUT_RECORDS = "precision_traces"
_SUFFIX = ".json.gz"
_NAME = re.compile(rf"(seg-\d+\.)?rank-\d+\.iterations-\d+-\d+{re.escape(_SUFFIX)}")


def new_trace_file(log_dir: Path, place: Place | None, rank: int, first: int, last: int) -> Path:
    """Return the path of a new trace: in the run's folder, or in ``precision_traces`` without records."""
    name = f"{rank_name(rank)}.iterations-{first:06d}-{last:06d}{_SUFFIX}"
    if place is None:
        return log_dir / _WITHOUT_RECORDS / name
    return log_dir / FOLDER / place.run_id / _TRACES / f"{segment_name(place.segment)}.{name}"


def traces_of(run: Path) -> list[Path]:
    """Return the profiles in the folder of a run, in order."""
    return sorted(path for path in (run / _TRACES).glob(f"*{_SUFFIX}") if not path.name.startswith("."))


def own_traces(given: Path, run_id: str) -> list[Path]:
    """Return the traces of a run, given the path it was read from; of a plain log, the traces without records."""
    if (given / FOLDER / run_id).is_dir():
        return traces_of(given / FOLDER / run_id)
    for folder in (given / run_id, given):
        if traces := traces_of(folder):
            return traces
    return sorted(path for path in (given / _WITHOUT_RECORDS).glob(f"*{_SUFFIX}") if _NAME.fullmatch(path.name))
