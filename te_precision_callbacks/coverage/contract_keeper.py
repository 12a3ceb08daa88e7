"""Checks a run against its contract: after the first steps, at each change of precision, and at its end."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from te_precision_callbacks.base.counts import first_of, group_by_key
from te_precision_callbacks.base.errors import RaisedInTraining
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.ranks.together import Ranks
from te_precision_callbacks.base.suggestions import suggestion
from te_precision_callbacks.base.vocabulary import PRECISIONS
from te_precision_callbacks.config.contract import Contract
from te_precision_callbacks.config.problems import ConfigError
from te_precision_callbacks.coverage.coverage import (
    MOST_WITHOUT_BACKWARD,
    NOTHING,
    REMEDIES,
    Coverage,
    Product,
    StateRow,
    list_uncounted,
    percent,
)
from te_precision_callbacks.layers.folding import fold_for_sentence

logger = logging.getLogger(__name__)

_MOST_OFFENDERS = 5

_MOST_INCOMPLETE = 16
"""The most steps with uncounted calls that are checked again at the end of the run."""

CHECK_INTERVAL = 10
"""Interval, in steps, of the cross-rank check for changes, if no statistics are collected."""


class PrecisionContractError(RaisedInTraining, RuntimeError):
    """The run breaks the contract of ``require=``. ``coverage`` has the checked products of all ranks."""

    def __init__(self, message: str, coverage: Coverage = NOTHING) -> None:
        super().__init__(message)
        self.coverage = coverage


class ContractKeeper:
    """Checks a run's contract, with the same result on all ranks that reduce together.

    Attributes:
        unchecked: the message if the contract cannot be checked; else empty.
        unchecked_steps: steps with shares that stayed estimates to the end of the run.

    Ranks announce changes of precision with the statistics of a step. Without statistics they exchange them in the
    first checked step, and in multiples of :data:`CHECK_INTERVAL`.
    """

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._first = math.inf
        self._changes = 0
        self._changed_at = 0
        self._checked = -1  # the number of changes at the last check, and at the last one that was possible
        self._checked_until = -1
        self._message = ""
        self.unchecked = ""
        self._incomplete: dict[int, None] = {}
        self.unchecked_steps: list[int] = []

    def begin_step(self, changes: int, iteration: int, ranks: Ranks) -> None:
        """Announce to the other ranks whether there is something to check; ``changes`` counts this rank's changes."""
        self._first = min(self._first, iteration + self._contract.by_step - 1)
        if changes != self._changes:
            self._changes = changes
            self._changed_at = iteration
        ranks.request(check=self._is_due(iteration))

    def _is_due(self, iteration: int) -> bool:
        return iteration >= self._first and self._checked != self._changes

    def end_step(self, coverage_at: Callable[[int], Coverage], iteration: int, ranks: Ranks) -> str | None:
        """Check the contract in its first step, and after a change of precision on any rank.

        Returns the message of a broken contract, or an empty string; None if the check was not due or not possible.
        Raises PrecisionContractError on all ranks.
        """
        is_due = self._is_due(iteration)
        step = iteration
        if ranks.several:
            is_due = ranks.check_requested(send=iteration == self._first or iteration % CHECK_INTERVAL == 0)
            if iteration != self._first:
                step = self._changed_at
        if not is_due:
            return None
        self._checked = self._changes
        local = coverage_at(step)
        products = shared_products(local, ranks, "products to check")
        coverage = Coverage(products, state=shared_state(local.state, ranks, "types to check"))
        if ranks.several and not ranks.are_connected:
            return None
        if coverage and not coverage.has_backward and iteration < self._first + MOST_WITHOUT_BACKWARD:
            self._checked = -1  # only forwards have run so far: check a later step
            return None
        if coverage.is_incomplete and not _is_broken_for_certain(self._contract, coverage):
            self._checked = -1  # the next steps may count what this step could not
            if len(self._incomplete) < _MOST_INCOMPLETE:
                self._incomplete[step] = None
            return None
        self._checked_until = self._checked
        broken = self._broken_clauses(coverage)
        raises = self._contract.on_broken == "raise" and bool(broken) and ranks.check_connected()
        self.unchecked = ""
        if broken:
            return self._report_broken(broken, coverage, f" at step {iteration}", raises=raises)
        self.unchecked = left_out(self._contract, coverage)
        return self.unchecked and self._report(self.unchecked, coverage, raises=False)

    def end_run(
        self,
        coverage_at: Callable[[int], Coverage],
        coverage: Coverage,
        changes: int,
        iteration: int,
        ranks: Ranks,
        *,
        why_not: str,
        raises: bool,
    ) -> str | None:
        """Check the remaining steps, on each rank separately.

        Args:
            coverage_at: returns this rank's products in a step.
            coverage: the products of the last step, on all ranks if known.
            why_not: the reason if there is nothing to check.
            raises: False if another exception ends the run.
        """
        raises = raises and self._contract.on_broken == "raise"
        all_seen = not ranks.several
        for step in self._incomplete:  # later steps may have counted the calls that were missing
            step_coverage = coverage_at(step)
            if step_coverage.is_incomplete:
                self.unchecked_steps.append(step)
                continue
            self.unchecked = left_out(self._contract, step_coverage) or self.unchecked
            if broken := self._broken_clauses(step_coverage, all_seen=all_seen):
                when = f" in step {step}, checked at the end of the run"
                return self._report_broken(broken, step_coverage, when, raises=raises)
        if not coverage and not coverage.state:
            if self._checked_until < 0:
                self.unchecked = f"The precision contract (require=) was never checked: {why_not}."
        elif self._checked_until < changes or not coverage:
            self.unchecked = left_out(self._contract, coverage) or self.unchecked
            broken = self._broken_clauses(coverage, all_seen=all_seen)
            when = ", checked at the end of the run, without any step()"
            if self._first < math.inf:
                when = f", checked at the end of the run, after step {iteration}"
            if broken and not coverage.is_incomplete:
                return self._report_broken(broken, coverage, when, raises=raises)
            if not self.unchecked:
                return ""
        if self.unchecked:
            return self._report(self.unchecked, coverage, raises=raises)
        return None

    def _broken_clauses(self, coverage: Coverage, *, all_seen: bool = True) -> list[str]:
        """Return the texts of broken clauses; ``all_seen``: whether ``coverage`` has the state of all ranks."""
        broken = broken_clauses(self._contract, coverage)
        if self._contract.same_as is not None and coverage:
            broken += [f"same_as: {text}" for text in self._contract.same_as.broken(coverage, "this run")]
        return [*broken, *_broken_state(self._contract, coverage.state, all_seen=all_seen)]

    def _report_broken(self, broken: Sequence[str], coverage: Coverage, when: str, *, raises: bool) -> str:
        message = "\n- ".join((f"The run breaks its precision contract (require=){when}:", *broken))
        offenders = _offenders(coverage)
        if offenders:
            message += "\nThe largest products that are not in low precision:\n" + "\n".join(offenders)
        if coverage.is_estimate:
            message += f"\nNot counted: {'; '.join(list_uncounted(coverage))}."
        return self._report(message, coverage, raises=raises)

    def _report(self, message: str, coverage: Coverage, *, raises: bool) -> str:
        if raises:
            raise PrecisionContractError(message, coverage)
        if own_rank() == 0 and message != self._message:
            logger.warning("%s", message)
        self._message = message
        return message


def left_out(contract: Contract, coverage: Coverage) -> str:
    """The reason if the shares or layers of a contract cannot be checked; empty if they can."""
    texts = list_uncounted(coverage)
    uncounted = itertools.chain(*coverage.not_counted.values())
    is_required = any(itertools.starmap(re.search, itertools.product(contract.layers, uncounted)))
    if not texts or not (contract.share or is_required):
        return ""
    return (
        "The precision contract (require=) cannot be checked, because these products are not counted:"
        f" {'; '.join(texts)}."
    )


def broken_clauses(contract: Contract, coverage: Coverage) -> list[str]:
    return [*_broken_shares(contract, coverage), *_broken_layers(contract, coverage)]


def _is_broken_for_certain(contract: Contract, coverage: Coverage) -> bool:
    whole = {
        key: share for key, share in contract.share.items() if share.number >= 1 and share.comparison in (">", ">=")
    }
    return bool(broken_clauses(contract.model_copy(update={"share": whole}), coverage))


def _broken_shares(contract: Contract, coverage: Coverage) -> Iterator[str]:
    if coverage.has_unknown:
        return
    for share in contract.share.values():
        backward = {"forward": False, "backward": True}.get(share.part)
        gemm = None
        if backward is None:
            gemm = share.part or None
        measured = coverage.share(share.precision, gemm=gemm, backward=backward)
        if not share.holds(measured):
            has = f" is {percent(measured)} %"
            if math.isnan(measured):
                has = ": no such products ran"
            yield (
                f"{share.precision}{share.part and f' {share.part}'}{has},"
                f" required: {share.comparison} {100 * share.number:g} %."
            )


def _broken_layers(contract: Contract, coverage: Coverage) -> Iterator[str]:
    for pattern, precision in contract.layers.items():
        high_products = [
            product
            for product in coverage
            if product.macs and product.precision not in PRECISIONS[precision] and re.search(pattern, product.layer)
        ]
        if high_products:
            first = max(high_products, key=lambda product: product.macs)
            text = (
                f"{pattern!r} must run in {precision}: {fold_for_sentence(first.layer)} {first.gemm} runs in"
                f" {first.precision}"
            )
            if first.why:
                text += f" ({first.why})"
            if len(high_products) > 1:
                text += f", and {len(high_products) - 1} more GEMMs"
            yield f"{text}."


def _broken_state(contract: Contract, state: Iterable[StateRow], *, all_seen: bool) -> Iterator[str]:
    dtypes = group_by_key((row.subject, row.dtype) for row in state)
    for subject, dtype in contract.state.items():
        other_dtypes = dict.fromkeys(dtypes.get(subject, ()))
        other_dtypes.pop(dtype, None)
        if other_dtypes:
            yield f"{subject} must be {dtype}: some are {', '.join(other_dtypes)}."
        elif all_seen and subject not in dtypes:
            yield f"{subject} must be {dtype}: no such tensor was found."


def require_layers(contract: Contract, names: Iterable[str], without_products: Iterable[str] = ()) -> None:
    """Require that each pattern of a contract matches a name; ``without_products`` are the names of norms and the like.

    Raises:
        ConfigError: a pattern matches none.
    """
    layer_names = list(names)
    for pattern, precision in contract.layers.items():
        if any(map(re.compile(pattern).search, layer_names)):
            continue
        unknown = next(filter(re.compile(pattern).search, without_products), None)
        if unknown is not None:
            raise ConfigError(
                f"require=: {pattern!r}, which the contract requires to run in {precision!r}, matches only modules"
                f" without matrix products, such as {unknown!r}, whose precision is not observed. A contract can name"
                " linear layers, convolutions and attention."
            )
        raise ConfigError(
            f"require=: no layer matches {pattern!r}, which the contract requires to run in"
            f" {precision!r}.{suggestion(pattern, layer_names)}"
        )


def _offenders(coverage: Coverage) -> list[str]:
    whole = coverage.macs()
    by_cause = group_by_key(
        ((product.precision, product.reason, product.why), product) for product in coverage.in_high_precision
    )
    texts = []
    for products in sorted(map(Coverage, by_cause.values()), key=Coverage.macs, reverse=True):
        first = products[0]
        share = percent(products.macs() / whole)
        gemms = ", ".join(dict.fromkeys(product.gemm for product in products))
        layers = fold_for_sentence(*dict.fromkeys(product.layer for product in products), most=3)
        text = f"- {layers} {gemms}: {share} % in {first.precision.upper()}"
        if first.reason:
            text += f" ({first.why})"
            if first.reason in REMEDIES:
                text += f". Remedy: {REMEDIES[first.reason]}."
        texts.append(text)
    return first_of(texts, _MOST_OFFENDERS, "- and {} more")


EntryT = TypeVar("EntryT", bound=Hashable)


@dataclass(frozen=True)
class _Entry:
    """A product as exchanged between ranks; ``alike`` lacks sizes, recipe and details of the reason."""

    alike: Product
    product: Product = field(compare=False)


def shared_products(rank_products: Iterable[Product], ranks: Ranks, kind: str, *, mean: bool = False) -> list[Product]:
    """Merge the products of all ranks, with sizes from the first rank that has the product. A collective call.

    Args:
        kind: the name of the message; equal on all ranks.
        mean: whether products get the mean multiply-adds of the ranks that have them, instead of the sum.
    """
    macs: dict[_Entry, tuple[int, int]] = {}
    for product in rank_products:
        kind_of_product = replace(product, n=0, m=0, k=0, batch=0, calls=0, macs=0, reason_ref="", recipe="")
        entry = _Entry(kind_of_product, product)
        former_macs, _ = macs.get(entry, (0, 1))
        macs[entry] = former_macs + product.macs, 1
    added = _sum_over_ranks(macs, ranks, kind, _Entry)
    products = []
    for entry, (total, count) in added.items():
        if mean:
            total = round(total / max(count, 1))
        products.append(replace(entry.product, macs=total))
    return products


def shared_state(rank_rows: Iterable[StateRow], ranks: Ranks, kind: str) -> tuple[StateRow, ...]:
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rank_rows:
        tensors, size = sizes.get((row.subject, row.dtype), (0, 0))
        sizes[row.subject, row.dtype] = tensors + row.tensors, size + row.bytes
    added = _sum_over_ranks(sizes, ranks, kind, tuple[str, str])
    return tuple(StateRow(*key, *numbers) for key, numbers in added.items())


def _sum_over_ranks(
    rank_numbers: Mapping[EntryT, tuple[int, int]], ranks: Ranks, kind: str, entry_type: Any
) -> dict[EntryT, tuple[int, int]]:
    entries = ranks.pool(rank_numbers, kind, entry_type)
    pairs = [rank_numbers.get(entry, (0, 0)) for entry in entries]
    numbers = np.array(pairs, np.float64).reshape(-1)  # exact up to 2**53
    merged = ranks.merge(numbers, f"sizes of {kind}", len(numbers))
    sums = list(map(round, numbers if merged is None else merged))
    return dict(zip(entries, zip(sums[::2], sums[1::2], strict=True), strict=True))
