"""Kinds of forward passes: training, part of a recomputed forward, or evaluation."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch.autograd.function import FunctionCtx

NO_BACKWARD = -1
"""``torch._C._current_graph_task_id()`` outside a backward pass."""


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def outside_of_dynamo(function: FunctionT) -> FunctionT:
    """Keeps a function out of a compiled model, which calls it between two graphs.

    Dynamo cannot import features, which were executed by path; and it must not trace the notes of a hook.
    """
    return cast(FunctionT, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class ForwardKind(enum.Enum):
    """What a session does with a forward pass."""

    OBSERVED = "features act, tensors are observed in it and in its backward"
    SILENT = "as observed, bit for bit, but nothing is recorded: the other half of a recomputed forward is"
    EVALUATION = "features that change precision act, nothing is observed"
    UNTOUCHED = "Transformer Engine's own path"


class ForwardClassifier:
    """Decides the kind of a forward.

    Attributes:
        paused: set by a front door while it evaluates.
        was_paused: whether ``paused`` was set since ``was_paused`` was last set to False.
        kept: whether the session has ended and left the features that change precision: every forward is an evaluation.
        eval_mode_counts: whether a module in eval mode counts as being evaluated. False if the front door says when it
            evaluates: a model may be trained in eval mode, or left in it by a validation that failed.
        abandoned: whether the loop that started the session has ended without stopping it, so forwards no longer belong
        to it.
    """

    def __init__(self, *, precision_features_in_eval: bool) -> None:
        self._evaluation = ForwardKind.EVALUATION if precision_features_in_eval else ForwardKind.UNTOUCHED
        self._paused = self.was_paused = False
        self.kept = False
        self.eval_mode_counts = True
        self.abandoned: Callable[[], bool] | None = None

    def begin(self, *, abandoned: Callable[[], bool]) -> None:
        """Begin a run."""
        self.abandoned = abandoned
        self.kept = False
        self.was_paused = self._paused

    def end(self) -> None:
        """Treat every forward from now on as without a session."""
        self.abandoned = _always

    @property
    def paused(self) -> bool:
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        self._paused = value
        self.was_paused = self.was_paused or value

    def __call__(self, module: torch.nn.Module) -> ForwardKind:
        """The kind of the forward of ``module`` that is being entered."""
        if self.abandoned is not None and self.abandoned():
            return ForwardKind.UNTOUCHED
        if self.kept:
            return self._evaluation
        if self.paused or (self.eval_mode_counts and not module.training):
            return self._evaluation
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            # Inside a backward pass, so recomputed for an activation checkpoint. A reentrant one (an autograd Function)
            # ran the first forward without gradients: this is the one to observe. Any other kind recomputes from a hook
            # of a saved tensor, and its first forward was observed.
            reentrant = innermost_autograd_frame() == "backward"
            return ForwardKind.OBSERVED if reentrant else ForwardKind.SILENT
        if torch.is_grad_enabled():
            return ForwardKind.OBSERVED
        # A reentrant checkpoint recomputes it later.
        return self._evaluation if in_evaluation() else ForwardKind.SILENT


def _always() -> bool:
    return True


def in_evaluation() -> bool:
    """Whether what runs in the forward of a training step is an evaluation, as of a teacher: without gradients, and not
    inside of a Function's forward, which runs without them, as that of a reentrant checkpoint."""
    return not torch.is_grad_enabled() and innermost_autograd_frame() != "forward"


def innermost_autograd_frame() -> str | None:
    """``forward`` or ``backward`` of the innermost autograd Function on the stack, or ``unpack_hook``; else None.

    ``unpack_hook`` is where torch 2.13's and Transformer Engine 2.20's non-reentrant checkpoints recompute.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name == "unpack_hook":
            return name
        # The cheap look at the names first: f_locals of every frame would cost more than the forward pass.
        is_function = name in ("forward", "backward") and frame.f_code.co_varnames[:1] == ("ctx",)
        if is_function and isinstance(frame.f_locals.get("ctx"), FunctionCtx):
            return name
        frame = frame.f_back
    return None


def running_forward(module: torch.nn.Module) -> FrameType | None:
    """The frame of the forward that a module is running; None if it runs none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_code.co_varnames
        if frame.f_code.co_name == "forward" and names[:1] == ("self",) and frame.f_locals.get("self") is module:
            return frame
        frame = frame.f_back
    return None
