"""Functions in C++ that read tensors on a CPU, beside plain torch.

Nothing is compiled before plain torch has measured as much as that takes: a short run would wait longer for the
compiler than for its numbers. Without a C++ compiler everything is done in plain torch, which is logged once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks.base.compiling import CppFunction

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the functions read, and its number there."""

_A_CALL = 2**16
"""Elements that plain torch measures in the time that a call takes it for the smallest tensor."""


class CppPass(CppFunction):
    """A function of a file of C++ beside this module, which reads one tensor.

    Args:
        file: its name.
        name: of the function, which returns nothing.
        argtypes: the types of its arguments, of ctypes.
        pays_from: elements that plain torch measures before the function is compiled.
        what: plain torch does without it, for the warning.
        times: how much slower that is at most, in words.

    Attributes:
        pays_from: see above.
        in_plain_torch: elements that plain torch has measured although the function could have.
    """

    def __init__(self, file: str, name: str, argtypes: Sequence[Any], *, pays_from: int, what: str, times: str) -> None:
        super().__init__(Path(__file__).with_name(file), name, argtypes, what=what, times=times)
        self.pays_from = pays_from
        self.in_plain_torch = 0

    def could_take(self, values: torch.Tensor) -> bool:
        """Whether it can read a tensor: a plain one on the CPU, of a dtype that it reads."""
        return type(values) is torch.Tensor and values.dtype in DTYPES and values.device.type == "cpu"

    def takes(self, values: torch.Tensor) -> bool:
        """Whether it is taken for a tensor that it can read: compiling pays by now and has not failed."""
        if self.failed or self.in_plain_torch < self.pays_from or not self.could_take(values):
            return False
        return self.function is not None or self.is_compiled()

    def leaves(self, values: torch.Tensor) -> None:
        """Count a tensor that plain torch measures."""
        if self.function is None and self.could_take(values):
            self.in_plain_torch += values.numel() + _A_CALL
