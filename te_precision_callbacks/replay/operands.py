"""The operands of a recorded GEMM: as recorded, as the original was, and as the format's own quantizer makes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.numerics import blocks
from te_precision_callbacks.base.numerics.formats import E5M2
from te_precision_callbacks.base.numerics.hadamard import random_hadamard_transform
from te_precision_callbacks.base.numerics.layouts import BLOCK_1D, BLOCK_2D, MXFP8, NVFP4, PER_TENSOR, Stored
from te_precision_callbacks.base.numerics.recipes import QuantizerSettings, round_blocks
from te_precision_callbacks.dumps.contents import Dump, operand_of
from te_precision_callbacks.dumps.header import HIGH_PRECISION, DumpedOperand
from te_precision_callbacks.gemm_error.codes import WINDOW_COLUMNS, WINDOW_ROWS, CodeCheck, RoundingRules, check_codes
from te_precision_callbacks.gemm_error.factors import factor_of

_RECIPE_OF_MODE = {
    PER_TENSOR: "fp8_current_scaling",
    MXFP8: "mxfp8",
    BLOCK_1D: "fp8_block_scaling",
    BLOCK_2D: "fp8_block_scaling",
    NVFP4: "nvfp4",
}


@dataclass(frozen=True)
class Recorded:
    """An operand.

    Attributes:
        described: its description.
        data: what the GEMM read.
        high: the tensor before quantization; None if it was not recorded, and if the operand is not quantized.
    """

    described: DumpedOperand
    data: Stored | torch.Tensor
    high: torch.Tensor | None

    @classmethod
    def of(cls, dump: Dump, side: str, described: DumpedOperand) -> Recorded:
        """The operand "a" or "b" of a record."""
        return cls(described, operand_of(dump, side), dump.tensors.get(f"{side}.{HIGH_PRECISION}"))

    @property
    def rules(self) -> RoundingRules:
        """How its quantizer rounds."""
        return self.described.rounding or RoundingRules(scales_follow=False)

    def decoded(self) -> torch.Tensor:
        """What the codes and scales say: float64, [rows, k]."""
        return factor_of(self.data, columnwise=self.described.columnwise).matrix()

    def original(self) -> torch.Tensor | None:
        """The tensor before quantization: float64, [rows, k]; None if it was not recorded."""
        if not isinstance(self.data, Stored):
            return self.decoded()
        return None if self.high is None else factor_of(self.high, columnwise=self.described.columnwise).matrix()

    def requantized(self) -> torch.Tensor | None:
        """What the format's own quantizer makes of the original: float64, [rows, k]; None without an original.

        It rounds to nearest. nan stays nan, and a block with inf, in NVFP4 a tensor, becomes nan. Where the scales do
        not follow from the tensor, as in delayed scaling, they are those that were recorded.
        """
        part = self.data
        if not isinstance(part, Stored):
            return self.decoded()
        exact = self._in_memory()
        if exact is None:
            return None
        if self.rules.scales_follow:
            values = self._rounded(part, exact)
        else:
            spread = blocks.spread(self._factors(part), self._block(part, exact), tuple(exact.shape))
            values = part.element_format.round(
                (exact / spread).clamp(-part.element_format.max, part.element_format.max)
            )
            values = values * spread
        return (values.t() if self.described.columnwise != part.transposed else values).double()

    def _factors(self, part: Stored) -> torch.Tensor:
        factors = part.factors()
        return factors.reshape(1, 1) if factors.numel() == 1 else factors

    def _block(self, part: Stored, exact: torch.Tensor) -> tuple[int, int]:
        return (exact.shape[0], exact.shape[1]) if part.factors().numel() == 1 else part.block

    def _rounded(self, part: Stored, exact: torch.Tensor) -> torch.Tensor:
        rules, shape = self.rules, (exact.shape[0], exact.shape[1])
        block = (max(part.block),) * 2 if rules.square else part.block
        if part.mode == PER_TENSOR:
            block = shape
        settings = QuantizerSettings(part.element_format == E5M2, rules.square, rules.power_of_two, rules.amax_epsilon)
        amax = exact.abs().nan_to_num(0.0, 0.0).amax().reshape(1)
        source = torch.float32 if self.high is None else self.high.dtype
        in_blocks = blocks.in_blocks(exact.to(source), block, 0.0)
        found = round_blocks(_RECIPE_OF_MODE[part.mode], in_blocks, amax, settings)
        has_inf = in_blocks.isinf().any(1, keepdim=True)
        lost = in_blocks.isnan() | (has_inf.any() if part.mode == NVFP4 else has_inf)
        return blocks.from_blocks(found.values.masked_fill(lost, math.nan), block, shape)

    def _in_memory(self) -> torch.Tensor | None:
        """The original as the codes lie in memory: float32."""
        if self.high is None or not isinstance(self.data, Stored):
            return None
        matrix = self.high.reshape(math.prod(self.high.shape[:-1]), self.high.shape[-1])
        exact = matrix.t() if self.data.transposed else matrix
        if self.rules.sign_mask is not None:
            exact = random_hadamard_transform(exact.to(torch.bfloat16).contiguous(), self.rules.sign_mask)
        return exact.float()

    @property
    def left_out(self) -> str:
        """What :meth:`checked` leaves out, in words; empty if it is nothing."""
        lost = 0 if self.high is None else int((~self.high.isfinite()).sum())
        if not lost:
            return ""
        verb, these = ("is", "it") if lost == 1 else ("are", "them")
        elements = f"{many(lost, 'element')} of {self.described.tensor} that {verb} inf or nan"
        return f"{elements}, and the scales that follow from {these}"

    def checked(self) -> CodeCheck | None:
        """The check of all codes and scales; None without an original, or for a plain tensor."""
        if self.high is None or not isinstance(self.data, Stored) or self.described.rounding is None:
            return None
        rows, columns = self.data.matrix_shape
        total = torch.zeros(len(CodeCheck._fields), dtype=torch.float64)
        for row in range(-(-rows // WINDOW_ROWS)):
            for column in range(-(-columns // WINDOW_COLUMNS)):
                total += torch.stack(list(check_codes(self.data, self.high, self.rules, row, column)))
        return CodeCheck(*total)
