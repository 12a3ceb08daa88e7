"""Makes a session's last messages come before the traceback of an exception that nobody catches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType


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
