"""Functions in C++ that read tensors on a CPU.

A file is compiled by torch's own cache of C++ code, in one or two seconds, and kept on disk. Nothing is compiled before
plain torch has measured as much as that takes: a short run would wait longer for the compiler than for its numbers.
Without a C++ compiler everything is done in plain torch, which is logged once.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks.engine.kernels.fallback import say_not_compiled

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the functions read, and its number there."""

_A_CALL = 2**16
"""Elements that plain torch measures in the time that a call takes it for the smallest tensor."""


class CppFunction:
    """A function of a file of C++ beside this module.

    Args:
        file: its name.
        name: of the function, which returns nothing.
        argtypes: the types of its arguments, of ctypes.
        pays_from: elements that plain torch measures before the function is compiled.
        what: plain torch does without it, for the warning.
        times: how much slower that is at most, in words.

    Attributes:
        function: once it is compiled.
        failed: whether it cannot be compiled.
        pays_from: see above.
        in_plain_torch: elements that plain torch has measured although the function could have.
    """

    def __init__(self, file: str, name: str, argtypes: Sequence[Any], *, pays_from: int, what: str, times: str) -> None:
        self._source = Path(__file__).with_name(file)
        self._name = name
        self._argtypes = argtypes
        self._said = what, times
        self.pays_from = pays_from
        self.function: Any = None
        self.failed = False
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

    def is_compiled(self) -> bool:
        """Compile it, if that has not been tried."""
        if self.function is None and not self.failed:
            try:
                self.function = self.loaded()
            except Exception as error:
                self.failed = True
                what, times = self._said
                say_not_compiled(logger, what, times, error)
        return self.function is not None

    def loaded(self, flags: Sequence[str] = ()) -> Any:
        """Compile it, unless torch has it in its cache (2.13, ``_inductor/codecache.py``).

        Args:
            flags: of the compiler, after torch's own, which are for the processor at hand.

        For code that is written with torch's own vectors, torch would first try which ones the processor has.
        """
        from torch._inductor.codecache import CppCodeCache

        known = inspect.signature(CppCodeCache.load_async).parameters
        library = CppCodeCache.load(
            self._source.read_text(encoding="utf-8"),
            extra_flags=flags,
            **({"needs_vec_isa": False} if "needs_vec_isa" in known else {}),
        )
        function = getattr(library, self._name)
        function.restype = None
        function.argtypes = list(self._argtypes)
        return function
