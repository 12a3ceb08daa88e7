"""Kinds of forwards: training, recomputation, or evaluation."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

import torch
from torch.autograd.function import FunctionCtx

NO_BACKWARD = -1
"""``torch._C._current_graph_task_id()`` outside a backward pass."""


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_MODULE_CALL = torch.nn.Module._call_impl.__code__
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
"""Code objects of torch 2.13 to 2.15 that identify frames."""


def outside_of_dynamo(function: FunctionT) -> FunctionT:
    """Exclude a function from compilation; compiled code calls it between two graphs.

    Dynamo cannot import features, which were loaded by path, and must not trace the side effects of hooks.
    """
    return cast(FunctionT, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def absent_from_graphs(function: FunctionT, in_graph: Callable[..., Any]) -> FunctionT:
    """Return a function that runs ``function`` uncompiled, and is ``in_graph`` where Dynamo compiles its caller.

    Compiled callers get the graph that they have without a session, and so the same rounding. By itself, after a graph
    break, the result is not compiled: it would be taken for part of a graph.
    """
    not_compiled = outside_of_dynamo(function)

    @functools.wraps(function)
    def either(*arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return in_graph(*arguments, **keywords)
        if torch._C._dynamo.eval_frame.get_eval_frame_callback() is None:  # nothing is compiled in this thread
            return function(*arguments, **keywords)
        return not_compiled(*arguments, **keywords)

    # A graph that was compiled before reads the defaults of the function by its name.
    for defaults in ("__defaults__", "__kwdefaults__"):
        setattr(either, defaults, getattr(in_graph, defaults))
    return cast(FunctionT, compiled_in_callers_only(either))


def compiled_in_callers_only(function: FunctionT) -> FunctionT:
    """Keep Dynamo from compiling a function by itself, as after a graph break, but not within a compiled caller.

    Read from torch 2.13: _dynamo/decorators.py, skip, which also keeps compiled callers from calling it.
    """
    torch._dynamo.eval_frame.skip_code(function.__code__)
    return function


class CallOfOneModule:
    """A call of one module, in an attribute of it; copies of the module get ``function(*arguments)`` instead."""

    __wrapped__: Callable[..., Any]

    def __init__(self, call: Callable[..., Any], function: Callable[..., Any], *arguments: Any) -> None:
        functools.update_wrapper(self, call)
        self._call = call
        self._in_copies = function, arguments

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._call(*arguments, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._in_copies


class ForwardKind(enum.Enum):
    OBSERVED = "features act, tensors are observed in it and in its backward"
    SILENT = "as observed, bit for bit, but nothing is recorded: the other half of a recomputed forward is"
    EVALUATION = "features that change precision act, nothing is observed"
    UNTOUCHED = "Transformer Engine's own path"


Classify = Callable[[torch.nn.Module], ForwardKind]
"""Returns the kind of a module's forward that is running."""


class ForwardClassifier:
    """Determines the kind of the running forward.

    Attributes:
        paused: whether the integration is evaluating.
        eval_mode_counts: whether a module in eval mode counts as evaluation. False if the integration reports
            evaluations, since a model may be trained in eval mode.
        abandoned: returns whether the session no longer observes this process.
        in_training_call: returns whether a call of the model with gradients is running in this thread.
    """

    def __init__(self, *, precision_features_in_eval: bool) -> None:
        self._evaluation = ForwardKind.EVALUATION if precision_features_in_eval else ForwardKind.UNTOUCHED
        self.paused = False
        self.eval_mode_counts = True
        self.abandoned: Callable[[], bool] | None = None
        self.in_training_call: Callable[[], bool] = bool

    def begin(self, *, abandoned: Callable[[], bool]) -> None:
        self.abandoned = abandoned

    def end(self) -> None:
        self.abandoned = lambda: True
        self.in_training_call = bool

    def pause_during(self, function: FunctionT) -> FunctionT:
        @functools.wraps(function)
        def paused(*arguments: Any, **keywords: Any) -> Any:
            was_paused = self.paused
            self.paused = True
            try:
                return function(*arguments, **keywords)
            finally:
                self.paused = was_paused

        return cast(FunctionT, paused)

    def __call__(self, module: torch.nn.Module) -> ForwardKind:
        if self.abandoned is not None and self.abandoned():
            return ForwardKind.UNTOUCHED
        if self.paused or (self.eval_mode_counts and not module.training):
            return self._evaluation
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            # A forward inside a backward is recomputed for an activation checkpoint. A reentrant checkpoint (an
            # autograd Function) ran the first forward without gradients, so the recomputed one is observed. A
            # non-reentrant checkpoint recomputes in a hook of a saved tensor, and its first forward was observed.
            reentrant = innermost_autograd_frame() == "backward"
            if reentrant:
                return ForwardKind.OBSERVED
            return ForwardKind.SILENT
        if torch.is_grad_enabled():
            return ForwardKind.OBSERVED
        if is_evaluation_forward():
            return self._evaluation
        if self.in_training_call() and is_checkpoint_without_backward():
            return ForwardKind.OBSERVED
        # A reentrant checkpoint recomputes it later.
        return ForwardKind.SILENT


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != NO_BACKWARD


def is_evaluation_forward() -> bool:
    """Return whether the running forward of a training step is an evaluation, such as a teacher's.

    An evaluation runs without gradients, and not inside an autograd Function such as a reentrant checkpoint.
    """
    return not torch.is_grad_enabled() and innermost_autograd_frame() != "forward"


def is_checkpoint_without_backward() -> bool:
    """Return whether a forward runs in a reentrant checkpoint without an input that needs a gradient.

    Such a checkpoint has no backward, so the parameters inside it get no gradient.
    """
    checkpoints = [context for context in running_functions() if "Checkpoint" in type(context).__name__]
    return bool(checkpoints) and not any(cast(Any, checkpoints[-1]).needs_input_grad)  # the outermost


def innermost_autograd_frame() -> str | None:
    """Return the innermost of ``forward`` or ``backward`` of an autograd Function, and ``unpack_hook``, on the stack.

    Non-reentrant checkpoints of torch 2.13 and Transformer Engine 2.20 recompute in ``unpack_hook``.
    """
    return next((name for name, _ in _autograd_frames()), None)


def running_functions() -> Iterator[FunctionCtx | None]:
    """Yield the contexts of autograd Functions with a running forward, innermost first, up to a backward.

    Yields None for a Function with ``setup_context``, which does not have a context yet.
    """
    for name, context in _autograd_frames():
        if name != "forward":
            return
        yield context


def is_recomputing() -> bool:
    """Return whether an activation checkpoint is recomputing a forward inside a backward."""
    in_module = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _ENGINE:
            return False  # a backward nested in the backward of a checkpoint
        in_module = in_module or code is _MODULE_CALL
        autograd = _autograd_frame(frame)
        if autograd is not None and autograd[0] != "forward":
            name, context = autograd
            checkpoints = "Checkpoint" in type(context).__name__
            return name == "unpack_hook" or in_module or checkpoints or torch.is_grad_enabled()
        frame = frame.f_back
    return False


def _autograd_frames() -> Iterator[tuple[str, FunctionCtx | None]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        autograd = _autograd_frame(frame)
        if autograd is not None:
            yield autograd
        frame = frame.f_back


def _autograd_frame(frame: FrameType) -> tuple[str, FunctionCtx | None] | None:
    """Return name and context of a frame of an autograd Function or of a recomputing checkpoint; else None."""
    name = frame.f_code.co_name
    if name == "unpack_hook":
        return name, None
    if name not in ("forward", "backward"):
        return None
    # Check the names first: reading f_locals of every frame would cost more than the forward pass.
    first = frame.f_code.co_varnames[:1]
    if first == ("ctx",):
        context = frame.f_locals.get("ctx")
        if isinstance(context, FunctionCtx):
            return name, context
    if name == "forward" and first != ("self",) and _is_of_function(frame.f_code):
        return name, None
    return None


@functools.lru_cache(maxsize=1024)
def _is_of_function(code: CodeType) -> bool:
    """Return whether code is the forward of an autograd Function; with ``setup_context`` it has no ``ctx``."""
    kinds: list[Any] = [torch.autograd.Function]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if getattr(inspect.unwrap(kind.forward), "__code__", None) is code:
            return True
    return False


def running_forward(module: torch.nn.Module) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_code.co_varnames
        if frame.f_code.co_name == "forward" and names[:1] == ("self",) and frame.f_locals.get("self") is module:
            return frame
        frame = frame.f_back
    return None
