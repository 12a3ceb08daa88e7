"""The SystemExit that ends the process, which Python shows to no hook.

Python reads the attribute ``code`` of an uncaught SystemExit while no Python frame is on the stack, and then runs the
functions of ``atexit`` (3.10 to 3.13, ``Python/pythonrun.c: _Py_HandleSystemExit``). Up to 3.11, an exception of the
builtin ``sys.exit`` has no instance, and so no attribute, until Python code handles it.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any, NoReturn

_CODE: Any = vars(SystemExit)["code"]


def exit_status(error: SystemExit) -> int:
    """Return the exit status of a process that the exception ends, from 0 to 255."""
    code = _CODE.__get__(error)
    if not isinstance(code, int):
        return int(code is not None)  # Python prints any other object, and ends with 1
    if -sys.maxsize <= code <= sys.maxsize:
        return code & 0xFF
    return 0xFF


def is_failure(error: BaseException | None) -> bool:
    """Return whether an exception that ends a process is a failure: not an exit with status 0."""
    return error is not None and not (isinstance(error, SystemExit) and not exit_status(error))


def error_text(error: BaseException) -> str:
    """Return class and message of an error; of a SystemExit, its exit status if that is not 0, and its text."""
    text = str(error).strip()
    if isinstance(error, SystemExit):
        status = exit_status(error)
        message = f": {text}" if isinstance(_CODE.__get__(error), str) else ""
        text = f"{status}{message}" if status else ""
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def raise_exit(status: object = None, /) -> NoReturn:
    """Exit as ``sys.exit`` does, by an exception with an instance."""
    raise SystemExit if status is None else SystemExit(status)


class ExitWatch:
    """The SystemExit that ends the process, from :meth:`begin` to :meth:`end`.

    Where the class cannot be changed, as in another Python than CPython, none is seen.

    Attributes:
        error: the exception; None before the end of the process, and if another way ends it.
    """

    def __init__(self) -> None:
        self.error: SystemExit | None = None
        self._exit = sys.exit

    def begin(self) -> None:
        _set_code(self)
        self._exit = sys.exit
        sys.exit = raise_exit

    def end(self) -> None:
        if sys.exit is raise_exit:
            sys.exit = self._exit
        if vars(SystemExit)["code"] is self:
            _set_code(_CODE)

    def __get__(self, error: SystemExit | None, owner: Any = None) -> Any:
        if error is not None and sys._getframe().f_back is None:
            self.error = error
        return _CODE.__get__(error, owner)

    def __set__(self, error: SystemExit, code: Any) -> None:
        _CODE.__set__(error, code)

    def __delete__(self, error: SystemExit) -> None:
        _CODE.__delete__(error)


def _set_code(descriptor: Any) -> None:
    for attributes in gc.get_referents(vars(SystemExit)):  # the dictionary behind a read-only proxy
        if isinstance(attributes, dict) and "code" in attributes and sys.implementation.name == "cpython":
            attributes["code"] = descriptor
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
