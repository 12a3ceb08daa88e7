"""Daemon threads, which do not block the interpreter's exit."""

from __future__ import annotations

import threading
from collections.abc import Callable


def started(what: str, call: Callable[[], object]) -> threading.Thread | None:
    """Start a daemon thread; None where the interpreter is ending and cannot start one."""
    thread = threading.Thread(target=call, name=f"te-precision {what}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
