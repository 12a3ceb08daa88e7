"""C++ functions for the CPU, compiled at their first use.

The first compilation on a machine takes some seconds; the library is kept in the folder ``TORCHINDUCTOR_CACHE_DIR``, by
default ``te_precision_<number of the user>`` in the folder for temporary files. If it fails, a warning is logged once,
and the caller uses plain torch.

torch's own ``CppCodeCache`` would do the same, but importing it takes longer than the rest of a session's first step.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_FLAGS = (
    "-O3 -DNDEBUG -fno-omit-frame-pointer -fno-trapping-math -funsafe-math-optimizations -ffinite-math-only"
    " -fno-signed-zeros -fno-finite-math-only -fno-unsafe-math-optimizations -fmath-errno -ffp-contract=off"
    " -fexcess-precision=fast -march=native -shared -fPIC -std=c++20 -fopenmp"
)
"""As torch compiles (2.13, ``_inductor/cpp_builder.py``); results depend on them."""


class CppFile:
    """The functions of a C++ file.

    Args:
        functions: name -> ctypes of the arguments.
        what: the work that plain torch does if compilation fails, for the warning.
        times: maximum slowdown of plain torch, for the warning.
    """

    def __init__(
        self,
        file: Path,
        functions: Mapping[str, Sequence[Any]],
        *,
        what: str,
        times: str,
    ) -> None:
        self._source = file
        self._argtypes = functions
        self._fallback = what, times
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
            advice = "Set TORCHINDUCTOR_CACHE_DIR, the folder of compiled code, to a writable one."
        else:
            advice = "Install a C++ compiler such as g++ if it is missing, or set CXX to another."
        reason = str(error).strip()
        logger.warning(
            "%s, up to %s times slower with the same results: the fast pass cannot be compiled (%s: %s). %s",
            *self._fallback,
            type(error).__name__,
            reason.splitlines()[0] if reason else "no message",
            advice,
        )

    def load(self, flags: str = "") -> dict[str, Any]:
        """Load from the folder of compiled code, after compiling if it is not there."""
        library = ctypes.CDLL(str(_compiled(self._source, f"{_FLAGS} {flags}")))
        functions = {name: getattr(library, name) for name in self._argtypes}
        for name, function in functions.items():
            function.restype = None
            function.argtypes = list(self._argtypes[name])
        return functions


def _compiled(source: Path, flags: str) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError("no C++ compiler is found")
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        processor = next(line for line in file if line.startswith(("flags", "Features")))
    key = repr((source.read_text(encoding="utf-8"), flags, compiler, os.stat(compiler).st_mtime_ns, processor))
    user_folder = f"{tempfile.gettempdir()}/te_precision_{os.getuid()}"
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", user_folder))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if str(folder) == user_folder and folder.stat().st_uid != os.getuid():  # whose code would run here
        raise PermissionError(f"{folder} belongs to another user")
    library = folder / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as build_folder:  # another process may compile at the same time
            new = Path(build_folder, library.name)
            done = subprocess.run([compiler, source, *flags.split(), "-o", new], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr)
            new.replace(library)
    return library
