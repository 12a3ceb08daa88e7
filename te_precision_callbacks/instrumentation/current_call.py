"""The current forward or backward of each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.vocabulary import OperandName
from te_precision_callbacks.coverage.micro_batches import ModelCall
from te_precision_callbacks.coverage.model_watch import hide_operators, modes_are_active
from te_precision_callbacks.instrumentation.arguments import PlainTensors
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.gemm_events import GemmOperand, Kept


class Forward:
    """A forward of a module, with its backward. It is made for each forward of a step, so it has no ``__init__``.

    Attributes:
        layers: names of the module's layers; empty for a module that is not watched.
        module: the id of the module.
        call: the call of the model that it belongs to, until its autograd Function has run; None without one.
        begun: number of autograd nodes of this thread before it.
        attention: the path of a module of attention, which has no layers; else empty.
        is_due: whether its GEMMs are observed by features.
        is_fused: whether it is an operation that fuses several layers, so that the layer of a GEMM is unknown.
        events: number of GEMMs so far.
        order: GEMM and position -> index of its layer, of a module with several layers in turn; else None.
        position: index of the layer with the last GEMM; -1 at the start of a forward, 2 at the start of a backward.
        wanted: (layer index, tensor name) of tensors that features need before quantization.
        high: (layer index, tensor name) -> tensor before quantization; None if ``wanted`` is empty.
        read: keys of tensors that a GEMM has read.
        due: the features that observe the module's tensors on its fused path; None without one.
        repeats: whether its GEMMs can be measured by prepared launches.
        kept: values that are kept until the backward has run.
        watched: (layer index, tensor name) of tensors that are in the ring; None if it gets nothing.
        micro_batch: number of the model's call, from 0; -1 if it is not known.
        unread: what the ring gets with the next GEMM of this forward or its backward: the name of the tensor, the
            tensor, and its format: 1 / RMS of each token before a norm, or a tensor before a cast that hides nan.
        shapes: layer index -> shape of the result of its fprop, if the forward counts as a product.
        has_wgrad: whether the wgrad of each layer runs right after its dgrad.
    """

    layers: Sequence[str] = ()
    module = 0
    call: ModelCall | None = None
    begun = 0
    attention = ""
    kind = ForwardKind.UNTOUCHED
    recipe = ""
    is_due = False
    is_fused = False
    events = 0
    order: Mapping[tuple[str, int], int] | None = None
    position = 0
    wanted: Collection[tuple[int, str]] = ()
    high: PlainTensors | None = None
    read: set[tuple[int, str]]
    due: Any = None
    repeats = False
    kept: Kept
    watched: set[tuple[int, str]] | None = None
    micro_batch = -1
    unread: Sequence[tuple[str, torch.Tensor, torch.dtype | int]] = ()
    shapes: dict[int, torch.Size]
    has_wgrad = False

    def operand(self, index: int, tensor: OperandName, passed: Any, *, columnwise: bool) -> GemmOperand:
        key = index, tensor
        first = key not in self.read
        self.read.add(key)
        high = None if self.high is None else self.high.pop(key, None)
        return GemmOperand(tensor, passed, columnwise, high, first)

    def next_layer_index(self, gemm: str, expert: int | None) -> int:
        """Return the index of the layer with the next GEMM, and advance to it."""
        if expert is not None or self.order is None:
            return expert or 0
        self.position = self.order[gemm, self.position]
        return self.position


UNOBSERVED = Forward()
"""The forward of every module that is not watched; it has no layers."""


class _ThreadState(threading.local):
    """State of a thread.

    Attributes:
        entered: forward of the module that this thread has entered.
        running: forward that this thread executes, or its backward.
        in_gemm: whether this thread is in a GEMM function, which may call another one.
        kind: kind of the current forward of ``te.ops`` operations; within their autograd Function, training and
            evaluation look the same.
    """

    entered: Forward | None = None
    running: Forward | None = None
    in_gemm: bool = False
    kind: ForwardKind = ForwardKind.UNTOUCHED


class Running:
    """The state of all threads."""

    def __init__(self) -> None:
        self.thread_state = _ThreadState()

    def begin_iteration(self) -> None:
        self.thread_state.entered = None  # of a forward that has failed

    def forget(self) -> None:
        self.thread_state = _ThreadState()

    def call(self, forward: Forward, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a function as part of a forward or backward, hidden from dispatch modes, since its GEMMs are counted."""
        state = self.thread_state
        caller = state.running
        state.running = forward
        try:
            if not modes_are_active():
                return function(*arguments, **keywords)
            with hide_operators():
                return function(*arguments, **keywords)
        finally:
            state.running = caller


class CurrentForward(threading.local):
    """The last forward of an armed module in this thread.

    Attributes:
        input_needs_gradient: whether its backward will run dgrad.
        dgrad: the last dgrad quantizer that was built, until it is paired with the next one.
    """

    kind: ForwardKind
    module: Any
    input_needs_gradient: bool = True
    has_quantized_input: bool = False
    dgrad: Any = None
