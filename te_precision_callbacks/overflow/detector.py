"""The overflow detector, and a check of one tensor."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from types import TracebackType

import torch

from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.ranks.messages import Messages
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.layers.naming import Model, named_roots
from te_precision_callbacks.overflow.calls import ForwardCalls
from te_precision_callbacks.overflow.checker import OverflowChecker
from te_precision_callbacks.overflow.errors import (
    DetectionFailedError,
    OverflowDetectorError,
    OverflowOptionError,
    text_of,
)
from te_precision_callbacks.overflow.extreme_slots import Slot, Slots
from te_precision_callbacks.overflow.grad_scaler import Steps, journals
from te_precision_callbacks.overflow.journal import DetectorOptions, Journal

logger = logging.getLogger(__name__)


class DebugActivationOverflow:
    """Stops a run when an activation or a gradient becomes inf or nan, and reports the frames before it.

    The detector is active once constructed. As a context manager it removes its hooks at the end::

        with DebugActivationOverflow(model):
            for batch in loader:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()          # raises ActivationOverflowError, before the weights are touched
                optimizer.zero_grad()

    The report has the last frames up to the bad one. ``abs_max`` is the largest magnitude; ``>`` marks an input of a
    module, ``<`` an output; ``[0]`` is the batch::

        < [0] encoder.block.2.layer.1.DenseReluDense.wo: Linear: output has infs


        last 40 frames:
        ...
        abs_max= 1.80e+04 > [0] encoder.block.2.layer.1.DenseReluDense.wo: Linear: input[0]
        abs_max=      inf < [0] encoder.block.2.layer.1.DenseReluDense.wo: Linear: output

    Forward and backward do not wait for the device. All tensors are checked once, before an optimizer of the model
    steps or in :meth:`check`; without gradients, at the end of the outermost forward.

    Args:
        model: the model; or several, as a list or as a mapping with prefixes of the paths as keys. On any device and in
            any wrapper.
        max_frames: the maximum number of frames in a report.
        parameters: report and check the values of each module's parameters.
        abs_min: add a column with the smallest magnitude; each tensor is read once more for it.
        trace_batches: numbers of batches; all of their frames are logged as warnings, and not checked.
        abort_after_batch: raise :class:`AbortAfterBatch` after the batch with this number.
        allow_neg_inf: patterns (as in ``fnmatch``) of the paths of modules that produce -inf on purpose.
        distributed: stop all ranks together, with the first culprit of any rank: each check reduces one number,
            so all ranks must take part.
        process_group: the ranks that stop together; None for all.
        trace_batch_nums: ``trace_batches`` under its name in ``transformers.debug_utils.DebugUnderflowOverflow``.
        abort_after_batch_num: ``abort_after_batch`` under its name there.

    After an :class:`ActivationOverflowError` the detector stays active, for a loop that catches the error. A second
    detector on a model replaces the first.

    Raises:
        OverflowOptionError: the value of a keyword is invalid.
        OverflowDetectorError: no model.
        ActivationOverflowError: while training, or in :meth:`check` or :meth:`close`: there was an inf or nan.
        DetectionFailedError: in the same places: detection itself has failed.
    """

    def __init__(
        self,
        model: Model,
        max_frames: int = 40,
        *,
        parameters: bool = False,
        abs_min: bool = False,
        trace_batches: Iterable[int] = (),
        abort_after_batch: int | None = None,
        allow_neg_inf: Iterable[str] = (),
        distributed: bool = True,
        process_group: torch.distributed.ProcessGroup | None = None,
        trace_batch_nums: Iterable[int] = (),
        abort_after_batch_num: int | None = None,
    ) -> None:
        roots = named_roots(model)
        if not roots:
            raise OverflowDetectorError(
                f"The model must be a torch.nn.Module, or a list or mapping of them, not {model!r}."
            )
        options = DetectorOptions.from_keywords(
            max_frames=max_frames,
            parameters=parameters,
            abs_min=abs_min,
            trace_batches=trace_batches or trace_batch_nums,
            abort_after_batch=abort_after_batch_num if abort_after_batch is None else abort_after_batch,
            allow_neg_inf=allow_neg_inf,
            distributed=distributed,
            process_group=process_group,
        )
        self._journal = Journal(options)
        self._checker = OverflowChecker(roots, options, self._journal)
        hooks = ForwardCalls(roots, options, self._journal, self._checker).hooks
        for pattern in options.allow_neg_inf:
            if not hooks.matches(pattern):
                logger.warning("allow_neg_inf=%r matches no module path of the model.", pattern)
        self._steps = Steps(hooks, self._journal, self._checker)
        self._checker.handles.callback(self._steps.remove)
        self._checker.handles.callback(hooks.remove)

    @property
    def batch_number(self) -> int:
        """The number of the current or last training batch, from 0; before training, of the evaluation batch."""
        return self._journal.batches.number

    @property
    def reports(self) -> int:
        """The number of reported overflows."""
        return self._checker.reports

    @property
    def loss_scaled(self) -> bool:
        """Set to True if something other than torch's GradScaler scales the loss. Inf or nan in gradients then does not
        stop the run.
        """
        return self._checker.reader.loss_scaled

    @loss_scaled.setter
    def loss_scaled(self, value: bool) -> None:
        self._checker.reader.loss_scaled = value

    def join_session(self, *, messages: Messages | None = None, step: Callable[[], str] = str) -> None:
        """Use a session's messages to other ranks, and its current training step, as text, in reports."""
        self._checker.messages = messages
        self._checker.reader.step = step

    def begin_batch(self) -> None:
        """Mark the start of a batch, in a loop that calls submodules instead of the model. Only these marks then count
        batches.

        Raises:
            AbortAfterBatch: the previous batch was ``abort_after_batch``.
        """
        self._journal.batches.mark_begin()
        if not self._journal.closed:
            self._checker.next_batch()

    def check(self) -> None:
        """Check the tensors since the last check; if ranks stop together, call this on all of them.

        Each step of an optimizer of the model triggers a check, even if a GradScaler then skips the step.

        Raises:
            ActivationOverflowError, DetectionFailedError, AbortAfterBatch: as described for the class.
        """
        self._checker.check()

    def close(self, error: BaseException | None = None) -> None:
        """Check the tensors since the last check, on this rank only, and remove all hooks. Can be called twice.

        Args:
            error: the exception that ended the run. Findings are then logged instead of raised.

        Raises:
            ActivationOverflowError, DetectionFailedError: without ``error``.
        """
        self._checker.close(error)

    def __enter__(self) -> DebugActivationOverflow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)


@outside_of_dynamo
def detect_overflow(tensor: torch.Tensor, label: str) -> bool:
    """Check a tensor for inf and nan inside a forward, and log a find as an error.

        forwarded_states = self.layer_norm(hidden_states)
        detect_overflow(forwarded_states, "after layer_norm")

    The report of a :class:`DebugActivationOverflow` gets a frame with the label. The host waits for the tensor.

    Args:
        tensor: any shape, dtype and device.
        label: the tensor's name in the log and the report.

    Returns:
        Whether there is an inf, of either sign, or a nan; False for a tensor with unreadable elements.

    Raises:
        OverflowOptionError: ``tensor`` is not a tensor.
        DetectionFailedError: the check itself has failed.
    """
    if not isinstance(tensor, torch.Tensor):
        raise OverflowOptionError(
            f"detect_overflow(tensor, label) takes a tensor first, not a {type(tensor).__name__}."
        )
    for journal in journals():
        journal.label(tensor, label)
    slots = Slots(abs_min=False)
    try:
        measured = slots.measure(tensor)
        if not isinstance(measured, Slot):
            return False
        low, high = slots.read().extremes(measured)
    except Exception as error:
        raise DetectionFailedError(text_of(error), rank=own_rank()) from error
    if math.isfinite(low) and math.isfinite(high):
        return False
    logger.error("%s has %s", label, "nans" if math.isnan(high) else "infs")
    return True
