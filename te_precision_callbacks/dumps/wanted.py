"""What DumpTensors wants of a tensor, and what there is of one; for :mod:`te_precision_callbacks.dumps.recording`.

wanted = Wanted.of({"high_precision_tensor": True, "when": "nonfinite"})
quantized, columnwise_from = quantized_form(Watched("fc1", "activation", 7, x, rowwise, columnwise))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from te_precision_callbacks.config.dumping import Condition, conditions_of, size_in_bytes
from te_precision_callbacks.dumps.budget import Limits
from te_precision_callbacks.dumps.contents import kind_is_known
from te_precision_callbacks.dumps.files import SAFETENSORS, TORCH
from te_precision_callbacks.watched import Watched


@dataclass(frozen=True)
class Wanted:
    """What the options of DumpTensors ask for.

    Attributes:
        high_precision, quantized, internals: what of a tensor.
        conditions: one of which must hold; none: always.
        file_format: None for the default of whoever has started the recorder.
        limits: the budget.
    """

    high_precision: bool = False
    quantized: bool = False
    internals: bool = True
    conditions: tuple[Condition, ...] = ()
    file_format: str | None = None
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Wanted:
        """From a feature's options.

        Raises:
            ValueError: a value that they do not take; a config that was checked has none.
        """
        file_format = options.get("file_format")
        if file_format not in (None, SAFETENSORS, TORCH):
            raise ValueError(f"'file_format' is one of {SAFETENSORS}, {TORCH}, not {file_format!r}")
        default = Limits()
        limits = Limits(
            max_bytes=_size(options, "max_bytes", default.max_bytes),
            max_files=int(options.get("max_files", default.max_files)),
            max_memory=_size(options, "max_memory", default.max_memory),
        )
        try:
            conditions = conditions_of(options)
        except ValueError as error:
            raise ValueError(f"'when' {error}") from error
        return cls(
            high_precision=bool(options.get("high_precision_tensor", False)),
            quantized=bool(options.get("quantized_tensor", False)),
            internals=bool(options.get("dump_quantized_internals", True)),
            conditions=conditions,
            file_format=file_format,
            limits=limits,
        )


def _size(options: Mapping[str, Any], key: str, default: int) -> int:
    try:
        return size_in_bytes(options.get(key, default))
    except ValueError as error:
        raise ValueError(f"{key!r} {error}") from error


def quantized_form(watched: Watched) -> tuple[Any, Any]:
    """What the tensor became, and the object whose columnwise data count where that is another one.

    A GEMM that runs in high precision reads the tensor itself, which is none of them.
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
    """Whether a tensor has an inf or nan: a bool on its device; None where there is nothing to look at."""
    values = watched.values
    if values is None:
        became, _ = quantized_form(watched)
        values = became.dequantize() if became is not None and kind_is_known(became) else became
    if values is None or not values.is_floating_point() or not values.numel():
        return None
    # One pass without a copy: a nan is either of them.
    low, high = torch.aminmax(values.detach())
    return ~(torch.isfinite(low) & torch.isfinite(high))
