"""Judges what a kernel gave for attention, at sampled queries.

    samples = sample(call, result, seed, most_bytes)     # rows of the result, computed again from its operands
    judged(call, samples, result)                        # the kernel's error, and the rows and columns beyond it
    check_operands(call, exact, samples, rules, seed, amax)          # of A and B: codes and scales that are wrong

A row of the result needs one query, and all keys and values of a head. ``O = S V`` with ``S = softmax(scale Q K^T)``
over the keys that the query sees is computed again for the sampled rows, and compared element by element. So all that
is wrong in a sampled row is seen, and nothing in another one: a fault in a share f of the rows is missed with the
probability ``(1 - f)^rows``.

Two kinds of bounds meet. A rounding to nearest is off by half a step at most: that of the result, and that of each
number of S, which the kernel rounds to the type of Q. What many roundings add up to is far smaller than the sum of
these bounds, and is bounded by its variance. The smaller bound counts. docs/gemm-error.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.gemm_error.attention_operands import Call, HeadTensor, Place, sampled
from te_precision_callbacks.gemm_error.chances import FALSE_ALARM, bound
from te_precision_callbacks.gemm_error.codes import CodeCheck, Rules, check_codes
from te_precision_callbacks.gemm_error.judging import FormatError, Judged, ratio_of, squares_of_difference
from te_precision_callbacks.gemm_error.probes import thin_dtype


class Attended(NamedTuple):
    """Rows of the result; [rows, size of a head of values].

    Attributes:
        output: O, in float32 or float64.
        known: whether a row is in its sequence and sees a key: bool, [rows].
        hard: by how much roundings to nearest put an element off at most, apart from that of S: of the result, and of
            numbers of S that become 0.
        sure: the same with that of S, and with ``bound(1)`` standard deviations of the sums.
        variance: of the errors of sums and of the rounding of S.
    """

    output: torch.Tensor
    known: torch.Tensor
    hard: torch.Tensor
    sure: torch.Tensor
    variance: torch.Tensor


def output_of(call: Call, place: Place, most_bytes: int) -> torch.Tensor:
    """The sampled rows of the result alone, before its rounding: [rows, size of a head of values]."""
    scores, seen, _ = _scores(call, place, most_bytes)
    weights, _, total = softmax(scores, seen)
    return _times_values(call, place, most_bytes, [(weights / total, _themselves)])[0]


def attended(call: Call, place: Place, most_bytes: int) -> Attended:
    """The sampled rows of the result, and what a healthy kernel may be off."""
    scores, seen, terms = _scores(call, place, most_bytes)
    weights, largest, total = softmax(scores, seen)
    weights = call.probabilities.clipped(weights)
    s, half = weights / total, torch.minimum(call.probabilities.half_step(weights), weights) / total
    # Of the scores: what is lost in their sums, and the float32 of the exponents.
    eps, own = torch.finfo(torch.float32).eps, torch.finfo(scores.dtype).eps
    of_scores = call.accumulator.variance(call.query.shape[3], terms, scores.square())
    of_scores = of_scores + own**2 * call.query.shape[3] * terms + eps**2 * (1 + scores.square() + largest.square())
    if call.scores is not None:
        of_scores = of_scores + call.scores.half_step(scores).square() / 3
    of_scores = torch.where(seen, of_scores * s.square(), 0.0)
    output, flushed, rounded, rounding, shifted, squares = _times_values(
        call,
        place,
        most_bytes,
        [
            (s, _themselves),
            (call.probabilities.flushed(weights) / total, torch.abs),
            (half, torch.abs),
            (half.square() / 3, torch.square),
            (2 * of_scores, torch.square),
            (s.square(), torch.square),
        ],
    )
    sums = shifted + 2 * output.square() * of_scores.sum(1, keepdim=True)
    sums = sums + call.accumulator.variance(call.longest[1], squares, output.square())
    sums = sums + (own**2 * call.longest[1] + eps**2) * (squares + output.square())
    of_sums = bound(1) * sums.sqrt()
    off = torch.minimum(rounded, flushed + bound(1) * rounding.sqrt()) + of_sums
    output = call.result.clipped(output)
    of_result = call.result.half_step(output.abs() + off)
    return Attended(output, seen.any(1), of_result + flushed, of_result + rounded + of_sums, sums + rounding)


def _pieces(call: Call, most_bytes: int) -> Iterator[slice]:
    """The keys of a sequence, as many at once as may be decoded."""
    each = 4 * max(call.key.shape[3], call.value.shape[3]) * thin_dtype().itemsize
    step = max(128, most_bytes // max(1, each))
    for first in range(0, call.longest[1], step):
        yield slice(first, min(first + step, call.longest[1]))


def _head_of_keys(call: Call, place: Place) -> int:
    return place.head // (call.query.shape[1] // call.key.shape[1])


def _scores(call: Call, place: Place, most_bytes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scores of the queries and all keys, which of them count, and the sums of their squared terms."""
    dtype, head = thin_dtype(), _head_of_keys(call, place)
    query = call.query.rows(place.sequence, place.head, place.first[0] + place.rows, dtype) * call.scale
    keys = torch.arange(call.longest[1], device=query.device)
    scores, terms = [], []
    for piece in _pieces(call, most_bytes):
        key = call.key.rows(place.sequence, head, place.first[1] + keys[piece], dtype)
        scores.append(query @ key.t())
        terms.append(query.square() @ key.square().t())
    found = torch.cat(scores, 1)
    if call.bias is not None:
        bias = call.bias.detach()[place.sequence % call.bias.shape[0], place.head % call.bias.shape[1]]
        found = found + bias.index_select(0, place.rows).to(dtype) * (call.scale if call.bias_is_scaled else 1.0)
    return found, call.mask.sees(place.rows, keys, place.lengths), torch.cat(terms, 1)


def softmax(scores: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """S before the division by its sum, the largest score, and the sum, which is 1 where no key is seen."""
    scores = scores.masked_fill(~seen, -math.inf)
    largest = scores.amax(1, keepdim=True)
    largest = torch.where(largest.isneginf(), 0.0, largest)
    weights = torch.exp(scores - largest)
    total = weights.sum(1, keepdim=True)
    return weights, largest, torch.where(total == 0, 1.0, total)


_Of = Callable[[torch.Tensor], torch.Tensor]


def _themselves(values: torch.Tensor) -> torch.Tensor:
    return values


def _times_values(
    call: Call, place: Place, most_bytes: int, weights: Sequence[tuple[torch.Tensor, _Of]]
) -> list[torch.Tensor]:
    """Matrices of [rows, keys], each times a function of the values: [rows, size of a head of values]."""
    head, keys = _head_of_keys(call, place), torch.arange(call.longest[1], device=place.rows.device)
    found: list[torch.Tensor] = []
    for piece in _pieces(call, most_bytes):
        values = call.value.rows(place.sequence, head, place.first[1] + keys[piece], weights[0][0].dtype)
        # What is behind the last key of a sequence may be anything.
        values = torch.where((keys[piece] < place.lengths[1]).unsqueeze(1), values, 0.0)
        of_values = {of: of(values) for _, of in weights}
        products = [each[:, piece] @ of_values[of] for each, of in weights]
        found = [one + other for one, other in zip(found, products, strict=True)] if found else products
    return found


# ------------------------------------------------------------------ the verdict


class Sample(NamedTuple):
    """Sampled rows of a result: what the operands give there, and what the kernel gave, [rows, size of a head]."""

    place: Place
    expected: Attended
    run: torch.Tensor


def sample(call: Call, result: HeadTensor, seed: int, most_bytes: int) -> list[Sample]:
    """Compute rows of a result again.

    Args:
        call: what the kernel was handed.
        result: what it gave.
        seed: chooses the rows.
        most_bytes: the memory for matrices of [rows, keys].

    Returns:
        Empty if not even one row fits.
    """
    return [sample_of(call, place, result, most_bytes) for place in sampled(call, seed, most_bytes)]


def sample_of(call: Call, place: Place, result: HeadTensor, most_bytes: int) -> Sample:
    """Compute the rows of a place again."""
    run = result.rows(place.sequence, place.head, place.first[0] + place.rows, thin_dtype())
    return Sample(place, attended(call, place, most_bytes), run)


def judged(
    call: Call, samples: Sequence[Sample], result: HeadTensor, elements: list[torch.Tensor] | None = None
) -> Judged:
    """Compare what the kernel gave with what its operands give. Nothing waits for the device.

    Args:
        call: what the kernel was handed.
        samples: rows of the result.
        result: what it gave.
        elements: gets the ratio of each element of each sample, [rows, size of a head].

    Rows and columns are those of the result as a matrix, [tokens, heads times size].
    """
    found = [one.expected for one in samples]
    expected, run = (
        torch.stack([each.double() for each in many])
        for many in ([one.output for one in found], [one.run for one in samples])
    )
    known = torch.stack([one.known for one in found]).unsqueeze(2) & expected.isfinite()
    use = known & run.isfinite()
    # In float16 a large result is inf, rightly.
    broken = known & ~run.isfinite() & (expected.abs() < call.result.largest / 64)
    error, expected = torch.where(use, run - expected, 0.0), torch.where(use, expected, 0.0)
    hard, sure, variance = (
        torch.where(use, torch.stack(many).double(), 0.0)
        for many in zip(*((one.hard, one.sure, one.variance) for one in found), strict=True)
    )
    of_elements = ratio_of(error.square(), torch.minimum(hard + bound(1) * variance.sqrt(), sure).square(), broken)
    if elements is not None:
        elements += of_elements
    of_columns = ratio_of_sums(error, hard, sure, variance, (1,))
    # The errors of one row have the rounding of S in common, those of different rows have not.
    whole = ratio_of_sums(error, hard, sure, variance.sum(2, keepdim=True), (0, 1, 2))
    sequences, heads, tokens, size = result.shape
    rows = torch.zeros(sequences * tokens, dtype=torch.float64, device=result.device)
    columns = torch.zeros(heads * size, dtype=torch.float64, device=result.device)
    for (place, _, _), by_element, by_column in zip(samples, of_elements, of_columns, strict=True):
        at = result.row_of(place.sequence, place.first[0] + place.rows).clamp(0, len(rows) - 1)
        rows.scatter_reduce_(0, at, by_element.amax(1), "amax")
        part = columns[place.head * size : (place.head + 1) * size]
        part.copy_(torch.maximum(part, torch.maximum(by_column, by_element.amax(0))))
    return Judged(
        error.square().sum(),
        expected.square().sum(),
        ((error + expected) * expected).sum(),
        torch.maximum(whole, torch.maximum(rows.amax(), columns.amax())),
        rows,
        columns,
        known.any().double(),
    )


def ratio_of_sums(
    error: torch.Tensor, hard: torch.Tensor, sure: torch.Tensor, variance: torch.Tensor, over: tuple[int, ...]
) -> torch.Tensor:
    """The ratio of the root of a sum of squared errors to its tolerance.

    Args:
        error, hard, sure: of the elements.
        variance: of parts that are independent of one another.
        over: the dimensions that are summed.
    """
    # |e|^2 is below tr + 2 sqrt(tr(V^2) t) + 2 |V| t with probability 1 - exp(-t) for errors e of the covariance V
    # (Hsu, Kakade and Zhang 2012, for sub-Gaussian vectors; a rounding error is one of 3 times its variance at most).
    t = -math.log(FALSE_ALARM)
    total = variance.sum(over)
    soft = 3 * (total + 2 * (t * variance.square().sum(over)).sqrt() + 2 * t * variance.amax(over))
    tolerance = torch.minimum(hard.square().sum(over).sqrt() + soft.sqrt(), sure.square().sum(over).sqrt())
    return ratio_of(error.square().sum(over), tolerance.square(), torch.zeros_like(total, dtype=torch.bool))


def format_error(
    call: Call, exact: Call, samples: Sequence[Sample], most_bytes: int
) -> tuple[torch.Tensor, FormatError]:
    """What the format does to the sampled rows and to their operands. A stands for the keys and values, B for the
    queries.

    Args:
        call, samples, most_bytes: as of :func:`sample`.
        exact: the call with the operands before their quantization.

    Returns:
        The squared error of what the kernel gave, and those of what the operands give.
    """
    totals = torch.zeros(7, dtype=torch.float64, device=call.query.device)
    for place, one, run in samples:
        high = output_of(exact, place, most_bytes)
        run = torch.where(one.known.unsqueeze(1), run, 0.0)
        parts = [squares_of_difference(run, high)[0], *squares_of_difference(one.output, high)]
        of_keys = torch.zeros(2, dtype=torch.float64, device=call.query.device)
        head, keys = _head_of_keys(call, place), torch.arange(call.longest[1], device=call.query.device)
        for piece in _pieces(call, most_bytes):
            there = (keys[piece] < place.lengths[1]).unsqueeze(1)
            at = place.sequence, head, place.first[1] + keys[piece], high.dtype
            for coded, original in ((call.key, exact.key), (call.value, exact.value)):
                both = (torch.where(there, tensor.rows(*at), 0.0) for tensor in (coded, original))
                of_keys += torch.stack(squares_of_difference(*both))
        at = place.sequence, place.head, place.first[0] + place.rows, high.dtype
        both = (torch.where(one.known.unsqueeze(1), tensor.rows(*at), 0.0) for tensor in (call.query, exact.query))
        totals += torch.stack([*parts, *of_keys, *squares_of_difference(*both)])
    output, *rest = totals
    return output, FormatError(*rest)


def check_operands(
    call: Call, exact: Call, samples: Sequence[Sample], rules: Rules, seed: int, amax: torch.Tensor | None
) -> tuple[CodeCheck, CodeCheck]:
    """Check codes and scales of the operands, in a window of each sampled head.

    Args:
        call, exact, samples: as of :func:`format_error`; the operands of ``call`` are quantized.
        rules: those of their quantizer.
        seed: chooses the windows.
        amax: that of all three operands; None if they have no scale in common.

    Returns:
        What was found in A, the keys and values, and in B, the queries.
    """

    def checked(coded: HeadTensor, original: HeadTensor, heads: Sequence[int]) -> Iterator[CodeCheck]:
        for number, (head, (place, *_)) in enumerate(zip(heads, samples, strict=True)):
            part, high = (each.head(place.sequence, head) for each in (coded, original))
            if isinstance(part, Stored) and isinstance(high, torch.Tensor):
                yield check_codes(part, high, rules, seed + number, amax)  # each head has the next window

    of_keys, of_queries = [_head_of_keys(call, place) for place, *_ in samples], [place.head for place, *_ in samples]
    of_a = [*checked(call.key, exact.key, of_keys), *checked(call.value, exact.value, of_keys)]
    of_b = checked(call.query, exact.query, of_queries)
    in_all = [CodeCheck(*(torch.stack(each).sum() for each in zip(*found, strict=True))) for found in (of_a, of_b)]
    return in_all[0], in_all[1]
