"""The watched modules of a model, and the hooks that record frames of their forwards and backwards."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import pydantic
import torch

from te_precision_callbacks.base.devices import is_capturing, is_lost, lost_message
from te_precision_callbacks.base.failures import Guard
from te_precision_callbacks.base.optimizers import held_ids
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.layers.forwards import (
    CallOfOneModule,
    ForwardClassifier,
    ForwardKind,
    is_in_backward,
    outside_of_dynamo,
)
from te_precision_callbacks.layers.naming import (
    NamedTorchModule,
    compiled_call,
    is_wrapper,
    module_paths,
    module_tree,
    parameters_of,
)
from te_precision_callbacks.overflow.errors import STOPS, OverflowOptionError
from te_precision_callbacks.overflow.frames import NO_MODULE, Extremes, Frame, WatchedModule, measure, tensors_in

logger = logging.getLogger(__name__)

_UNKNOWN = Extremes(unknown="unknown")


_Number = Annotated[int, pydantic.Field(strict=True, ge=0)]


class DetectorOptions(pydantic.BaseModel):
    """The keywords of :class:`~te_precision_callbacks.debug_utils.DebugActivationOverflow`."""

    model_config = pydantic.ConfigDict(frozen=True, arbitrary_types_allowed=True)

    max_frames: Annotated[int, pydantic.Field(strict=True, ge=1)]
    parameters: bool
    abs_min: bool
    trace_batches: tuple[_Number, ...]
    abort_after_batch: _Number | None
    allow_neg_inf: tuple[str, ...]
    distributed: bool
    process_group: torch.distributed.ProcessGroup | None

    @classmethod
    def from_keywords(cls, **keywords: object) -> DetectorOptions:
        try:
            return cls.model_validate(keywords)
        except pydantic.ValidationError as error:
            problem = error.errors()[0]
            why = problem["msg"].replace("Input should", "It must").replace("valid tuple", "list")
            raise OverflowOptionError(f"{problem['loc'][0]}= has the value {problem['input']!r}. {why}.") from error


def watched_modules(roots: Sequence[NamedTorchModule]) -> Iterator[NamedTorchModule]:
    """Yield each watched module once, with its path, parents first.

    Wrappers, and their parts of paths, are skipped. Modules inside a compiled module are not watched.
    """
    known_ids: set[int] = set()
    for prefix, root in roots:
        for path, module in module_paths(root, prefix, opaque=is_compiled):
            if id(module) not in known_ids and (is_compiled(module) or not is_wrapper(module)):
                known_ids.add(id(module))
                yield path, module


def is_compiled(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule) or compiled_call(module) is not None:
        return True
    return "OptimizedModule" in class_names(module)


def _class_name(module: torch.nn.Module) -> str:
    names = class_names(getattr(module, "_orig_mod", module))
    if "FSDPModule" in names[:-1]:
        return names[names.index("FSDPModule") + 1]
    return names[0]


def _ignore_call(*_: Any) -> None:
    """The hook of a copy of a watched module."""


@dataclass(slots=True, eq=False)
class _Call:
    """An outermost call of a watched module, with the calls inside it.

    Attributes:
        frames: the list that gets its frames; None without frames, as in a recomputed forward.
        gradients: whether its tensors' gradients are watched.
        open: the calls that have not ended, each with its inputs.
    """

    frames: list[Frame] | None
    gradients: bool
    batch: int = 0
    open: list[tuple[WatchedModule, list[Frame]]] = field(default_factory=list)

    def close(self, watched: WatchedModule) -> list[Frame] | None:
        """End a module's call, and calls inside it that never ended; return its inputs."""
        while self.open:
            opened, inputs = self.open.pop()
            if opened is watched:
                return inputs
        return None


@dataclass(slots=True, eq=False)
class _Record:
    """A version of a tensor.

    Attributes:
        gradients: the frames of its gradient, without extremes, in the order of the backward.
    """

    tensor: weakref.ref[torch.Tensor]
    version: int
    extremes: Extremes | None = None
    gradients: list[Frame] = field(default_factory=list)


class _Thread(threading.local):
    """The current call of each thread: on a GPU, a thread of autograd runs recomputed forwards and gradients."""

    call: _Call | None = None


class FrameRecorder:
    """Records the frames of a model, until :meth:`remove`.

    Args:
        before_forward: called at the start of an outermost forward, with whether it starts a batch.
        after_evaluation: called at the end of a forward without gradients, with its frames.

    Attributes:
        frames: the frames of the training since :meth:`forget_frames`.
        due: whether the model has trained since the last check.
        failure: a failure of recording. Nothing is recorded until it is set to None.
        is_over: whether nothing is recorded any more.
        batch: the number of the training batch; -1 before the first.
        evaluation: the number of the evaluation batch since the last training batch.
        has_marks: whether the loop marks its batches.
        all_checked: whether the next forward of any module starts a batch.
    """

    def __init__(
        self,
        roots: Sequence[NamedTorchModule],
        options: DetectorOptions,
        before_forward: Callable[[bool], None],
        after_evaluation: Callable[[list[Frame]], None],
    ) -> None:
        self.frames: list[Frame] = []
        self.due = False
        self.failure: Exception | None = None
        self.is_over = False
        self.batch = self.evaluation = -1
        self.has_marks = False
        self.all_checked = True
        self.modules: dict[torch.nn.Module, WatchedModule] = {}
        self._roots = roots
        self._options = options
        self._before_forward = before_forward
        self._after_evaluation = after_evaluation
        # Kinds of forwards as in a session, but independent of a module's eval mode.
        self._classify = ForwardClassifier(precision_features_in_eval=False)
        self._classify.eval_mode_counts = False
        self._thread = _Thread()
        self.guard = Guard(self._fail, STOPS)
        self._records: dict[int, _Record] = {}  # by the id of the tensor
        self._leaf_hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._tree: list[tuple[object, ...]] = []
        self._held: set[int] = set()
        self._has_warned = False
        self._watch()

    # ------------------------------------------------------------------ the hooks of a model

    def _watch(self) -> None:
        """Put the hooks on all modules, again if the modules have changed."""
        tree = module_tree([root for _, root in self._roots])
        if tree == self._tree:
            return
        self._tree = tree
        self.remove()
        self.modules.clear()
        opaque = []
        parameters: set[torch.nn.Parameter] = set()
        for path, module in watched_modules(self._roots):
            watched = WatchedModule(path, _class_name(module), is_root=not self.modules)
            self.modules[module] = watched
            if is_compiled(module):
                opaque.append(watched)
            if not isinstance(module, torch.jit.ScriptModule):  # does not accept hooks
                enter, leave = (
                    CallOfOneModule(functools.partial(hook, watched), functools.partial, _ignore_call)
                    for hook in (self._enter, self._leave)
                )
                self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                # Also called after an exception, to register the end of the call.
                self._handles.append(module.register_forward_hook(leave, always_call=True))
            for name, parameter in module.named_parameters(recurse=is_compiled(module)):
                if parameter.requires_grad and parameter.is_leaf and parameter not in parameters:
                    parameters.add(parameter)
                    frame = Frame("gradient", "<", watched, f"grad of {name}", 0, _UNKNOWN)
                    call = functools.partial(_parameter_gradient, weakref.ref(self), frame)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(call))  # type: ignore[no-untyped-call]
        if opaque and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Activation overflow: %s (%s)%s compiled, so the modules inside are not watched. To watch them, run"
                " without torch.compile and TorchScript.",
                opaque[0].path or "the model",
                opaque[0].class_name,
                f" and {len(opaque) - 1} more modules are" if len(opaque) > 1 else " is",
            )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def is_stepped_by(self, optimizer: Any) -> bool:
        stepped: set[int] | None = None
        with self.guard:
            stepped = set(held_ids(optimizer))
            if self._held.isdisjoint(stepped):  # a wrapper of the model may have replaced its parameters
                self._held = {id(parameter) for parameter in parameters_of([root for _, root in self._roots])}
        # Also after a failure, since other ranks may be waiting in their check.
        return self.failure is not None or stepped is None or not self._held.isdisjoint(stepped)

    def clear(self) -> None:
        """End an interval of training, and a call that an interrupt has left open."""
        self.forget_frames()
        self.due = False
        self._thread.call = None

    def forget_frames(self) -> None:
        self.frames.clear()
        self._records.clear()
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()

    # ------------------------------------------------------------------ failures

    @property
    def _rests(self) -> bool:
        return self.is_over or self.failure is not None

    def _fail(self, error: Exception) -> None:
        """Keep a failure for the next check."""
        if self._rests:
            return
        if is_lost(error):  # the next operation of training raises it
            self.is_over = True
            logger.warning("%s", lost_message(error, "Activation overflow detection"))
        else:
            self.failure = error

    # ------------------------------------------------------------------ a forward

    @outside_of_dynamo
    def _enter(
        self, watched: WatchedModule, module: torch.nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        if self.is_over:
            return
        with self.guard:
            call = self._thread.call or self._begin(watched, module)
            # The containers of the arguments do not count as nesting.
            tensors = tensors_in({**dict(enumerate(arguments)), **keywords}, "input", -1)
            call.open.append((watched, self._frames_of(call, ">", watched, tensors)))

    @outside_of_dynamo
    def _leave(self, watched: WatchedModule, module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        call = self._thread.call
        if call is None:
            return
        # After an exception torch calls the hook without an output, while it handles the exception.
        failed = output is None and sys.exc_info()[0] is not None
        inputs = call.close(watched)
        with self.guard:
            if inputs is not None and not failed:
                outputs = self._frames_of(call, "<", watched, tensors_in(output, "output"), inputs)
                if call.frames is not None:
                    parameters = module.named_parameters(recurse=False) if self._options.parameters else ()
                    call.frames += [*self._frames_of(call, "=", watched, parameters, inputs), *inputs, *outputs]
        if not call.open:
            self._thread.call = None
            if call.frames is not None and not call.gradients and not failed:
                self._after_evaluation(call.frames)

    def _begin(self, watched: WatchedModule, module: torch.nn.Module) -> _Call:
        kind = self._classify(module)
        if torch._C._get_tracing_state() is not None or is_capturing():
            call = _Call(None, gradients=False)
        elif is_in_backward():
            # Recomputed: the first forward has the frames. In a reentrant checkpoint, only this one has gradients.
            call = _Call(None, gradients=kind is ForwardKind.OBSERVED)
        elif kind is ForwardKind.UNTOUCHED:
            call = _Call([], gradients=False)
        else:
            self.due = True
            call = _Call(self.frames, gradients=True)
        self._thread.call = call  # first of all, so that a rank that fails below still joins the next common check
        if call.frames is not None:
            starts = watched.is_root or (call.gradients and self.all_checked)
            if call.gradients:
                self._before_forward(starts and not self.has_marks)
                self.all_checked = False
            else:
                self.evaluation += watched.is_root
            if starts and not self._rests:
                self._watch()
        call.batch = max(self.batch if call.gradients or call.frames is None else self.evaluation, 0)
        return call

    def _frames_of(
        self,
        call: _Call,
        sign: str,
        watched: WatchedModule,
        tensors: Iterable[tuple[str, torch.Tensor]],
        inputs: Sequence[Frame] = (),
    ) -> list[Frame]:
        """Return the frames of tensors, with their roles, if the call has any, and watch the tensors' gradients."""
        frames: list[Frame] = []
        for role, tensor in () if self._rests else tensors:
            record = self._record_of(tensor)
            if call.frames is not None:
                extremes = self._extremes(record, tensor)
                frames.append(Frame("forward", sign, watched, role, call.batch, extremes, inputs))
            if call.gradients and torch.is_grad_enabled() and tensor.requires_grad and sign != "=":
                if not record.gradients and tensor.dtype.is_floating_point:
                    with contextlib.suppress(RuntimeError):  # for example under a transform of torch.func
                        note = functools.partial(self.note_gradient, record.gradients)
                        handle = tensor.register_hook(note)  # type: ignore[no-untyped-call]
                        if tensor.is_leaf:  # a leaf outlives the graph
                            self._leaf_hooks.append(handle)
                turned = "<" if sign == ">" else ">"
                frame = Frame("gradient", turned, watched, f"grad_{role}", call.batch, _UNKNOWN)
                record.gradients.insert(0, frame)
        return frames

    def note_label(self, tensor: torch.Tensor, label: str) -> None:
        call = self._thread.call
        if call is None or call.frames is None or self._rests:
            return
        with self.guard:
            extremes = self._extremes(self._record_of(tensor), tensor)
            call.frames.append(Frame("label", "=", NO_MODULE, label, call.batch, extremes))

    def _record_of(self, tensor: torch.Tensor) -> _Record:
        """Return the record of a tensor, shared by all modules until the tensor is changed in place."""
        try:
            version = tensor._version
        except RuntimeError:  # created in inference mode, without a version counter
            return _Record(weakref.ref(tensor), -1)
        record = self._records.get(id(tensor))
        if record is None or record.version != version or record.tensor() is not tensor:
            record = _Record(weakref.ref(tensor), version)
            self._records[id(tensor)] = record
        return record

    def _extremes(self, record: _Record, tensor: torch.Tensor) -> Extremes:
        if record.extremes is None:
            record.extremes = measure(tensor, abs_min=self._options.abs_min)
        return record.extremes

    # ------------------------------------------------------------------ a backward

    @outside_of_dynamo
    def note_gradient(self, frames: Sequence[Frame], gradient: torch.Tensor | None) -> None:
        if gradient is None or self._rests:  # None: of an autograd Function, such as DDP's for unused outputs
            return
        with self.guard:
            extremes = self._extremes(self._record_of(gradient), gradient)
            for frame in frames:  # _replace() would be slow
                self.frames.append(Frame("gradient", frame.sign, frame.module, frame.role, frame.batch, extremes))
            self.due = True


@outside_of_dynamo
def _parameter_gradient(recorder: weakref.ref[FrameRecorder], frame: Frame, parameter: torch.Tensor) -> None:
    """The hook of a parameter, with a weak reference: the cycle collector does not visit hooks of parameters."""
    alive = recorder()
    if alive is not None:
        alive.note_gradient([frame._replace(batch=max(alive.batch, 0))], parameter.grad)
