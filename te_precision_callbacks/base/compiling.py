"""Functions in C++ that work on a CPU, and the warning where something cannot be compiled.

A file is compiled by torch's own cache of C++ code, in one or two seconds, and kept on disk. Without a C++ compiler
plain torch does its work, which is logged once.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class CppFunction:
    """A function of a file of C++.

    Args:
        file: the file.
        name: of the function, which returns nothing.
        argtypes: the types of its arguments, of ctypes.
        what: plain torch does without it, for the warning.
        times: how much slower that is at most, in words.
        flags: of the compiler, after torch's own.

    Attributes:
        function: once it is compiled.
        failed: whether it cannot be compiled.
    """

    def __init__(
        self, file: Path, name: str, argtypes: Sequence[Any], *, what: str, times: str, flags: Sequence[str] = ()
    ) -> None:
        self._source = file
        self._name = name
        self._argtypes = argtypes
        self._said = what, times
        self._flags = tuple(flags)
        self.function: Any = None
        self.failed = False

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
            flags: of the compiler, after torch's own, which are for the processor at hand, and those of the file.

        For code that is written with torch's own vectors, torch would first try which ones the processor has.
        """
        from torch._inductor.codecache import CppCodeCache

        known = inspect.signature(CppCodeCache.load_async).parameters
        library = CppCodeCache.load(
            self._source.read_text(encoding="utf-8"),
            extra_flags=(*self._flags, *flags),
            **({"needs_vec_isa": False} if "needs_vec_isa" in known else {}),
        )
        function = getattr(library, self._name)
        function.restype = None
        function.argtypes = list(self._argtypes)
        return function


def say_not_compiled(logger: logging.Logger, what: str, times: str, error: BaseException) -> None:
    """Log why something cannot be compiled, and what helps.

    Args:
        logger: of the module whose code cannot be compiled.
        what: plain torch does, in words.
        times: how much slower plain torch is at most, in words.
        error: the reason.
    """
    if isinstance(error, OSError):
        advice = "Compiled code is kept in a folder of torch's: let TORCHINDUCTOR_CACHE_DIR name one to write to."
    else:
        advice = "Install a C++ compiler such as g++, if there is none; TORCH_LOGS=dynamo,inductor prints more."
    reason = str(error).strip()
    logger.warning(
        "%s, up to %s times slower but equally exact: the fast pass cannot be compiled (%s: %s). %s",
        what,
        times,
        type(error).__name__,
        reason.splitlines()[0] if reason else "no message",
        advice,
    )
