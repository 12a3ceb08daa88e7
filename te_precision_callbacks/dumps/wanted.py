"""The options of DumpTensors for one tensor, and the tensor's quantized form.

wanted = Wanted.of(schema.targets[0].options, schema)
quantized, columnwise_from = quantized_form(Watched("fc1", "activation", 7, x, rowwise, columnwise))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_precision_callbacks.config.conditions import Condition
from te_precision_callbacks.dumps.budget import Limits
from te_precision_callbacks.dumps.contents import kind_is_known
from te_precision_callbacks.dumps.dump_files import SAFETENSORS
from te_precision_callbacks.layers.watched import Watched
from te_precision_callbacks.statistics.schedule import Schedule

if TYPE_CHECKING:
    from te_precision_callbacks.config.schemas import DumpTensors, DumpTensorsGemmItem, DumpTensorsItem


@dataclass(frozen=True)
class Wanted:
    """The options of DumpTensors for a tensor.

    Attributes:
        schedule: the steps in which to dump.
        high_precision, quantized, internals: the parts of the tensor to dump.
        conditions: one of these must hold; without any, the tensor is always dumped.
        file_format: None for the recorder's default.
        limits: the budget.
        gemm: the GEMM that is written as a whole; empty for a tensor.
    """

    schedule: Schedule
    high_precision: bool
    quantized: bool
    internals: bool
    conditions: tuple[Condition, ...]
    file_format: str | None
    limits: Limits
    gemm: str = ""

    @classmethod
    def of_gemm(cls, gemm: DumpTensorsGemmItem, options: DumpTensors) -> Wanted:
        """Take the options for one GEMM, which is always a file of the format safetensors."""
        return cls(
            schedule=gemm.schedule,
            high_precision=True,
            quantized=True,
            internals=False,
            conditions=tuple(gemm.when),
            file_format=SAFETENSORS,
            limits=Limits(options.max_bytes, options.max_files, options.max_memory),
            gemm=gemm.gemm,
        )

    @classmethod
    def of(cls, tensor: DumpTensorsItem, options: DumpTensors) -> Wanted:
        """Take the options for one tensor.

        Args:
            tensor: the options that apply to the tensor.
            options: all options of the feature.
        """
        return cls(
            schedule=tensor.schedule,
            high_precision=tensor.high_precision_tensor,
            quantized=tensor.quantized_tensor,
            internals=tensor.dump_quantized_internals,
            conditions=tuple(tensor.when),
            file_format=options.file_format,
            limits=Limits(options.max_bytes, options.max_files, options.max_memory),
        )


def quantized_form(watched: Watched) -> tuple[Any, Any]:
    """Gives the quantized form of the tensor, and the object with its columnwise data if that is a separate one.

    A GEMM that runs in high precision reads the tensor itself, which is not a quantized form.
    """
    operands = (watched.rowwise, watched.columnwise)
    became = [operand for operand in operands if operand is not None and not _is_values(watched.values, operand)]
    quantized = [operand for operand in became if kind_is_known(operand)]
    chosen = quantized or became
    if not chosen:
        return None, None
    other = chosen[-1]
    return chosen[0], other if other is not chosen[0] and len(quantized) == 2 else None


def _is_values(values: torch.Tensor | None, operand: Any) -> bool:
    """Whether an operand is the high-precision tensor, perhaps another view of it."""
    if values is None or operand is values:
        return operand is values
    plain = {type(operand), type(values)} <= {torch.Tensor, torch.nn.Parameter}
    return plain and operand.dtype == values.dtype and operand.data_ptr() == values.data_ptr()


def has_nonfinite(watched: Watched) -> torch.Tensor | None:
    """Whether a tensor has an inf or nan, as a bool on its device; None if there is nothing to check."""
    values = watched.values
    if values is None:
        became, _ = quantized_form(watched)
        values = became.dequantize() if became is not None and kind_is_known(became) else became
    if values is None or not values.is_floating_point() or not values.numel():
        return None
    # One pass without a copy: a nan makes both extremes nan.
    low, high = torch.aminmax(values.detach())
    return ~(torch.isfinite(low) & torch.isfinite(high))
