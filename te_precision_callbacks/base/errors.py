"""The exceptions of this package, from one base class.

Each part derives its exceptions from :class:`PrecisionDebugError`, so ``except PrecisionDebugError`` catches everything
that this package raises on purpose, and nothing else. The exceptions of several parts are here::

    PrecisionDebugError
        OptionError                          a keyword, or its value
        MissingExtraError                    an optional package is missing
        SessionError                         a session cannot start or step
            TransformerEngineUnavailableError
            FeatureLoadError
        FeatureError                         a feature failed
        ObservationError                     with strict=True: a failure in observation
        ResumeAuditError                     with strict=True: a resume has not restored what the checkpoint had
"""

from __future__ import annotations

import copyreg
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = [
    "FeatureError",
    "FeatureLoadError",
    "MissingExtraError",
    "ObservationError",
    "OptionError",
    "PrecisionDebugError",
    "ResumeAuditError",
    "SessionError",
    "TransformerEngineUnavailableError",
]


class PrecisionDebugError(Exception):
    """Base class of every exception that this package raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle and copies, without a call of the class: its arguments may be others than the message."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class OptionError(PrecisionDebugError, TypeError):
    """A keyword does not exist, or does not accept the given value."""


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about keywords that are raised inside name what the user wrote: ``--observe= must be ...``.

    Args:
        names: keyword -> the name of the argument of a command or script that gave its value.
    """
    try:
        yield
    except PrecisionDebugError as error:
        if names:
            keyword = re.compile(rf"(?<![\w.'\"])({'|'.join(names)})(?==)")
            error.args = tuple(keyword.sub(lambda found: names[found[1]], str(text)) for text in error.args)
        raise


class FeatureError(PrecisionDebugError, RuntimeError):
    """A debug feature failed while it was called.

    Args:
        message: the full message.
        feature: the feature that failed; empty where no single one did.
        call: the call in which it failed.
        layer: the layer for which it failed.
        failure: what went wrong, in words that are the same for each layer; the default is the message.
    """

    def __init__(self, message: str, *, feature: str = "", call: str = "", layer: str = "", failure: str = "") -> None:
        super().__init__(message)
        self.feature = feature
        self.call = call
        self.layer = layer
        self.failure = failure or message

    @property
    def kind(self) -> tuple[str, str, str]:
        """A key that is equal for the same failure in different layers."""
        return self.feature, self.call, self.failure


def install_line(extra: str) -> str:
    """The command that installs an extra: from a checkout, since no package index has this package yet."""
    return f"pip install -e '.[{extra}]' in a checkout of te-precision-callbacks"


class MissingExtraError(PrecisionDebugError, ImportError):
    """A module was imported whose optional dependency is not installed.

    Args:
        module: the module that was imported.
        extra: the extra of this package that installs the dependency.
    """

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module} needs a package that is not installed. Install it with: {install_line(extra)}")


class SessionError(PrecisionDebugError, RuntimeError):
    """A session was used in an order that cannot work, or could not be started."""


class TransformerEngineUnavailableError(SessionError, ImportError):
    """Transformer Engine cannot be imported, so there is nothing to observe.

    Args:
        error: the exception of the import.
        subject: the subject of the message: Transformer Engine, and what imports it.
    """

    def __init__(self, error: BaseException, subject: str = "Transformer Engine") -> None:
        super().__init__(
            f"{subject} cannot be imported. On a machine with a GPU install the compiled build: pip install"
            " --no-build-isolation 'transformer-engine[pytorch]>=2.20,<2.21'. Without a GPU:"
            f" {install_line('reference')}; then call te_precision_callbacks.reference.install_where_needed() before"
            " anything imports Transformer Engine, or start the script with 'te-precision run SCRIPT'. Overflow"
            " detection alone (te_precision_callbacks.debug_utils) needs no Transformer Engine. What happened:"
            f" {type(error).__name__}: {error}"
        )


def transformer_engine_error(error: BaseException | None) -> BaseException | None:
    """The exception inside Transformer Engine that led to ``error``; None if there was none."""
    while error is not None:
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "transformer_engine":
                return error
            traceback = traceback.tb_next
        error = error.__cause__ or error.__context__
    return None


class FeatureLoadError(SessionError):
    """A feature file or class could not be loaded."""


class ResumeAuditError(PrecisionDebugError, RuntimeError):
    """With ``strict=True``: a resumed run has not begun as its checkpoint ended."""


class ObservationError(PrecisionDebugError, RuntimeError):
    """A failure in observation, raised with ``strict=True``; otherwise it is reported once and training goes on."""
