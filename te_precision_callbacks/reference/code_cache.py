"""Code of rewritten modules, kept from one process to the next: parsing, rewriting and compiling takes seconds.

Each module has a file in ``te-precision-callbacks/rewritten`` of the user's cache folder (``$XDG_CACHE_HOME``, else
``~/.cache``), whose name has a hash of all that the code depends on: source, rewriter, Python. If Python writes no
bytecode (``python -B``), or the folder cannot be used, nothing is kept.
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
    """The place of one module's code: of its source, its path, which is part of the code, and the options of the
    rewrite."""

    def __init__(self, source: bytes, path: str, how: str) -> None:
        made_of = hashlib.sha256(_rewriter())
        for part in (source, os.fsencode(path), how.encode()):
            made_of.update(hashlib.sha256(part).digest())
        self._file = _folder() / f"{Path(path).stem}-{made_of.hexdigest()[:32]}"

    def read(self) -> CodeType | None:
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
            code = marshal.loads(self._file.read_bytes())
            return code if isinstance(code, CodeType) else None
        return None

    def write(self, code: CodeType) -> None:
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
