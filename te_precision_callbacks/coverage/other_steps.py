"""Steps with a precision unlike the last step's, for example because a section acts only in some steps.

for steps in other_steps(history.by_span()):
    print(steps)                          # In steps 1 to 2 and 4: FP8 in 66.7 % of the multiply-adds (...)
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pyarrow as pa

from te_precision_callbacks.base.counts import first_of
from te_precision_callbacks.coverage.coverage import Coverage, Product, Reason
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.statistics.schedule import Schedule

_MOST_LINES = 3
_MOST_INTERVALS = 4

_Span = tuple[int, int | None]


class ProductSpan(NamedTuple):
    """A product over a span of steps without a change of it.

    Attributes:
        order: its place in the step.
        since, until: the first and the last iteration; ``until`` is None while the span is open.
    """

    product: Product
    order: int
    since: int
    until: int | None


@dataclass(frozen=True)
class OtherSteps:
    """Steps with a precision unlike the last step's. ``str()`` is a line."""

    intervals: Sequence[tuple[int, int]]
    coverage: Coverage

    @property
    def steps(self) -> str:
        text = str(Schedule(intervals=tuple(self.intervals[:_MOST_INTERVALS])))
        remaining = len(self.intervals) - _MOST_INTERVALS
        if remaining > 0:
            text += f" and {remaining} more spans"
        return text

    def __str__(self) -> str:
        # A reason that names the same steps need not repeat them.
        return f"In {self.steps}: {str(self.coverage).replace(f', {self.steps})', ')')}"


def other_steps(products: Iterable[ProductSpan]) -> list[OtherSteps]:
    """Group the steps that have other products in low precision than the last step.

    Steps with the same summary as the last step are left out.
    """
    spans: dict[tuple[object, ...], tuple[Product, list[_Span]]] = {}
    for span in products:
        product = span.product
        if product.macs or product.runs == "uncounted":  # others do not appear in the summary
            key = product.layer, product.gemm, product.backward, product.macs, product.format_name, product.why
            spans.setdefault(key, (product, []))[1].append((span.since, span.until))
    number_of_spans: dict[tuple[_Span, ...], int] = {}  # few, even with thousands of layers
    numbered = []
    for product, product_spans in spans.values():
        numbered.append((product, number_of_spans.setdefault(tuple(product_spans), len(number_of_spans))))
    changed = set()
    for since, until in itertools.chain.from_iterable(number_of_spans):
        changed.add(since)
        if until is not None:
            changed.add(until + 1)
    firsts = sorted(changed)

    def state_in(step: int) -> frozenset[int]:
        return frozenset(number for product_spans, number in number_of_spans.items() if _has_step(product_spans, step))

    states: dict[frozenset[int], list[tuple[int, int]]] = {}
    for first, following in itertools.pairwise(firsts):
        intervals = states.setdefault(state_in(first), [])
        begin = first
        if intervals and intervals[-1][1] == first - 1:
            begin = intervals.pop()[0]
        intervals.append((begin, following - 1))
    if not states:
        return []
    last = state_in(firsts[-1])
    states.pop(last, None)

    def coverage_of(state: frozenset[int]) -> Coverage:
        return Coverage(product for product, number in numbered if number in state)

    in_last = str(coverage_of(last))
    differing = []
    for state, intervals in states.items():
        if state:
            coverage = coverage_of(state)
            if str(coverage) != in_last:
                differing.append(OtherSteps(intervals, coverage))
    return differing


def _has_step(spans: Iterable[_Span], step: int) -> bool:
    return any(since <= step and (until is None or step <= until) for since, until in spans)


def format_other_steps(differing: Sequence[OtherSteps]) -> list[str]:
    return first_of(map(str, differing), _MOST_LINES, "and {} more: session.coverage(at=...)")


def recorded_products(gemms: pa.Table, operands: pa.Table) -> Iterator[tuple[Mapping[str, Any], Product]]:
    """The products of ``run.gemms`` and ``run.operands``. With several scopes, layer names include the scope."""
    formats: dict[int, dict[str, str]] = defaultdict(dict)
    for row in operands.to_pylist():
        formats[row["gemm_id"]][row["tensor"]] = row["format"] or ""
    rows = gemms.to_pylist()
    has_scopes = len({row["scope"] or "" for row in rows if row["macs"]}) > 1
    for row in rows:
        name = row["layer"]
        if has_scopes and row["scope"]:
            name = f"{row['scope']}: {name}"
        yield row, _product(row, name, formats.get(row["gemm_id"], {}))


def other_steps_of_run(run: RecordedRun) -> list[str]:
    if run.gemms["until"].null_count == run.gemms.num_rows:
        return []  # the usual case, without a loop over thousands of products
    spans = []
    for row, product in recorded_products(run.gemms, run.operands):
        spans.append(ProductSpan(product, row["order"] or 0, row["since"] or 0, row["until"]))
    return format_other_steps(other_steps(spans))


def columns_of(product: Product) -> dict[str, Any]:
    """Return the columns of records, except for the operands, which have another table."""
    columns = {field.name: getattr(product, field.name) for field in fields(product) if field.name != "operands"}
    return {**columns, "precision": product.precision, "reason": product.reason and product.reason.name}


def _product(row: Mapping[str, Any], layer: str, operands: Mapping[str, str]) -> Product:
    values: dict[str, Any] = dict.fromkeys(("n", "m", "k", "calls", "macs"), 0)
    values |= {"family": "functional", "backward": False, "batch": 1}  # a record may lack any of them
    values |= {field.name: row[field.name] for field in fields(Product) if row.get(field.name)}
    if row["reason"]:
        values["reason"] = Reason.__members__.get(row["reason"], Reason.UNKNOWN)
    return Product(**{**values, "layer": layer, "operands": operands})
