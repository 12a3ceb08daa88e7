"""What the replay of a record says, of a GEMM or of attention: lanes, faults, and where a result is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from te_precision_callbacks.dumps.header import Attention, Gemm, Header
from te_precision_callbacks.gemm_error.confirmed import is_confirmed
from te_precision_callbacks.replay.operands import Codes, Recorded

_MOST_BIAS = 6.0
"""How many standard deviations the bias of stochastic rounding, and the share of zeros, may be off."""

_LEFT = 0.2
"""A factor that leaves less of an error than this accounts for it."""

Cause = Literal["kernel", "quantizer"]


@dataclass(frozen=True)
class Lane:
    """A way to compute a result.

    Attributes:
        name: as in the description of the module that has replayed it.
        difference: by what the next lane differs: format, quantizer, accumulation, rounding of S or kernel; empty for
            the last.
        error: the norm of the difference to the next lane over the norm of the next; None where a lane cannot be
            computed.
    """

    name: str
    difference: str
    error: float | None


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a GEMM or attention.

    Attributes:
        cause: the kernel, or the quantizer.
        text: what is wrong, with its place.
        operand: the operand that the quantizer has made; empty for the kernel.
        is_confirmed: whether a real kernel has confirmed the tolerance on the GPU, or no tolerance is concerned. If
            not, the fault is a warning, as of the rules of a run.
    """

    cause: Cause
    text: str
    operand: str = ""
    is_confirmed: bool = True


@dataclass(frozen=True)
class Replayed:
    """What the replay of a record has found.

    Attributes:
        header, call: of the record: a GEMM, or a call of attention.
        lanes: the ways to compute the product.
        faults: what is wrong, the kernel first; none if nothing is.
        not_judged: what cannot be judged, and why.
        gain: <result, codes> / |codes|^2, which is 1; None where it is not known.
        rows, columns: the ratio to the tolerance of each row and column, [n] and [m]; above 1 is wrong. Of attention,
            of each token of the result that is off most, those of all sequences, and of each head.
        tiles: the largest ratio in each tile of the result, at most 32 x 64 tiles.
        axes: what the rows and columns are.
    """

    header: Header
    call: Gemm | Attention
    lanes: tuple[Lane, ...]
    faults: tuple[Fault, ...]
    not_judged: tuple[str, ...]
    gain: float | None
    rows: torch.Tensor
    columns: torch.Tensor
    tiles: torch.Tensor
    axes: tuple[str, str] = ("rows", "columns")

    @property
    def name(self) -> str:
        """What has run in words: ``fc1 fprop, step 3``."""
        header = self.header
        rank = f", rank {header.rank}" if header.rank else ""
        micro_batch = f", micro-batch {header.micro_batch}" if header.micro_batch else ""
        return f"{header.layer} {self.call.name}, step {header.iteration}{micro_batch}{rank}"

    @property
    def verdict(self) -> str:
        """The verdict in a line."""
        if self.faults:
            first = self.faults[0]
            return f"{self.name}: {first.cause}{'' if first.is_confirmed else ' (unconfirmed)'}: {first.text}"
        if self.gain is None and not self.lanes:
            return f"{self.name}: not judged: {'; '.join(self.not_judged)}."
        lane = next((lane for lane in self.lanes if lane.name == "original" and lane.error is not None), None)
        of_format = "" if lane is None else f"; the format costs {100 * (lane.error or 0):.2f} %"
        left = f" Not judged: {'; '.join(self.not_judged)}." if self.not_judged else ""
        return f"{self.name}: nothing is wrong with the kernel and the quantizers{of_format}.{left}"


def kernel_fault(header: Header, call: Gemm | Attention, text: str) -> Fault:
    """A fault of the kernel that has run a call."""
    gpu = "" if call.capability is None else call.device
    return Fault("kernel", text, is_confirmed=is_confirmed(header.recipe or "", gpu))


def accounts_for(gain: float, codes: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a factor accounts for most of what is wrong with a result."""
    off, left = (float((result - factor * codes).norm()) for factor in (1.0, gain))
    return left < _LEFT * off


def faults_of_codes(operand: Recorded, checked: Codes) -> list[Fault]:
    """What is wrong with the codes and scales of an operand."""
    found = []
    tensor = operand.described.tensor
    if checked.wrong_scales:
        found.append(f"{checked.wrong_scales:.0f} of {checked.scales:.0f} scales are not those of the format")
    if checked.wrong:
        found.append(f"{checked.wrong:.0f} of {checked.codes:.0f} codes are not the nearest number of the format")
    if checked.rounded and not checked.wrong:
        deviation = checked.bias / math.sqrt(checked.rounded / 4)
        if abs(deviation) > _MOST_BIAS:
            way = "towards 0" if deviation < 0 else "away from 0"
            found.append(
                f"stochastic rounding has a bias {way}: {checked.bias / checked.rounded:+.3f} of a step on average"
            )
        excess = checked.zeros - checked.expected_zeros
        if excess > _MOST_BIAS * math.sqrt(max(1.0, checked.expected_zeros)):
            found.append(f"{checked.zeros:.0f} codes are 0, and {checked.expected_zeros:.0f} are expected to be")
    return [Fault("quantizer", f"{tensor}: {'; '.join(found)}", tensor)] if found else []


def tiles_of(ratios: torch.Tensor) -> torch.Tensor:
    """The largest ratio in each of at most 32 x 64 tiles of a matrix."""
    ratios = torch.maximum(ratios, torch.zeros_like(ratios))
    most = zip(ratios.shape, (32, 64), strict=True)
    rows, columns = (torch.arange(size) * tiles // max(size, tiles) for size, tiles in most)
    height, width = (int(where[-1]) + 1 if len(where) else 0 for where in (rows, columns))
    of_rows = ratios.new_zeros(height, ratios.shape[1])
    of_rows.scatter_reduce_(0, rows.unsqueeze(1).expand_as(ratios), ratios, "amax")
    return ratios.new_zeros(height, width).scatter_reduce_(1, columns.expand_as(of_rows), of_rows, "amax")


def apart(one: torch.Tensor | None, following: torch.Tensor | None) -> float | None:
    """The norm of the difference of two lanes over the norm of the first, in what is finite in both; None if one of
    them is unknown, or nothing is finite."""
    if one is None or following is None:
        return None
    use = one.isfinite() & following.isfinite()
    if use.numel() and not use.any():
        return None
    one, following = torch.where(use, one, 0.0), torch.where(use, following, 0.0)
    norm = float(one.norm())
    off = float((one - following).norm())
    return off / norm if norm else (0.0 if off == 0 else math.inf)
