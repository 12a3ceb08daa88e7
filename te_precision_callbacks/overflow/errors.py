"""The exceptions of activation overflow detection."""

from __future__ import annotations

from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError, RaisedInTraining


class ActivationOverflowError(RaisedInTraining, RuntimeError):
    """An activation or a gradient became inf or nan.

    Attributes:
        path: the module's path in the model, without wrapper parts; empty for the model itself.
        class_name: the module's class.
        role: the tensor of the module: ``output``, ``input[0]``, ``grad_output[logits]``, ``grad of weight``, or a
            label of :func:`~te_precision_callbacks.debug_utils.detect_overflow`.
        batch: the batch number, from 0: of the training, or of the evaluation since the last training batch.
        evaluation: whether the overflow happened in an evaluation: a forward without gradients.
        rank: the rank where it happened.
        report: the complete report.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str,
        class_name: str,
        role: str,
        batch: int,
        evaluation: bool,
        rank: int,
        report: str,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.class_name = class_name
        self.role = role
        self.batch = batch
        self.evaluation = evaluation
        self.rank = rank
        self.report = report


class DetectionFailedError(RaisedInTraining, RuntimeError):
    """Detection has failed, and an overflow may have been missed since then. ``__cause__`` is set on the failing rank.

    Attributes:
        rank: the rank of the failure.
        failure: the class and the text of the failure.
    """

    def __init__(self, failure: str, *, rank: int) -> None:
        super().__init__(
            f"Activation overflow detection has failed on rank {rank} ({failure}), so inf or nan since the last check"
            " may have been missed. To train without detection, remove DebugActivationOverflow, or"
            " activation_overflow from debug=."
        )
        self.failure = failure
        self.rank = rank


class OverflowDetectorError(PrecisionDebugError, ValueError):
    """A detector cannot be created without a model."""


class OverflowOptionError(OptionError, ValueError):
    """The value of a keyword of the detector is invalid."""


class AbortAfterBatch(RaisedInTraining, ValueError):
    """The last batch of the run, ``abort_after_batch=``, is over.

    Attributes:
        batch: the number of the batch, counted from 0.
    """

    def __init__(self, batch: int) -> None:
        super().__init__(
            f"Stopped after batch {batch}, as set by abort_after_batch={batch}. The batch itself is not at fault."
        )
        self.batch = batch


STOPS = (ActivationOverflowError, DetectionFailedError, AbortAfterBatch)
