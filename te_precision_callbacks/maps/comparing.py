"""Compares two maps: modules that only one side quantizes, or that both quantize in different formats."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.config.problems import shown
from te_precision_callbacks.layers.folding import fold_names
from te_precision_callbacks.maps.alignment import Alignment, align, read_alignment
from te_precision_callbacks.maps.matching import join_names, nearest_names
from te_precision_callbacks.maps.precision_map import MapError, PrecisionMap, from_products, use_of
from te_precision_callbacks.maps.sources import open_map

_TENSORS = ("weight", "activation")
_MOST_SAID = 2


class Difference(NamedTuple):
    """A module whose tensor is quantized on one side only, or in different formats.

    Attributes:
        a, b: the module on each side.
        tensor: ``weight`` or ``activation``.
        format_a, format_b: the formats.
        said_a, said_b: the rules that decide.
        allowed: whether the alignment file allows the difference.
    """

    a: str
    b: str
    tensor: str
    format_a: str
    format_b: str
    said_a: str
    said_b: str
    allowed: bool = False


@dataclass(frozen=True)
class MapComparison:
    """The comparison of two maps.

    Attributes:
        compared: the number of pairs of modules.
        only_a, only_b: modules without a partner, which were not compared.
        quantized_alone: quantized modules among them, so that the sides cannot be called equal.
        not_said: tensor -> the number of pairs in which a side does not say the format.
    """

    a: PrecisionMap
    b: PrecisionMap
    compared: int
    differences: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    quantized_alone: tuple[str, ...]
    not_said: dict[str, int]

    @property
    def broken(self) -> list[str]:
        """Messages about differences that are not allowed, and about what could not be compared."""
        return [*_group_texts(self.differences), *self.not_compared]

    @property
    def not_compared(self) -> list[str]:
        """Messages about quantized modules without a partner."""
        texts = []
        if not self.compared:
            texts.append(f"No module of {self.a.source} has a partner in {self.b.source}. Give an alignment file.")
        if self.quantized_alone:
            first = self.quantized_alone[0]
            other = self.b if first in self.only_a else self.a
            near = nearest_names(first, fold_names(other.modules))
            texts.append(
                f"{many(len(self.quantized_alone), 'quantized module')} could not be compared, because the other side"
                f" has no such name: {join_names(self.quantized_alone)}.{near}"
            )
        return texts


def compare_maps(a: PrecisionMap, b: PrecisionMap, alignment: Alignment | None = None) -> MapComparison:
    """Compare the quantization of weights and activations, after aligning names; raises MapError."""
    given = alignment or Alignment()
    pairs, only_a, only_b = align(a.modules, b.modules, given)
    not_said: dict[str, int] = {}
    differences: list[Difference] = []
    for name, others in pairs.items():
        for other in others:
            allowed = given.allows((name, other))
            ours = a.modules[name]
            theirs = b.modules[other]
            for tensor in _TENSORS:
                first = getattr(ours, tensor)
                second = getattr(theirs, tensor)
                if not use_of(first) or not use_of(second):
                    not_said[tensor] = not_said.get(tensor, 0) + 1
                elif _differ(first, second):
                    differences.append(Difference(name, other, tensor, first, second, ours.said, theirs.said, allowed))
    alone = [*_quantized(a, only_a, given), *_quantized(b, only_b, given)]
    compared = sum(len(others) for others in pairs.values())
    return MapComparison(a, b, compared, tuple(differences), tuple(only_a), tuple(only_b), tuple(alone), not_said)


def _differ(first: str, second: str) -> bool:
    if use_of(first) == use_of(second) == "high":
        return False
    return first != second


def _quantized(source: PrecisionMap, names: Sequence[str], given: Alignment) -> Iterator[str]:
    for name in names:
        if use_of(source.modules[name].weight) != "high" and not given.allows((name,)):
            yield name


def group_alike(differences: Iterable[Difference]) -> dict[tuple[str, str, str, bool], list[Difference]]:
    """Return (tensors, format in A, format in B, whether it is allowed) -> differences, one for each pair."""
    tensors: dict[Difference, list[str]] = {}
    for difference in differences:
        tensors.setdefault(difference._replace(tensor=""), []).append(difference.tensor)
    return group_by_key(
        ((" and ".join(names), pair.format_a, pair.format_b, pair.allowed), pair) for pair, names in tensors.items()
    )


def _group_texts(differences: Iterable[Difference]) -> Iterator[str]:
    for (tensors, first, second, allowed), alike in group_alike(differences).items():
        if not allowed:
            names = join_names(dict.fromkeys(difference.a for difference in alike))
            said_a = fold_said(difference.said_a for difference in alike)
            said_b = fold_said(difference.said_b for difference in alike)
            yield f"{names}: {tensors} in {first} in A, in {second} in B. A: {said_a}. B: {said_b}."


def fold_said(texts: Iterable[str]) -> str:
    """Return where the formats of similar modules are said, with folded numbers."""
    return "; ".join(fold_names(texts, most=_MOST_SAID))


SameAsSource = str | os.PathLike[str] | Mapping[str, Any] | None
"""A value of ``require_same=``."""


@dataclass(frozen=True)
class SameAs:
    """The map that a run or a plan must agree with: ``require_same=`` and ``--same-as``."""

    required: PrecisionMap
    alignment: Alignment

    def broken(self, products: Iterable[Any], source: str) -> list[str]:
        """Return messages about matrix products that differ from the map, or cannot be compared with it."""
        try:
            comparison = compare_maps(from_products(products, source), self.required, self.alignment)
        except MapError as error:
            return [f"{source} cannot be compared with {self.required.source}: {error}"]
        return [f"A is {source}, B is {self.required.source}: {text}" for text in comparison.broken]


def read_same_as(value: SameAsSource) -> SameAs | None:
    """Read ``require_same=``: the path of a map, or a mapping with ``map`` and ``alignment``; raises a MapError."""
    if value is None:
        return None
    given = value if isinstance(value, Mapping) else {"map": value}
    if "map" not in given or set(given) - {"map", "alignment"}:
        raise MapError(f"require_same= must be a path, or a mapping with map and alignment, not {shown(value)}.")
    for key, path in given.items():
        if not isinstance(path, (str, os.PathLike)):
            raise MapError(f"require_same=: {key} must be a path, not {shown(path)}.")
    return SameAs(open_map(given["map"]), read_alignment(given.get("alignment")))
