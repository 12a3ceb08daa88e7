"""The products of the kinds of calls that were counted, and those of a step as a sum over its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from te_precision_callbacks.coverage.coverage import ESTIMATED, Product, StateRow
from te_precision_callbacks.coverage.micro_batches import NOT_CALLED, OUTSIDE, Kind, ModelCall, Parts
from te_precision_callbacks.coverage.seen_product import SeenProduct, summed


class _Counted(NamedTuple):
    """The calls of a kind that were counted: one, or several where sizes depend on the values of tensors.

    Attributes:
        seen: their products.
        calls, backwards: the number of calls, and of those with a backward.
        may_lack_backward: whether calls of the kind may have a backward that was not counted.
    """

    seen: Sequence[SeenProduct]
    calls: int
    backwards: int
    may_lack_backward: bool

    def in_step(self, forwards: int, backwards: int) -> Iterator[tuple[SeenProduct, float]]:
        """The products, each with the number of times that it runs in a step with so many calls."""
        for one in self.seen:
            counted = self.backwards if one.is_of_backward else self.calls
            yield one, (backwards if one.is_of_backward else forwards) / max(counted, 1)


class CountedKinds:
    """The counted kinds of a model's calls.

    Args:
        root: the path of the model.

    Attributes:
        changes: how often a kind was counted.
    """

    def __init__(self, root: str) -> None:
        self.changes = 0
        self._root = root
        self._counted: dict[Kind, _Counted] = {}

    def put(self, kind: Kind, found: Sequence[tuple[ModelCall, Sequence[SeenProduct]]]) -> bool:
        """Keep the products of counted calls of a kind; returns whether the kind was unknown."""
        before = self._counted.get(kind)
        calls = [(call, seen) for call, seen in found if call.may_have_backward] or found[:1]
        if any(call.goes_by_values for call, _ in found):
            calls = found
        backwards = sum(call.may_have_backward for call, _ in calls)
        if before is not None and (before.backwards or not backwards):
            return False
        seen = [one for _, products in calls for each in products for one in each.alone()]
        lacks = kind.form != OUTSIDE and not backwards
        self._counted[kind] = _Counted(seen, len(calls), backwards, lacks)
        self.changes += 1
        return before is None

    def put_failed(self, kind: Kind, seen: Sequence[SeenProduct]) -> None:
        """Keep what was counted of a step in which counting has failed; the form of the kind is the reason."""
        self._counted[kind] = _Counted([one for each in seen for one in each.alone()], 1, 1, False)
        self.changes += 1

    def find(self, wanted: Callable[[Kind], bool]) -> Kind | None:
        """The first counted kind that fulfils a condition."""
        return next(filter(wanted, self._counted), None)

    def are_alike(self, *kinds: Kind) -> bool:
        """Whether kinds have equal products."""
        products = (
            Counter((one.layer, one.gemm, one.is_of_backward, one.sizes) for one in self._counted[kind].seen)
            for kind in kinds
        )
        return len({frozenset(counts.items()) for counts in products}) == 1

    def has_backward(self, kind: Kind) -> bool | None:
        """Whether products of a backward were counted of a kind; None where the kind was not counted."""
        counted = self._counted.get(kind)
        return None if counted is None else any(one.is_of_backward for one in counted.seen)

    def products(self, parts: Parts, steps: int = 1) -> tuple[Product, ...]:
        """The products of a step with these calls; of several steps the mean. What is not counted comes last."""
        weighted: list[tuple[SeenProduct, float]] = []
        unknown = lacking = 0
        texts: dict[str, None] = {}
        for kind, (forwards, backwards) in parts.items():
            counted = self._counted.get(kind)
            if counted is None:
                unknown += forwards
                alike = [self._counted[other] for other in self._counted if other.form == kind.form]
                alike = alike or [self._counted[other] for other in self._counted if other.form != OUTSIDE]
            else:
                alike = [counted]
                lacking += backwards * counted.may_lack_backward
            for one in alike:
                weighted += [(seen, times / len(alike) / steps) for seen, times in one.in_step(forwards, backwards)]
            if isinstance(kind.form, str) and kind.form != OUTSIDE:
                texts[kind.form] = None
        whole = sum(forwards for forwards, _ in parts.values())
        if unknown:
            texts[
                f"{ESTIMATED}{unknown} of {whole} micro-batches took another way through the model than those that"
                " were counted, or had other sizes"
            ] = None
        if lacking:
            texts[
                f"{ESTIMATED}the backward of {lacking} of {whole} micro-batches, since none of this kind was counted"
            ] = None
        if all(kind.form == OUTSIDE for kind in parts):
            texts[NOT_CALLED] = None
        left: dict[tuple[str, str, bool], SeenProduct] = {}
        for seen, _ in weighted:
            if seen.not_counted:
                left.setdefault((seen.layer, seen.not_counted, seen.backward), seen)
        return (
            *summed((seen, times) for seen, times in weighted if not seen.not_counted and times),
            *(Product.uncounted(layer, seen.family, what, backward=back) for (layer, what, back), seen in left.items()),
            *(Product.uncounted(self._root, "functional", what) for what in texts),
        )


class CountedStep(NamedTuple):
    """What a step ran.

    Attributes:
        parts: its calls by kind.
        kinds: the products of kinds.
        state: what is kept in which type, in the first step; else None.
    """

    parts: Parts
    kinds: CountedKinds
    state: tuple[StateRow, ...] | None

    @property
    def has_backward(self) -> bool:
        """Whether a backward of a call has run."""
        return any(
            backwards and self.kinds.has_backward(kind) is not False for kind, (_, backwards) in self.parts.items()
        )
