"""Daemon threads: the interpreter would wait for any other one before all else at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


def started(what: str, call: Callable[[], object]) -> threading.Thread | None:
    """A daemon thread that makes a call.

    Args:
        what: what it does, for its name.
        call: made in it.

    Returns:
        The thread; None where none can be started, as when the interpreter is ending.
    """
    thread = threading.Thread(target=call, name=f"te-precision {what}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def within(seconds: float, call: Callable[[], ResultT]) -> ResultT:
    """The result of a call that asks a disk, which may not answer.

    Args:
        seconds: how long to wait for it.
        call: made in a daemon thread, which goes on waiting; in this one where no thread can be started.

    Raises:
        TimeoutError: there was no answer in time.
    """
    found: list[ResultT] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)

    thread = started("asks a disk", run)
    if thread is None:
        run()
    else:
        thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"the disk has not answered for {seconds:g} seconds")
    return found[0]
