"""Random vectors, reproducible and apart from the random state of training, and how many of them it takes.

    x = probes(columns, PROBES, seed_of(iteration, layer, gemm, "right"), device)    # [columns, PROBES]
    missed(probes=16, factor=3.0)                    # 5e-06: how likely an error of 3 times its tolerance is missed
    probes_for(miss=1e-5, factor=3.0)                # 16

For Gaussian x, |E x|^2 is a sum of chi-squared variables, weighted by the squared singular values of E. It is smallest
compared with |E|_F^2 most often if E has one singular value: then, over s probes, it is |E|_F^2 chi^2_s / s. Signs
would do worse: one probe of signs misses a swap of two columns in half of all cases.
"""

from __future__ import annotations

import hashlib
import math

import torch

PROBES = 16
"""Misses an error of 3 times its tolerance with a probability below 1e-5, and shifts |E|_F by 18 % at most (one
standard deviation, for one singular value)."""

FALSE_ALARM = 1e-12
"""The probability that a sum of squared Gaussians exceeds its bound. A GEMM of 8,192 x 8,192 has 16,384 rows and
columns, and 100,000 GEMMs have 2e9."""


def seed_of(*parts: object) -> int:
    """A seed that follows from the parts alone, the same in each process."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def probes(rows: int, number: int, seed: int, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Standard Gaussian vectors, [rows, number], from a generator of their own.

    Args:
        rows, number: the shape.
        seed: as of :func:`seed_of`.
        device: where they are drawn; the same seed gives the same numbers on the same kind of device.
        dtype: None for :func:`thin_dtype`.
    """
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    drawn = torch.randn(rows, number, generator=generator, device=device, dtype=torch.float32)
    return drawn.to(thin_dtype() if dtype is None else dtype)


def thin_dtype() -> torch.dtype:
    """The type of thin products: float32, or float64 where torch may run products of float32 in TF32 or bfloat16."""
    return torch.float32 if torch.get_float32_matmul_precision() == "highest" else torch.float64


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
