"""The memory that snapshots from a GPU are copied to."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

from te_precision_callbacks.dumps import page_locked, recording
from te_precision_callbacks.dumps.budget import Limits
from te_precision_callbacks.dumps.contents import Dump, dump_of
from te_precision_callbacks.dumps.page_locked import Place, Ring
from te_precision_callbacks.dumps.recording import Recorder


class Event:
    """Stands for an event of a GPU."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def plain(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_places_never_overlap_and_are_used_again() -> None:
    """Against a list of what is in use."""
    ring, draw = Ring(16 * 1024, plain), random.Random(0)
    used: list[Place] = []
    refused = wrapped = 0
    for _ in range(3000):
        place = ring.take(draw.randint(1, 3000))
        if place is None:
            refused += 1
            given = used.pop(draw.randrange(min(3, len(used))))  # nearly in order, as a writer does it
            Ring.give_back([given], [])
            continue
        assert all(place.end <= other.begin or other.end <= place.begin for other in used)
        assert place.begin % 256 == 0
        assert place.end <= 16 * 1024
        wrapped += place.begin == 0
        used.append(place)
    assert refused > 100
    assert wrapped > 100


def test_all_of_it_is_free_again() -> None:
    ring = Ring(1024, plain)
    for _ in range(3):
        place = ring.take(1024)
        assert place is not None
        assert ring.take(1) is None
        Ring.give_back([place], [])
    assert ring.take(1025) is None, "more than there is"
    assert ring.take(0) is None


def test_a_place_waits_for_the_copy_that_still_runs() -> None:
    """A held dump is dropped although its copy has not arrived: the next copy may run on another stream."""
    ring, event = Ring(1024, plain), Event()
    place = ring.take(1024)
    assert place is not None
    Ring.give_back([place], [event])
    assert ring.take(512) is None
    event.passed = True
    assert ring.take(512) is not None


class OnCuda(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.fixture
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done(Event):
        def record(self, stream: object) -> None:
            self.passed = True

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Done)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)


def on_cuda(values: torch.Tensor) -> Dump:
    dump = dump_of(values, None, tensor="activation")
    dump.tensors.update({name: tensor.as_subclass(OnCuda) for name, tensor in dump.tensors.items()})
    return dump


@pytest.mark.usefixtures("_pretended")
def test_a_snapshot_lies_in_the_ring_until_it_is_dropped() -> None:
    ring, values = Ring(4096, plain), torch.arange(1024, dtype=torch.float32).view(32, 32)
    address = ring._memory.data_ptr()
    for _ in range(3):
        snapshot = on_cuda(values).copied(ring)
        found = snapshot.tensors["high_precision"]
        assert found.data_ptr() == address, "the same memory each time"
        assert torch.equal(found.as_subclass(torch.Tensor), values)
        beside = on_cuda(values).copied(ring).tensors["high_precision"]
        assert beside.data_ptr() != address, "there is no room left, and torch gives its own"
        del snapshot, found, beside
        gc.collect()


@pytest.mark.usefixtures("_pretended")
def test_a_recorder_allocates_once_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(recording, "Ring", lambda nbytes: sizes.append(nbytes) or Ring(nbytes, plain))
    recorder = Recorder(tmp_path, file_format="safetensors")
    limits = Limits(max_bytes=1 << 30, max_files=10, max_memory=1 << 20)
    recorder._copied(dump_of(torch.ones(8), None), limits)
    assert sizes == [], "nothing on a GPU"
    for _ in range(3):
        recorder._copied(on_cuda(torch.ones(8)), limits)
    assert sizes == [1 << 20]
    recorder.close()
    assert recorder._ring is None
    assert page_locked.LARGEST == 1 << 30


@pytest.mark.usefixtures("_pretended")
def test_without_page_locked_memory_dumps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int) -> Ring:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(recording, "Ring", refuse)
    recorder = Recorder(tmp_path, file_format="safetensors")
    limits = Limits(max_bytes=1 << 30, max_files=10, max_memory=1 << 20)
    for _ in range(2):
        found = recorder._copied(on_cuda(torch.ones(8)), limits).tensors["high_precision"]
        assert found.as_subclass(torch.Tensor).tolist() == [1.0] * 8
    assert caplog.text.count("cannot be allocated (CUDA error: out of memory)") == 1
