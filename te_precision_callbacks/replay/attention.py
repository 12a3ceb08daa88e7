"""Replays one record of attention: its lanes, its faults, and where a result is wrong.

====================  ====================================================================== ====================
lane                  computed in float64                                                     next differs by
====================  ====================================================================== ====================
original              from Q, K and V before quantization                                     the format
codes                 from the recorded codes and scales                                      rounding of S
rounded S             from these, with S, and in a backward the gradient of the scores,       the kernel
                      rounded as the record says
result                the recorded result
====================  ====================================================================== ====================

The forward is judged in all rows, by :mod:`te_precision_callbacks.gemm_error.attention`. The backward is ``dV = S^T
dO``, ``dQ = dS K`` and ``dK = dS^T Q``, with ``dS = scale S (dO V^T - sum(dO O))`` and O as the kernel has read it. An
element may be off by half a step of the result, by what is rounded to 0 in S or dS, and by so many standard deviations
of the other roundings and sums that a sum of independent errors exceeds them with a probability below 1e-12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.dumps.contents import Dump, operand_of
from te_precision_callbacks.dumps.header import DTYPES, FORMATS, Attention, Rounded
from te_precision_callbacks.gemm_error.accumulators import accumulator_of
from te_precision_callbacks.gemm_error.attention import judged, ratio_of_sums, sample_of, softmax
from te_precision_callbacks.gemm_error.attention_operands import Bounds, Call, HeadTensor, Mask, Place, Spacing
from te_precision_callbacks.gemm_error.chances import bound
from te_precision_callbacks.gemm_error.judging import ratio_of
from te_precision_callbacks.replay.damage import damage_in_words
from te_precision_callbacks.replay.operands import Recorded
from te_precision_callbacks.replay.verdict import (
    Lane,
    Replayed,
    accounts_for,
    apart,
    faults_of_codes,
    kernel_fault,
    tiles_of,
)

_ROWS = 512
"""The most queries whose matrices of [queries, keys] exist at once."""

_MOST_BYTES = 1 << 30
"""The memory for the keys of a head, decoded."""

_SYMBOLS = {"output": "O", "query_gradient": "dQ", "key_gradient": "dK", "value_gradient": "dV"}

_PRODUCTS = {"query_gradient": "dS K", "key_gradient": "dS^T Q", "value_gradient": "S^T dO"}

_Round = Callable[[torch.Tensor], torch.Tensor]


def replay_attention(dump: Dump, attention: Attention) -> Replayed:
    """Replay a record of attention.

    Args:
        dump: the record.
        attention: its description.
    """
    if attention.why_not:
        nothing = torch.zeros(0)
        return Replayed(dump.header, attention, (), (), (attention.why_not,), None, nothing, nothing, nothing)
    tensors = {name: HeadTensor(operand_of(dump, name), "bhsd") for name in attention.tensors()}
    call = _call_of(dump, attention, tensors)
    of_codes = _results(call, tensors, None)
    found = {name: _ratios(call, tensors[name], of_codes[name], attention) for name in attention.results}
    worst = max(found, key=lambda name: max(float(each.max()) for each in found[name]))
    elements, columns = found[worst]
    ratios = elements if bool((elements > 1).any()) else torch.maximum(elements, columns.unsqueeze(2))
    # What is behind the last token of a sequence may be anything.
    defined = of_codes[worst].expected.isfinite()
    codes, run = (torch.where(defined, each, 0.0) for each in (of_codes[worst].expected, _whole(tensors[worst])))
    faults, lacking, not_judged = [], [], []
    if float(ratios.max()) > 1:
        where, product = _where(codes, run, elements > 1, columns > 1), _product(dump, call, worst)
        faults.append(kernel_fault(dump.header, attention, f"{_SYMBOLS[worst]}, {where}; in {product}"))
    highs: dict[str, HeadTensor] = {}
    for name, described in attention.operands.items():
        operand = Recorded.of(dump, name, described)
        if not isinstance(operand.data, Stored):
            highs[name] = tensors[name]
        elif operand.high is None:
            lacking.append(name)
        else:
            highs[name] = HeadTensor(operand.high, "bhsd")
            checked = operand.checked()
            faults += [] if checked is None else faults_of_codes(operand, checked)
            not_judged += [operand.left_out] if operand.left_out else []
    high = _results(call, tensors | highs, None)[worst].expected if len(highs) == len(attention.operands) else None
    rounding = _rounding(dump, attention.probabilities), _rounding(dump, attention.scores or attention.probabilities)
    rounded = _results(call, tensors, rounding)[worst].expected
    if lacking:
        which = ", ".join(lacking)
        not_judged.append(f"the quantizers of {which}, whose tensors before quantization are not in the record")
    lanes = (
        Lane("original", "format", apart(high, codes)),
        Lane("codes", "rounding of S", apart(codes, rounded)),
        Lane("rounded S", "kernel", apart(rounded, run)),
        Lane("result", "", None),
    )
    of_heads = ratios.amax(3).transpose(1, 2).flatten(0, 1)
    square = float(codes.square().sum())
    return Replayed(
        dump.header,
        attention,
        lanes,
        tuple(faults),
        tuple(not_judged),
        float((run * codes).nan_to_num().sum()) / square if square else None,
        of_heads.amax(1),
        of_heads.amax(0),
        tiles_of(of_heads),
        (f"tokens of {_SYMBOLS[worst]}", "heads"),
    )


def _call_of(dump: Dump, attention: Attention, tensors: Mapping[str, HeadTensor]) -> Call:
    def bounds(which: str) -> Bounds | None:
        lengths = dump.tensors.get(f"lengths_{which}")
        return None if lengths is None else Bounds(lengths, dump.tensors.get(f"places_{which}"))

    def spacing(rounded: Rounded) -> Spacing:
        scale = None if rounded.scale is None else dump.tensors[rounded.scale].view(())
        return Spacing.of(FORMATS.get(rounded.numbers) or DTYPES[rounded.numbers], scale)

    query = tensors["query"]
    return Call(
        query,
        tensors["key"],
        tensors["value"],
        attention.scale,
        attention.longest,
        attention.sequences,
        Mask(attention.left, attention.right, attention.at_the_end),
        bounds("q"),
        bounds("kv"),
        spacing(attention.probabilities),
        tensors[next(iter(attention.results))].spacing,
        dump.tensors.get("bias"),
        attention.bias == "pre_scale_bias",
        accumulator_of(query.part, split_accumulator=False, capability=attention.capability),
        Spacing.of(query.numbers) if attention.kernel == "unfused" else None,
        spacing(attention.scores) if attention.scores is not None else None,
    )


def _rounding(dump: Dump, rounded: Rounded) -> _Round:
    """Rounds a matrix inside of attention as the record says."""
    number_format = FORMATS.get(rounded.numbers)
    if number_format is None:
        return lambda values: values.to(DTYPES[rounded.numbers]).double()
    scale = 1.0 if rounded.scale is None else float(dump.tensors[rounded.scale])
    largest = number_format.max
    return lambda values: number_format.round((values * scale).clamp(-largest, largest).float()).double() / scale


def _whole(tensor: HeadTensor) -> torch.Tensor:
    """float64, [batch, heads, tokens, size]."""
    batch, heads, tokens, _ = tensor.shape
    places = torch.arange(tokens)
    return torch.stack(
        [torch.stack([tensor.rows(one, head, places, torch.float64) for head in range(heads)]) for one in range(batch)]
    )


class _Result(NamedTuple):
    """A result in float64, and what a healthy kernel may be off: [batch, heads, tokens, size].

    Attributes:
        expected: before its rounding; nan where it is not defined: behind the last token of a sequence.
        hard: by how much what is rounded to 0 puts it off.
        variance: of the other errors.
    """

    expected: torch.Tensor
    hard: torch.Tensor
    variance: torch.Tensor

    @classmethod
    def like(cls, tensor: HeadTensor) -> _Result:
        empty = torch.zeros(tensor.shape, dtype=torch.float64)
        return cls(empty.fill_(math.nan), torch.zeros_like(empty), torch.zeros_like(empty))

    def add(self, at: tuple[int, int, slice], *parts: torch.Tensor) -> None:
        for whole, part in zip(self, parts, strict=True):
            whole[at] = whole[at].nan_to_num() + part


def _places(call: Call) -> Iterator[Place]:
    """All queries of all heads of all sequences, those of several keys at once that fit."""
    for sequence in range(call.sequences):
        lengths = [
            longest if each is None else int(each.length(sequence))
            for each, longest in zip((call.queries, call.keys), call.longest, strict=True)
        ]
        first = [0 if each is None else int(each.first(sequence)) for each in (call.queries, call.keys)]
        for head in range(call.query.shape[1]):
            for start in range(0, lengths[0], _ROWS):
                rows = torch.arange(start, min(start + _ROWS, lengths[0]))
                yield Place(sequence, head, rows, (lengths[0], lengths[1]), (first[0], first[1]))


def _results(
    call: Call, tensors: Mapping[str, HeadTensor], rounding: tuple[_Round, _Round] | None
) -> dict[str, _Result]:
    """The output, or the gradients, in float64; with the rounding of S and of the gradient of the scores, if given."""
    backward = "gradient" in tensors
    names = [f"{name}_gradient" for name in ("query", "key", "value")] if backward else ["output"]
    found = {name: _Result.like(tensors[name]) for name in names}
    for place in _places(call):
        (sequence, head, rows, (_, keys), first) = place
        own = head // (call.query.shape[1] // call.key.shape[1])
        batch = min(sequence, call.query.shape[0] - 1)
        of_rows = (batch, head, slice(int(first[0] + rows[0]), int(first[0] + rows[-1]) + 1))
        of_keys = (batch, own, slice(int(first[1]), int(first[1]) + keys))

        def read(name: str, head: int = head, at: torch.Tensor = first[0] + rows, place: Place = place) -> torch.Tensor:
            return tensors[name].rows(place.sequence, head, at, torch.float64)

        q, k, v = read("query"), *(read(name, own, first[1] + torch.arange(keys)) for name in ("key", "value"))
        scores = call.scale * (q @ k.t())
        if call.bias is not None:
            bias = call.bias[sequence % call.bias.shape[0], head % call.bias.shape[1]][rows, :keys].double()
            scores = scores + bias * (call.scale if call.bias_is_scaled else 1.0)
        if rounding is not None and call.scores is not None:
            scores = rounding[0](scores)
        seen = call.mask.sees(rows, torch.arange(keys), place.lengths)
        weights, _, total = softmax(scores, seen)
        s = weights / total
        if not backward:
            rounded = (weights if rounding is None else rounding[0](weights)) / total
            found["output"].add(of_rows, rounded @ v, *(torch.zeros(()),) * 2)
            continue
        gradient, output = read("gradient"), read("output")
        of_s = gradient @ v.t()
        ds = call.scale * s * (of_s - (gradient * output).sum(1, keepdim=True))
        variances = _variances(call, q, k, v, gradient, output, scores, s, ds)
        s_spacing, ds_spacing = call.probabilities, call.gradient_of_scores or call.probabilities
        for name, matrix, other, spacing, variance, at, round_it in (
            ("query_gradient", ds, k, ds_spacing, variances[1], of_rows, 1),
            ("key_gradient", ds.t(), q, ds_spacing, variances[1].t(), of_keys, 1),
            ("value_gradient", s.t(), gradient, s_spacing, variances[0].t(), of_keys, 0),
        ):
            exact = spacing.clipped(matrix) if rounding is None else rounding[round_it](matrix)
            product, size = exact @ other, matrix.abs()
            flushed = spacing.flushed(size)
            steps = torch.where(flushed > 0, 0.0, spacing.half_step(size).square() / 3)
            lost = call.accumulator.variance(matrix.shape[1], matrix.square() @ other.square(), product.square())
            found[name].add(at, product, flushed @ other.abs(), (steps + variance) @ other.square() + lost)
    return found


def _variances(call: Call, *of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What sums lose in S and in the gradient of the scores, before these are rounded: variances, [queries, keys]."""
    q, k, v, gradient, output, scores, s, ds = of
    eps = torch.finfo(torch.float32).eps
    terms = call.scale**2 * (q.square() @ k.square().t())
    of_scores = call.accumulator.variance(q.shape[1], terms, scores.square()) + eps**2 * (1 + scores.square())
    of_scores = 2 * (of_scores + of_scores.amax(1, keepdim=True))
    products = gradient.square() @ v.square().t()
    lost = call.accumulator.variance(v.shape[1], products, (gradient @ v.t()).square())
    lost = lost + eps**2 * v.shape[1] * (gradient * output).square().sum(1, keepdim=True)
    return of_scores * s.square(), of_scores * ds.square() + call.scale**2 * s.square() * lost


def _ratios(call: Call, tensor: HeadTensor, exact: _Result, attention: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """The errors of a result over their tolerances: of each element, [batch, heads, tokens, size], and of each column
    of a head over all of its tokens, [batch, heads, size]."""
    run = _whole(tensor)
    if not attention.is_backward:
        return _ratios_of_output(call, tensor, run)
    defined = exact.expected.isfinite()
    expected = torch.where(defined, tensor.spacing.clipped(exact.expected), 0.0)
    off = exact.hard + bound(1) * exact.variance.sqrt()
    hard = exact.hard + tensor.spacing.half_step(expected.abs() + off)
    broken = defined & ~run.isfinite() & (expected.abs() < tensor.spacing.largest / 64)
    error = torch.where(defined & run.isfinite(), run - expected, 0.0)
    elements = ratio_of(error.square(), (hard + bound(1) * exact.variance.sqrt()).square(), broken)
    # The errors of different tokens are independent.
    return elements, ratio_of_sums(error, hard, torch.full_like(hard, math.inf), exact.variance, (2,))


def _ratios_of_output(call: Call, result: HeadTensor, run: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    elements, columns = torch.zeros_like(run), torch.zeros_like(run[:, :, 0])
    for place in _places(call):
        of_place: list[torch.Tensor] = []
        found = judged(call, [sample_of(call, place, result, _MOST_BYTES)], result, of_place)
        batch = min(place.sequence, run.shape[0] - 1)
        elements[batch, place.head, place.first[0] + place.rows] = of_place[0]
        own = columns[batch, place.head]
        own.copy_(torch.maximum(own, found.columns.reshape(result.shape[1], -1)[place.head]))
    return elements, columns


def _where(codes: torch.Tensor, run: torch.Tensor, bad: torch.Tensor, bad_columns: torch.Tensor) -> str:
    """Where a result is wrong, and how: a row is a token, a column an element of a head."""
    of_heads = bad.flatten(2).any(2) | bad_columns.any(2)
    heads = [(int(sequence), int(head)) for sequence, head in of_heads.nonzero()]
    if len(heads) == of_heads.numel():
        where = "all heads"
        codes, run, bad = (each.transpose(1, 2).flatten(2).flatten(0, 1) for each in (codes, run, bad))
        bad_columns = bad_columns.amax(0).flatten()
    else:
        sequence, head = max(heads, key=lambda at: int(bad[at].sum()))
        of = f" of sequence {sequence}" if of_heads.shape[0] > 1 else ""
        where = f"head {head}{of}" + (f" and {len(heads) - 1} more" if len(heads) > 1 else "")
        codes, run, bad, bad_columns = (each[sequence, head] for each in (codes, run, bad, bad_columns))
    damage = damage_in_words(codes, run, bad, bad.any(1), bad_columns).replace("the whole result", "all of it")
    gain = float((codes * run).nan_to_num().sum() / codes.square().sum().clamp(min=1e-300))
    return f"{where}: {damage}" + (
        f"; {gain:.3g} of what it should be" if gain and accounts_for(gain, codes, run) else ""
    )


def _product(dump: Dump, call: Call, name: str) -> str:
    """The product whose fault it is."""
    if name in _PRODUCTS:
        return f"the product {_PRODUCTS[name]}"
    right = _stats_are_right(dump, call)
    if right is None:
        return "the scores QK^T or the product PV"
    if right:
        return "the product PV, since the statistics of the softmax are right"
    return "the scores QK^T, since the statistics of the softmax are wrong"


def _stats_are_right(dump: Dump, call: Call) -> bool | None:
    """Whether the recorded statistics of the softmax are those of the scores; None if they are not known."""
    stats = dump.tensors.get("softmax_stats")
    if stats is None or tuple(stats.shape) != (call.sequences, call.query.shape[1], call.longest[0], 1):
        return None
    for place in _places(call):
        keys, own = torch.arange(place.lengths[1]), place.head // (call.query.shape[1] // call.key.shape[1])
        q = call.query.rows(place.sequence, place.head, place.first[0] + place.rows, torch.float64)
        k = call.key.rows(place.sequence, own, place.first[1] + keys, torch.float64)
        seen = call.mask.sees(place.rows, keys, place.lengths)
        scores = call.scale * (q @ k.t())
        exact = scores.masked_fill(~seen, -math.inf).logsumexp(1)
        terms = call.scale**2 * (q.square() @ k.square().t())
        variance = call.accumulator.variance(q.shape[1], terms, scores.square()).amax(1)
        apart_by = (stats[place.sequence, place.head, place.rows, 0].double() - exact).abs()
        wrong = apart_by > bound(1) * variance.sqrt() + 1e-4 * (1 + exact.abs())
        if bool((wrong & seen.any(1)).any()):
            return False
    return True
