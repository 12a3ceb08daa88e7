"""The work of a trace, and the calls of matrix products in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed.trace.contexts import Context, Contexts, Pass
from te_precision_callbacks.speed.trace.kinds import NamedKernel, of_kernel, of_operator
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
    known: NamedKernel | None
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


def _with_operator(known: NamedKernel | None, trace: Trace, context: Context) -> NamedKernel | None:
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
            known = of_operator(name) or NamedKernel("host")
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


_LIKE_GEMMS = frozenset({"gemm", "convolution", "attention"})

Sizes = tuple[int, frozenset[int]]
"""Of a product: the elements that each sum has, and the rows and columns of the result."""


@dataclass(slots=True)
class HostCall:
    """A GEMM, a convolution, or attention in one kernel, as the host called it.

    Attributes:
        work: its kernels.
        of_pass: its pass.
        unit: the operator or the node that called it.
        operator: the innermost operator.
        sizes: what its operands say of the product; None where nothing does.
        layer, gemm: by its range, or by that of the forward of a backward; empty where neither is known.
    """

    work: list[Work]
    of_pass: Pass
    unit: int
    operator: int
    sizes: Sizes | None
    layer: str = ""
    gemm: str = ""
    product: Product | None = field(default=None)

    @property
    def is_attention(self) -> bool:
        """Whether it is attention in one kernel: all products of it at once."""
        known = self.work[0].known
        return known is not None and known.kind == "attention"


def calls_of(work: Iterable[Work], trace: Trace, contexts: Contexts) -> list[HostCall]:
    """The calls of products, in the order in which the host made them."""
    found: list[HostCall] = []
    by_operator: dict[int, HostCall] = {}
    last_of_unit: dict[int, HostCall] = {}
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
        call = HostCall(
            [each],
            context.of_pass,
            context.unit,
            operator,
            _sizes(trace, operator, name),
            context.layer,
            context.gemm,
        )
        found.append(call)
        by_operator[operator] = last_of_unit[context.unit] = call
    return found


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
