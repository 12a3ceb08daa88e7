"""How many probes it takes: the chance of missing a fault, and that of a false alarm. torch is not imported.

    missed(probes=16, factor=3.0)         # 4e-06: how likely an error of 3 times its tolerance is missed
    probes_for(miss=1e-5, factor=3.0)     # 16

For Gaussian x, |E x|^2 is a sum of chi-squared variables, weighted by the squared singular values of E. It is smallest
compared with |E|_F^2 most often if E has one singular value: then, over s probes, it is |E|_F^2 chi^2_s / s. Signs
would do worse: one probe of signs misses a swap of two columns in half of all cases.
"""

from __future__ import annotations

import math

PROBES = 16
"""Misses an error of 3 times its tolerance with a probability below 1e-5, and shifts |E|_F by 18 % at most (one
standard deviation, for one singular value)."""

FALSE_ALARM = 1e-12
"""The probability that a sum of squared Gaussians exceeds its bound. A GEMM of 8,192 x 8,192 has 16,384 rows and
columns, and 100,000 GEMMs have 2e9."""


def missed(probes: int, factor: float) -> float:
    """The probability that s probes miss an error of ``factor`` times its tolerance: P(chi^2_s <= s / factor^2).

    Args:
        probes: s, an even number.
        factor: above 1.
    """
    half, x = probes // 2, probes / factor**2 / 2
    # Of a Gamma distribution with an integer shape: 1 - exp(-x) sum of x^j / j!, as a series without cancellation.
    term = math.exp(-x) * x**half / math.factorial(half)
    total, number = 0.0, half
    while term > 1e-18 * max(total, 1e-300):
        total += term
        number += 1
        term *= x / number
    return total


def probes_for(miss: float, factor: float) -> int:
    """The least even number of probes that misses an error of ``factor`` times its tolerance with at most ``miss``."""
    return next(number for number in range(2, 1025, 2) if missed(number, factor) <= miss)


def bound(probes: int, false_alarm: float = FALSE_ALARM) -> float:
    """z: |E x| over s probes is above ``z sqrt(s) sigma`` with at most the probability ``false_alarm``.

    ``sigma^2`` is the variance of a healthy E, summed over what x meets. Two parts: chi^2_s is below
    ``s + 2 sqrt(s t) + 2 t`` with probability 1 - exp(-t) (Laurent and Massart, Annals of Statistics 28, 2000, lemma
    1), and a rounding error is at most sqrt(3) times the standard deviation that it is assigned: where one element
    outweighs all others, E x has that element's error, which is fixed while x varies.
    """
    t = -math.log(false_alarm)
    return math.sqrt(3.0 * (1.0 + 2.0 * math.sqrt(t / probes) + 2.0 * t / probes))
