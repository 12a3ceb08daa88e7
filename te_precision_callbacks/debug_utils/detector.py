"""The detector."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import TracebackType

import torch
from typing_extensions import Unpack

from te_precision_callbacks.debug_utils.calls import Calls
from te_precision_callbacks.debug_utils.errors import OverflowDetectorError
from te_precision_callbacks.debug_utils.journal import Journal
from te_precision_callbacks.debug_utils.looking import Looking
from te_precision_callbacks.debug_utils.options import (
    Mode,
    NamesOfTransformers,
    OnFailure,
    Options,
    from_transformers,
    listed,
)
from te_precision_callbacks.debug_utils.steps import Steps
from te_precision_callbacks.naming import Model, named_roots

logger = logging.getLogger(__name__)


class DebugActivationOverflow:
    """Stops a run where an activation or a gradient becomes inf or nan, and shows what led to it.

    It works from its construction on, or as a context manager, which takes its hooks away at the end::

        with DebugActivationOverflow(model):
            for batch in loader:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()          # raises ActivationOverflowError, before the weights are touched
                optimizer.zero_grad()

    The report shows the last frames up to the bad one: ``abs_max`` is the largest magnitude, ``>`` what enters a
    module, ``<`` what leaves it, ``[0]`` the batch::

        < [0] encoder.block.2.layer.1.DenseReluDense.wo: Linear: output has infs


        last 40 frames:
        ...
        abs_max= 1.80e+04 > [0] encoder.block.2.layer.1.DenseReluDense.wo: Linear: input[0]
        abs_max=      inf < [0] encoder.block.2.layer.1.DenseReluDense.wo: Linear: output

    In the mode ``deferred`` nothing waits for the device in forward and backward. All is looked at once, before an
    optimizer of the model steps or in :meth:`look`; without gradients, at the end of the outermost forward.

    Args:
        model: the model; or several, as a list or as a mapping whose keys their paths begin with. On any device and in
            any wrapper.
        max_frames: how many frames a report has at most.
        mode: ``deferred``, or ``immediate``: looks at the end of each module's forward, and raises from there.
        gradients: whether gradients are watched, of activations and parameters.
        parameters: whether the values of each module's parameters are shown, and looked at.
        abs_min: whether a column with the smallest magnitude is shown; each tensor is read once more for it.
        trace_batches: numbers of batches whose frames are all logged (as warnings), and not looked at.
        abort_after_batch: the number of a batch after which :class:`AbortAfterBatch` is raised.
        allow_neg_inf: patterns (as in ``fnmatch``) of the paths of modules that make -inf on purpose.
        warn_above: a share of the dtype's largest number: one warning for each module with an output above it. None: no
            warning.
        distributed: whether all ranks stop together, with the culprit of the one on which it came first: one number is
            reduced in each training look, which all ranks must take part in.
        process_group: over which ranks; None for all.
        on_failure: what a failure of detection itself does: ``raise`` a :class:`DetectionFailedError` in the next look,
            on all ranks, since an overflow may have been missed; ``warn`` logs it as an error, and training goes on
            without detection.
        **names_of_transformers: ``trace_batch_nums`` and ``abort_after_batch_num``, as
            ``transformers.debug_utils.DebugUnderflowOverflow`` names ``trace_batches`` and ``abort_after_batch``.

    After an :class:`ActivationOverflowError` it goes on watching, for a loop that catches it. A second detector on a
    model takes the place of the first.

    Raises:
        OverflowOptionError: an unknown keyword, or a value that a keyword does not take.
        OverflowDetectorError: no model.
        ActivationOverflowError: while training, or in :meth:`look` or :meth:`close`: an inf or nan.
        DetectionFailedError: there too: detection itself has failed.
    """

    def __init__(
        self,
        model: Model,
        max_frames: int = 40,
        *,
        mode: Mode = "deferred",
        gradients: bool = True,
        parameters: bool = False,
        abs_min: bool = False,
        trace_batches: Iterable[int] = (),
        abort_after_batch: int | None = None,
        allow_neg_inf: Iterable[str] = (),
        warn_above: float | None = 0.9,
        distributed: bool = True,
        process_group: torch.distributed.ProcessGroup | None = None,
        on_failure: OnFailure = "raise",
        **names_of_transformers: Unpack[NamesOfTransformers],
    ) -> None:
        trace_batches, abort_after_batch = from_transformers(names_of_transformers, trace_batches, abort_after_batch)
        roots = named_roots(model)
        if not roots:
            raise OverflowDetectorError(f"The model is a torch.nn.Module, or a list or mapping of them, not {model!r}.")
        options = Options(
            max_frames=max_frames,
            mode=mode,
            gradients=gradients,
            parameters=parameters,
            abs_min=abs_min,
            trace_batches=listed("trace_batches", trace_batches),
            abort_after_batch=abort_after_batch,
            allow_neg_inf=listed("allow_neg_inf", allow_neg_inf),
            warn_above=warn_above,
            distributed=distributed,
            process_group=process_group,
            on_failure=on_failure,
        )
        self._journal = Journal(options)
        self._looking = Looking(roots, options, self._journal)
        hooks = Calls(roots, options, self._journal, self._looking).hooks
        for pattern in options.allow_neg_inf:
            if not hooks.matches(pattern):
                logger.warning("allow_neg_inf=: no module of the model has a path like %r.", pattern)
        steps = Steps(hooks, self._journal, self._looking)
        self._looking.handles.callback(steps.remove)
        self._looking.handles.callback(hooks.remove)

    @property
    def batch_number(self) -> int:
        """The number of the training batch that is running or was the last, 0-based; before the first one, of the
        forward without gradients."""
        return self._journal.batches.number

    @property
    def reports(self) -> int:
        """How many overflows it has reported."""
        return self._looking.reports

    @property
    def loss_scaled(self) -> bool:
        """Whether the loss is scaled by something other than torch's GradScaler, which is recognized: then gradients
        that are inf or nan are shown, and are no reason to stop. May be set at any time."""
        return self._looking.reader.loss_scaled

    @loss_scaled.setter
    def loss_scaled(self, value: bool) -> None:
        self._looking.reader.loss_scaled = value

    @property
    def abandoned(self) -> Callable[[], bool] | None:
        """Tells whether the loop that made the detector has ended without closing it: then forwards, backwards and
        steps are not its any more, and it does nothing. None: never. May be set at any time."""
        return self._journal.abandoned

    @abandoned.setter
    def abandoned(self, value: Callable[[], bool] | None) -> None:
        self._journal.abandoned = value

    def begin_batch(self) -> None:
        """Say that a batch begins, where the loop does not call the model itself but modules in it.

        From the first call on, batches are counted by these calls alone.

        Raises:
            AbortAfterBatch: the batch before was the last one that was wanted.
        """
        self._journal.batches.give()
        if not self._journal.closed:
            self._looking.next_batch()

    def look(self) -> None:
        """Look at what training has done since the last look; where ranks stop together, on all of them.

        Not needed where an optimizer of the model steps: it looks before each step, also before one that a GradScaler
        leaves out.

        Raises:
            ActivationOverflowError: there was an inf or nan.
            DetectionFailedError: detection itself has failed.
            AbortAfterBatch: the last batch that was wanted is over.
        """
        self._looking.look()

    def close(self, error: BaseException | None = None) -> None:
        """Look at what was not looked at, on this rank alone, and take all hooks away. Closing twice does nothing.

        Args:
            error: what ended the run. What is found is logged then, and not raised over it.

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
