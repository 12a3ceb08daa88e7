"""The overflow detector, and a check of one tensor."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.optimizers import after_closure
from te_precision_callbacks.base.ranks import is_distributed, is_initialized, own_rank
from te_precision_callbacks.base.ranks.messages import Messages, RanksLostError
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.layers.naming import Model, named_roots
from te_precision_callbacks.overflow.errors import (
    AbortAfterBatch,
    ActivationOverflowError,
    DetectionFailedError,
    OverflowDetectorError,
    OverflowOptionError,
)
from te_precision_callbacks.overflow.frames import Frame, measure, read
from te_precision_callbacks.overflow.grad_scalers import call_before_scaled_steps, largest_loss_scale
from te_precision_callbacks.overflow.hooks import DetectorOptions, FrameRecorder
from te_precision_callbacks.overflow.report import (
    Finding,
    advice_on,
    advice_on_parameters,
    first_bad,
    format_frame,
    format_place,
)

logger = logging.getLogger(__name__)

MOST_FRAMES = 65_536
"""The number of frames after which a rank checks them alone, before the next forward.

If ranks stop together, an overflow found there waits for the next common check.
"""

_FOREIGN_STEPS = 10
"""Steps of other optimizers after which to warn, if no optimizer of the model has stepped."""

_DETECTORS: weakref.WeakSet[DebugActivationOverflow] = weakref.WeakSet()


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

    Attributes:
        reports: the number of reported overflows.
        loss_scaled: set to True if something other than torch's GradScaler scales the loss. Inf or nan in gradients
            then does not stop the run.

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
        self.reports = 0
        self.loss_scaled = False
        self._options = options
        self._roots = roots
        self._messages: Messages | None = None
        self._pending: Finding | None = None
        self._has_checked = False
        self._foreign_steps = 0
        self._is_closed = False
        self._step: Callable[[], str] = str
        self._history: deque[Frame] = deque(maxlen=max_frames)
        self._count = 0  # of frames since the last common check of the ranks
        self._last_title = ""
        self._recorder = FrameRecorder(roots, options, self._before_forward, self._after_evaluation)
        for former in list(_DETECTORS):
            if not self._recorder.modules.keys().isdisjoint(former._recorder.modules):
                logger.warning("Activation overflow: this detector replaces another one on the same model.")
                former.close(OverflowDetectorError("Another detector replaced this one."))
        for pattern in options.allow_neg_inf:
            if not any(fnmatch.fnmatchcase(watched.path, pattern) for watched in self._recorder.modules.values()):
                logger.warning("allow_neg_inf=%r matches no module path of the model.", pattern)
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._recorder.remove)
        # The hook of a collected detector stays and does nothing, since torch may be iterating over its hooks.
        before_step = functools.partial(_before_step, weakref.ref(self))
        self._undo.callback(register_optimizer_step_pre_hook(before_step).remove)
        self._undo.callback(call_before_scaled_steps(self._before_scaled_step))
        _DETECTORS.add(self)
        self._undo.callback(_DETECTORS.discard, self)

    @property
    def batch_number(self) -> int:
        """The number of the current or last training batch, from 0; before training, of the evaluation batch."""
        recorder = self._recorder
        return recorder.batch if recorder.batch >= 0 else max(recorder.evaluation, 0)

    def join_session(self, *, messages: Messages | None = None, step: Callable[[], str] = str) -> None:
        """Use a session's messages to other ranks, and its current training step, as text, in reports."""
        self._messages = messages
        self._step = step

    def begin_batch(self) -> None:
        """Mark the start of a batch, in a loop that calls submodules instead of the model. Only these marks then count
        batches.

        Raises:
            AbortAfterBatch: the previous batch was ``abort_after_batch``.
        """
        self._recorder.has_marks = True
        if not self._is_closed:
            self._next_batch()

    def check(self) -> None:
        """Check the tensors since the last check; if ranks stop together, call this on all of them.

        Each step of an optimizer of the model triggers a check, even if a GradScaler then skips the step.

        Raises:
            ActivationOverflowError, DetectionFailedError, AbortAfterBatch: as described for the class.
        """
        self._check(may_be_skipped=True)

    def close(self, error: BaseException | None = None) -> None:
        """Check the tensors since the last check, on this rank only, and remove all hooks. Can be called twice.

        Args:
            error: the exception that ended the run. Findings are then logged instead of raised.

        Raises:
            ActivationOverflowError, DetectionFailedError: without ``error``.
        """
        if self._is_closed:
            return
        finding = self._look_at_training()
        self._is_closed = True
        self._recorder.is_over = True
        self._undo.close()
        if error is None:
            self._stop_if(finding)
        if finding is not None and finding.failure:
            failure = self._recorder.failure
            logger.error("Activation overflow detection has failed (%s).", finding.failure, exc_info=failure)
        elif finding is not None:
            self.reports += 1
            logger.error(finding.report)
        self._reset()

    def __enter__(self) -> DebugActivationOverflow:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    # ------------------------------------------------------------------ before an optimizer's step

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Check before an optimizer of the model steps; return new arguments for ``step`` with a wrapped closure."""
        check = functools.partial(self._check, may_be_skipped=False)
        if self._is_stepped_by(optimizer):
            check()
            return after_closure(arguments, keywords, check)
        if not self._has_checked and self._recorder.due:
            self._foreign_steps += 1
            if self._foreign_steps == _FOREIGN_STEPS:
                logger.warning(
                    "Activation overflow: optimizers without parameters of the model made %d unchecked steps. If they"
                    " update copies of the parameters (DeepSpeed ZeRO, Megatron's distributed optimizer), call"
                    " detector.check() before each of their steps.",
                    _FOREIGN_STEPS,
                )
        return None

    @outside_of_dynamo
    def _before_scaled_step(self, optimizer: Any) -> None:
        if self._is_stepped_by(optimizer):
            self.check()

    def _is_stepped_by(self, optimizer: Any) -> bool:
        return not self._is_closed and self._recorder.is_stepped_by(optimizer)

    # ------------------------------------------------------------------ at a forward

    def _before_forward(self, starts_batch: bool) -> None:
        if len(self._recorder.frames) >= MOST_FRAMES:
            self._pending = self._look_at_training()
            if not self._is_collective:
                self._stop_if(self._pending)
        if starts_batch:
            self._next_batch()

    def _next_batch(self) -> None:
        if self._recorder.batch >= 0:
            self._abort_if_over()
        self._recorder.batch += 1
        self._recorder.evaluation = -1

    def _after_evaluation(self, frames: list[Frame]) -> None:
        if self._is_closed:
            return
        has_trained = self._recorder.batch >= 0
        finding = self._look(frames, evaluation=True)
        # The next common check raises a failure.
        if not (has_trained and self._is_collective and (finding is None or finding.failure)):
            self._stop_if(finding)
        if not has_trained:
            self._abort_if_over()

    def _abort_if_over(self) -> None:
        last = self._options.abort_after_batch
        if last is not None and self.batch_number >= last:
            self.close()
            raise AbortAfterBatch(self.batch_number)

    # ------------------------------------------------------------------ a check

    @property
    def _is_collective(self) -> bool:
        return self._options.distributed and is_distributed(self._options.process_group)

    def _check(self, *, may_be_skipped: bool) -> None:
        """Check the training, on all ranks together.

        Args:
            may_be_skipped: whether a GradScaler that has scaled the loss can still skip the step.
        """
        recorder = self._recorder
        if self._is_closed or is_capturing():  # earlier frames wait for the first check after the capture
            return
        self._has_checked = True
        is_collective = self._is_collective
        if not recorder.due and (is_collective or recorder.failure is None):
            return
        finding = self._look_at_training(may_be_skipped=may_be_skipped)
        self._end_interval()
        recorder.all_checked = True
        self._stop_if(self._agree(finding) if is_collective else finding)
        if recorder.batch >= 0:
            self._abort_if_over()

    def _look_at_training(self, *, may_be_skipped: bool = True) -> Finding | None:
        """Return an overflow, or else a failure, and forget the frames."""
        finding = self._pending or self._look(self._recorder.frames, may_be_skipped=may_be_skipped)
        self._recorder.forget_frames()
        return finding

    def _look(
        self, frames: Sequence[Frame], *, evaluation: bool = False, may_be_skipped: bool = True
    ) -> Finding | None:
        """Return the first overflow, or else a failure of detection."""
        finding = None
        with self._recorder.guard:
            finding = self._first_overflow(frames, evaluation=evaluation, may_be_skipped=may_be_skipped)
        failure = self._recorder.failure
        if finding is None and failure is not None:
            return Finding(own_rank(), failure=f"{type(failure).__name__}: {failure}")
        return finding

    def _first_overflow(self, frames: Sequence[Frame], *, evaluation: bool, may_be_skipped: bool) -> Finding | None:
        """Return the first overflow; log traced frames, and keep frames for later reports."""
        options = self._options
        read(frame.extremes for frame in frames)
        traced: Sequence[int] = options.trace_batches
        if evaluation and self._recorder.batch >= 0:  # they are numbers of training batches
            traced = ()
        self._trace([frame for frame in frames if frame.batch in traced], "evaluation batch" if evaluation else "batch")
        index = first_bad(frames, traced, options.allow_neg_inf, gradients=not self.loss_scaled)
        scale = None
        if index is not None and frames[index].kind == "gradient" and may_be_skipped:
            scale = largest_loss_scale()
            if scale is not None and scale > 1:  # the scaler reduces the scale, and skips the step
                index = first_bad(frames, traced, options.allow_neg_inf, gradients=False)
        earlier = self._count
        self._count += len(frames)
        if index is None:
            self._history.extend(frames)
            return None
        self._history.extend(frames[: index + 1])
        bad = frames[index]
        step = "" if evaluation else self._step()
        headline = f"{format_place(bad)} has {bad.extremes.kind}"
        lines = [headline, *([f"batch {bad.batch} is in {step}"] if step else ()), "", ""]
        lines.append(f"last {len(self._history)} frames:")
        lines += [format_frame(frame, abs_min=options.abs_min) for frame in self._history]
        return Finding(
            path=bad.module.path,
            class_name=bad.module.class_name,
            role=bad.role,
            batch=bad.batch,
            evaluation=evaluation,
            rank=own_rank(),
            index=earlier + index,
            headline=headline,
            advice=advice_on(bad, scale),
            report="\n".join(lines),
            step=step,
        )

    def _trace(self, frames: Iterable[Frame], batch: str) -> None:
        lines: list[str] = []
        for frame in frames:
            title = f"*** {batch} {frame.batch} ***"
            if title != self._last_title:
                self._last_title = title
                lines.append(title)
            lines.append(format_frame(frame, abs_min=self._options.abs_min))
        if lines:
            logger.warning("%s", "\n".join(lines))

    def _agree(self, finding: Finding | None) -> Finding | None:
        """Return the earliest overflow of all ranks, or else a failure of any rank.

        The ranks that stop together connect in their first common check.
        """
        why = "to check for activation overflow. A rank may not have trained in this step"
        try:
            if self._messages is None:
                self._messages = Messages(self._options.process_group, "overflow")
                self._undo.callback(self._messages.close)
                self._messages.open("to check for activation overflow")
            if not self._messages.is_open:
                return finding
            findings = self._messages.pool([] if finding is None else [finding], "overflow", why, Finding)
        except RanksLostError as error:
            logger.warning(
                "Activation overflow: this rank checks alone from now on. %s. If it finds an overflow, only this rank"
                " stops, and the others wait until the timeout of their process group.",
                str(error).removesuffix("."),
            )
            return finding
        return min(findings, key=lambda earliest: (bool(earliest.failure), earliest.index), default=None)

    def _stop_if(self, finding: Finding | None) -> None:
        if finding is None:
            return
        is_own = finding.rank == own_rank()
        failure = self._recorder.failure
        if finding.failure:
            self._reset()
            raise DetectionFailedError(finding.failure, rank=finding.rank) from failure if is_own else None
        self.reports += 1
        advice = finding.advice
        try:
            advice = advice_on_parameters(self._roots, finding.path) or advice
        except Exception as error:  # the overflow must still be reported
            logger.warning("Activation overflow: the parameters could not be checked (%s).", error)
        self._reset()
        if is_own:
            logger.error("%s", finding.report)
        kind = "evaluation " if finding.evaluation else ""
        step = f" ({finding.step})" if finding.step else ""
        rank = f" on rank {finding.rank}" if is_initialized() else ""
        raise ActivationOverflowError(
            f"{finding.headline}, in {kind}batch {finding.batch}{step}{rank}. The report, in the log and in the"
            f" exception's 'report', has the frames before it. {advice}",
            path=finding.path,
            class_name=finding.class_name,
            role=finding.role,
            batch=finding.batch,
            evaluation=finding.evaluation,
            rank=finding.rank,
            report=finding.report,
        )

    def _reset(self) -> None:
        self._end_interval()
        self._recorder.failure = None
        self._history.clear()

    def _end_interval(self) -> None:
        self._recorder.clear()
        self._pending = None
        self._count = 0


@outside_of_dynamo
def _before_step(detector: weakref.ref[DebugActivationOverflow], optimizer: Any, arguments: Any, keywords: Any) -> Any:
    """The hook of all optimizers of the process, which does not keep the detector and the model alive."""
    alive = detector()
    if alive is None:
        return None
    return alive._before_step(optimizer, arguments, keywords)


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
    for detector in list(_DETECTORS):
        detector._recorder.note_label(tensor, label)
    try:
        extremes = measure(tensor, abs_min=False)
        read([extremes])
    except Exception as error:
        raise DetectionFailedError(f"{type(error).__name__}: {error}", rank=own_rank()) from error
    if extremes.kind:
        logger.error("%s has %s", label, extremes.kind)
    return bool(extremes.kind)
