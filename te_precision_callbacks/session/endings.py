"""The ends of a process that a session must precede."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

from te_precision_callbacks.base.errors import SessionError
from te_precision_callbacks.session.signals import Termination

logger = logging.getLogger(__name__)


class Terminated(SessionError):
    """SIGTERM ends the process, as it ends those of all ranks: nothing has failed in this one."""


class ProcessEnds:
    """Stops a session before its process ends: at the exit, by SIGTERM, or by an uncaught exception.

    Args:
        stop: stops the session; called with the exception that ends the process.
        release: removes what a stopped session has left in place.
        flush: writes what was handed over to the log and the records, in so many seconds.
        at_sigterm: whether to handle SIGTERM, if the script has set no handler for it.

    Attributes:
        termination: what acts at SIGTERM and SIGUSR1.
    """

    def __init__(
        self,
        stop: Callable[[BaseException], None],
        release: Callable[[], None],
        flush: Callable[[float], Any],
        *,
        at_sigterm: bool,
    ) -> None:
        self._stop = stop
        self._release = release
        # Runs also at the end of a spawned process, which calls no atexit function, and whose trainer calls no hook.
        self._at_exit = Finalize(None, self._stop_at_exit, exitpriority=100)
        self.termination = Termination(
            lambda: self._stop_before_the_end(
                Terminated("The process was ended by SIGTERM while the session was running.")
            ),
            flush,
            ends=at_sigterm,
        )
        self._uncaught = Uncaught(self._stop_before_the_end)

    def forget_exceptions(self) -> None:
        """Ignore exceptions from now on: the session has stopped."""
        self._uncaught.remove()

    def forget_exit(self) -> None:
        """Do nothing at the exit from now on: nothing is left in place."""
        self._at_exit.cancel()

    def _stop_at_exit(self) -> None:
        self._release()
        self._stop(SessionError("The process ended before session.stop() was called"))

    def _stop_before_the_end(self, error: BaseException) -> None:
        """Stop because an error ends the process; a failure here must not hide that error."""
        try:
            self._stop(error)
        except Exception as failure:
            logger.error(
                "The session could not be stopped after %s. What its files have so far stays readable.",
                type(error).__name__,
                exc_info=failure,
            )


class Uncaught:
    """Calls a function before Python shows an exception that ends the process.

    A function that runs at the exit of the process would log its messages below the traceback, which has been shown by
    then. At an interactive prompt the process continues after an exception, and the function is not called.

    Args:
        before: called with the exception; it must not raise.
    """

    def __init__(self, before: Callable[[BaseException], None]) -> None:
        self._before: Callable[[BaseException], None] | None = before
        self._shown_by = sys.excepthook
        sys.excepthook = self._show

    def remove(self) -> None:
        """Stop acting; a hook that other code has set around this one since then stays."""
        if sys.excepthook == self._show:
            sys.excepthook = self._shown_by
        self._before = None

    def _show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        prompted = bool(sys.flags.interactive) or hasattr(sys, "ps1")
        try:
            if self._before is not None and not prompted and threading.current_thread() is threading.main_thread():
                self._before(error)
        finally:
            self._shown_by(kind, error, trace)
            if isinstance(error, KeyboardInterrupt):
                _end_by_sigint()


def _end_by_sigint() -> None:
    """Let Python end the process by SIGINT after an uncaught Ctrl-C, as shells and schedulers expect.

    Python does so if the source text that it ran last has ended with KeyboardInterrupt (3.11, ``Python/pythonrun.c:
    run_eval_code_obj``). What the end of a session imports runs texts, such as those of ``collections.namedtuple``.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
