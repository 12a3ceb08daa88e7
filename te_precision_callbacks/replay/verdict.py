"""The result of a replay: lanes, faults, and where a GEMM's result is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from te_precision_callbacks.dumps.header import DumpedGemm, Header

Cause = Literal["kernel", "quantizer"]


@dataclass(frozen=True)
class Lane:
    """A way to compute a result.

    Attributes:
        name: as in the description of the module that has replayed it.
        difference: by what the next lane differs: format, quantizer, accumulation or kernel; empty for
            the last.
        error: the norm of the difference to the next lane over the norm of the next; None where a lane cannot be
            computed.
    """

    name: str
    difference: str
    error: float | None


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a GEMM.

    Attributes:
        cause: the kernel, or the quantizer.
        text: what is wrong, with its place.
        operand: the operand that the quantizer has made; empty for the kernel.
    """

    cause: Cause
    text: str
    operand: str = ""


@dataclass(frozen=True)
class Replayed:
    """What the replay of a record has found.

    Attributes:
        header, gemm: of the record.
        lanes: the ways to compute the product.
        faults: what is wrong, the kernel first; none if nothing is.
        not_judged: what cannot be judged, and why.
        gain: <result, codes> / |codes|^2, which is 1; None where it is not known.
        rows, columns: the ratio to the tolerance of each row and column, [n] and [m]; above 1 is wrong.
    """

    header: Header
    gemm: DumpedGemm
    lanes: tuple[Lane, ...]
    faults: tuple[Fault, ...]
    not_judged: tuple[str, ...]
    gain: float | None
    rows: torch.Tensor
    columns: torch.Tensor

    @property
    def name(self) -> str:
        """What has run in words: ``fc1 fprop, step 3``."""
        header = self.header
        rank = f", rank {header.rank}" if header.rank else ""
        micro_batch = f", micro-batch {header.micro_batch}" if header.micro_batch else ""
        return f"{header.layer} {self.gemm.name}, step {header.iteration}{micro_batch}{rank}"

    @property
    def verdict(self) -> str:
        """The verdict in a line."""
        if self.faults:
            return f"{self.name}: {self.faults[0].cause}: {self.faults[0].text}"
        lane = next((lane for lane in self.lanes if lane.name == "original" and lane.error is not None), None)
        of_format = "" if lane is None else f"; the format costs {100 * (lane.error or 0):.2f} %"
        left = f" Not judged: {'; '.join(self.not_judged)}." if self.not_judged else ""
        return f"{self.name}: nothing is wrong with the kernel and the quantizers{of_format}.{left}"
