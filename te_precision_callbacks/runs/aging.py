"""Keeps the files of a rank within a limit: thins what is oldest, in all segments of a run (``runs/thinning.py``)."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator
from pathlib import Path

from te_precision_callbacks.runs.bounds import read_json
from te_precision_callbacks.runs.parts import DROPPED, EVERY, UNREADABLE, SealedPart, stretch_of
from te_precision_callbacks.runs.run_files import (
    RUN_FILE,
    PartFile,
    has_ended,
    is_incomplete,
    part_files,
    segments_of,
)
from te_precision_callbacks.runs.thinning import can_be_thinned, choose, thin
from te_precision_callbacks.runs.writing import RunWriter

logger = logging.getLogger(__name__)

_BEFORE = 15 / 16
"""The share of the limit at which thinning begins: a new part is written before those that it replaces are removed."""

_LEAST = 1 / 2
"""The share of the limit that statistics have at least, however much all else needs."""


class Aging:
    """Keeps the files of a rank within a limit, from the thread that writes them.

    Args:
        run: the folder of the run.
        writer: writes the segment of this process.
        first_iteration: of that segment.
        limit: the bytes that the rank's files of all segments may have.
        say: gets an event's kind and text, and whether it is a warning.

    Attributes:
        is_full: whether there is no room for more statistics.
    """

    def __init__(
        self, run: Path, writer: RunWriter, first_iteration: int, limit: int, say: Callable[[str, str, bool], None]
    ) -> None:
        self.is_full = False
        self._writer = writer
        self._limit = limit
        self._say = say
        self._said: set[str] = set()
        self._parts: list[SealedPart] = []  # of earlier segments, oldest first
        self._fixed = 0  # the bytes of all other files of other segments
        self._earlier: list[tuple[Path, Path]] = []  # segments that others may still write
        self._damaged: set[PartFile] = set()
        self._group: list[SealedPart] = []
        self._work: Generator[None, None, SealedPart] | None = None
        self._begins: dict[Path, float] = {writer.folder: first_iteration}  # segment -> its first iteration
        for number, segment in segments_of(run).items():
            if number < writer.segment:
                self._begins[segment] = _first_iteration(segment)
            folder = segment / writer.own.name
            if number != writer.segment and folder.is_dir():
                self._fixed += _nbytes(folder)
                if number < writer.segment:
                    self._earlier.append((segment, folder))
        self._adopt()

    def follow(self, writer: RunWriter, first_iteration: int) -> None:
        """Go on with another segment, after the one so far was closed."""
        self._parts += self._writer.sealed
        self._fixed += self._writer.nbytes - sum(part.nbytes for part in self._writer.sealed)
        self._writer = writer
        self._begins[writer.folder] = first_iteration

    def keep(self, seconds: float = math.inf) -> None:
        """Thin what is oldest until all files are within the limit; or for so long, unless they are beyond it.

        Raises:
            OSError: never for what cannot be thinned: it is left as it is, and said.
        """
        begun = time.monotonic()
        while True:
            used, room = self._used_and_room()
            if self._work is None and not self._begin(used, room):
                return
            self._go_on()
            if used <= room and time.monotonic() - begun > seconds:
                return

    def stop(self) -> None:
        """Leave what is not done."""
        if self._work is not None:
            self._work.close()

    # ------------------------------------------------------------------ what there is

    @property
    def _sound(self) -> list[SealedPart]:
        return [part for part in (*self._parts, *self._writer.sealed) if part.file not in self._damaged]

    def _used_and_room(self) -> tuple[int, float]:
        """The bytes of statistics, and those that they may have."""
        used = sum(part.nbytes for part in self._sound if can_be_thinned(part)) + self._writer.waiting_bytes
        others = self._fixed + sum(part.nbytes for part in self._parts) + self._writer.nbytes - used
        return used, max(self._limit - others, _LEAST * self._limit)

    def _adopt(self) -> None:
        """Take the parts of earlier segments, back to the first one whose process lives: that one thins its own, and
        those before it."""
        while self._earlier and has_ended(self._earlier[-1][0] / RUN_FILE):
            folder = self._earlier.pop()[1]
            try:
                before = _nbytes(folder)
                found = _parts_in(folder)
                self._fixed += _nbytes(folder) - before - sum(part.nbytes for part in found)
                self._parts = found + self._parts
            except OSError as error:
                logger.warning("The records in %s cannot be thinned: %s", folder, error)

    # ------------------------------------------------------------------ thinning

    def _begin(self, used: int, room: float) -> bool:
        """Begin to thin the next parts; False if there is no need to, or none."""
        if used <= _BEFORE * room:
            self.is_full = False
            return False
        self._adopt()
        self._group = choose(self._sound, self._writer.waiting_bytes, _BEFORE * room)
        if self._group:
            own = self._group[0].file.path.parent.parent
            later = [first for segment, first in self._begins.items() if segment.name > own.name]
            self._work = thin(self._group, min(later, default=math.inf))
            return True
        self.is_full = used > room
        if self.is_full:
            self._say_once(
                "full",
                "records_limited",
                f"The records of rank {self._writer.rank} have reached their limit of {self._limit:,} bytes, and there"
                " is nothing to be thinned. Statistics are no longer recorded; the trainer's numbers and events are."
                " A larger size for records= allows more.",
            )
        return False

    def _go_on(self) -> None:
        if self._work is None:
            return
        try:
            next(self._work)
        except StopIteration as done:
            self._replace(done.value)
        except UNREADABLE as error:
            logger.warning("The records in %s cannot be thinned, and stay: %s", self._group[0].file.path, error)
            self._damaged |= {part.file for part in self._group}
            self._work = None

    def _replace(self, made: SealedPart) -> None:
        """Put a part in the place of the parts that it was made of."""
        self._work = None
        for parts in (self._parts, self._writer.sealed):
            if self._group[0] in parts:
                place = parts.index(self._group[0])
                parts[:] = [part for part in parts if part not in self._group]
                parts.insert(place, made)
        self._say_level(made)

    def _say_level(self, made: SealedPart) -> None:
        every = EVERY[made.level]
        stretch = stretch_of(made.file.path)
        until = 0 if stretch is None else stretch.last
        if every == DROPPED:
            self._say_once(
                "dropped",
                "records_limited",
                f"The limit of {self._limit:,} bytes for the records of rank {self._writer.rank} is too small even for"
                f" every {EVERY[-2]}th step of all that has run. The oldest statistics are dropped, at first those up"
                f" to iteration {until:,}. A larger size for records= keeps more.",
            )
        else:
            self._say_once(
                str(every),
                "records_thinned",
                f"The records of rank {self._writer.rank} have reached their limit of {self._limit:,} bytes. Of the"
                f" oldest steps, at first those up to iteration {until:,}, every {every}th one is kept, and the lowest"
                " and highest value of each series. The latest steps are kept whole. A larger size for records= keeps"
                " more.",
            )

    def _say_once(self, what: str, kind: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(kind, text, kind == "records_limited" or what == str(EVERY[1]))


def _first_iteration(segment: Path) -> float:
    """The first iteration of a segment; infinite where that is not known."""
    try:
        return int(read_json(segment / RUN_FILE)["first_iteration"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return math.inf


def _parts_in(folder: Path) -> list[SealedPart]:
    """The parts in a folder that nobody writes any more, a tail included.

    What a process that was killed has left of its last thinning is removed.

    Raises:
        OSError: the folder cannot be read.
    """
    for path in folder.iterdir():
        if is_incomplete(path):
            path.unlink(missing_ok=True)
    parts, replaced = part_files(folder)
    for file in replaced:
        file.path.unlink(missing_ok=True)
    found = []
    for file in parts:
        with contextlib.suppress(*UNREADABLE):
            stretch = stretch_of(file.path) if file.thinned else None
            level = 0 if stretch is None else EVERY.index(stretch.every)
            found.append(SealedPart(file, file.path.stat().st_size, level))
    return found


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
