"""The work of a trace, and the calls of matrix products in it, with the products of a run that each may be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.trace.contexts import Context, Contexts, Pass
from te_precision_callbacks.speed.trace.kinds import Known, of_kernel, of_operator
from te_precision_callbacks.speed.trace.reading import NOTHING, HostKind, Shapes, Trace, column

_OUTSIDE = Context()

_BESIDE_A_GEMM = re.compile(
    r"(?i)splitKreduce|reduce_1Block|epilogue::impl|setup_grouped|grouped_tensor_offsets|bias_add"
)
"""Kernels that a GEMM brings with it, behind its own."""


@dataclass(slots=True)
class Work:
    """A kernel, or an operator of the host.

    Attributes:
        name: its name.
        begin, end: when it ran, in microseconds. Of an operator of the host ``begin`` and ``end`` are those of the
            whole operator.
        us: the time that counts, in microseconds: of an operator of the host without the operators inside.
        launched: when the host launched it, in microseconds.
        launched_at: the place of the call that launched it; NOTHING where the trace does not say it.
        known: what is known of its name; None if nothing is.
        context: what it belongs to.
        captured: whether a replayed CUDA graph ran it.
    """

    name: str
    begin: float
    end: float
    us: float
    launched: float
    launched_at: int
    known: Known | None
    context: Context
    captured: bool = False

    @property
    def comes_with_a_gemm(self) -> bool:
        """Whether it is a part of the GEMM before it."""
        return bool(_BESIDE_A_GEMM.search(self.name))


def work_of(trace: Trace, contexts: Contexts) -> list[Work]:
    """The work of a trace, in the order in which the host launched it."""
    found = _of_device(trace, contexts) if trace.has_device else _of_host(trace, contexts)
    return sorted(found, key=lambda work: (work.launched, work.begin))


def _of_device(trace: Trace, contexts: Contexts) -> Iterable[Work]:
    host, device, names = trace.host, trace.on_device, trace.names
    calls = {host.link[place]: place for place in range(len(host)) if host.link[place] != NOTHING}
    for place in range(len(device)):
        begin, end, name = device.begin[place], device.end[place], names[device.name[place]]
        call = calls.get(device.link[place], NOTHING)
        if call == NOTHING:
            call = trace.externals.get(device.external[place], NOTHING)
        context = _OUTSIDE if call == NOTHING else contexts.of[call]
        launched = begin if call == NOTHING else host.begin[call]
        known = of_kernel(name)
        if known is None or (known.kind == "gemm" and not known.format):
            known = _with_operator(known, trace, context)
        captured = device.captured[place] > 0
        yield Work(name, begin, end, end - begin, launched, call, known, context, captured)


def _with_operator(known: Known | None, trace: Trace, context: Context) -> Known | None:
    """What is known of a kernel by the operator that launched it, where its own name does not say it."""
    if context.operator == NOTHING:
        return known
    by_operator = of_operator(trace.names[trace.host.name[context.operator]])
    return by_operator if known is None else known


def _of_host(trace: Trace, contexts: Contexts) -> Iterable[Work]:
    host, names = trace.host, trace.names
    lengths = (column(host.end, np.float64) - column(host.begin, np.float64)).tolist()
    own = lengths.copy()
    is_operator = [kind == HostKind.OPERATOR for kind in host.kind]
    for place, outer in enumerate(contexts.outer):
        if not is_operator[place]:
            continue
        while outer != NOTHING and not is_operator[outer]:
            outer = contexts.outer[outer]
        if outer != NOTHING:
            own[outer] -= lengths[place]
    for place in range(len(host)):
        if is_operator[place]:
            name = names[host.name[place]]
            known = of_operator(name) or Known("host")
            begin = host.begin[place]
            yield Work(name, begin, host.end[place], max(0.0, own[place]), begin, place, known, contexts.of[place])


def union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The stretches in which any of some spans runs, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


_OF_TE = frozenset(
    {"_Linear", "_LayerNormLinear", "_LayerNormMLP", "_GroupedLinear", "_OperationFuserAutogradFunction"}
)
"""The Functions of autograd that run the GEMMs of Transformer Engine 2.20; their backwards have ``Backward`` behind."""

_LIKE_GEMMS = frozenset({"gemm", "convolution", "attention"})

Sizes = tuple[int, frozenset[int]]
"""Of a product: the elements that each sum has, and the rows and columns of the result."""


@dataclass(slots=True)
class Call:
    """A GEMM, a convolution, or attention in one kernel, as the host called it.

    Attributes:
        work: its kernels.
        of_pass: its pass.
        unit: the operator or the node that called it.
        operator: the innermost operator.
        sizes: what its operands say of the product; None where nothing does.
        among: the sizes of what a Function of Transformer Engine was given, among which are those of its products; None
            where nothing says them.
        of_te: whether a Function of Transformer Engine called it; None where nothing says it.
        layer, gemm: what a range says, or what was inferred; empty where neither does.
        inferred: whether the layer or the GEMM was inferred.
    """

    work: list[Work]
    of_pass: Pass
    unit: int
    operator: int
    sizes: Sizes | None
    among: frozenset[int] | None
    of_te: bool | None
    layer: str = ""
    gemm: str = ""
    inferred: bool = False
    product: Product | None = field(default=None)

    @property
    def is_attention(self) -> bool:
        """Whether it is attention in one kernel: all products of it at once."""
        known = self.work[0].known
        return known is not None and known.kind == "attention"


def calls_of(work: Iterable[Work], trace: Trace, contexts: Contexts) -> list[Call]:
    """The calls of products, in the order in which the host made them."""
    found: list[Call] = []
    by_operator: dict[int, Call] = {}
    last_of_unit: dict[int, Call] = {}
    for each in work:
        if each.known is None or each.known.kind not in _LIKE_GEMMS:
            continue
        context = each.context
        operator = context.operator
        name = "" if operator == NOTHING else trace.names[trace.host.name[operator]]
        before = by_operator.get(operator) if name.startswith("aten::") else None
        if before is None and each.comes_with_a_gemm:
            before = last_of_unit.get(context.unit)
        if before is not None:
            before.work.append(each)
            continue
        function = _function_of_te(trace, contexts, operator)
        call = Call(
            [each],
            context.of_pass,
            context.unit,
            operator,
            _sizes(trace, operator, name),
            None if context.of_pass == "backward" else _among(trace, function),
            None if operator == NOTHING else function != NOTHING,
            context.layer,
            context.gemm,
        )
        found.append(call)
        by_operator[operator] = last_of_unit[context.unit] = call
    return found


def _function_of_te(trace: Trace, contexts: Contexts, operator: int) -> int:
    """The Function of Transformer Engine around an operator, or its backward; NOTHING without one."""
    place = operator
    while place != NOTHING:
        name = trace.names[trace.host.name[place]]
        if trace.host.kind[place] == HostKind.OPERATOR and name.removesuffix("Backward") in _OF_TE:
            return place
        place = contexts.outer[place]
    return NOTHING


def _among(trace: Trace, function: int) -> frozenset[int] | None:
    number = NOTHING if function == NOTHING else trace.host.operands[function]
    if number == NOTHING:
        return None
    shapes = [shape for shape in trace.operands[number].shapes if len(shape) > 1]
    return frozenset(size for shape in shapes for size in (*shape, math.prod(shape[:-1]))) or None


def _sizes(trace: Trace, operator: int, name: str) -> Sizes | None:
    """The sizes of the product that an operator of torch computes, by those of its operands."""
    number = NOTHING if operator == NOTHING else trace.host.operands[operator]
    if number == NOTHING or not name.startswith("aten::"):
        return None
    shapes: Shapes = trace.operands[number].shapes
    if name.startswith(("aten::addmm", "aten::baddbmm", "aten::_addmm_activation")):
        shapes = shapes[1:]
    if len(shapes) < 2:
        return None
    a, b = shapes[0], shapes[1]
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        return None
    return a[-1], frozenset((a[-2], b[-1]))


def sizes_of(product: Product) -> Sizes:
    """The sizes of a product of a run."""
    return product.k, frozenset((product.n, product.m))


def may_be(call: Call, product: Product) -> bool:
    """Whether a call may be a call of a product, by its sizes and by what called it."""
    if call.sizes is not None and call.sizes != sizes_of(product):
        return False
    if call.sizes is None and call.among is not None and not {product.k, product.n, product.m} <= call.among:
        return False
    if call.is_attention:
        return product.family == "attention"
    return call.of_te is None or call.of_te == (product.family in ("te", "te_ops"))


def aligned(calls: Sequence[Call], expected: Sequence[Product]) -> list[int]:
    """Which product each call is, where both come in one order: a call may be none, and a product may not be called.

    Of all ways that keep the order, the one in which most calls are products.

    Returns:
        For each call the place of its product; NOTHING for none.
    """
    if len(calls) == len(expected) and all(map(may_be, calls, expected)):
        return list(range(len(calls)))
    if any(call.sizes is None and call.among is None for call in calls) and not _tells_apart(calls, expected):
        return [NOTHING] * len(calls)
    return _most_matches(calls, expected)


def _tells_apart(calls: Sequence[Call], expected: Sequence[Product]) -> bool:
    """Whether the order alone says enough of calls without sizes: as many of each family as expected."""
    of_te = sum(call.of_te is True for call in calls)
    return len(calls) == len(expected) and of_te == sum(product.family in ("te", "te_ops") for product in expected)


_BAND = 96
"""How far calls and products may be apart: more calls of no product in a row than these are not looked through."""


def _most_matches(calls: Sequence[Call], expected: Sequence[Product]) -> list[int]:
    """The longest common subsequence within a band around where both are equally far."""
    count, width = len(expected), 2 * _BAND + 1
    slope = count / max(1, len(calls))
    best = [0] * (count + 1)
    steps: list[tuple[int, bytearray]] = []
    for number, call in enumerate(calls):
        first = max(0, min(count, int(number * slope) - _BAND))
        last = min(count, first + width)
        moves = bytearray(last - first)
        left = diagonal = best[first]
        for place in range(first, last):
            above = best[place + 1]
            score, move = (above, 1) if above >= left else (left, 2)
            if diagonal + 1 > score and may_be(call, expected[place]):
                score, move = diagonal + 1, 3
            diagonal, left = above, score
            best[place + 1] = score
            moves[place - first] = move
        steps.append((first, moves))
    found = [NOTHING] * len(calls)
    place = count
    for number in range(len(calls) - 1, -1, -1):
        first, moves = steps[number]
        place = min(place, first + len(moves))
        while place > first:
            move = moves[place - first - 1]
            if move == 2:
                place -= 1
                continue
            if move == 3:
                place -= 1
                found[number] = place
            break
    return found
