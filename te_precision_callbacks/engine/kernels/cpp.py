"""C++ functions that read tensors on a CPU.

They are compiled once plain torch has spent about as long as compiling takes. Without a C++ compiler, plain torch does
everything, which is logged once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks.base.compiling import CppFile

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""dtype -> its number in the C++ code."""

_A_CALL = 2**16
"""Elements that plain torch measures in the time of its call for the smallest tensor."""


class CppPass(CppFile):
    """A C++ function in this folder that reads one tensor."""

    def __init__(self, file: str, name: str, argtypes: Sequence[Any], **about: Any) -> None:
        super().__init__(Path(__file__).with_name(file), {name: argtypes}, **about)

    def could_take(self, values: torch.Tensor) -> bool:
        """Return whether the tensor is plain, on the CPU, and of a supported dtype."""
        return type(values) is torch.Tensor and values.dtype in DTYPES and values.device.type == "cpu"

    def takes(self, values: torch.Tensor) -> bool:
        return self.could_take(values) and self.is_taken()

    def leaves(self, values: torch.Tensor) -> None:
        if self.could_take(values):
            self.leaves_to_torch(values.numel() + _A_CALL)
