"""The exceptions that several packages raise; others are defined where they are raised.

Hierarchy::

    PrecisionDebugError
        OptionError                          an unknown keyword, or an invalid value
        MissingExtraError                    an optional package is missing
        SessionError                         a session cannot start or step
            TransformerEngineUnavailableError
            FeatureLoadError
        FeatureError                         a feature failed
        ReductionError                       statistics could not be reduced
        QuantizationError                    a statistic that a layer cannot have
        RaisedInTraining                     raised by a step
            ObservationError                 with strict=True: a failure in observation
            ResumeAuditError                 with strict=True: a resume has not restored the checkpoint
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
    """Base class of all exceptions that this package raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without calling the class; its arguments may differ from the message."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class RaisedInTraining(PrecisionDebugError):
    """An exception that a step raises into training. All others are reported as failures of observation.

    Wrong usage, such as a step without a model, raises a SessionError before the step runs.
    """


class ReductionError(PrecisionDebugError, RuntimeError):
    """Statistics could not be reduced over the ranks."""


class QuantizationError(PrecisionDebugError, RuntimeError):
    """A statistic of a quantized tensor cannot be computed."""


class OptionError(PrecisionDebugError, TypeError):
    """An unknown keyword, or an invalid value."""


@contextmanager
def rename_keywords(names: Mapping[str, str]) -> Iterator[None]:
    """Replace keywords in error messages by the user's arguments (keyword -> argument), such as ``--observe=``."""
    try:
        yield
    except PrecisionDebugError as error:
        if names:
            keyword = re.compile(rf"(?<![\w.'\"])({'|'.join(names)})(?==)")
            error.args = tuple(keyword.sub(lambda match: names[match[1]], str(text)) for text in error.args)
        raise


class FeatureError(PrecisionDebugError, RuntimeError):
    """A debug feature failed; ``failure`` identifies the failure, without the layer."""

    def __init__(self, message: str, *, feature: str = "", call: str = "", layer: str = "", failure: str = "") -> None:
        super().__init__(message)
        self.feature = feature
        self.call = call
        self.layer = layer
        self.failure = failure or message

    @property
    def kind(self) -> tuple[str, str, str]:
        return self.feature, self.call, self.failure


def exit_status(error: SystemExit) -> int:
    """Return the exit status of a process that the exception ends, from 0 to 255."""
    if isinstance(error.code, int):
        return error.code & 0xFF
    return int(error.code is not None)  # Python prints any other object, and ends with 1


def is_failure(error: BaseException | None) -> bool:
    """Return whether an exception that ends a process is a failure: not an exit with status 0."""
    return error is not None and not (isinstance(error, SystemExit) and not exit_status(error))


def error_text(error: BaseException) -> str:
    """Return class and message of an error; of a SystemExit, its exit status if that is not 0, and its text."""
    text = str(error).strip()
    if isinstance(error, SystemExit):
        message = f": {text}" if isinstance(error.code, str) else ""
        text = f"{exit_status(error)}{message}" if exit_status(error) else ""
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def install_line(extra: str) -> str:
    """Return the command that installs an extra; no package index has this package yet."""
    return f"pip install -e '.[{extra}]' in a checkout of te-precision-callbacks"


class MissingExtraError(PrecisionDebugError, ImportError):
    """A module's optional dependency is not installed; ``extra`` installs it."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module} needs a package that is not installed. Install it with: {install_line(extra)}")


class SessionError(PrecisionDebugError, RuntimeError):
    """A session was used in an invalid order, or could not start."""


class TransformerEngineUnavailableError(SessionError, ImportError):
    """Transformer Engine cannot be imported; the message starts with ``subject``."""

    def __init__(self, error: BaseException, subject: str = "Transformer Engine") -> None:
        super().__init__(
            f"{subject} cannot be imported. With a GPU: pip install --no-build-isolation"
            f" 'transformer-engine[pytorch]>=2.20,<2.21'. Without a GPU: {install_line('reference')}, then run"
            " 'te-precision run SCRIPT', or call te_precision_callbacks.reference.install_where_needed() first."
            f" Cause: {type(error).__name__}: {error}"
        )


class FeatureLoadError(SessionError): ...


class ResumeAuditError(RaisedInTraining, RuntimeError):
    """With ``strict=True``: a resumed run does not match its checkpoint."""


class ObservationError(RaisedInTraining, RuntimeError):
    """With ``strict=True``: observation failed. Otherwise failures are reported once."""
