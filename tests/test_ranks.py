"""Messages among ranks, which are processes forked from the test: what comes of a message, and who learns of a failure.
Meetings are tested in threads."""

import contextlib
import gc
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from te_precision_callbacks.base.ranks import group, meeting, messages
from te_precision_callbacks.base.ranks.group import devices
from te_precision_callbacks.base.ranks.meeting import MeetingFailed, RankPlace, next_keys, refuse
from te_precision_callbacks.base.ranks.messages import Departure, Messages, RanksLostError, _Reconnection


def on_all(size: int, run: Callable[[int], Any]) -> list[Any]:
    def guarded(rank: int) -> Any:
        try:
            return run(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


def forked(folder: Path, size: int, run: Callable[[Messages], Any], *, is_open: bool = True) -> list[Any]:
    """Run each rank in a process; return its result or exception, None if it was killed."""
    children = [os.fork() or _rank(folder, rank, size, run, is_open) for rank in range(size)]
    for child in children:
        os.waitpid(child, 0)
    files = [folder / f"{rank}.result" for rank in range(size)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def _rank(folder: Path, rank: int, size: int, run: Callable[[Messages], Any], is_open: bool) -> NoReturn:
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        sent = Messages(None, "test")
        if is_open:
            sent.open("to test")
            sent.settle()
        try:
            result = run(sent)
        except Exception as error:
            result = error
        (folder / "part").mkdir(exist_ok=True)
        (folder / "part" / str(rank)).write_bytes(pickle.dumps(result))
        (folder / "part" / str(rank)).replace(folder / f"{rank}.result")
        until = time.monotonic() + 30  # the store and the connections are shared by all
        while len(list(folder.glob("*.result"))) < size - (folder / "killed").exists() and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        os._exit(0)


def merged(sent: Messages, kind: str = "b", count: int = 3) -> None:
    sent.merge(kind, f"to {kind}", np.zeros(count), 1)


@pytest.mark.processes
@pytest.mark.parametrize(("size", "maxima"), [(2, 4), (5, 2000)])
def test_all_ranks_have_the_same_bits_of_sums_maxima_and_texts(tmp_path: Path, size: int, maxima: int) -> None:
    numbers = np.random.default_rng(0).normal(size=(size, 3000 + maxima))
    numbers[0, 3000:3004] = np.nan, -np.nan, np.inf, -np.inf
    assert np.signbit(numbers[0, 3001])
    expected = np.array([*np.sum(numbers, axis=0)[:3000], *np.max(numbers, axis=0)[3000:]])

    def run(sent: Messages) -> Any:
        before = dist.distributed_c10d._world.group_count, dist.group.WORLD._get_sequence_number_for_group()
        own = numbers[sent.rank].copy()
        sent.merge("a", "to a", own, 3000)
        entries = sent.pool([f"own {sent.rank}", "shared"], "names", "to name", str)
        assert sent.pool(["equal", "equal"], "names", "to name", str) == ["equal"]
        assert sent.pool([float("inf")], "names", "to name", float) == [float("inf")]
        after = dist.distributed_c10d._world.group_count, dist.group.WORLD._get_sequence_number_for_group()
        assert after == before, "the training's groups have counted nothing"
        return own, entries

    results = forked(tmp_path, size, run)
    for own, entries in results:
        assert own.tobytes() == results[0][0].tobytes()
        np.testing.assert_allclose(own, expected, rtol=1e-12, atol=1e-12)
        assert entries == ["own 0", "shared", *(f"own {other}" for other in range(1, size))]


@contextlib.contextmanager
def a_worker() -> Any:
    """A process that was forked from the rank, such as a worker of a DataLoader: it has inherited the sockets."""
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.processes
@pytest.mark.parametrize("waits", [False, True])
def test_all_ranks_learn_at_once_why_one_has_left(tmp_path: Path, waits: bool) -> None:
    """Before they come to the message, or while they wait in it."""

    def run(sent: Messages) -> Any:
        with a_worker():
            if sent.rank == 2:
                time.sleep(0.3 * waits)
                sent.leave(MemoryError("no room"), raises=True)
                return None
            time.sleep(0.3 * (not waits))
            begun = time.monotonic()
            with pytest.raises(RanksLostError) as lost:
                merged(sent)
            assert time.monotonic() - begun < 10
            return lost.value.departure

    departure = Departure(2, "MemoryError: no room", "MemoryError", raises=True)
    assert forked(tmp_path, 3, run) == [departure, departure, None]


@pytest.mark.processes
@pytest.mark.extended
def test_ranks_learn_at_once_that_one_was_killed_although_its_worker_lives(tmp_path: Path) -> None:
    def run(sent: Messages) -> Any:
        if sent.rank == 1:
            if os.fork() == 0:
                time.sleep(3)
                os._exit(0)
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(RanksLostError, match="is no longer reachable"):
            merged(sent)
        return time.monotonic() - begun

    first, _, third = forked(tmp_path, 3, run)
    assert max(first, third) < 2.5


@pytest.mark.processes
@pytest.mark.extended
def test_a_forked_process_does_not_wait_for_threads_that_it_lacks(tmp_path: Path) -> None:
    def run(sent: Messages) -> Any:
        merged(sent)
        child = os.fork()
        if child == 0:
            sent.close()
            assert not sent._keys.check([messages._LEFT]), "the rank itself has not left"
            del sent
            gc.collect()
            os._exit(3)
        until = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
            time.sleep(0.01)
        merged(sent)
        return os.waitstatus_to_exitcode(ended[1])

    assert forked(tmp_path, 2, run) == [3, 3]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("other", "told"),
    [
        (("c", 3), "are at different points"),
        (("b", 4), "are at different points"),
        (("b", 5000), "are at different points"),
        (None, "has waited 1 s for rank 2, to b"),
    ],
)
def test_ranks_at_different_messages_part(tmp_path: Path, other: tuple[str, int] | None, told: str) -> None:
    """Of another kind, or of another size, which would make gloo end the process; or one that does not come."""

    def run(sent: Messages) -> None:
        if other is None:
            sent.timeout = 1.0
        if sent.rank < 2:
            merged(sent)
        elif other is None:
            time.sleep(2)
        else:
            merged(sent, *other)

    for error in forked(tmp_path, 3, run)[: 2 if other is None else 3]:
        assert isinstance(error, RanksLostError)
        assert told in str(error)


@pytest.mark.processes
@pytest.mark.extended
def test_signals_are_handled_while_a_rank_waits(tmp_path: Path) -> None:
    def run(sent: Messages) -> Any:
        if sent.rank:
            time.sleep(2)
            return None
        begun, handled = time.monotonic(), []
        signal.signal(signal.SIGALRM, lambda *_: handled.append(time.monotonic() - begun))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        sent.timeout = 1.0
        with pytest.raises(RanksLostError):
            merged(sent)
        return handled[0]

    assert forked(tmp_path, 2, run)[0] < 0.9


@pytest.mark.processes
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_to_connect_is_named(tmp_path: Path, failing: int) -> None:
    def run(sent: Messages) -> Any:
        if sent.rank == failing:
            meeting.devices = mock.Mock(side_effect=MemoryError("no room"))
        begun = time.monotonic()
        with pytest.raises(RanksLostError) as lost:
            sent.open("to test")
        assert time.monotonic() - begun < 10, "nobody has waited in vain"
        return str(lost.value)

    said = forked(tmp_path, 3, run, is_open=False)
    reason = f"The ranks could not connect: rank {failing} has failed (MemoryError: no room)"
    assert [text for rank, text in enumerate(said) if rank != failing] == [reason] * 2


@contextlib.contextmanager
def listeners() -> Any:
    addresses: list[Any] = []
    before = group._sockets().values()
    yield addresses
    for descriptor, inode in group._sockets().items():
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            if inode not in before and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                addresses.append(opened.getsockname())


@pytest.mark.processes
@pytest.mark.extended
def test_a_stranger_holds_nobody_up(tmp_path: Path) -> None:
    """It connects before the ranks do, and sends a few bytes."""
    strangers = []

    def visited() -> list[Any]:
        with listeners() as addresses:
            listening = devices()
        for address in addresses:
            strangers.append(socket.create_connection(address, 1))
            strangers[-1].send(b"abc")
        return listening

    def run(sent: Messages) -> Any:
        meeting.devices = visited  # type: ignore[assignment]
        begun = time.monotonic()
        sent.open("to test")
        merged(sent)
        assert strangers
        return time.monotonic() - begun

    assert max(forked(tmp_path, 2, run, is_open=False)) < 8


@pytest.mark.processes
def test_messages_are_not_unpickled(tmp_path: Path) -> None:
    def run(sent: Messages) -> Any:
        if sent.rank:
            return sent.pool(["text"], "names", "to name", str)
        return sent.merge("names", "to name", np.empty(0), 0, pickle.dumps(["text"]))

    _, error = forked(tmp_path, 2, run)
    assert isinstance(error, ValueError)


# ---------------------------------------------------------------------- meetings


def met(store: Any, at: RankPlace, wait: float) -> bool:
    meeting.meet(next_keys(store, at.rank), at, wait, "to test").close()
    return True


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_later_ranks_learn_why_a_rank_refused_to_meet(failing: int) -> None:
    """It waits for nobody, and nobody for it, however slow the others are; and in the next meeting all are there."""
    store = dist.HashStore()
    refuse(next_keys(store, failing), "rank has no room")
    others = [RankPlace(rank, 3, f"rank {rank}") for rank in range(3) if rank != failing]
    for error in on_all(2, lambda number: met(store, others[number], 20)):
        assert repr(error) == "MeetingFailed('rank has no room')"
    assert on_all(3, lambda rank: met(store, RankPlace(rank, 3, f"rank {rank}"), 20)) == [True] * 3


def test_a_rank_that_has_lost_its_patience_is_not_waited_for() -> None:
    """Rank 0 comes when rank 1 has given up; and after a meeting that rank 1 came late for, all meet again."""
    store = dist.HashStore()
    places = [RankPlace(rank, 2, f"rank {rank}") for rank in range(2)]
    for rank, wait in ((1, 0.1), (0, 20), (0, 0.1), (1, 20)):
        with pytest.raises(MeetingFailed, match=r"not all ranks arrived within 0\.1 s"):
            met(store, places[rank], wait)
    assert on_all(2, lambda rank: met(store, places[rank], 20)) == [True] * 2


def test_a_rank_with_another_version_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    store, at = dist.HashStore(), threading.Event()

    def run(rank: int) -> Any:
        if rank == 1:
            at.wait(20)
            monkeypatch.setattr(meeting, "PROTOCOL", 4)
        else:
            threading.Timer(0.2, at.set).start()
        return met(store, RankPlace(rank, 2, f"rank {rank}"), 20)

    for error in on_all(2, run):
        assert isinstance(error, MeetingFailed)
        assert "different versions of te-precision-callbacks (rank " in str(error)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 1)])
def test_ranks_come_together_in_the_same_step_without_waiting(order: tuple[int, ...]) -> None:
    """By optimizer steps, which are alike, though iterations are not; each looks at the store in some steps only.
    Without a rank that has ended they never come together."""
    for parted_at in range(9):
        met: dict[int, int] = {}
        store = dist.HashStore()
        ranks = [(RankPlace(rank, 3, f"rank {rank}"), _Reconnection(store)) for rank in order]
        for _, item in ranks:
            item.put_off()
        for step in range(parted_at, parted_at + 100):
            for at, item in ranks:
                if item.is_time(at, step - 5 * at.rank, step):
                    met.setdefault(at.rank, step)
        assert met == (dict.fromkeys(range(3), met[0]) if len(order) == 3 else {})
        assert not met or 26 <= met[0] - parted_at <= 34, "as docs/session.md says"


@pytest.mark.parametrize(
    ("address", "interface", "hosts"),
    [
        ("127.0.0.1", None, ["127.0.0.1"]),
        ("no.such.host.invalid", None, None),  # the address of this machine
        ("no.such.host.invalid", "lo", ["127.0.0.1"]),
    ],
)
def test_a_rank_listens_on_one_interface_only(
    monkeypatch: pytest.MonkeyPatch, address: str, interface: str | None, hosts: list[str] | None
) -> None:
    monkeypatch.setenv(group.INTERFACE, "nosuch0")
    with pytest.raises(RuntimeError, match="nosuch0"):
        devices()
    monkeypatch.setenv(group.INTERFACE, interface) if interface else monkeypatch.delenv(group.INTERFACE)
    monkeypatch.setenv("MASTER_ADDR", address)
    with listeners() as addresses:
        kept = devices()
    assert kept
    ((host, _),) = addresses
    assert hosts in (None, [host])
