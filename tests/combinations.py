"""Fewer cases than all combinations of several factors."""

import itertools
from collections.abc import Iterable
from typing import Any


def half(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every second combination; all values of all factors but any one meet: of three factors all pairs, of
    four all triples. Each factor has at least two values."""
    places = itertools.product(*(enumerate(factor) for factor in factors))
    return [tuple(value for _, value in item) for item in places if sum(place for place, _ in item) % 2 == 0]
