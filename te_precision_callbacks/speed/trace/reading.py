"""Reads a trace of torch.profiler (Kineto's JSON, in the Chrome trace event format), plain or with gzip.

The file is read in pieces, and each event is put into columns and forgotten: a trace takes some 60 bytes of memory for
an event of the host or the device, and none for what nobody asks for here, such as the stack of Python.

Format: the "Trace Event Format" of Chrome; the categories and arguments are those of Kineto's ``output_json.cpp`` and
of torch's ``profiler_kineto.cpp``, in their spellings since torch 1.8.
"""

from __future__ import annotations

import enum
import gzip
import json
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.speed.errors import TraceError

NOTHING = -1
"""A number that an event does not have."""

Shapes = tuple[tuple[int, ...], ...]


class HostKind(enum.IntEnum):
    """What an event of the host is."""

    OPERATOR = 0
    RANGE = 1
    CALL = 2
    """A call of the CUDA runtime or driver."""


@dataclass(frozen=True)
class OperatorInputs:
    """The operands that an operator was given.

    Attributes:
        shapes: the sizes of each; empty for what is no tensor.
        types: the type of each, as torch's profiler names it: ``c10::BFloat16``.
    """

    shapes: Shapes
    types: tuple[str, ...]


@dataclass
class Events:
    """Events in columns, in the order of the file until :meth:`Trace.close`. Times in microseconds.

    Attributes:
        begin, end: when.
        name: the number of the name.
        lane: the number of the thread, or of the stream.
        link: the correlation of calls and kernels; NOTHING without one.
    """

    begin: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("i"))
    lane: array[int] = field(default_factory=lambda: array("i"))
    link: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.begin)


@dataclass
class HostEvents(Events):
    """Operators, ranges and calls of the runtime.

    Attributes:
        kind: a :class:`HostKind`.
        sequence: the number of an operator's node in autograd; NOTHING without one.
        operands: the number of its operands; NOTHING without shapes.
    """

    kind: array[int] = field(default_factory=lambda: array("b"))
    sequence: array[int] = field(default_factory=lambda: array("q"))
    operands: array[int] = field(default_factory=lambda: array("i"))


@dataclass
class DeviceEvents(Events):
    """Kernels, copies and fills of a device.

    Attributes:
        external: the number of the operator that launched it, where the trace says so; NOTHING without one.
        captured: the number of its node in a CUDA graph; 0 outside of graphs.
    """

    external: array[int] = field(default_factory=lambda: array("q"))
    captured: array[int] = field(default_factory=lambda: array("q"))


@dataclass
class Trace:
    """A trace.

    Attributes:
        path: the file.
        device: the name of the device; empty if the trace does not say it.
        rank: the rank of the process; None if the trace does not say it.
        names: the names of events, by number.
        operands: the operands of operators, by number.
        host: what the host did.
        on_device: what the device did.
        forward_of: (lane, begin) of an operator of a backward -> that of the forward whose node it is.
        externals: the number of an operator in the trace -> its place in ``host``.
        has_shapes: whether any operator tells its shapes.
    """

    path: Path
    device: str = ""
    rank: int | None = None
    names: list[str] = field(default_factory=list)
    operands: list[OperatorInputs] = field(default_factory=list)
    host: HostEvents = field(default_factory=HostEvents)
    on_device: DeviceEvents = field(default_factory=DeviceEvents)
    forward_of: dict[tuple[int, float], tuple[int, float]] = field(default_factory=dict)
    externals: dict[int, int] = field(default_factory=dict)

    @property
    def has_shapes(self) -> bool:
        return bool(self.operands)

    @property
    def has_device(self) -> bool:
        """Whether a device did anything; else operators of the host take the place of kernels."""
        return len(self.on_device) > 0


def column(values: Sequence[Any], kind: type[np.generic]) -> npt.NDArray[Any]:
    """A column as an array."""
    return np.frombuffer(values, dtype=kind) if len(values) else np.empty(0, dtype=kind)  # type: ignore[call-overload]


_PIECE = 1 << 22
"""The characters that are read at once; no event of Kineto is nearly as long."""

_MOST_HEAD = 1 << 24
"""The characters before the first event, or behind the last one: facts about the device and the process group."""

_SPACE = re.compile(r"[ \t\r\n]*")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')

_HOST = {
    "cpu_op": HostKind.OPERATOR,
    "operator": HostKind.OPERATOR,
    "user_annotation": HostKind.RANGE,
    "cuda_runtime": HostKind.CALL,
    "cuda_driver": HostKind.CALL,
    "runtime": HostKind.CALL,
}
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
_FORWARD_BACKWARD = frozenset({"fwdbwd", "forward_backward"})


def read_trace(path: str | Path) -> Trace:
    """Read a trace.

    Args:
        path: a ``.json`` or ``.json.gz`` that torch.profiler has written.

    Raises:
        TraceError: there is no such file, it is no trace, or it is cut off.
    """
    path = Path(path)
    trace = Trace(path)
    taker = _Taker(trace)
    for event in _events(path, trace):
        try:
            taker.take(event)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise TraceError(
                f"{path}: event {taker.count} is none of torch.profiler: {_short(event)} ({error})."
            ) from error
    taker.end()
    if not len(trace.host) and not len(trace.on_device):
        raise TraceError(
            f"{path} has {taker.count} events, but none of an operator, a kernel or a range: it is no trace of"
            " torch.profiler. Give a file of torch.profiler's export_chrome_trace() or tensorboard_trace_handler()."
        )
    return trace


class _Taker:
    """Puts events into the columns of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.count = 0
        self._trace = trace
        self._names: dict[str, int] = {}
        self._lanes: dict[tuple[Any, Any], int] = {}
        self._operands: dict[str, int] = {}
        self._nodes: dict[Any, tuple[int, float]] = {}
        self._backwards: list[tuple[Any, tuple[int, float]]] = []

    def take(self, event: Any) -> None:
        """Take the next event."""
        self.count += 1
        if not isinstance(event, Mapping):
            raise TypeError("it is no object")
        phase = event.get("ph")
        if phase == "X":
            category = str(event.get("cat", "")).lower()
            if (kind := _HOST.get(category)) is not None:
                self._take_host(event, kind)
            elif category in _DEVICE:
                self._take_device(event)
        elif phase in ("s", "f") and event.get("cat") in _FORWARD_BACKWARD:
            at = self._lane(event), float(event["ts"])
            if phase == "s":
                self._nodes[event["id"]] = at
            else:
                self._backwards.append((event["id"], at))

    def end(self) -> None:
        """Link the operators of the backward to those of the forward."""
        self._trace.forward_of = {at: self._nodes[key] for key, at in self._backwards if key in self._nodes}

    def _take_host(self, event: Mapping[str, Any], kind: HostKind) -> None:
        trace, host = self._trace, self._trace.host
        facts = event.get("args") or {}
        name = str(event["name"])
        begin = float(event["ts"])
        if kind is HostKind.OPERATOR and (external := facts.get("External id", facts.get("external id"))) is not None:
            trace.externals[int(external)] = len(host)
        host.begin.append(begin)
        host.end.append(begin + float(event.get("dur", 0)))
        host.name.append(self._name(name))
        host.lane.append(self._lane(event))
        host.link.append(int(facts.get("correlation", NOTHING)) if kind is HostKind.CALL else NOTHING)
        host.kind.append(kind)
        host.sequence.append(_whole(facts.get("Sequence number")))
        host.operands.append(self._operands_of(facts) if kind is HostKind.OPERATOR else NOTHING)

    def _take_device(self, event: Mapping[str, Any]) -> None:
        device = self._trace.on_device
        facts = event.get("args") or {}
        begin = float(event["ts"])
        device.begin.append(begin)
        device.end.append(begin + float(event.get("dur", 0)))
        device.name.append(self._name(str(event["name"])))
        device.lane.append(self._lane(event))
        device.link.append(_whole(facts.get("correlation")))
        device.external.append(_whole(facts.get("External id", facts.get("external id"))))
        device.captured.append(max(0, _whole(facts.get("graph node id"))))

    def _name(self, name: str) -> int:
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names)
            self._trace.names.append(name)
        return number

    def _lane(self, event: Mapping[str, Any]) -> int:
        key = event.get("pid"), event.get("tid")
        return self._lanes.setdefault(key, len(self._lanes))

    def _operands_of(self, facts: Mapping[str, Any]) -> int:
        shapes = facts.get("Input Dims", facts.get("Input dims"))
        if not isinstance(shapes, list):
            return NOTHING
        key = f"{shapes}{facts.get('Input type')}"
        number = self._operands.get(key)
        if number is None:
            number = self._operands[key] = len(self._operands)
            types = facts.get("Input type")
            self._trace.operands.append(
                OperatorInputs(
                    tuple(tuple(size for size in one if isinstance(size, int)) for one in shapes if _is_list(one)),
                    tuple(map(str, types)) if isinstance(types, list) else (),
                )
            )
        return number


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _whole(value: object) -> int:
    """A whole number; NOTHING for anything else."""
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.isdigit() else NOTHING


def _short(event: object) -> str:
    text = repr(event)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _events(path: Path, trace: Trace) -> Iterator[Any]:
    """The events of a file; the facts before them go into the trace.

    Raises:
        TraceError: as :func:`read_trace`.
    """
    try:
        with _opened(path) as file:
            pieces = _Pieces(path, file)
            _take_head(pieces, trace)
            yield from pieces.objects()
            _take_facts("{" + pieces.rest().lstrip("] \t\r\n,"), trace)
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path} is cut off: its gzip ends early ({error}). Copy or write it again.") from error
    except gzip.BadGzipFile as error:
        raise TraceError(f"{path} is no gzip file ({error}), although its first bytes say so.") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no trace of torch.profiler: it is no text ({error}).") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}.") from error


def _opened(path: Path) -> IO[str]:
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if packed else open(path, encoding="utf-8")


class _Pieces:
    """The text of a file, of which a part is in memory."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path = path
        self._file = file
        self.text = file.read(_PIECE)
        self.at = 0
        self._before = 0
        self._count = 0
        self._is_whole = False

    def more(self) -> bool:
        """Read the next piece; whether there is one."""
        piece = self._file.read(_PIECE)
        self._before += self.at
        self.text = self.text[self.at :] + piece
        self.at = 0
        return bool(piece)

    def skip_space(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def objects(self) -> Iterator[Any]:
        """The entries of the list that begins here.

        Raises:
            TraceError: the list is cut off or is no JSON.
        """
        decode = json.JSONDecoder().raw_decode
        match = _SPACE.match
        if self.skip_space() == "]":
            return
        while True:
            try:
                event, self.at = decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if len(self.text) - self.at <= 2 * _PIECE and self.more():
                    self.skip_space()
                    continue
                self._refuse(error)
            self._count += 1
            yield event
            self.at = match(self.text, self.at).end()  # type: ignore[union-attr]
            following = self.skip_space()
            if following == "]":
                return
            if following != ",":
                self._refuse(json.JSONDecodeError("Expecting ',' delimiter", self.text, self.at))
            self.at += 1
            self.skip_space()

    def rest(self) -> str:
        """What follows the list, up to a limit."""
        return self.text[self.at :] + self._file.read(_MOST_HEAD)

    def _refuse(self, error: json.JSONDecodeError) -> NoReturn:
        if not self._file.read(1) and len(self.text) - self.at <= 2 * _PIECE:
            raise TraceError(
                f"{self.path} is cut off after {self._count} events, or its last event is no JSON ({error.msg})."
                " A process that is killed while it writes leaves such a file. Write the trace again."
            ) from error
        raise TraceError(
            f"{self.path} is no trace of torch.profiler: after {self._count} events, at character"
            f" {self._before + error.pos}, it is no JSON ({error.msg})."
        ) from error


def _take_head(pieces: _Pieces, trace: Trace) -> None:
    """Go to the first event, and take the facts before it.

    Raises:
        TraceError: there are no events.
    """
    first = pieces.skip_space()
    if first == "[":
        pieces.at += 1
        return
    found = _EVENTS.search(pieces.text, pieces.at) if first == "{" else None
    while found is None and first == "{" and len(pieces.text) < _MOST_HEAD and pieces.more():
        found = _EVENTS.search(pieces.text)
    if found is None:
        raise TraceError(
            f'{trace.path} is no trace of torch.profiler: it has no list "traceEvents". Give a file of'
            " torch.profiler's export_chrome_trace() or tensorboard_trace_handler()."
        )
    head = pieces.text[pieces.at : found.start()].rstrip().rstrip(",")
    pieces.at = found.end()
    _take_facts(head + "}", trace)


def _take_facts(text: str, trace: Trace) -> None:
    """Take the device and the rank from the facts before or behind the events, as far as they are there."""
    try:
        facts = json.loads(text)
    except json.JSONDecodeError:
        return
    devices, group = facts.get("deviceProperties"), facts.get("distributedInfo")
    if isinstance(devices, list) and devices and isinstance(devices[0], Mapping):
        trace.device = str(devices[0].get("name", ""))
    if isinstance(group, Mapping) and isinstance(group.get("rank"), int):
        trace.rank = group["rank"]
