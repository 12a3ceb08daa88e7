"""Code of rewritten modules, kept from one process to the next: parsing, rewriting and compiling takes seconds.

Usage::

    entry = Entry(source, path, "on the CPU")
    code = entry.read()
    if code is None:
        code = compile(...)
        entry.write(code)

An entry is a file in ``te-precision-callbacks/rewritten`` of the user's cache folder (``$XDG_CACHE_HOME``, else
``~/.cache``). Its name has a hash of all that the code depends on: another source, rewriter or Python has another
entry; an environment has some 4 MB. If Python writes no bytecode (``python -B``), none is written here either; if the
folder cannot be used, there is silently no entry.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import marshal
import os
import sys
import tempfile
from pathlib import Path
from types import CodeType

from te_precision_callbacks.reference import rewrite


class CachedCode:
    """The place of one module's code.

    Args:
        source: the module's source.
        path: the path of its file, which is part of the code.
        how: the options of the rewrite.
    """

    def __init__(self, source: bytes, path: str, how: str) -> None:
        made_of = hashlib.sha256(_rewriter())
        for part in (source, os.fsencode(path), how.encode()):
            made_of.update(hashlib.sha256(part).digest())
        self._file = _folder() / f"{Path(path).stem}-{made_of.hexdigest()[:32]}"

    def read(self) -> CodeType | None:
        """The code, if an earlier process has kept it."""
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
            code = marshal.loads(self._file.read_bytes())
            return code if isinstance(code, CodeType) else None
        return None

    def write(self, code: CodeType) -> None:
        """Keep the code, whole or not at all."""
        if sys.dont_write_bytecode:
            return
        with contextlib.suppress(OSError, RuntimeError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, unfinished = tempfile.mkstemp(dir=self._file.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(marshal.dumps(code))
                os.replace(unfinished, self._file)
            except BaseException:
                os.unlink(unfinished)
                raise


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "te-precision-callbacks" / "rewritten"


@functools.cache
def _rewriter() -> bytes:
    rules = Path(rewrite.__file__).read_bytes()
    return importlib.util.MAGIC_NUMBER + bytes([sys.flags.optimize]) + rules
