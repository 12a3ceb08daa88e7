"""Messages among ranks, here in threads: who talks to whom, what comes of a message, and who learns of a failure."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from te_precision_callbacks.base.ranks import meeting, tree
from te_precision_callbacks.base.ranks.meeting import Meeting, MeetingFailed, Place, connect
from te_precision_callbacks.base.ranks.messages import _packed, _Return, _union
from te_precision_callbacks.base.ranks.tree import Departure, RanksLostError, Tree, children_of, parent_of


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 64, 65, 100, 1024, 1025, 10_000])
def test_the_tree_has_each_rank_once_and_is_flat(size: int) -> None:
    depth = {0: 0}
    for rank in range(size):
        for child in children_of(rank, size):
            assert parent_of(child) == rank
            depth[child] = depth[rank] + 1
    assert sorted(depth) == list(range(size))
    digits = len(oct(size - 1)) - 2
    assert max(depth.values()) <= digits
    assert max(len(children_of(rank, size)) for rank in range(size)) <= 7 * digits


def name(rank: int) -> str:
    return f"rank {rank}"


def on_all(size: int, run: Callable[[int], Any]) -> list[Any]:
    """What each rank returns, or its exception."""

    def guarded(rank: int) -> Any:
        try:
            return run(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


@pytest.fixture(params=[(1, 8), (2, 8), (4, 2), (6, 2), (12, 3)], ids=lambda value: "{} ranks, fan {}".format(*value))
def trees(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    size, fan = request.param
    monkeypatch.setattr(tree, "FAN", fan)
    store = dist.HashStore()

    def joined(rank: int) -> Tree:
        at = Place(rank, size, name)
        return connect(*Meeting(store, at).meet(20, "to test"), at, 20)

    found = on_all(size, joined)
    assert all(isinstance(one, Tree) for one in found), found
    yield found
    for one in found:
        one.close()


def test_all_ranks_have_the_same_bits_of_sums_maxima_and_texts(trees: list[Tree]) -> None:
    numbers = [np.random.default_rng(one.rank).normal(size=5000) for one in trees]
    expected = np.array([*np.sum(numbers, axis=0)[:3000], *np.max(numbers, axis=0)[3000:]])
    own = [numbers[one.rank].copy() for one in trees]

    def run(rank: int) -> list[str]:
        text = _packed([f"own {rank}", "shared"])
        found: list[str] = pickle.loads(trees[rank].exchange("a", "to a", own[rank], 3000, text, _union, 20))
        return found

    texts = on_all(len(trees), run)
    for rank, text in enumerate(texts):
        assert text == texts[0]
        assert sorted(text) == sorted(["shared", *(f"own {other}" for other in range(len(trees)))])
        assert own[rank].tobytes() == own[0].tobytes()
        np.testing.assert_allclose(own[rank], expected, rtol=1e-12, atol=1e-12)


def exchanged(one: Tree, kind: str, *, wait: float = 20.0, count: int = 3) -> bytes:
    try:
        return one.exchange(kind, f"to {kind}", np.zeros(count), 1, b"", lambda own, other: own, wait)
    except RanksLostError as error:
        one.leave(error.departure)
        raise


@pytest.mark.processes
def test_all_ranks_learn_at_once_why_one_has_left(trees: list[Tree]) -> None:
    """Also where a process that was forked from the rank, such as a worker of a DataLoader, has its sockets too."""
    if len(trees) == 1:
        return
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    try:
        departure = Departure(len(trees) - 1, "MemoryError: no room", "MemoryError", raises=True)
        trees[-1].leave(departure)
        for found in on_all(len(trees) - 1, lambda rank: exchanged(trees[rank], "b")):
            assert isinstance(found, RanksLostError)
            assert found.departure == departure, "and not that the time is over"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("other", [("c", 3), ("b", 4)])
def test_ranks_at_different_messages_part(trees: list[Tree], other: tuple[str, int]) -> None:
    """Of another kind, or of another size, with which a process group of gloo's ends the process."""
    last = len(trees) - 1
    if not last:
        return
    kind = {last: other}
    for found in on_all(
        last + 1, lambda rank: exchanged(trees[rank], *kind.get(rank, ("b", 3))[:1], count=kind.get(rank, ("b", 3))[1])
    ):
        assert isinstance(found, RanksLostError)
        assert "are at different places" in str(found)


def test_a_rank_that_does_not_come_costs_a_timeout(trees: list[Tree]) -> None:
    if len(trees) == 1:
        return
    for found in on_all(len(trees) - 1, lambda rank: exchanged(trees[rank], "b", wait=0.2)):
        assert isinstance(found, RanksLostError)
        assert "has waited 0.2 s for rank" in str(found)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_cannot_meet_says_so_once_to_those_that_come_later(failing: int) -> None:
    """It waits for nobody, and nobody for it, however slow the others are; and in the next meeting all are there."""
    store = dist.HashStore()
    at = [Place(rank, 3, name) for rank in range(3)]
    Meeting(store, at[failing]).refuse("rank has no room")
    others = [rank for rank in range(3) if rank != failing]
    for error in on_all(2, lambda number: Meeting(store, at[others[number]]).meet(20, "to test")):
        assert isinstance(error, MeetingFailed)
        assert str(error) == "rank has no room"
    met = on_all(3, lambda rank: Meeting(store, at[rank]).meet(20, "to test"))
    assert len({secret for _, secret in met}) == 1


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_rank_that_has_met_and_does_not_connect_says_so(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ranks in a tree of three levels, as where no memory is left in between."""
    monkeypatch.setattr(tree, "FAN", 2)
    store = dist.HashStore()

    def run(rank: int) -> Any:
        at = Place(rank, 4, name)
        meeting = Meeting(store, at)
        try:
            keys, secret = meeting.meet(20, "to test")
            if rank == failing:
                raise MeetingFailed("no room")
            return connect(keys, secret, at, 20)
        except MeetingFailed as error:
            meeting.refuse(str(error))
            raise

    found = on_all(4, run)
    failed = [str(error) for error in found if isinstance(error, MeetingFailed)]
    assert len(failed) > 1
    assert not [text for text in failed if "cannot connect" in text], "nobody has waited in vain"
    for one in found:
        if isinstance(one, Tree):  # a rank that had its parent and children: it hears from them in the first message
            assert isinstance(on_all(1, lambda _, one=one: exchanged(one, "b"))[0], RanksLostError)


def test_a_rank_that_has_lost_its_patience_is_not_waited_for() -> None:
    """Rank 0 comes when rank 1 has given up; and after a meeting for which rank 1 came late, all meet again."""
    store = dist.HashStore()
    first, second = (Place(rank, 2, name) for rank in range(2))
    late = Meeting(store, second)
    with pytest.raises(MeetingFailed, match=r"rank 0 has not come within 0\.1 s"):
        late.meet(0.1, "to test")
    late.refuse("rank 0 has not come within 0.1 s")
    with pytest.raises(MeetingFailed, match=r"rank 0 has not come within 0\.1 s"):
        Meeting(store, first).meet(20, "to test")
    with pytest.raises(MeetingFailed, match=r"not all of them have come within 0\.1 s"):
        Meeting(store, first).meet(0.1, "to test")
    with pytest.raises(MeetingFailed, match=r"not all of them have come within 0\.1 s"):
        Meeting(store, second).meet(20, "to test")
    assert on_all(2, lambda rank: Meeting(store, (first, second)[rank]).meet(20, "to test")[1])[0]


def test_a_rank_with_another_version_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    at = threading.Event()

    def run(rank: int) -> Any:
        if rank == 1:
            at.wait(20)
            monkeypatch.setattr(meeting, "PROTOCOL", 2)
        else:
            threading.Timer(0.2, at.set).start()
        return Meeting(store, Place(rank, 2, name)).meet(20, "to test")

    for found in on_all(2, run):
        assert isinstance(found, MeetingFailed)
        assert "different versions of te-precision-callbacks (messages 1 and 2)" in str(found)


def test_ranks_that_miss_a_meeting_are_not_waited_for_longer() -> None:
    found = on_all(1, lambda rank: Meeting(dist.HashStore(), Place(0, 2, name)).meet(0.1, "to test"))[0]
    assert isinstance(found, MeetingFailed)
    assert "not all of them have come within 0.1 s" in str(found)


@pytest.mark.parametrize("parted_at", range(9))
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranks_come_together_in_the_same_step_without_waiting(parted_at: int, order: tuple[int, ...]) -> None:
    """By optimizer steps, which are alike, though iterations are not; each looks at the store in some steps only."""
    store = dist.HashStore()
    ranks = [(Place(rank, 3, name), _Return(store, "secret")) for rank in order]
    for _, found in ranks:
        found.put_off()
    met: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in range(parted_at, parted_at + 100):
        for at, found in ranks:
            if found.is_time(at, step - 5 * at.rank, step) and not met[at.rank]:
                met[at.rank].append(step)
    assert met[0]
    assert met[0] == met[1] == met[2]
    assert 26 <= met[0][0] - parted_at <= 34, "as docs/session.md says"


def test_ranks_without_a_rank_that_has_ended_never_come_together() -> None:
    store = dist.HashStore()
    ranks = [(Place(rank, 3, name), _Return(store, "secret")) for rank in range(2)]
    for _, found in ranks:
        found.put_off()
    assert not any(found.is_time(at, step, step) for step in range(500) for at, found in ranks)
