"""C++ functions that read tensors on a CPU, next to plain torch.

Nothing is compiled before plain torch has measured as much as that takes: a short run would wait longer for the
compiler than for its numbers. Without a C++ compiler everything is done in plain torch, which is logged once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks.base.compiling import CppFile

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the functions read, and its number there."""

_A_CALL = 2**16
"""Elements that plain torch measures in the time that a call takes it for the smallest tensor."""


class CppPass(CppFile):
    """A function of a C++ file in this folder that reads one tensor."""

    def __init__(self, file: str, name: str, argtypes: Sequence[Any], **about: Any) -> None:
        super().__init__(Path(__file__).with_name(file), {name: argtypes}, **about)

    def could_take(self, values: torch.Tensor) -> bool:
        """Return whether it can read a tensor: a plain one on the CPU, of a supported dtype."""
        return type(values) is torch.Tensor and values.dtype in DTYPES and values.device.type == "cpu"

    def takes(self, values: torch.Tensor) -> bool:
        """Return whether it applies to a tensor."""
        return self.could_take(values) and self.is_taken()

    def leaves(self, values: torch.Tensor) -> None:
        """Count a tensor that plain torch measures."""
        if self.could_take(values):
            self.leaves_to_torch(values.numel() + _A_CALL)
