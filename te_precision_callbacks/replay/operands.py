"""The operands of a recorded GEMM: as recorded, and before quantization."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.dumps.contents import Dump, operand_of
from te_precision_callbacks.dumps.header import HIGH_PRECISION, DumpedOperand
from te_precision_callbacks.gemm_error.codes import WINDOW_COLUMNS, WINDOW_ROWS, CodeCheck, RoundingRules, check_codes
from te_precision_callbacks.gemm_error.factors import factor_of


@dataclass(frozen=True)
class Recorded:
    """An operand as the GEMM read it, and before quantization, if recorded."""

    described: DumpedOperand
    data: Stored | torch.Tensor
    high: torch.Tensor | None

    @classmethod
    def of(cls, dump: Dump, side: str, described: DumpedOperand) -> Recorded:
        return cls(described, operand_of(dump, side), dump.tensors.get(f"{side}.{HIGH_PRECISION}"))

    @property
    def rules(self) -> RoundingRules:
        return self.described.rounding or RoundingRules(scales_follow=False)

    def decoded(self) -> torch.Tensor:
        return factor_of(self.data, columnwise=self.described.columnwise).matrix()

    def original(self) -> torch.Tensor | None:
        if not isinstance(self.data, Stored):
            return self.decoded()
        return None if self.high is None else factor_of(self.high, columnwise=self.described.columnwise).matrix()

    @property
    def left_out(self) -> str:
        lost = 0 if self.high is None else int((~self.high.isfinite()).sum())
        return f"{many(lost, 'element')} of {self.described.tensor} with inf or nan, and their scales" if lost else ""

    def checked(self) -> CodeCheck | None:
        """Check all codes and scales; None without an original, or for a plain tensor."""
        if self.high is None or not isinstance(self.data, Stored) or self.described.rounding is None:
            return None
        rows, columns = self.data.matrix_shape
        total = torch.zeros(len(CodeCheck._fields), dtype=torch.float64)
        for row in range(-(-rows // WINDOW_ROWS)):
            for column in range(-(-columns // WINDOW_COLUMNS)):
                total += torch.stack(list(check_codes(self.data, self.high, self.rules, row, column)))
        return CodeCheck(*total)
