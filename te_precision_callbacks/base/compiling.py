"""Functions in C++ that work on a CPU, and the warning where something cannot be compiled.

A file is compiled by torch's own cache of C++ code, in one or two seconds, and kept on disk. Without a C++ compiler
plain torch does its work, which is logged once.
"""

from __future__ import annotations

import inspect
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)


class CppFile:
    """Functions of a file of C++, which return nothing.

    Args:
        file: the file.
        functions: name -> the types of its arguments, of ctypes.
        what: plain torch does without them, for the warning.
        times: how much slower that is at most, in words.
        pays_from: elements that plain torch takes before the file is compiled.
        flags: of the compiler, after torch's own.

    Attributes:
        functions: by name, once they are compiled; else empty.
        failed: whether they cannot be compiled.
        pays_from: see above.
        in_plain_torch: elements that plain torch has taken although a function could have.
    """

    def __init__(
        self,
        file: Path,
        functions: Mapping[str, Sequence[Any]],
        *,
        what: str,
        times: str,
        pays_from: int = 0,
        flags: Sequence[str] = (),
    ) -> None:
        self._source = file
        self._argtypes = functions
        self._said = what, times
        self._flags = tuple(flags)
        self.functions: dict[str, Any] = {}
        self.failed = False
        self.pays_from = pays_from
        self.in_plain_torch = 0

    def is_taken(self) -> bool:
        """Whether the functions are taken: compiling pays by now and has not failed."""
        return not self.failed and self.in_plain_torch >= self.pays_from and self.is_compiled()

    def leaves_to_torch(self, elements: int) -> None:
        """Count elements that plain torch takes although a function could."""
        if not self.functions:
            self.in_plain_torch += elements

    def is_compiled(self) -> bool:
        """Compile it, if that has not been tried."""
        if not self.functions and not self.failed:
            try:
                self.functions = self.loaded()
            except Exception as error:
                self.failed = True
                what, times = self._said
                say_not_compiled(logger, what, times, error)
        return bool(self.functions)

    def loaded(self, flags: Sequence[str] = ()) -> dict[str, Any]:
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
        functions = {name: getattr(library, name) for name in self._argtypes}
        for name, function in functions.items():
            function.restype = None
            function.argtypes = list(self._argtypes[name])
        return functions


class CppFunction(CppFile):
    """The one function of a file; the arguments are those of :class:`CppFile`, with its name and types."""

    def __init__(self, file: Path, name: str, argtypes: Sequence[Any], **about: Any) -> None:
        super().__init__(file, {name: argtypes}, **about)

    @property
    def function(self) -> Any:
        """The function, once it is compiled; else None."""
        return next(iter(self.functions.values()), None)


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
        if "InvalidCxxCompiler" not in f"{type(error).__name__}: {error}":
            advice = _about_paths() or advice
    reason = str(error).strip()
    logger.warning(
        "%s, up to %s times slower but equally exact: the fast pass cannot be compiled (%s: %s). %s",
        what,
        times,
        type(error).__name__,
        reason.splitlines()[0] if reason else "no message",
        advice,
    )


def _about_paths() -> str:
    """What helps where torch cannot compile because of a path; empty where no path is in the way.

    torch joins the paths of compiled code and of its own libraries to a command line without quotes, and splits it as
    a shell does (2.13, ``_inductor/cpp_builder.py``).
    """
    from torch._inductor.codecache import cache_dir

    advice = []
    if not _is_one_word(cache_dir()):
        advice.append(f"It keeps compiled code in {cache_dir()!r}: let TORCHINDUCTOR_CACHE_DIR name another folder.")
    if not _is_one_word(str(Path(torch.__file__).parent)):
        advice.append(
            f"It is installed in {str(Path(torch.__file__).parent)!r}: make the Python environment in another folder."
        )
    return " ".join(["torch cannot compile where a path has a space or a quote.", *advice]) if advice else ""


def _is_one_word(path: str) -> bool:
    try:
        return shlex.split(path) == [path]
    except ValueError:  # a quote without another
        return False
