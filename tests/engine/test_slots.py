"""The slots of a step's statistics."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from te_precision_callbacks.engine import slots as slots_module
from te_precision_callbacks.engine.kernels.columns import NOTHING
from te_precision_callbacks.engine.slots import SegmentKey, Segments

CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The name of the stream that is current, and each reading: the stream that reads, the stream that has written,
    where the vectors lie. All on a CPU."""
    result = SimpleNamespace(now="first", log=[])

    def follow(stream: str, tensors: Iterator[torch.Tensor]) -> None:
        result.log.append((result.now, stream, tuple(tensor.data_ptr() for tensor in tensors)))

    monkeypatch.setattr(slots_module, "current_stream", lambda device: result.now)
    monkeypatch.setattr(slots_module, "raw_stream_of", lambda device: lambda: hash(result.now))
    monkeypatch.setattr(slots_module, "follow", follow)
    return result


def added(slots: Segments, layer: str, number: float, kind: str = "TENSOR") -> None:
    segment = slots.segment(SegmentKey(layer, "activation", kind), CPU, contributes=True)
    sums, maxima = (torch.full((len(names),), number, dtype=torch.float64) for names in segment.key.columns)
    slots.merge(segment, sums, maxima)


def of_stream(slots: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """The vectors of the current stream."""
    vectors = slots.devices[CPU].current()
    return vectors.sums, vectors.maxima


def read(slots: Segments) -> tuple[list[float], list[float]]:
    sums, maxima = slots.devices[CPU].read()
    return sums.tolist(), maxima.tolist()


def test_growing_moves_and_copies_nothing() -> None:
    """A kernel that is queued on another stream has the address of the vectors that were there."""
    slots = Segments()
    added(slots, "first", 1.0)
    for layer in range(3):
        added(slots, f"layer{layer}", 2.0, "EXPONENTS")
    before = of_stream(slots)
    addresses, contents = [item.data_ptr() for item in before], [item.clone() for item in before]
    added(slots, "last", 2.0, "EXPONENTS")
    after = of_stream(slots)
    assert [item.data_ptr() for item in before] == addresses, "it was not moved"
    assert {item.data_ptr() for item in after}.isdisjoint(addresses)
    assert all(torch.equal(item, content) for item, content in zip(before, contents, strict=True))
    assert after[0][:6].tolist() == [0.0] * 6, "it was not copied"
    before[0][0] += 10.0  # such a kernel runs now
    before[1][0] = 7.0
    added(slots, "first", 1.0)
    assert read(slots) == ([12.0, *[2.0] * (5 + 4 * 256)], [7.0, 1.0, 1.0])
    slots.reset()
    assert read(slots) == ([0.0] * (6 + 4 * 256), [NOTHING] * 3)
    assert [item.data_ptr() for item in of_stream(slots)] == [item.data_ptr() for item in after], (
        "and the longest stays"
    )


def test_each_stream_adds_to_vectors_of_its_own_and_the_reading_waits_for_all(streams: SimpleNamespace) -> None:
    slots = Segments()
    added(slots, "layer", 1.0)
    of_first = of_stream(slots)
    streams.now = "second"
    added(slots, "layer", 2.0)
    of_second = of_stream(slots)
    assert {item.data_ptr() for item in of_first}.isdisjoint(item.data_ptr() for item in of_second)
    assert of_first[0][:6].tolist() == [1.0] * 6
    assert streams.log == [], "no stream waits for another before the reading"
    streams.now = "first"
    added(slots, "layer", 4.0)
    assert of_stream(slots)[0].data_ptr() == of_first[0].data_ptr()
    assert read(slots) == ([7.0] * 6, [4.0] * 3)
    addresses = {
        name: tuple(item.data_ptr() for item in of) for name, of in (("first", of_first), ("second", of_second))
    }
    assert sorted(streams.log) == [("first", "first", addresses["first"]), ("first", "second", addresses["second"])]
    slots.reset()
    streams.log.clear()
    added(slots, "layer", 8.0)
    assert read(slots) == ([8.0] * 6, [8.0] * 3)
    assert streams.log == [("first", "first", addresses["first"])], "the other stream is not waited for again"
