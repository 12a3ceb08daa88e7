"""The thread that writes: what becomes of it, and of those who wait for it, when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from te_precision_callbacks.dumps.writer import Stop, Writer


def ends(doing: Callable[[], object]) -> bool:
    """Whether it comes to an end."""
    thread = threading.Thread(target=doing, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


@pytest.mark.parametrize("error", [SystemExit("no more"), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_nobody_waits_for_a_thread_that_has_ended(error: BaseException) -> None:
    begun, go = threading.Event(), threading.Event()
    written: list[int] = []

    def write(job: int) -> None:
        written.append(job)
        begun.set()
        go.wait(20)
        raise error

    writer = Writer(write)
    writer.put(0, 100, most=1000)
    assert begun.wait(20)
    writer.put(1, 100, most=1000)
    waiting = threading.Thread(target=lambda: writer.put(2, 950, most=1000), daemon=True)
    waiting.start()
    go.set()
    waiting.join(20)
    assert not waiting.is_alive(), "it has waited for room"
    assert ends(writer.drain)
    assert ends(lambda: writer.put(3, 100, most=50))
    assert ends(lambda: writer.wait_for_room(10**6, most=1))
    assert ends(writer.drain)
    assert written == [0], "what waited is dropped, and nothing more is taken"
    assert writer.pending == 0
    assert [writer.take_failure(), writer.take_failure()] == [error, None]


def test_stop_is_no_failure() -> None:
    def write(job: int) -> None:
        raise Stop

    writer = Writer(write)
    for number in range(3):
        writer.put(number, 10, most=1000)
    assert ends(writer.drain)
    assert (writer.pending, writer.take_failure()) == (0, None)


def test_without_a_thread_the_caller_gets_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter ends, and starts no thread any more."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def write(job: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    writer = Writer(write)
    with pytest.raises(KeyboardInterrupt):
        writer.put(0, 100, most=1000)
    assert (writer.pending, writer.take_failure()) == (0, None)
    writer.drain()
