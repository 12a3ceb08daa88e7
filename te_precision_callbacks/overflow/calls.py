"""Records the calls of modules and the gradients as events, and triggers checks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.layers.forwards import NO_BACKWARD, ForwardClassifier, ForwardKind, outside_of_dynamo
from te_precision_callbacks.overflow.checker import OverflowChecker
from te_precision_callbacks.overflow.errors import STOPS
from te_precision_callbacks.overflow.extreme_slots import Unmeasured
from te_precision_callbacks.overflow.hooks import ModelHooks, WatchedModule
from te_precision_callbacks.overflow.journal import DetectorOptions, Frame, Interval, Journal, Pass, Record, TensorEvent

_UNKNOWN = Unmeasured("unknown")

_DEEPEST = 8

_WITHOUT_TENSORS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


class ForwardCalls:
    """Receives the hooks of a model, and records events.

    At the start of an outermost forward and at the end of an evaluation it calls ``checker``, which may stop the run.
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, torch.nn.Module]],
        options: DetectorOptions,
        journal: Journal,
        checker: OverflowChecker,
    ) -> None:
        self._journal = journal
        self._checker = checker
        self._parameters = options.parameters
        # Kinds of forwards as in a session, but independent of a module's eval mode.
        self._classify = ForwardClassifier(precision_features_in_eval=False)
        self._classify.eval_mode_counts = False
        self.hooks = ModelHooks(roots, self, notices=journal.notices)

    def enter(self, watched: WatchedModule, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        journal = self._journal
        if journal.closed:
            return
        try:
            current = journal.thread.current
            if current is None:
                current = self._begin(watched)
            self._record_inputs(current, watched, inputs, keywords)
        except STOPS:
            raise
        except Exception as error:
            journal.fail(error)

    def leave(self, watched: WatchedModule, inputs: tuple[Any, ...], output: Any) -> None:
        journal = self._journal
        current = journal.thread.current
        if current is None:
            return
        # After an exception torch calls the hook without an output, while it handles the exception.
        failed = output is None and sys.exc_info()[0] is not None
        try:
            self._record_outputs(current, watched, output, failed=failed)
        except Exception as error:
            journal.fail(error)
        if not current.open:
            journal.thread.current = None
            if current.evaluates and not failed:
                self._checker.check_evaluation()

    @outside_of_dynamo
    def parameter_gradient(self, watched: WatchedModule, name: str, parameter: torch.Tensor) -> None:
        journal = self._journal
        if journal.broken or parameter.grad is None or journal.closed or _is_recorded():
            return
        try:
            measured = journal.training.slots.measure(parameter.grad)
            self._note(journal.batches.number, [Frame("<", watched, f"grad of {name}", measured)])
        except Exception as error:
            journal.fail(error)

    def close(self, error: BaseException | None = None) -> None:
        self._checker.close(error)

    # ------------------------------------------------------------------ a forward

    def _begin(self, watched: WatchedModule) -> Pass:
        journal = self._journal
        batches = self._journal.batches
        over = journal.closed
        # First of all, so that a rank that fails below still joins the next common check.
        new = self._new_pass(watched, over=over)
        journal.thread.current = new
        if over:
            return new
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            follow = watched.is_root or batches.all_checked
            self._checker.before_forward(is_root=watched.is_root, evaluation=new.evaluates)
            if follow and not journal.broken:
                self.hooks.synchronize()
        new.batch = batches.evaluation if new.evaluates else batches.number
        return new

    def _new_pass(self, watched: WatchedModule, *, over: bool) -> Pass:
        journal = self._journal
        if over or _is_recorded():
            return Pass(None, frames=False, gradients=False, evaluates=False)
        kind = self._classify(watched.module)
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            # Recomputed: the first forward has the frames. In a reentrant checkpoint, only this one has gradients.
            return Pass(journal.training, frames=False, gradients=kind is ForwardKind.OBSERVED, evaluates=False)
        if kind is ForwardKind.UNTOUCHED:
            journal.evaluation.clear()
            return Pass(journal.evaluation, frames=True, gradients=False, evaluates=True)
        journal.due = True
        journal.batches.train()
        return Pass(journal.training, frames=True, gradients=True, evaluates=False)

    def _record_inputs(
        self, current: Pass, watched: WatchedModule, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        taken: list[Frame] = []
        current.open.append((watched, taken))
        interval = current.interval
        if interval is None or self._journal.broken:
            return
        # The containers of the arguments do not count as nesting.
        for role, tensor in _items({**dict(enumerate(inputs)), **keywords}, "input", -1):
            record = self._measure(current, interval, tensor, Frame(">", watched, role, _UNKNOWN), taken)
            if record is not None:
                record.readers.append((watched, role))

    def _measure(
        self, current: Pass, interval: Interval, tensor: torch.Tensor | None, frame: Frame, frames: list[Frame]
    ) -> Record | None:
        """Add a tensor's frame; return its record if its gradient is watched."""
        if tensor is None:
            frames.append(frame)
            return None
        record = interval.measure(tensor) if current.frames else interval.record(tensor)
        if record.measured is not None:
            frames.append(frame._replace(measured=record.measured))
        if not (current.gradients and torch.is_grad_enabled() and tensor.requires_grad):
            return None
        interval.watch_gradient(tensor, record, current.batch, self._gradient)
        return record

    def _record_outputs(self, current: Pass, watched: WatchedModule, output: Any, *, failed: bool) -> None:
        taken = current.close(watched)
        interval = current.interval
        if failed or taken is None or interval is None or self._journal.broken:
            return
        results: list[Frame] = []
        for role, tensor in tensors_in(output, "output"):
            record = self._measure(current, interval, tensor, Frame("<", watched, role, _UNKNOWN), results)
            if record is not None:
                record.producers.append((watched, role))
        if not current.frames:
            return
        frames = []
        if self._parameters:
            for name, parameter in watched.module.named_parameters(recurse=False):
                frames.append(Frame("=", watched, name, interval.slots.measure(parameter)))
        frames += [*taken, *results]
        if frames:
            interval.events.append(TensorEvent("forward", current.batch, frames))

    # ------------------------------------------------------------------ a backward

    @outside_of_dynamo
    def _gradient(self, record: Record, gradient: torch.Tensor | None) -> None:
        journal = self._journal
        if gradient is None or journal.broken or journal.closed:
            return
        training = journal.training
        try:
            measured = training.measure(gradient).measured
            if measured is not None and (frames := record.gradient_frames(measured)):
                self._note(record.batch or 0, frames)
        except Exception as error:
            journal.fail(error)

    def _note(self, batch: int, frames: Sequence[Frame]) -> None:
        self._journal.training.events.append(TensorEvent("gradient", batch, frames))
        self._journal.due = True


def _is_recorded() -> bool:
    return torch._C._get_tracing_state() is not None or is_capturing()


def tensors_in(value: Any, role: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield each tensor with its role: the role of ``value``, and the index, key or field in brackets.

    The maximum depth is 8; objects of other classes, such as key-value caches, are not searched. A container that
    raises yields None.
    """
    if isinstance(value, torch.Tensor):
        yield role, value
    elif type(value) not in _WITHOUT_TENSORS and depth < _DEEPEST:
        try:
            yield from _items(value, role, depth)
        except Exception:  # user code, such as a mapping with computed items
            yield role, None


def _items(value: Any, role: str, depth: int) -> Iterator[tuple[str, torch.Tensor | None]]:
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{role}[{index}]", depth + 1)
    elif isinstance(value, Mapping):  # including ModelOutput of transformers
        for key, item in value.items():
            yield from tensors_in(item, f"{role}[{key}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), f"{role}[{field.name}]", depth + 1)
