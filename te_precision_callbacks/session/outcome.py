"""The results of a session that ran in another process.

Lightning's ``ddp_spawn`` and ``ddp_fork`` strategies fit in child processes, each with a copy of the callback. The copy
of rank 0 leaves what its session found in a file that the callback knows by name, and the callback takes it from there.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import tempfile
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from te_precision_callbacks.records.model import LayerInfo, Row
from te_precision_callbacks.records.precision import Precision
from te_precision_callbacks.records.worst import Worst

if TYPE_CHECKING:
    from te_precision_callbacks.session.session import InspectSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionOutcome:
    """The part of an ``InspectSession`` that can be read after its end, with the same names; of rank 0.

    Attributes:
        layers: every layer of the model that could be observed, and what the config did with it.
        precision: the precision that each GEMM really ran in; ``precision(at=120)`` of one iteration.
        last_statistics: the last value of each statistic.
        worst_statistics: the worst value of each statistic, and the iteration in which it was.
        iteration: the first debug iteration that was not run.
        log_dir: where the session wrote.
        unconverted: layers that a trainer left without Transformer Engine: name -> why.
    """

    layers: tuple[LayerInfo, ...]
    precision: Precision
    last_statistics: tuple[Row, ...]
    worst_statistics: tuple[Worst, ...]
    iteration: int
    log_dir: Path
    unconverted: Mapping[str, str]

    @property
    def running(self) -> bool:
        """Whether the session is running: never."""
        return False

    @classmethod
    def of(cls, session: InspectSession) -> SessionOutcome:
        """What a session has found."""
        return cls(
            layers=session.layers,
            precision=session.precision,
            last_statistics=session.last_statistics,
            worst_statistics=session.worst_statistics,
            iteration=session.iteration,
            log_dir=session.log_dir,
            unconverted=session.unconverted,
        )


class Mailbox:
    """Where copies of an object in child processes leave an outcome for it. A copy is made by pickling or forking."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._path = Path(tempfile.gettempdir()) / f"te_precision_outcome_{uuid.uuid4().hex}.pickle"
        weakref.finalize(self, _remove, self._path, self._owner)

    @property
    def in_child(self) -> bool:
        """Whether this process was started by the one that made the mailbox."""
        parent = multiprocessing.parent_process()
        return parent is not None and parent.pid == self._owner

    def put(self, outcome: SessionOutcome) -> None:
        """Leave an outcome; a failure is logged, since a fit has just ended."""
        try:
            written = self._path.with_suffix(".part")
            written.write_bytes(pickle.dumps(outcome))
            written.replace(self._path)
        except Exception as error:
            logger.warning("callback.session cannot be given back to the process that called fit(): %s", error)

    def take(self) -> SessionOutcome | None:
        """The outcome that was left since the last call; None where there is none."""
        try:
            outcome: SessionOutcome = pickle.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        _remove(self._path, self._owner)
        return outcome


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not at the end of a forked child
        path.unlink(missing_ok=True)
