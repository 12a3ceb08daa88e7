"""C++ functions for the CPU, compiled by torch at their first use.

The first compilation on a machine takes some seconds; torch caches the library on disk. If it fails, a warning is
logged once, and the caller uses plain torch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class CppFile:
    """The functions of a C++ file.

    Args:
        functions: name -> ctypes of the arguments.
        what: the work that plain torch does if compilation fails, for the warning.
        times: maximum slowdown of plain torch, for the warning.
        flags: compiler flags, after torch's own.
    """

    def __init__(
        self,
        file: Path,
        functions: Mapping[str, Sequence[Any]],
        *,
        what: str,
        times: str,
        flags: Sequence[str] = (),
    ) -> None:
        self._source = file
        self._argtypes = functions
        self._fallback = what, times
        self._flags = tuple(flags)
        self.functions: dict[str, Any] = {}
        self.failed = False

    @property
    def function(self) -> Any:
        """The function of a file with a single one; None before it is compiled."""
        return next(iter(self.functions.values()), None)

    def is_compiled(self) -> bool:
        """Compile the file at the first call; return whether it succeeded."""
        if not self.functions and not self.failed:
            try:
                self.functions = self.load()
            except Exception as error:
                self.failed = True
                self._warn(error)
        return bool(self.functions)

    def _warn(self, error: Exception) -> None:
        if isinstance(error, OSError):
            advice = "torch keeps compiled code in a cache folder: set TORCHINDUCTOR_CACHE_DIR to a writable one."
        else:
            advice = "Install a C++ compiler such as g++ if it is missing; TORCH_LOGS=inductor prints details."
        reason = str(error).strip()
        logger.warning(
            "%s, up to %s times slower with the same results: the fast pass cannot be compiled (%s: %s). %s",
            *self._fallback,
            type(error).__name__,
            reason.splitlines()[0] if reason else "no message",
            advice,
        )

    def load(self, flags: Sequence[str] = ()) -> dict[str, Any]:
        """Compile, or load from torch's cache (2.13, ``_inductor/codecache.py``).

        Without ``needs_vec_isa=False``, torch would first test the processor for vector instructions.
        """
        from torch._inductor.codecache import CppCodeCache

        known = inspect.signature(CppCodeCache.load_async).parameters
        library = CppCodeCache.load(
            self._source.read_text(encoding="utf-8"),
            extra_flags=(*self._flags, *flags),
            **({"needs_vec_isa": False} if "needs_vec_isa" in known else {}),
        )
        functions = {name: getattr(library, name) for name in self._argtypes}
        for name, function in functions.items():
            function.restype = None
            function.argtypes = list(self._argtypes[name])
        return functions
