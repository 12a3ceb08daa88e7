"""Fewer cases than all combinations of several factors."""

import itertools
from collections.abc import Iterable
from typing import Any


def half(first: Iterable[Any], second: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every second combination of two factors, so that each value meets half of the other's."""
    places = itertools.product(enumerate(first), enumerate(second))
    return [(a, b) for (row, a), (column, b) in places if (row + column) % 2 == 0]


def pairs(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """A few combinations of three or more factors, with every pair of values of two factors in one of them."""
    values = [list(factor) for factor in factors]
    every = list(itertools.product(*(range(len(choices)) for choices in values)))
    chosen, met = [], set[tuple[tuple[int, int], ...]]()
    for new in range(len(values) * (len(values) - 1) // 2, 0, -1):
        for places in every:
            of_this = set(itertools.combinations(enumerate(places), 2))
            if len(of_this - met) >= new:
                chosen.append(places)
                met |= of_this
    return [tuple(choices[place] for choices, place in zip(values, places, strict=True)) for places in sorted(chosen)]


def diagonal(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Each value of each factor at least once; shorter factors begin again."""
    values = [list(factor) for factor in factors]
    return [tuple(choices[place % len(choices)] for choices in values) for place in range(max(map(len, values)))]


def grouped(first: Iterable[Any], *others: Iterable[Any]) -> list[tuple[Any, list[tuple[Any, ...]]]]:
    """The combinations of :func:`pairs`, one case for each value of the first factor."""
    values = list(first)
    chosen = pairs(range(len(values)), *others)
    return [(value, [rest for at, *rest in chosen if at == place]) for place, value in enumerate(values)]
