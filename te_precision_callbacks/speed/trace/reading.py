"""Read a trace of torch.profiler: Kineto's JSON in the Chrome trace event format, plain or compressed with gzip.

Categories and arguments are those of Kineto's ``output_json.cpp`` and torch's ``profiler_kineto.cpp``. Events become
:class:`TraceEvent` objects while the JSON is parsed, so that the arguments that are not needed take no memory.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from te_precision_callbacks.speed.errors import TraceError
from te_precision_callbacks.speed.trace.events import EventType, Trace, TraceEvent

_CATEGORIES: Mapping[str, EventType] = {
    "cpu_op": "operator",
    "user_annotation": "range",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "kernel": "kernel",
    "gpu_memcpy": "kernel",
    "gpu_memset": "kernel",
}


def read_trace(path: str | Path) -> Trace:
    """Read a trace.

    Args:
        path: a ``.json`` or ``.json.gz`` that torch.profiler has written.

    Raises:
        TraceError: there is no such file, it is not a trace, or it is cut off.
    """
    path = Path(path)
    trace = Trace(path)
    reader = _TraceReader(trace)
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        facts = json.loads(text, object_hook=reader.read)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is cut off or not a gzip file ({error}). Copy or write it again.") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise TraceError(
            f"{path} is cut off, or is not a trace of torch.profiler: it is not JSON ({error}). A process that is"
            " killed while it writes leaves such a file. Write the trace again."
        ) from error
    if not trace.host and not trace.kernels:
        raise TraceError(
            f"{path} is not a trace of torch.profiler: it has no operator, kernel or range. Give a file of"
            " torch.profiler's export_chrome_trace() or tensorboard_trace_handler()."
        )
    trace.arrows = {at: reader.forwards[key] for key, at in reader.backwards if key in reader.forwards}
    if isinstance(facts, Mapping):
        trace.device = str((facts.get("deviceProperties") or [{}])[0].get("name", ""))
        trace.rank = (facts.get("distributedInfo") or {}).get("rank")
    return trace


class _TraceReader:
    """Puts the events of a JSON file into a trace."""

    def __init__(self, trace: Trace) -> None:
        self.forwards: dict[Any, tuple[int, float]] = {}
        self.backwards: list[tuple[Any, tuple[int, float]]] = []
        self._trace = trace
        self._lanes: dict[tuple[Any, Any], int] = {}

    def read(self, found: dict[str, Any]) -> object:
        """Read an object of the file.

        Returns:
            The object; None in place of an event, which is kept in the trace if it is needed.
        """
        phase = found.get("ph")
        if phase is None:
            return found
        try:
            what = _CATEGORIES.get(found.get("cat", ""))
            if phase == "X" and what is not None:
                events = self._trace.kernels if what == "kernel" else self._trace.host
                events.append(self._event(found, what))
            elif phase in ("s", "f") and found.get("cat") == "fwdbwd":
                at = self._lane(found), float(found["ts"])
                if phase == "s":
                    self.forwards[found["id"]] = at
                else:
                    self.backwards.append((found["id"], at))
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise TraceError(
                f"{self._trace.path} has an event that torch.profiler does not write: {str(found)[:120]} ({error})."
            ) from error
        return None

    def _event(self, found: Mapping[str, Any], what: EventType) -> TraceEvent:
        arguments = found.get("args") or {}
        begin = float(found["ts"])
        shapes = arguments.get("Input Dims")
        return TraceEvent(
            sys.intern(found["name"]),
            what,
            begin,
            begin + float(found.get("dur", 0)),
            self._lane(found),
            arguments.get("correlation") if what in ("call", "kernel") else None,
            "Sequence number" in arguments,
            shapes if isinstance(shapes, list) else None,
        )

    def _lane(self, found: Mapping[str, Any]) -> int:
        return self._lanes.setdefault((found.get("pid"), found.get("tid")), len(self._lanes))
