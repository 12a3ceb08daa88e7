"""The slots of a step's statistics."""

from __future__ import annotations

import torch

from te_precision_callbacks.engine.slots import SegmentKey, Segments
from te_precision_callbacks.statistics.names import tensor_request

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_segment_moves_with_its_layer_but_not_within_a_step() -> None:
    slots, key = Segments(), SegmentKey("layer", "activation", "TENSOR")

    def on(device: torch.device) -> torch.device:
        return slots.segment(key, ("sum", "numel"), ("max",), device, contributes=True).device

    assert on(CPU) == CPU
    segment = slots.segments[key]
    slots.ask(segment, (tensor_request("max"),))
    slots.merge(segment, torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64))
    assert on(META) == CPU, "its numbers are there"
    slots.reset()
    before = slots.version
    assert on(META) == META
    assert slots.version > before, "who knows where it was must look again"
    assert list(segment.outputs) == ["max"]
    assert on(CPU) == CPU
    ones = torch.ones(2, dtype=torch.float64)
    slots.merge(slots.segments[key], ones, ones[:1])
    ((_, sums, maxima),) = (found for found in slots.vectors() if found[0] == CPU)
    assert (sums[-2:].tolist(), maxima[-1:].tolist()) == ([1.0, 1.0], [1.0])
