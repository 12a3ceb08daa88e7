"""Scales for the differences of a statistic.

Magnitudes differ by factors (an amax of 400 is as far from 200 as 0.04 from 0.02), shares by points (6 % is as far from
5 % as 2 % from 1 %).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.statistics.names import logged_request

Values = npt.NDArray[np.float64]

ZERO_BELOW = 20.0
"""How many powers of two the number 0 is below the smallest other number of a series."""

_INFINITE, _NAN = 2000.0, 4000.0
"""The places of inf and nan on every scale, beyond all numbers."""

NO_NUMBER = 1000.0
"""A difference beyond it is one with inf or nan."""


@dataclass(frozen=True)
class NoiseScale:
    """A scale.

    Attributes:
        least: the smallest spread that is believed, however little noise has been seen.
        bound: the smallest difference that counts where no noise is known.
        onto: values, and the magnitude of each one's series -> places on the scale.
        back: places and magnitudes -> values.
    """

    name: str
    unit: str
    least: float
    bound: float
    onto: Callable[[Values, Values], Values]
    back: Callable[[Values, Values], Values]

    def places(self, values: Values, magnitudes: Values) -> Values:
        """Place values on the scale, inf and nan too.

        ``magnitudes`` are positive and equal in a whole series: for :data:`MAGNITUDE` its smallest magnitude above 0,
        otherwise its ordinary size.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            places = self.onto(values, magnitudes)
        places = np.where(np.isinf(values), np.copysign(_INFINITE, values), places)
        return np.where(np.isnan(values), _NAN, places)

    def values(self, places: Values, magnitudes: Values) -> Values:
        with np.errstate(over="ignore", invalid="ignore"):
            return self.back(places, magnitudes)


def _powers(values: Values, magnitudes: Values) -> Values:
    above = np.log2(np.abs(values)) - np.log2(magnitudes) + ZERO_BELOW
    return np.where(values == 0, 0.0, np.sign(values) * above)


def _from_powers(places: Values, magnitudes: Values) -> Values:
    return np.asarray(np.where(places == 0, 0.0, np.sign(places) * magnitudes * 2.0 ** (np.abs(places) - ZERO_BELOW)))


def _same(values: Values, magnitudes: Values) -> Values:
    return values


MAGNITUDE = NoiseScale("magnitude", "powers of two", 0.01, 1.0, _powers, _from_powers)
SQUARE = NoiseScale("square", "powers of two", 0.01, 2.0, _powers, _from_powers)
LEVEL = NoiseScale(
    "level",
    "of its size",
    0.02,
    6.0,
    lambda values, sizes: np.arcsinh(values / sizes),
    lambda places, sizes: sizes * np.sinh(places),
)
SHARE = NoiseScale("share", "points", 0.02, 5.0, _same, _same)
DECIBELS = NoiseScale("decibels", "dB", 0.1, 3.0, _same, _same)
POWERS = NoiseScale("powers", "powers of two", 0.05, 12.0, _same, _same)
COUNT = NoiseScale(
    "count",
    "powers of two",
    0.01,
    1.0,
    lambda values, sizes: np.log2(1 + np.abs(values)),
    lambda places, sizes: 2.0 ** np.fmax(places, 0.0) - 1,
)

_BY_UNIT = {
    "of the tensor": MAGNITUDE,
    "square of the tensor's": SQUARE,
    "%": SHARE,
    "dB": DECIBELS,
    "powers of two": POWERS,
    "elements": COUNT,
}


def scale_of(tensor: str, statistic: str) -> NoiseScale:
    """The scale of a statistic; ``tensor`` is empty for a metric of the trainer or of a user's own feature."""
    request = logged_request(statistic) if tensor else None
    if request is None:
        return SHARE if statistic.endswith("%") else LEVEL
    if request.statistic.signed:
        return LEVEL
    return _BY_UNIT.get(request.statistic.unit, LEVEL)
