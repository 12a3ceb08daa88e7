"""The detector, and a check of one tensor."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from types import TracebackType

import torch
from typing_extensions import Unpack

from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.ranks.messages import Messages
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.layers.naming import Model, named_roots
from te_precision_callbacks.overflow.calls import ForwardCalls
from te_precision_callbacks.overflow.detector_options import (
    DetectorOptions,
    NamesOfTransformers,
    OnFailure,
    from_transformers,
)
from te_precision_callbacks.overflow.errors import (
    DetectionFailedError,
    OverflowDetectorError,
    OverflowOptionError,
    text_of,
)
from te_precision_callbacks.overflow.extreme_slots import Slot, Slots
from te_precision_callbacks.overflow.grad_scaler import journals
from te_precision_callbacks.overflow.journal import Journal
from te_precision_callbacks.overflow.looking import Looking
from te_precision_callbacks.overflow.steps import Steps

logger = logging.getLogger(__name__)


class DebugActivationOverflow:
    """Stops a run where an activation or a gradient becomes inf or nan, and shows what led to it.

    The detector works from its construction on. As a context manager it removes its hooks at the end::

        with DebugActivationOverflow(model):
            for batch in loader:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()          # raises ActivationOverflowError, before the weights are touched
                optimizer.zero_grad()

    The report shows the last frames up to the bad one. ``abs_max`` is the largest magnitude; ``>`` marks a tensor that
    enters a module, ``<`` a tensor that leaves it; ``[0]`` is the batch::

        < [0] encoder.block.2.layer.1.DenseReluDense.wo: Linear: output has infs


        last 40 frames:
        ...
        abs_max= 1.80e+04 > [0] encoder.block.2.layer.1.DenseReluDense.wo: Linear: input[0]
        abs_max=      inf < [0] encoder.block.2.layer.1.DenseReluDense.wo: Linear: output

    Nothing waits for the device in forward and backward. All tensors are checked once, before an optimizer of the model
    steps or in :meth:`look`; without gradients, at the end of the outermost forward.

    Args:
        model: the model; or several, as a list or as a mapping whose keys become prefixes of the paths. On any device
            and in any wrapper.
        max_frames: the maximum number of frames in a report.
        parameters: whether the values of each module's parameters are shown and checked.
        abs_min: whether a column with the smallest magnitude is shown; each tensor is read once more for it.
        trace_batches: numbers of batches whose frames are all logged (as warnings), and not checked.
        abort_after_batch: the number of a batch after which :class:`AbortAfterBatch` is raised.
        allow_neg_inf: patterns (as in ``fnmatch``) of the paths of modules that produce -inf on purpose.
        distributed: whether all ranks stop together, with the first culprit of any rank: one number is reduced in each
            training look, in which all ranks must take part.
        process_group: the ranks that stop together; None for all.
        on_failure: what happens if detection itself fails: ``raise`` a :class:`DetectionFailedError` in the next look,
            on all ranks, since an overflow may have been missed; ``warn`` logs it as an error, and training goes on
            without detection.
        **names_of_transformers: ``trace_batch_nums`` and ``abort_after_batch_num``, as
            ``transformers.debug_utils.DebugUnderflowOverflow`` names ``trace_batches`` and ``abort_after_batch``.

    After an :class:`ActivationOverflowError` the detector goes on watching, for a loop that catches the error. A second
    detector on a model replaces the first.

    Raises:
        OverflowOptionError: a keyword is unknown, or its value is invalid.
        OverflowDetectorError: no model.
        ActivationOverflowError: while training, or in :meth:`look` or :meth:`close`: there was an inf or nan.
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
        on_failure: OnFailure = "raise",
        **names_of_transformers: Unpack[NamesOfTransformers],
    ) -> None:
        trace_batches, abort_after_batch = from_transformers(names_of_transformers, trace_batches, abort_after_batch)
        roots = named_roots(model)
        if not roots:
            what = "a torch.nn.Module, or a list or mapping of them"
            raise OverflowDetectorError(f"The model must be {what}, not {model!r}.")
        options = DetectorOptions.checked(
            max_frames=max_frames,
            parameters=parameters,
            abs_min=abs_min,
            trace_batches=trace_batches,
            abort_after_batch=abort_after_batch,
            allow_neg_inf=allow_neg_inf,
            distributed=distributed,
            process_group=process_group,
            on_failure=on_failure,
        )
        self._journal = Journal(options)
        self._looking = Looking(roots, options, self._journal)
        hooks = ForwardCalls(roots, options, self._journal, self._looking).hooks
        for pattern in options.allow_neg_inf:
            if not hooks.matches(pattern):
                logger.warning("allow_neg_inf=: %r matches no module path of the model.", pattern)
        self._steps = Steps(hooks, self._journal, self._looking)
        self._looking.handles.callback(self._steps.remove)
        self._looking.handles.callback(hooks.remove)

    @property
    def batch_number(self) -> int:
        """The number of the current or last training batch, counted from 0; before the first training batch, the number
        of the forward without gradients."""
        return self._journal.batches.number

    @property
    def reports(self) -> int:
        """The number of overflows that the detector has reported."""
        return self._looking.reports

    @property
    def loss_scaled(self) -> bool:
        """Whether something other than torch's GradScaler, which is recognized, scales the loss: gradients that are inf
        or nan are then shown, and do not stop the run. May be set at any time."""
        return self._looking.reader.loss_scaled

    @loss_scaled.setter
    def loss_scaled(self, value: bool) -> None:
        self._looking.reader.loss_scaled = value

    def join_session(self, *, messages: Messages | None = None, step: Callable[[], str] = str) -> None:
        """Work as part of a session.

        Args:
            messages: the session's messages to other ranks, which it opens and closes.
            step: gives the training step that runs, in words, which reports name beside the batch.
        """
        self._looking.messages = messages
        self._looking.reader.step = step

    def begin_batch(self) -> None:
        """Mark the beginning of a batch, in a loop that calls submodules instead of the model itself.

        From the first call on, only these calls count batches.

        Raises:
            AbortAfterBatch: the previous batch was ``abort_after_batch``.
        """
        self._journal.batches.give()
        if not self._journal.closed:
            self._looking.next_batch()

    def look(self) -> None:
        """Check the tensors since the last look; if ranks stop together, call this on all of them.

        Not needed where an optimizer of the model steps: each step triggers a look first, even if a GradScaler then
        skips the step.

        Raises:
            ActivationOverflowError: there was an inf or nan.
            DetectionFailedError: detection itself has failed.
            AbortAfterBatch: the batch ``abort_after_batch`` is over.
        """
        self._looking.look()

    def close(self, error: BaseException | None = None) -> None:
        """Check the tensors since the last look, on this rank alone, and remove all hooks. Closing twice does nothing.

        Args:
            error: the exception that ended the run. Findings are then logged, and not raised over that exception.

        Raises:
            ActivationOverflowError: without ``error``: there was an inf or nan.
            DetectionFailedError: without ``error``: detection itself has failed.
        """
        self._looking.close(error)

    def __enter__(self) -> DebugActivationOverflow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)


@outside_of_dynamo
def detect_overflow(tensor: torch.Tensor, label: str) -> bool:
    """Check a tensor for inf and nan between two operations inside a forward, and log a find as an error.

        forwarded_states = self.layer_norm(hidden_states)
        detect_overflow(forwarded_states, "after layer_norm")

    If a :class:`DebugActivationOverflow` watches the running forward, its report gets a frame with the label. The host
    waits for the tensor.

    Args:
        tensor: any shape, dtype and device.
        label: the tensor's name in the log and the report.

    Returns:
        Whether there is an inf, of either sign, or a nan; False for a tensor whose elements cannot be read.

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
