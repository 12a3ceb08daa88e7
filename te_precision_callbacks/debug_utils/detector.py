"""The detector."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Literal, get_args

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import TypedDict, Unpack

from te_precision_callbacks.debug_utils import report as text
from te_precision_callbacks.debug_utils.agreement import Failure, Find, agree, rank
from te_precision_callbacks.debug_utils.errors import (
    AbortAfterBatch,
    ActivationOverflowError,
    DetectionFailedError,
    OverflowDetectorError,
    OverflowOptionError,
)
from te_precision_callbacks.debug_utils.events import Call, Event, Gradient, Labelled
from te_precision_callbacks.debug_utils.hooks import ModelHooks, Watched
from te_precision_callbacks.debug_utils.interval import GradientRoles, History, Interval, Record, seen
from te_precision_callbacks.debug_utils.scales import fp8_scale
from te_precision_callbacks.debug_utils.scaling import Listening
from te_precision_callbacks.debug_utils.slots import Measured, Unmeasured, Values
from te_precision_callbacks.debug_utils.structure import arguments, tensors_in
from te_precision_callbacks.debug_utils.verdict import Judge, near_limit
from te_precision_callbacks.errors import PrecisionDebugError
from te_precision_callbacks.forwards import NO_BACKWARD, ForwardClassifier, ForwardKind, outside_of_dynamo
from te_precision_callbacks.naming import Model, named_roots
from te_precision_callbacks.ranks import is_distributed, pooled

logger = logging.getLogger(__name__)

Mode = Literal["deferred", "immediate"]

OnFailure = Literal["raise", "warn"]


class NamesOfTransformers(TypedDict, total=False):
    """What ``transformers.debug_utils.DebugUnderflowOverflow`` calls keywords that it has, too."""

    trace_batch_nums: Iterable[int] | None
    abort_after_batch_num: int | None


MOST_SLOTS = 65_536
"""Slots after which frames that nobody has looked at are looked at by their rank alone, before the next forward.

Where ranks stop together, what is found there waits for the next look of all.
"""

_MOST_SLOTS_IMMEDIATE = 1024
"""Slots after which the mode ``immediate``, which has looked at them, begins anew."""

_FOREIGN_STEPS = 10
"""Steps of other optimizers after which a model that none of its own has stepped is spoken of."""

_UNKNOWN = Unmeasured("unknown")

_QUANTIZED_GRADIENTS = frozenset({"grad_output", "grad_output[0]"})
"""Of the outputs of a module of Transformer Engine: a second one is a bias, or what a normalization gave."""


class _Pass:
    """An outermost call of a watched module, and all calls inside of it.

    Attributes:
        interval: where it is noted; None: not at all.
        frames: whether it makes frames; a recomputed forward does not.
        gradients: whether its tensors' gradients are watched.
        looks: whether it is looked at when it ends: a forward without gradients.
        batch: the number that its frames have.
    """

    __slots__ = ("batch", "frames", "gradients", "interval", "looks", "open")

    def __init__(self, interval: Interval | None, *, frames: bool, gradients: bool, looks: bool) -> None:
        self.interval = interval
        self.frames = frames
        self.gradients = gradients
        self.looks = looks
        self.batch = 0
        self.open: list[tuple[Watched, list[tuple[str, Measured | None]]]] = []

    def close(self, watched: Watched) -> list[tuple[str, Measured | None]] | None:
        """What was taken by the call of a module that ends; None if none has begun."""
        if all(opened is not watched for opened, _ in reversed(self.open)):
            return None
        while True:  # a call above it has never ended
            opened, taken = self.open.pop()
            if opened is watched:
                return taken


class _Thread(threading.local):
    """What runs in a thread: on a GPU, recomputed forwards and gradients come from a thread of autograd."""

    current: _Pass | None = None


class _Running(threading.local):
    """The detectors whose models are running, the innermost last."""

    def __init__(self) -> None:
        self.detectors: list[DebugActivationOverflow] = []


running = _Running()


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

    Attributes:
        reports: how many overflows it has reported.
        loss_scaled: whether the loss is scaled by something other than torch's GradScaler, which is recognized: then
            gradients that are inf or nan are shown, and are no reason to stop. May be set at any time.
        abandoned: tells whether the loop that made the detector has ended without closing it: then forwards, backwards
            and steps are not its any more, and it does nothing. None: never. May be set at any time.

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
        trace_batches, abort_after_batch = _from_transformers(names_of_transformers, trace_batches, abort_after_batch)
        roots = _roots(model)
        self._max_frames = _count("max_frames", max_frames, least=1)
        if mode not in get_args(Mode):
            raise OverflowOptionError(f"mode= is one of {', '.join(map(repr, get_args(Mode)))}, not {mode!r}.")
        self._immediate = mode == "immediate"
        if on_failure not in get_args(OnFailure):
            raise OverflowOptionError(
                f"on_failure= is one of {', '.join(map(repr, get_args(OnFailure)))}, not {on_failure!r}."
            )
        self._on_failure = on_failure
        self._gradients = gradients
        self._parameters = parameters
        self._abs_min = abs_min
        self._traced = frozenset(_count("trace_batches", batch) for batch in _several("trace_batches", trace_batches))
        self._last_batch = None if abort_after_batch is None else _count("abort_after_batch", abort_after_batch)
        patterns = _several("allow_neg_inf", allow_neg_inf)
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise OverflowOptionError(f"allow_neg_inf= takes patterns of module paths, not {pattern!r}.")
        if warn_above is not None and not (isinstance(warn_above, (int, float)) and 0 < warn_above <= 1):
            raise OverflowOptionError(f"warn_above= is a share between 0 and 1, or None, not {warn_above!r}.")
        if process_group is not None and not isinstance(process_group, torch.distributed.ProcessGroup):
            raise OverflowOptionError(f"process_group= is a torch.distributed.ProcessGroup, not {process_group!r}.")
        self._warn_above = warn_above
        self._warned: set[str] = set()
        self._traced_last = -1
        self._distributed = distributed
        self._group = process_group
        self.loss_scaled = False
        self.abandoned: Callable[[], bool] | None = None

        self._judge = Judge(patterns)
        self._history = History(self._max_frames)
        self._training = Interval(abs_min=abs_min)
        self._evaluation = Interval(abs_min=abs_min)
        self._thread = _Thread()
        # The kinds of forwards are those of a session; whether a module is in eval mode says nothing of them here.
        self._classify = ForwardClassifier(precision_features_in_eval=False)
        self._classify.eval_mode_counts = False
        self._batch = -1
        self._evaluation_batch = -1
        self._trains = False
        self._batches_are_given = False
        self._looked = True
        self._due = False
        self._closed = False
        # Nothing is noted after a failure: until the look that raises it, or for good.
        self._broken = False
        self._failure: Exception | None = None
        self._pending: Find | None = None
        self._steps = 0
        self._stepped_by = ""
        self._dropped = 0
        self._foreign_steps: int | None = 0
        self._saw_forward = False
        self.reports = 0
        self._said_unseen = False
        # How many parameters each group had, and whether one of them is the model's.
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[int], bool]] = (
            weakref.WeakKeyDictionary()
        )
        self._leaf_hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._hooks = ModelHooks(roots, self, parameter_gradients=gradients)
        for pattern in patterns:
            if not self._hooks.matches(pattern):
                logger.warning("allow_neg_inf=: no module of the model has a path like %r.", pattern)
        self._step_hook = register_optimizer_step_pre_hook(_before_step_of(weakref.ref(self)))
        # A collected detector leaves it, and it does nothing: torch may be running such hooks just then.
        self._scaler_hook = Listening(self)
        weakref.finalize(self, self._scaler_hook.remove)

    # ------------------------------------------------------------------ for the training loop

    @property
    def batch_number(self) -> int:
        """The number of the training batch that is running or was the last, 0-based; before the first one, of the
        forward without gradients."""
        return max(self._batch, 0)

    def begin_batch(self) -> None:
        """Say that a batch begins, where the loop does not call the model itself but modules in it.

        From the first call on, batches are counted by these calls alone.

        Raises:
            AbortAfterBatch: the batch before was the last one that was wanted.
        """
        self._batches_are_given = True
        if not self._closed:
            self._begin_training()
            self._next_batch()

    def look(self) -> None:
        """Look at what training has done since the last look; where ranks stop together, on all of them.

        Not needed where an optimizer of the model steps: it looks before each step, also before one that a GradScaler
        leaves out.

        Raises:
            ActivationOverflowError: there was an inf or nan.
            DetectionFailedError: detection itself has failed.
            AbortAfterBatch: the last batch that was wanted is over.
        """
        self._look(may_be_skipped=True)

    def _look(self, *, may_be_skipped: bool) -> None:
        """Look, as :meth:`look`.

        Args:
            may_be_skipped: whether a scaler that has scaled the loss can still leave out the step.
        """
        if self._closed or self._is_abandoned():
            return
        self._foreign_steps = None  # there is somebody who looks
        together = self._looks_together()
        if not self._due and (together or self._failure is None):
            return
        self._thread.current = None  # no call is running, whatever an interrupt has left
        self._due = False
        found = self._look_at_training(may_be_skipped=may_be_skipped)
        self._stop_if(agree(found, self._group) if together else found, together=together)
        if self._last_batch is not None and self._batch >= self._last_batch:
            self._abort()

    def close(self, error: BaseException | None = None) -> None:
        """Look at what was not looked at, on this rank alone, and take all hooks away. Closing twice does nothing.

        Args:
            error: what ended the run. What is found is logged then, and not raised over it.

        Raises:
            ActivationOverflowError: without ``error``: there was an inf or nan.
            DetectionFailedError: without ``error``: detection itself has failed.
        """
        if self._closed:
            return
        found, failure = self._look_at_training(), self._failure
        if error is None:
            self._close_hooks()
            self._stop_if(found)
            self._begin_anew()
            return
        self._remove()
        if isinstance(found, Find):
            self.reports += 1
            logger.error(found.report)
        elif found is not None:
            logger.error("Activation overflow detection has failed (%s).", found.text, exc_info=failure)

    def __enter__(self) -> DebugActivationOverflow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    # ------------------------------------------------------------------ what the hooks call

    def enter(self, watched: Watched, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """The forward of a module begins."""
        if self._closed:
            return
        try:
            current = self._thread.current
            if current is None or (watched.is_root and current.frames and _calls_running(watched.module) == 1):
                # Nothing runs around the model: an interrupt, of which hooks hear nothing, has left the last call.
                current = self._begin(watched)
            self._take(current, watched, inputs, keywords)
        except PrecisionDebugError:
            raise
        except Exception as error:
            self._fail(error)

    def leave(self, watched: Watched, output: Any, *, failed: bool) -> None:
        """The forward of a module has ended."""
        current = self._thread.current
        if current is None:
            return
        made = False
        try:
            made = self._give(current, watched, output, failed=failed)
        except Exception as error:
            self._fail(error)
        if made and self._immediate and not self._broken and current.interval is not None:
            self._check_last(current.interval)
        if not current.open:
            self._end(current, failed=failed)

    @outside_of_dynamo
    def parameter_gradient(self, watched: Watched, name: str, parameter: torch.Tensor) -> None:
        """The gradient of a parameter was accumulated."""
        if self._closed or self._broken or parameter.grad is None or self._is_abandoned() or _is_recorded():
            return
        try:
            measured = self._training.slots.measure(parameter.grad)
            roles = [("<", watched, f"grad of {name}")]
            self._training.events.append(Gradient(self.batch_number, roles, measured, (None,)))
            self._due = True
        except Exception as error:
            self._fail(error)
            return
        if self._immediate:
            self._check_last(self._training)

    def label(self, tensor: torch.Tensor, label: str) -> None:
        """Add a frame with a label, in a forward that is running."""
        current = self._thread.current
        if self._closed or self._broken or current is None or current.interval is None or not current.frames:
            return
        try:
            if not self._is_abandoned():
                measured = current.interval.slots.measure(tensor)
                current.interval.events.append(Labelled(current.batch, label, measured))
        except Exception as error:
            self._fail(error)

    # ------------------------------------------------------------------ a forward

    def _begin(self, watched: Watched) -> _Pass:
        """An outermost call begins."""
        abandoned = self._is_abandoned()
        # First of all: a rank that fails below takes part in the next look of all.
        new = self._thread.current = self._new_pass(watched, abandoned=abandoned)
        if abandoned:
            return new
        if self not in running.detectors:
            running.detectors.append(self)
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            if self._training.slots.used >= MOST_SLOTS:
                self._make_room()
            elif self._immediate and self._training.slots.used >= _MOST_SLOTS_IMMEDIATE:
                self._training.forget_numbers()
            self._count_batch(watched, new)
        new.batch = max(self._evaluation_batch, 0) if new.looks and self._trains else self.batch_number
        return new

    def _new_pass(self, watched: Watched, *, abandoned: bool) -> _Pass:
        if abandoned or _is_recorded():
            return _Pass(None, frames=False, gradients=False, looks=False)
        kind = self._classify(watched.module)
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            # Recomputed: the first forward made the frames. Of a reentrant checkpoint only this one sees gradients.
            gradients = self._gradients and kind is ForwardKind.OBSERVED
            return _Pass(self._training, frames=False, gradients=gradients, looks=False)
        if kind is ForwardKind.UNTOUCHED:
            self._evaluation.clear()
            return _Pass(self._evaluation, frames=True, gradients=False, looks=True)
        self._due = self._saw_forward = True
        return _Pass(self._training, frames=True, gradients=self._gradients, looks=False)

    def _count_batch(self, watched: Watched, new: _Pass) -> None:
        if not new.looks and new.interval is not None:
            self._begin_training()
        begins = watched.is_root or self._looked
        self._looked = False
        if not begins:
            return
        if new.looks and self._trains:
            self._evaluation_batch += watched.is_root
        elif not self._batches_are_given:
            self._next_batch()
        if not self._broken and self._hooks.synchronize():
            self._optimizers.clear()

    def _begin_training(self) -> None:
        """Count anew from the first training batch on; what has no gradients is an evaluation from here."""
        if not self._trains:
            self._trains, self._batch = True, -1

    def _next_batch(self) -> None:
        if self._last_batch is not None and self._batch >= self._last_batch:
            self._abort()
        self._batch += 1
        self._evaluation_batch = -1

    def _take(self, current: _Pass, watched: Watched, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Measure the inputs of a call, before the module can change them."""
        taken: list[tuple[str, Measured | None]] = []
        current.open.append((watched, taken))
        interval = current.interval
        if interval is None or self._broken:
            return
        gradients = current.gradients and torch.is_grad_enabled()
        for role, tensor in arguments(inputs, keywords):
            if tensor is None:
                taken.append((role, _UNKNOWN))
                continue
            record = interval.measure(tensor) if current.frames else interval.record(tensor)
            taken.append((role, record.measured))
            if gradients and tensor.requires_grad:
                self._gradient_roles(tensor, record, current.batch).takers.append((watched, role))

    def _give(self, current: _Pass, watched: Watched, output: Any, *, failed: bool) -> bool:
        """Note a call that has ended; whether it made an event."""
        taken = current.close(watched)
        interval = current.interval
        if failed or taken is None or interval is None or self._broken:
            return False
        gradients = current.gradients and torch.is_grad_enabled()
        given: list[tuple[str, Measured]] = []
        one = isinstance(output, torch.Tensor)
        for role, tensor in (("output", output),) if one else tensors_in(output, "output"):
            if tensor is None:
                given.append((role, _UNKNOWN))
                continue
            record = interval.measure(tensor) if current.frames else interval.record(tensor)
            if record.measured is not None:
                given.append((role, record.measured))
            if gradients and tensor.requires_grad:
                self._gradient_roles(tensor, record, current.batch).makers.append((watched, role))
        if not current.frames:
            return False
        entered = [(role, measured) for role, measured in taken if measured is not None]
        own = self._own_parameters(watched, interval) if self._parameters else ()
        if not (entered or given or own):
            return False
        scale = fp8_scale(watched.module, "scaling_fwd", interval.slots) if watched.quantizes else None
        interval.events.append(Call(watched, current.batch, own, entered, given, scale))
        return True

    def _own_parameters(self, watched: Watched, interval: Interval) -> list[tuple[str, Measured]]:
        parameters = watched.module.named_parameters(recurse=False)
        return [(name, interval.slots.measure(parameter)) for name, parameter in parameters]

    def _end(self, current: _Pass, *, failed: bool) -> None:
        """An outermost call has ended."""
        self._thread.current = None
        if self in running.detectors:
            running.detectors.remove(self)
        if current.looks and not failed and not self._closed:
            self._looked = self._looked or not self._trains
            found = self._look_at(self._evaluation)
            if found is None and self._trains and self._looks_together():
                return  # a failure waits for the next look of all
            self._stop_if(found or self._failed())
            if self._last_batch is not None and self._batch >= self._last_batch and not self._trains:
                self._abort()

    # ------------------------------------------------------------------ a backward

    def _gradient_roles(self, tensor: torch.Tensor, record: Record, batch: int) -> GradientRoles:
        """Watch the gradient of a tensor, if it is not yet."""
        if record.gradient is None:
            roles = record.gradient = GradientRoles(batch)
            if tensor.dtype.is_floating_point:
                with contextlib.suppress(RuntimeError):  # such as under a transform of torch.func
                    handle = tensor.register_hook(functools.partial(self._gradient, roles))  # type: ignore[no-untyped-call]
                    if tensor.is_leaf:  # it outlives the graph
                        self._leaf_hooks.append(handle)
        return record.gradient

    @outside_of_dynamo
    def _gradient(self, roles: GradientRoles, gradient: torch.Tensor | None) -> None:
        """A gradient has arrived; None where an autograd Function, such as DDP's for unused outputs, has given none."""
        if gradient is None or self._closed or self._broken or self._is_abandoned():
            return
        try:
            measured = self._training.measure(gradient).measured
            frames = roles.frames()
            if measured is None or not frames:
                return
            scales = [
                fp8_scale(place.module, "scaling_bwd", self._training.slots)
                if role in _QUANTIZED_GRADIENTS and sign == ">" and isinstance(place, Watched) and place.quantizes
                else None
                for sign, place, role in frames
            ]
            self._training.events.append(Gradient(roles.batch, frames, measured, scales))
            self._due = True
        except Exception as error:
            self._fail(error)
            return
        if self._immediate:
            self._check_last(self._training)

    # ------------------------------------------------------------------ looking

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Look before an optimizer of the model steps; other arguments for the step, if it is given a closure.

        Args:
            optimizer: any optimizer.
            args: the optimizer again, and the positional arguments of ``step``.
            keywords: the others.
        """
        if self._closed or self._is_abandoned():
            return None
        if not self._is_ours(optimizer):
            self._count_foreign_step()
            return None
        self._warn_of_unseen_forward()
        # The looks before the step of a scaler come first; an optimizer that is given one leaves out the step itself.
        scales = any(isinstance(value, GradScaler) for value in (*args[1:], *keywords.values()))
        self._look(may_be_skipped=scales)
        self._steps, self._stepped_by = self._steps + 1, type(optimizer).__name__
        # Lightning, and an optimizer such as LBFGS, run forward and backward inside of the step.
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._looking_after(args[1]), *args[2:]), keywords
        if callable(keywords.get("closure")):
            return args, {**keywords, "closure": self._looking_after(keywords["closure"])}
        return None

    def loss_scaled_by(self, scale: torch.Tensor | None) -> None:
        """A GradScaler has scaled a loss."""
        if self._closed or self._broken or self._is_abandoned():
            return
        try:
            self._training.note_loss_scale(scale)
        except Exception as error:
            self._fail(error)

    def before_scaled_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look before a GradScaler decides whether an optimizer of the model steps."""
        if not self._closed and not self._is_abandoned() and self._is_ours(optimizer):
            self._warn_of_unseen_forward()
            self.look()

    def _is_ours(self, optimizer: Any) -> bool:
        """Whether an optimizer steps a parameter of the model; groups may be added to it."""
        try:
            if not isinstance(optimizer, torch.optim.Optimizer):  # a wrapper: nothing is known of how it is compared
                return self._hooks.holds_parameter_of(optimizer)
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            known = self._optimizers.get(optimizer)
            if known is None or known[0] != sizes:
                known = self._optimizers[optimizer] = sizes, self._hooks.holds_parameter_of(optimizer)
            return known[1]
        except Exception as error:
            self._fail(error)
            return True  # other ranks may wait for this one in their look

    def _count_foreign_step(self) -> None:
        """Say once that nobody looks, where no optimizer of the model has ever stepped."""
        if self._foreign_steps is None or not self._due:
            return
        self._foreign_steps += 1
        if self._foreign_steps == _FOREIGN_STEPS:
            self._foreign_steps = None
            logger.warning(
                "Activation overflow: %d steps of optimizers have passed, none of which holds a parameter of the model,"
                " and nothing was looked at before them. Optimizers that step copies of the parameters (DeepSpeed ZeRO,"
                " Megatron's distributed optimizer) are not known by them: call look() of the detector before each"
                " step of theirs.",
                _FOREIGN_STEPS,
            )

    def _warn_of_unseen_forward(self) -> None:
        """Say once that gradients came of a forward of which no hook has heard."""
        if self._saw_forward or self._said_unseen or self._dropped or not self._training.events:
            return
        self._said_unseen = True
        logger.warning(
            "Activation overflow: the model was trained without a call of its hooks, so that its forward is not"
            " watched: it was compiled before the detector was made, or is called by model.forward(). Make the"
            " detector before the first compiled call, or call torch._dynamo.reset() after making it."
        )

    def _looking_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure, and a look at what it has done."""

        def run_and_look() -> Any:
            loss = closure()
            self._look(may_be_skipped=False)
            return loss

        return run_and_look

    def _looks_together(self) -> bool:
        return self._distributed and is_distributed(self._group)

    def _look_at_training(self, *, may_be_skipped: bool = True) -> Find | Failure | None:
        """A look: the first overflow since the last one, or else a failure."""
        find = self._look_at(self._training, may_be_skipped=may_be_skipped)
        find, self._pending, self._dropped = self._pending or find, None, 0
        self._looked = True
        return find or self._failed()

    def _failed(self) -> Failure | None:
        return None if self._failure is None else Failure(rank(), _text_of(self._failure))

    def _make_room(self) -> None:
        """Empty the slots, where nobody looks. A rank that others would wait for keeps what is found for the look."""
        events = len(self._training.events)
        find = self._look_at(self._training)
        if not self._looks_together():
            self._stop_if(find or self._failed())
        self._pending = self._pending or find
        self._dropped += events

    def _look_at(self, interval: Interval, *, may_be_skipped: bool = True) -> Find | None:
        """Read an interval, and begin it anew; the first overflow in it."""
        find = None
        try:
            if interval.events:
                find = self._judged(interval, interval.events, may_be_skipped=may_be_skipped)
        except Exception as error:
            self._fail(error)
        interval.clear()
        if interval is self._training:
            for handle in self._leaf_hooks:
                handle.remove()
            self._leaf_hooks.clear()
        return find

    def _check_last(self, interval: Interval) -> None:
        """The mode ``immediate``: look at the event that was just made."""
        events, interval.events = interval.events, []
        try:
            find = self._judged(interval, events)
        except Exception as error:
            self._fail(error)
            return
        self._stop_if(find)

    def _judged(self, interval: Interval, events: Sequence[Event], *, may_be_skipped: bool = True) -> Find | None:
        """The first overflow; the other frames are kept for later reports, traced, and compared with the limits."""
        values = interval.slots.read()
        evaluation = interval is self._evaluation and self._trains
        traced = frozenset[int]() if evaluation else self._traced
        if traced:
            self._trace(events, values)
        first_bad = functools.partial(self._judge.first_bad, events, values, excused=interval.excused, not_in=traced)
        bad = first_bad(loss_scaled=self.loss_scaled)
        scale = None
        if bad is not None and isinstance(events[bad[0]], Gradient) and may_be_skipped:
            scale = interval.loss_scale()
            if scale is not None and not scale <= 1:  # a scaler makes it smaller, and leaves out the step
                bad = first_bad(loss_scaled=True)
        if self._warn_above is not None:
            self._warn_of(events[: None if bad is None else bad[0]], values, self._warn_above)
        if bad is None:
            self._history.add(events, values)
            return None
        index, number = bad
        before = [*self._history, *seen(events[: index + 1], values)]
        after = len(list(events[index].frames())) - 1 - number
        frames = before[: len(before) - after][-self._max_frames :]
        culprit = frames[-1]
        place = culprit.frame.place
        return Find(
            path="" if place is None else place.path,
            class_name="" if place is None else place.class_name,
            role=culprit.frame.role,
            batch=culprit.batch,
            evaluation=evaluation,
            rank=rank(),
            sequence=self._dropped + index,
            headline=text.headline(culprit),
            advice=text.advice(culprit, events[index], loss_scale=scale),
            report=text.report(frames, abs_min=self._abs_min),
        )

    def _trace(self, events: Sequence[Event], values: Values) -> None:
        lines: list[str] = []
        for event in events:
            if event.batch in self._traced:
                if event.batch != self._traced_last:
                    self._traced_last = event.batch
                    lines.append(f"*** batch {event.batch} ***")
                lines += [text.line(frame, abs_min=self._abs_min) for frame in seen([event], values)]
        if lines:
            logger.warning("%s", "\n".join(lines))

    def _warn_of(self, events: Sequence[Event], values: Values, share: float) -> None:
        for near in near_limit(events, values, share):
            if near.place.path not in self._warned:
                self._warned.add(near.place.path)
                limit = torch.finfo(near.dtype).max
                logger.warning(
                    "%s: %s: %s comes near an overflow in batch %d: abs_max=%.2e is %.0f%% of what %s holds (%.2e)."
                    " This is said once for each module.",
                    near.place.path or "The model",
                    near.place.class_name,
                    near.role,
                    near.batch,
                    near.amax,
                    100 * near.amax / limit,
                    str(near.dtype).removeprefix("torch."),
                    limit,
                )

    def _stop_if(self, find: Find | Failure | None, *, together: bool = False) -> None:
        """Raise what was found.

        Args:
            find: nothing, an overflow, or a failure.
            together: whether all ranks are here with the same find.
        """
        if find is None:
            return
        if isinstance(find, Failure):
            cause = self._failure if find.rank == rank() else None
            self._begin_anew()
            raise DetectionFailedError(find.text, rank=find.rank) from cause
        self.reports += 1
        advice = self._advice_on_weights(find, together=together) or find.advice
        self._begin_anew()
        if find.rank == rank():
            logger.error("%s", find.report)
        over = (
            f" on rank {find.rank}" if torch.distributed.is_available() and torch.distributed.is_initialized() else ""
        )
        raise ActivationOverflowError(
            f"{find.headline}, in {'evaluation ' if find.evaluation else ''}batch {find.batch}{over}. The report in the"
            f" log, and in this exception's attribute 'report', has the frames before it. {advice}",
            path=find.path,
            class_name=find.class_name,
            role=find.role,
            batch=find.batch,
            evaluation=find.evaluation,
            rank=find.rank,
            report=find.report,
        )

    def _abort(self) -> None:
        found, batch = self._look_at_training(), self._batch
        self._close_hooks()
        self._stop_if(found)
        self._begin_anew()
        raise AbortAfterBatch(batch)

    def _is_abandoned(self) -> bool:
        return self.abandoned is not None and self.abandoned()

    def _advice_on_weights(self, find: Find, *, together: bool) -> str | None:
        """What to do where parameters are inf or nan themselves, of this rank or of any; None where all are finite."""
        try:
            broken = self._hooks.broken_parameters(find.path)
        except Exception as error:  # what was found has to be told all the same
            logger.warning("Activation overflow: the parameters could not be looked at (%s).", _text_of(error))
            broken = []
        if together:
            broken = pooled(broken, self._group)
        return text.advice_on_weights(broken, self._steps, self._stepped_by) if broken else None

    def _fail(self, error: Exception) -> None:
        """A failure of detection: nothing is noted until the next look, which raises it; or it is logged."""
        if self._broken:
            return
        self._broken = True
        if self._on_failure == "raise":
            self._failure = error
        else:
            logger.error(
                "Activation overflow detection failed (%s), and is off from here on. Training goes on.",
                _text_of(error),
                exc_info=error,
            )

    def _remove(self) -> None:
        """Take all hooks away, and forget what was seen."""
        self._close_hooks()
        self._begin_anew()

    def _close_hooks(self) -> None:
        self._closed = True
        self._hooks.remove()
        self._step_hook.remove()
        self._scaler_hook.remove()

    def _begin_anew(self) -> None:
        """Forget what was seen."""
        self._thread.current = None
        self._due = False
        if self._failure is not None:
            self._broken, self._failure = False, None
        if self in running.detectors:
            running.detectors.remove(self)
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()
        self._training.clear()
        self._evaluation.clear()
        self._history = History(self._max_frames)


def _before_step_of(detector: weakref.ref[DebugActivationOverflow]) -> Any:
    """The hook of all optimizers of the process; it does not keep the detector, and so not the model, alive."""

    @outside_of_dynamo
    def before_step(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> Any:
        found = detector()
        return None if found is None else found._before_step(optimizer, args, keywords)

    return before_step


def _calls_running(module: torch.nn.Module) -> int:
    """How many calls of a module are on the stack. A model may call itself: Lightning's training_step runs so."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        count += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


def _is_recorded() -> bool:
    """Whether what runs is recorded, for TorchScript or a CUDA graph: there are no numbers that anyone will read."""
    if torch._C._get_tracing_state() is not None:
        return True
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use and torch.cuda.is_current_stream_capturing()


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _roots(model: object) -> list[tuple[str, torch.nn.Module]]:
    if roots := named_roots(model):
        return roots
    raise OverflowDetectorError(f"The model is a torch.nn.Module, or a list or mapping of them, not {model!r}.")


def _from_transformers(
    given: Mapping[str, Any], trace_batches: Iterable[int], abort_after_batch: int | None
) -> tuple[Iterable[int], int | None]:
    """The values of ``trace_batches`` and ``abort_after_batch``, under whichever name."""
    ours = {"trace_batch_nums": "trace_batches", "abort_after_batch_num": "abort_after_batch"}
    for name, own in {"trace_batches": trace_batches, "abort_after_batch": abort_after_batch}.items():
        theirs = next(key for key, value in ours.items() if value == name)
        if theirs in given and own not in ((), None):
            raise OverflowOptionError(f"{theirs}= is another name of {name}=. Give one of the two.")
    for key in given:
        if key == "max_frames_to_save":
            raise OverflowOptionError(
                "max_frames_to_save= counts modules, and a frame is a tensor here. Give max_frames=, about three times"
                " as many: for a module's inputs, its outputs, and their gradients."
            )
        if key not in ours:
            known = inspect.signature(DebugActivationOverflow).parameters
            close = difflib.get_close_matches(key, [*known, *ours], n=1)
            raise OverflowOptionError(f"There is no option {key!r}.{f' Did you mean {close[0]!r}?' if close else ''}")
    traced = given.get("trace_batch_nums")
    last = given.get("abort_after_batch_num")
    return trace_batches if traced is None else traced, abort_after_batch if last is None else last


def _several(key: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OverflowOptionError(f"{key}= is a list, not {value!r}.")
    return tuple(value)


def _count(key: str, value: Any, *, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise OverflowOptionError(f"{key}= takes whole numbers from {least} on, not {value!r}.")
    return value
