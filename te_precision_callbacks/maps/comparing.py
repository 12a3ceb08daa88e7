"""Compares two maps: modules that only one side quantizes, or that both quantize in different formats."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.config.contract import Contract, ContractSource, read_contract
from te_precision_callbacks.layers.folding import fold_names
from te_precision_callbacks.maps.alignment import Alignment, align, read_alignment
from te_precision_callbacks.maps.precision_map import (
    MapError,
    PrecisionMap,
    from_products,
    is_quantized,
    join_names,
    nearest_names,
    validated,
)
from te_precision_callbacks.maps.sources import open_map


class Difference(NamedTuple):
    """A pair of modules with different formats, or with one quantized module.

    Attributes:
        a, b: the module on each side.
        tensors: ``weight``, ``activation``, or both.
        format_a, format_b: their formats.
        said_a, said_b: the rules that decide.
    """

    a: str
    b: str
    tensors: str
    format_a: str
    format_b: str
    said_a: str
    said_b: str


@dataclass(frozen=True)
class MapComparison:
    """The comparison of two maps.

    Attributes:
        compared: the number of pairs of modules.
        allowed: modules of A that the alignment file allows to differ.
        only_a, only_b: modules without a partner, which were not compared.
        quantized_alone: quantized modules among them, so that the sides cannot be called equal.
        not_said: tensor -> the number of pairs without a known format on one side.
    """

    a: PrecisionMap
    b: PrecisionMap
    compared: int
    differences: tuple[Difference, ...]
    allowed: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    quantized_alone: tuple[str, ...]
    not_said: Mapping[str, int]

    @property
    def broken(self) -> list[str]:
        """Messages about differences, and about quantized modules that were not compared."""
        texts = []
        groups = group_by_key(((entry.tensors, entry.format_a, entry.format_b), entry) for entry in self.differences)
        for (tensors, first, second), entries in groups.items():
            names = join_names(dict.fromkeys(entry.a for entry in entries))
            theirs = join_names(dict.fromkeys(entry.b for entry in entries))
            if names != theirs:
                names += f" ({theirs} in B)"
            statements = [fold_said(getattr(entry, side) for entry in entries) for side in ("said_a", "said_b")]
            texts.append(
                f"{names}: {tensors} in {first} in A, in {second} in B. A: {statements[0]}. B: {statements[1]}."
            )
        if not self.compared:
            texts.append(f"No module of {self.a.source} has a partner in {self.b.source}. Give an alignment file.")
        if self.quantized_alone:
            first = self.quantized_alone[0]
            other = self.b if first in self.only_a else self.a
            near = nearest_names(first, other.modules)
            texts.append(
                f"{many(len(self.quantized_alone), 'quantized module')} could not be compared, because the other side"
                f" has no such name: {join_names(self.quantized_alone)}.{near}"
            )
        return texts


def compare_maps(a: PrecisionMap, b: PrecisionMap, alignment: Alignment | None = None) -> MapComparison:
    """Compare the quantization of weights and activations, after aligning names; raises MapError."""
    rules = alignment or Alignment()
    partners = align(a.modules, b.modules, rules)
    pairs = [(name, other) for name, partner_names in partners.items() for other in partner_names]
    not_said: Counter[str] = Counter()
    allowed: dict[str, None] = {}
    differences: list[Difference] = []
    for name, other in pairs:
        ours = a.modules[name]
        theirs = b.modules[other]
        differing: dict[str, tuple[str, str]] = {}
        for tensor in ("weight", "activation"):
            formats = getattr(ours, tensor), getattr(theirs, tensor)
            if "" in formats:
                not_said[tensor] += 1
            elif formats[0] != formats[1] and any(map(is_quantized, formats)):
                differing[tensor] = formats
        if differing and rules.allows(name, other):
            allowed[name] = None
        elif differing:
            in_a, in_b = map(dict.fromkeys, zip(*differing.values(), strict=True))
            texts = (" and ".join(differing), " and ".join(in_a), " and ".join(in_b))
            differences.append(Difference(name, other, *texts, ours.said, theirs.said))
    matched = set(chain(*partners.values()))
    only_a = tuple(name for name, partner_names in partners.items() if not partner_names)
    only_b = tuple(name for name in b.modules if name not in matched)
    unpaired: list[str] = []
    for side, names in ((a, only_a), (b, only_b)):
        unpaired += [name for name in names if is_quantized(side.modules[name].weight) and not rules.allows(name)]
    return MapComparison(
        a, b, len(pairs), tuple(differences), tuple(allowed), only_a, only_b, tuple(unpaired), not_said
    )


def fold_said(texts: Iterable[str]) -> str:
    """Return the sources of the formats of similar modules, with folded numbers."""
    return "; ".join(fold_names(texts, most=2))


@dataclass(frozen=True)
class SameAs:
    """The map that a run or a plan must agree with: ``same_as`` of a contract, and ``--same-as``."""

    required: PrecisionMap
    alignment: Alignment

    def broken(self, products: Iterable[Any], source: str) -> list[str]:
        """Return messages about matrix products that differ from the map, or cannot be compared with it."""
        try:
            comparison = compare_maps(from_products(products, source), self.required, self.alignment)
        except MapError as error:
            return [f"{source} cannot be compared with {self.required.source}: {error}"]
        return [f"A is {source}, B is {self.required.source}: {text}" for text in comparison.broken]


def read_requirements(source: ContractSource) -> Contract | None:
    """Read a contract, and open the map of its ``same_as``, which becomes a :class:`SameAs`.

    Raises:
        ConfigError: the contract is not valid.
        MapError: the map or the alignment cannot be read.
    """
    contract = read_contract(source)
    value = contract and contract.same_as
    if contract is None or value is None or isinstance(value, SameAs):
        return contract
    files = value if isinstance(value, Mapping) else {"map": value}
    if "map" not in files or set(files) - {"map", "alignment"}:
        raise MapError(f"same_as of a contract must be a path, or a mapping with map and alignment, not {value!r}.")
    paths = validated(dict[str, str | os.PathLike[str]], files, "same_as of a contract")
    required = SameAs(open_map(paths["map"]), read_alignment(paths.get("alignment")))
    return contract.model_copy(update={"same_as": required})
