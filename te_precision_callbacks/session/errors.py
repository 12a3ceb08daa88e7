"""The exceptions of a session."""

from __future__ import annotations

from te_precision_callbacks.errors import PrecisionDebugError


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
            " --no-build-isolation 'transformer-engine[pytorch]'. Without a GPU install"
            " 'te-precision-callbacks[reference]', and call te_precision_callbacks.reference.install_where_needed()"
            " before anything imports Transformer Engine, or start the script with 'te-precision run SCRIPT'. Overflow"
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
