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
        name: see :mod:`te_precision_callbacks.replay.gemm`.
        difference: the cause of the difference to the next lane; empty for the last lane.
        error: the norm of the difference to the next lane over the norm of this lane, if known.
    """

    name: str
    difference: str
    error: float | None


@dataclass(frozen=True)
class Fault:
    """A fault of a GEMM.

    Attributes:
        cause: the kernel, or the quantizer.
        text: the fault with its place.
        operand: the operand of the quantizer; empty for the kernel.
    """

    cause: Cause
    text: str
    operand: str = ""


@dataclass(frozen=True)
class Replayed:
    """The result of the replay of a record.

    Attributes:
        header, gemm: the header of the record, and its GEMM.
        lanes: the ways to compute the product.
        faults: the faults, the kernel first.
        not_checked: parts that cannot be checked, and why.
        gain: <result, codes> / |codes|^2, which should be 1, if known.
        rows, columns: the ratio to the tolerance of each row and column, [n] and [m]; above 1 is wrong.
    """

    header: Header
    gemm: DumpedGemm
    lanes: tuple[Lane, ...]
    faults: tuple[Fault, ...]
    not_checked: tuple[str, ...]
    gain: float | None
    rows: torch.Tensor
    columns: torch.Tensor

    @property
    def name(self) -> str:
        """Such as ``fc1 fprop, step 3``."""
        header = self.header
        rank = f", rank {header.rank}" if header.rank else ""
        micro_batch = f", micro-batch {header.micro_batch}" if header.micro_batch else ""
        return f"{header.layer} {self.gemm.name}, step {header.iteration}{micro_batch}{rank}"

    @property
    def verdict(self) -> str:
        if self.faults:
            return f"{self.name}: {self.faults[0].cause}: {self.faults[0].text}"
        lane = next((lane for lane in self.lanes if lane.name == "original" and lane.error is not None), None)
        of_format = "" if lane is None else f"; the format costs {100 * (lane.error or 0):.2f} %"
        left = f" Not checked: {'; '.join(self.not_checked)}." if self.not_checked else ""
        return f"{self.name}: no faults of the kernel and the quantizers{of_format}.{left}"
