"""The largest magnitude by Triton: one launch for the tensors of a GEMM, which reads words of four bytes.

See :mod:`te_precision_callbacks.engine.kernels.largest`. One compiled kernel reads all formats; after the first launch,
it is called without Triton's binder.
"""

# Triton has no types, so its functions are annotated only where it reads this: constants.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from te_precision_callbacks.base.devices import raw_stream_of
from te_precision_callbacks.engine.kernels.columns import (
    AMAX,
    COLUMNS,
    E8M0,
    FIRST,
    FLOAT32,
    INFINITE,
    RECIPROCAL,
    LargestOf,
    single_one,
)
from te_precision_callbacks.engine.kernels.triton_parts import (
    Jit,
    Launcher,
    decode,
    grid_of,
    jit,
    launcher_of,
    program_count,
    report_binder,
    select,
)

TOGETHER = 5
"""As many as a GEMM of delayed scaling behind a norm has: weight and activation, the amax of each, and the norm."""
_WORDS = 2048
"""Words that a program reads at a time."""

_INFINITE = constexpr(INFINITE)
_FLOAT32 = constexpr(FLOAT32)
_FLOAT16 = constexpr(2)
_E4M3 = constexpr(3)
_E5M2 = constexpr(4)
_E8M0 = constexpr(E8M0)
_RECIPROCAL = constexpr(RECIPROCAL)

_OF_TENSOR = ("scale", "words", "number", "at", "first", "order")
_GENERAL = [
    "row",
    *(f"{name}{place}" for place, name in itertools.product(range(TOGETHER), _OF_TENSOR)),
    *(f"begin{place}" for place in range(1, TOGETHER)),
]
"""Arguments that Triton must not compile separate kernels for."""

_jit: Jit = triton.jit(do_not_specialize=_GENERAL)

_launchers: dict[torch.device, Launcher] = {}


def add(tensors: Sequence[LargestOf], row: torch.Tensor) -> list[LargestOf]:
    """Add tensors to a row; return tensors that the kernel cannot read."""
    if len(tensors) > TOGETHER:
        return add(tensors[:TOGETHER], row) + add(tensors[TOGETHER:], row)
    device = row.device
    unit = single_one(device)  # of which an amax is the scale, which may have any address
    tensors = [(unit, FLOAT32, tensor[0], *tensor[3:]) if tensor[1] == AMAX else tensor for tensor in tensors]
    words: list[int] = []
    pointers: list[int] = []
    scale_pointers: list[int] = []
    tensor_numbers: list[int] = []
    for tensor in tensors:
        values, number, scale, slot, order, column = tensor
        size = values.nbytes
        address = values.data_ptr()
        if not 0 < size < 2**33 or size % 4 or address % 16 or not values.is_contiguous():
            rest = [other for other in tensors if other is not tensor]
            return [tensor, *add(rest, row)] if rest else [tensor]
        words.append(size // 4)
        pointers.append(address)
        scale_pointers.append((unit if scale is None else scale).data_ptr())
        begin = COLUMNS * slot
        tensor_numbers += number, begin + column, begin + FIRST, order
    unused = TOGETHER - len(words)  # they repeat the first
    programs, begins = grid_of(tuple(words), _WORDS, program_count(device), TOGETHER)
    if unused:
        words += [0] * unused
        pointers += pointers[:1] * unused
        scale_pointers += scale_pointers[:1] * unused
        tensor_numbers += tensor_numbers[:4] * unused
    launcher = _launchers.get(device)
    if launcher is not None:
        launch, settings = launcher
        arguments = *pointers, *scale_pointers, row.data_ptr(), *words, *begins, *tensor_numbers, _WORDS
        try:
            launch(programs, 1, 1, raw_stream_of(device)(), *settings, arguments)
            return []
        except Exception as error:
            _launchers.clear()
            report_binder(error)
    padded = [*tensors, *[tensors[0]] * unused]
    as_words = [values.detach().view(-1).view(torch.int32) for values, *_ in padded]
    scales = [unit if scale is None else scale for _, _, scale, *_ in padded]
    with torch.cuda.device(as_words[0].get_device()):
        launcher = launcher_of(
            _add[(programs,)](*as_words, *scales, row, *words, *begins, *tensor_numbers, WORDS=_WORDS)
        )
    if launcher is not None:
        _launchers[device] = launcher
    return []


@_jit
def _add(
    values0,
    values1,
    values2,
    values3,
    values4,
    scale0,
    scale1,
    scale2,
    scale3,
    scale4,
    row,
    words0,
    words1,
    words2,
    words3,
    words4,
    begin1,
    begin2,
    begin3,
    begin4,
    number0,
    at0,
    first0,
    order0,
    number1,
    at1,
    first1,
    order1,
    number2,
    at2,
    first2,
    order2,
    number3,
    at3,
    first3,
    order3,
    number4,
    at4,
    first4,
    order4,
    WORDS: constexpr,
):
    """Each program reads every n-th piece of a tensor, and raises the tensor's number in the row."""
    program = tl.program_id(0)
    which = (program >= begin1).to(tl.int32) + (program >= begin2).to(tl.int32) + (program >= begin3).to(tl.int32)
    which += (program >= begin4).to(tl.int32)
    begin = _select(which, 0, begin1, begin2, begin3, begin4)
    programs = _select(which, begin1, begin2, begin3, begin4, tl.num_programs(0)) - begin
    values = tl.multiple_of(_select(which, values0, values1, values2, values3, values4), 16)
    words = _select(which, words0, words1, words2, words3, words4)
    number = _select(which, number0, number1, number2, number3, number4)
    lane = tl.arange(0, WORDS)
    largest = tl.full([WORDS], 0, tl.int32)
    first = (program - begin) * WORDS
    step = programs * WORDS
    for piece in range(first, words - (WORDS - 1), step):
        largest = _larger(largest, tl.load(values + piece + lane), number)
    rest = words // WORDS * WORDS  # the piece that is not whole, if any, of the program whose turn it is
    if (rest // WORDS) % programs == program - begin:
        none = (number == _RECIPROCAL).to(tl.int32) * 0x7F800000
        largest = _larger(largest, tl.load(values + rest + lane, mask=lane < words - rest, other=none), number)
    scale = tl.load(_select(which, scale0, scale1, scale2, scale3, scale4))
    magnitude = _decode(tl.max(largest, 0), number) * scale
    bits = tl.where(magnitude == magnitude, magnitude.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FC00000)
    tl.atomic_max(row + _select(which, at0, at1, at2, at3, at4), bits, sem="relaxed")
    if bits >= _INFINITE:
        order = _select(which, order0, order1, order2, order3, order4)
        tl.atomic_min(row + _select(which, first0, first1, first2, first3, first4), order, sem="relaxed")


@jit
def _select(which, first, second, third, fourth, fifth):
    return tl.where(which == 4, fifth, select(which, first, second, third, fourth))


@jit
def _larger(largest, word, number):
    """Raise each number to the largest magnitude in a word, as bits without their sign.

    Of a reciprocal, the smallest bits count, as their distance to those of inf.
    """
    if number == _FLOAT32:
        largest = tl.maximum(largest, word & 0x7FFFFFFF)
    elif number == _RECIPROCAL:
        bits = word & 0x7FFFFFFF
        largest = tl.maximum(largest, tl.where(bits > _INFINITE, 0x7FC00000, 0x7F800000 - bits))
    elif number <= _FLOAT16:
        largest = tl.maximum(largest, tl.maximum(word & 0x7FFF, (word >> 16) & 0x7FFF))
    else:
        mask = tl.where(number == _E8M0, 0xFF, 0x7F)
        low = tl.maximum(word & mask, (word >> 8) & mask)
        largest = tl.maximum(largest, tl.maximum(low, tl.maximum((word >> 16) & mask, (word >> 24) & mask)))
    return largest


@jit
def _decode(word, number):
    """The magnitude with the bits ``word`` in a format, as a float32."""
    half = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    e8m0 = tl.where(word == 254, float("inf"), decode(word, "e8m0"))
    bfloat16 = decode(word, "bfloat16")
    float32_or_bfloat16 = tl.where(number == _FLOAT32, word.to(tl.float32, bitcast=True), bfloat16)
    half_or_float = tl.where(number == _FLOAT16, half, float32_or_bfloat16)
    e5m2_or_e8m0 = tl.where(number == _E5M2, decode(word, "e5m2"), e8m0)
    fp8 = tl.where(number == _E4M3, decode(word, "e4m3"), e5m2_or_e8m0)
    divisor = (0x7F800000 - word).to(tl.float32, bitcast=True)
    reciprocal = tl.where(word == 0x7FC00000, float("nan"), 1.0 / divisor)
    fp8_or_reciprocal = tl.where(number == _RECIPROCAL, reciprocal, fp8)
    return tl.where(number >= _E4M3, fp8_or_reciprocal, half_or_float)
