"""The largest magnitude of each tensor, as C++, torch and Triton read it, against float64 and torch's float8 casts."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from te_precision_callbacks.engine.kernels import largest
from te_precision_callbacks.engine.kernels.columns import (
    E4M3,
    E5M2,
    E8M0,
    FIRST,
    FORMATS,
    MAGNITUDE,
    NEVER,
    RECIPROCAL,
    SCALE,
)
from tests.drawn import normal
from tests.engine.test_triton_kernel import interpreted


class Largest(NamedTuple):
    """A tensor to add to a row: a :data:`LargestOf` with names."""

    values: torch.Tensor
    format: int
    scale: torch.Tensor | None
    slot: int
    order: int
    column: int = MAGNITUDE


Add = Callable[[Sequence[Largest], torch.Tensor], None]

CODES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
ALL_HALVES = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
SCALED = torch.tensor([0.37])


def in_torch(tensors: Sequence[Largest], row: torch.Tensor) -> None:
    for tensor in tensors:
        largest._in_torch([tensor], row)


@pytest.fixture(params=["C++", "torch", "Triton"])
def add(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "C++":
        assert largest.ONE_PASS.is_compiled()
        yield largest.add
    elif request.param == "torch":
        yield in_torch
    else:
        pytest.importorskip("triton")
        monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
        with interpreted("triton_largest") as kernel:

            def by_triton(tensors: Sequence[Largest], row: torch.Tensor) -> None:
                assert not kernel.add(tensors, row)

            yield by_triton


def test_triton_returns_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    many = torch.full((8, 8), 3.0)
    others = [
        Largest(values, FORMATS[torch.float32], None, 1, place)
        for place, values in enumerate((many.view(-1)[1:9], many[:, :4], many[:0]))
    ]
    row = largest.new_rows(1, 2, many.device)[0]
    with interpreted("triton_largest") as kernel:
        assert kernel.add(others, row) == others
        whole = [Largest(many, FORMATS[torch.float32], None, 0, place) for place in range(7)]
        assert kernel.add([*others, *whole], row) == others
    assert row.tolist() == [[torch.tensor(3.0).view(torch.int32).item(), -1, NEVER], [-1, -1, NEVER]]


def decoded(tensor: Largest) -> torch.Tensor:
    values = tensor.values
    if tensor.format in CODES:
        return values.view(CODES[tensor.format]).double()
    if tensor.format == E8M0:
        exponents = values.double()
        numbers = torch.exp2(exponents - 127)
        return torch.where(exponents == 255, math.nan, torch.where(exponents == 254, math.inf, numbers))
    if tensor.format == RECIPROCAL:
        return values.reciprocal().double()
    return values.double()


def expected(tensor: Largest) -> float:
    """The largest magnitude in float64, rounded once with its scale; nan before inf."""
    numbers = decoded(tensor).abs()
    number = math.nan if numbers.isnan().any() else float(numbers.max())
    if tensor.scale is None:
        return number
    return float((torch.tensor(number, dtype=torch.float32) * tensor.scale)[0])


def check(add: Add, tensors: Sequence[Largest]) -> None:
    row = largest.new_rows(1, len(tensors), torch.device("cpu"))[0]
    add(tensors, row)
    for tensor in tensors:
        found = float(row[tensor.slot, tensor.column].view(torch.float32))
        wanted = expected(tensor)
        assert found == wanted or (math.isnan(found) and math.isnan(wanted)), tensor
        assert row[tensor.slot, FIRST] == (NEVER if math.isfinite(wanted) else tensor.order)


def tensors_of(values: Sequence[tuple[torch.Tensor, int]], scale: torch.Tensor | None = None) -> list[Largest]:
    return [Largest(one, number, scale, slot, 100 - slot) for slot, (one, number) in enumerate(values)]


@pytest.mark.slow
def test_every_code_of_every_format(add: Add) -> None:
    """Four equal ones, since the kernel of a GPU reads words of four bytes."""
    of_bytes = [(code.repeat(4), number) for number in (E4M3, E5M2, E8M0) for code in ALL_BYTES[::3]]
    halves = ALL_HALVES[::997]
    of_halves = [
        (one.repeat(2).view(dtype), FORMATS[dtype]) for dtype in (torch.bfloat16, torch.float16) for one in halves
    ]
    check(add, tensors_of([*of_bytes, *of_halves]))


@pytest.mark.slow
@pytest.mark.parametrize("broken", [None, -math.inf, math.nan])
def test_drawn_tensors(add: Add, broken: float | None) -> None:
    """Of several pieces of a kernel, the last one not whole; the broken element at the end, where a mask could be."""
    drawn = normal(3, 5004) * 1e-3
    if broken is not None:
        drawn[-1, -1] = broken
    plain = [(drawn.to(dtype), number) for dtype, number in FORMATS.items()]
    codes = [(drawn.to(dtype).view(torch.uint8), number) for number, dtype in CODES.items()]
    check(add, tensors_of([*plain, (drawn, RECIPROCAL)]))
    check(add, tensors_of(codes, SCALED))


def test_reciprocals_of_special_numbers(add: Add) -> None:
    for special in [0.0, -0.0, 1e-45, 3e38, math.inf, -math.inf, math.nan]:
        check(add, tensors_of([(torch.tensor([0.5, 2.0, special, -4.0]), RECIPROCAL)]))
        check(add, tensors_of([(torch.full((4,), special), RECIPROCAL)]))


def test_a_slot_keeps_the_largest_and_the_first(add: Add) -> None:
    row = largest.new_rows(1, 2, torch.device("cpu"))[0]
    for order, number in ((7, 2.0), (3, math.inf), (5, math.nan), (9, 1.0)):
        add([Largest(torch.full((4,), number), FORMATS[torch.float32], None, 1, order)], row)
    assert row[0].tolist() == [-1, -1, NEVER], "nothing was added to it"
    assert math.isnan(float(row[1, MAGNITUDE].view(torch.float32)))
    assert row[1, FIRST] == 3


def test_the_scales_of_blocks_have_a_column(add: Add) -> None:
    row = largest.new_rows(1, 1, torch.device("cpu"))[0]
    add([Largest(torch.tensor([126, 129, 128, 0], dtype=torch.uint8), E8M0, None, 0, 0, SCALE)], row)
    assert row[0, MAGNITUDE] == -1
    assert float(row[0, SCALE].view(torch.float32)) == 4.0


def test_a_tensor_that_is_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.arange(24.0).reshape(4, 6)[:, :5]
    check(largest.add, [Largest(matrix, FORMATS[torch.float32], None, 0, 0)])
    monkeypatch.setattr(largest.ONE_PASS, "functions", {})
    monkeypatch.setattr(largest.ONE_PASS, "failed", True)
    check(largest.add, [Largest(matrix, FORMATS[torch.float32], None, 0, 0)])
