"""Limits the time of a regular-expression search, which could otherwise run practically forever.

    with at_most(0.5):                  # seconds of the processor
        pattern.search(text)            # TookTooLong

Python's ``re`` looks for signals while it searches (3.10 to 3.13, ``_sre.c``: every 4,096 steps), so a timer can end a
search, and the result is otherwise exactly that of ``re``. Signals reach only the main thread: in another thread, and
where the script has set the timer or handles its signal outside Python, there is no limit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LIMIT = 0.5
"""Seconds; a search in thousands of names takes hundredths of a second."""


class TookTooLong(Exception):
    """The time was up."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Limits a block to this much of the processor's time.

    Raises:
        TookTooLong: the time was up.
    """
    if not _can_be_limited():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _can_be_limited() -> bool:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return False
    return signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0 and signal.getsignal(signal.SIGVTALRM) is not None


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise TookTooLong
