"""The thread that writes: what becomes of it, and of those who wait for it, when it ends."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from te_precision_callbacks.dumps import writer as module
from te_precision_callbacks.dumps.budget import Limits
from te_precision_callbacks.dumps.contents import Dump
from te_precision_callbacks.dumps.header import Header
from te_precision_callbacks.dumps.writer import Job, Writer


def job(number: int, nbytes: int, most: int) -> Job:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    return Job(Dump(Header(iteration=number), {"high_precision": tensor}), Limits(1 << 40, 1 << 20, most))


def ends(doing: Callable[[], object]) -> bool:
    thread = threading.Thread(target=doing, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


@pytest.mark.parametrize("error", [SystemExit("no more"), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_nobody_waits_for_a_thread_that_has_ended(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    written: list[int | None] = []

    def write(dump: Dump, folder: Path) -> int:
        written.append(dump.header.iteration)
        begun.set()
        go.wait(20)
        raise error

    monkeypatch.setattr(module, "write_new", write)
    writer = Writer(tmp_path)
    writer.put(job(0, 100, most=1000))
    assert begun.wait(20)
    writer.put(job(1, 100, most=1000))
    waiting = threading.Thread(target=lambda: writer.put(job(2, 950, most=1000)), daemon=True)
    waiting.start()
    go.set()
    waiting.join(20)
    assert not waiting.is_alive(), "it has waited for room"
    assert ends(writer.drain)
    if not isinstance(error, Exception):
        assert ends(lambda: writer.put(job(3, 100, most=50)))
        assert ends(lambda: writer.wait_for_room(10**6, Limits(1, 1, 1)))
        assert ends(writer.drain)
        assert written == [0], "what waited is dropped, and nothing more is taken"
    assert writer.pending == 0
    failure = writer.take_failure()
    assert error in (failure, failure.__cause__)
    assert writer.take_failure() is None
