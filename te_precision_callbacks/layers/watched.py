from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_precision_callbacks.base.numerics.layouts import has_scale


class Watched(NamedTuple):
    """A tensor at the moment when a layer computes with it.

    Attributes:
        values: the tensor in high precision; None for a weight that exists only in quantized form.
        rowwise, columnwise: the operands of the two GEMMs that read the tensor, quantized or plain.
        quantizer: Transformer Engine's quantizer of the tensor, or None.
        tp_group: the tensor-parallel group, None without tensor parallelism.
    """

    layer: str
    tensor: str
    iteration: int
    values: torch.Tensor | None
    rowwise: Any = None
    columnwise: Any = None
    quantizer: Any = None
    tp_group: dist.ProcessGroup | None = None

    def quantized(self, *, columnwise: bool = False) -> Any:
        """The quantized tensor that the GEMM of a direction reads, or the one of the other direction, or None."""
        first, second = (self.columnwise, self.rowwise) if columnwise else (self.rowwise, self.columnwise)
        if has_scale(first):
            return first
        return second if second is not first and has_scale(second) else None
