"""Daemon threads, which do not block the interpreter's exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


def started(what: str, call: Callable[[], object]) -> threading.Thread | None:
    """Start a daemon thread; None where the interpreter is ending and cannot start one."""
    thread = threading.Thread(target=call, name=f"te-precision {what}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def within(seconds: float, call: Callable[[], ResultT]) -> ResultT:
    """Return the result of a disk access in a daemon thread; raises TimeoutError if the disk does not respond."""
    results: list[ResultT] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            failed.append(error)

    thread = started("asks a disk", run)
    if thread is None:
        run()
    else:
        thread.join(seconds)
    if failed:
        raise failed[0]
    if not results:
        raise TimeoutError(f"the disk has not answered for {seconds:g} seconds")
    return results[0]
