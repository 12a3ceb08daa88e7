"""The warning that something cannot be compiled, and that plain torch does its work."""

from __future__ import annotations

import logging


def say_not_compiled(logger: logging.Logger, what: str, times: str, error: BaseException) -> None:
    """Log why, and what helps.

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
