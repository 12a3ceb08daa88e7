"""The results of a session that ran in another process.

Lightning's ``ddp_spawn`` and ``ddp_fork`` strategies fit in child processes, each with a copy of the callback. The copy
of rank 0 leaves the results of its session in a file that the callback knows by name, and the callback reads the file.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import pickle
import shutil
import tempfile
import weakref
from pathlib import Path

from te_precision_callbacks.session.results import Results

logger = logging.getLogger(__name__)


class SessionOutcome(Results):
    """The part of an ``InspectSession`` that can be read after its end, with the same names; of rank 0."""

    @property
    def running(self) -> bool:
        """Whether the session is running: never."""
        return False

    @classmethod
    def of(cls, session: Results) -> SessionOutcome:
        """The outcome of a session so far; it does not change when the session goes on."""
        findings = copy.deepcopy(session._results)
        findings.iteration = session.iteration
        return cls(findings)


class Mailbox:
    """A file in which copies of an object, pickled or forked into child processes, leave it an outcome.

    It is unpickled, so it lies in a folder that no other user can write to.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._path = Path(tempfile.mkdtemp(prefix="te_precision_outcome_")) / "outcome.pickle"
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
            logger.warning(
                "callback.session cannot be returned to the process that called fit(): %s."
                " The files in log_dir have the same.",
                error,
            )

    def take(self) -> SessionOutcome | None:
        """The outcome that was left since the last call; None if there is none."""
        try:
            outcome: SessionOutcome = pickle.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        self._path.unlink()
        return outcome


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not at the end of a forked child
        shutil.rmtree(path.parent, ignore_errors=True)
