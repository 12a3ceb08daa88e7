"""Matrix products and state of all ranks that reduce together.

Ranks with an equal layer, GEMM, operands and reason send one entry, whatever the sizes of their batches are, and add up
its multiply-adds. So a message grows with the model and not with the ranks, and a share counts each layer as often as
ranks run it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from te_precision_callbacks.coverage.coverage import Product, Reason, StateRow
from te_precision_callbacks.coverage.parallel import Ranks

EntryT = TypeVar("EntryT", bound=Hashable)


@dataclass(frozen=True)
class _Entry:
    """A product as ranks send it. Entries with different sizes are equal."""

    layer: str
    gemm: str
    family: str
    backward: bool
    operands: tuple[tuple[str, str], ...]
    runs: str
    not_run: str
    reason: Reason | None
    product: Product = field(compare=False)


def shared_products(own: Iterable[Product], ranks: Ranks, kind: str, *, of_one: bool = False) -> list[Product]:
    """The products of all ranks, each with the sizes of its first rank. All ranks must call it alike.

    Args:
        own: the products of this rank.
        ranks: the ranks that reduce together.
        kind: a name, equal on all ranks.
        of_one: whether a product gets the mean multiply-adds of a rank instead of their sum.
    """
    macs: dict[_Entry, int] = {}
    for product in own:
        entry = _entry(product)
        macs[entry] = macs.get(entry, 0) + product.macs
    added = _added({entry: (each, 1) for entry, each in macs.items()}, ranks, kind, _Entry)
    return [
        replace(entry.product, macs=round(of_all / max(count, 1)) if of_one else of_all)
        for entry, (of_all, count) in added.items()
    ]


def shared_state(own: Iterable[StateRow], ranks: Ranks, kind: str) -> tuple[StateRow, ...]:
    """The state of all ranks, added up; see :func:`shared_products`."""
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    for row in own:
        tensors, size = sizes.get((row.subject, row.dtype), (0, 0))
        sizes[row.subject, row.dtype] = tensors + row.tensors, size + row.bytes
    added = _added(sizes, ranks, kind, tuple[str, str])
    return tuple(StateRow(*key, tensors=tensors, bytes=size) for key, (tensors, size) in added.items())


def _added(own: Mapping[EntryT, tuple[int, int]], ranks: Ranks, kind: str, of: Any) -> dict[EntryT, tuple[int, int]]:
    """The entries of all ranks, each with the sums of its two numbers."""
    entries = ranks.pool(own, kind, of)
    pairs = [own.get(entry, (0, 0)) for entry in entries]
    added = ranks.add([float(number) for pair in pairs for number in pair], f"sizes of {kind}")  # exact up to 2**53
    sums = [round(number) for number in added]
    return {entry: (first, second) for entry, first, second in zip(entries, sums[::2], sums[1::2], strict=True)}


def _entry(product: Product) -> _Entry:
    return _Entry(
        product.layer,
        product.gemm,
        product.family,
        product.backward,
        tuple(product.operands.items()),
        product.runs,
        product.not_run,
        product.reason,
        product,
    )
