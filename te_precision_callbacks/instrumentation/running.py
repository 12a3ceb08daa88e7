"""What a thread runs of the modules whose GEMMs are seen: the forward that a GEMM belongs to, or its backward."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.profiler import record_function

from te_precision_callbacks.base.vocabulary import OperandName
from te_precision_callbacks.coverage.seeing import modes_are_active, unseen
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.gemm_events import GemmOperand
from te_precision_callbacks.speed.trace.range_names import LayerRange, module_of


class Forward:
    """A forward of a module, with its backward.

    Attributes:
        layers: the names of the module's layers; empty for a module that nobody listens to.
        kind: the kind of the forward.
        recipe: its recipe.
        is_heard: whether its GEMMs have events: those of an operation that several layers are fused in have none, since
            nobody knows which layer a GEMM belongs to.
        events: how many events there have been.
        half: the layer of a LayerNormMLP whose GEMM ran last; -1 at the start of a forward, 2 at that of a backward.
        wanted: (number of the layer, tensor) of the tensors that are looked at before their quantization.
        high: (number of the layer, tensor) -> the tensor before its quantization, of the forward or backward that runs;
            None where nobody wants any.
        recomputed: the keys of what was computed once more, which a fused kernel has quantized.
        kept: what listeners keep of the forward until its backward has run.
        handled: the id of the exception that was being handled when the forward began.
    """

    __slots__ = (
        "_halves",
        "_read",
        "events",
        "half",
        "handled",
        "high",
        "is_heard",
        "kept",
        "kind",
        "layers",
        "recipe",
        "recomputed",
        "wanted",
    )

    def __init__(
        self, layers: Sequence[str], kind: ForwardKind, recipe: str, *, halves: bool, is_heard: bool = True
    ) -> None:
        self.is_heard = is_heard
        self.events = 0
        self.layers = layers
        self.kind = kind
        self.recipe = recipe
        self.wanted: Collection[tuple[int, str]] = ()
        self.high: dict[tuple[int, str], Any] | None = None
        self.recomputed: set[tuple[int, str]] = set()
        self.kept: dict[Any, Any] = {}
        self.handled = id(None)
        self._halves = halves
        self.half = 0
        self._read: set[tuple[int, str]] = set()

    def wants(self, number: int, tensor: str) -> bool:
        """Whether a tensor is looked at, and no GEMM has read it yet."""
        return (number, tensor) in self.wanted and (number, tensor) not in self._read

    def operand(self, number: int, tensor: OperandName, given: Any, *, columnwise: bool) -> GemmOperand:
        """An operand of a GEMM of one of the layers."""
        key = number, tensor
        first = key not in self._read
        self._read.add(key)
        high = None if self.high is None else self.high.pop(key, None)  # nobody looks at it a second time
        return GemmOperand(tensor, given, columnwise, high, first, key in self.recomputed)

    def next_number_of(self, gemm: str) -> int:
        """What :meth:`number_of` is going to give; nothing changes."""
        half = self.half
        try:
            return self.number_of(gemm, None)
        finally:
            self.half = half

    def number_of(self, gemm: str, expert: int | None) -> int:
        """The number of the layer whose GEMM runs next.

        LayerNormMLP has two: its forward, also a recomputed one, runs fc1 before fc2, and its backward fc2 before fc1,
        each dgrad before the wgrad of the same half.
        """
        if expert is not None or not self._halves:
            return expert or 0
        if gemm == "fprop":
            self.half = 0 if self.half in (-1, 2) else 1
        elif gemm == "dgrad":
            self.half = 1 if self.half in (-1, 0, 2) else 0
        return self.half


def unheard() -> Forward:
    """A forward of a module that nobody listens to."""
    return Forward((), ForwardKind.UNTOUCHED, "", halves=False, is_heard=False)


class _Here(threading.local):
    """What runs in a thread.

    Attributes:
        entered: the forward of a module that is being run; None outside of them.
        running: the forward or backward of an autograd Function that runs; None outside of them.
        inside: whether a GEMM runs, which may call another one.
        kind: the kind of the forward of operations that is being run. They run in an autograd Function, where
            training and evaluation look the same.
    """

    entered: Forward | None = None
    running: Forward | None = None
    inside: bool = False
    kind: ForwardKind = ForwardKind.UNTOUCHED


class Running:
    """What all threads run.

    Attributes:
        here: what the thread that asks runs.
        numbers: those of the products that follow in the iteration.
        has_ranges: whether ranges of torch.profiler are put around forwards, backwards and GEMMs.
    """

    def __init__(self) -> None:
        self.here = _Here()
        self.numbers = itertools.count()
        self.has_ranges = False

    def begin_iteration(self) -> None:
        """Count the products from 0 again."""
        self.numbers = itertools.count()

    def forget(self) -> None:
        """Forget what the threads run."""
        self.here = _Here()

    def in_layer(self) -> bool:
        """Whether this thread runs a layer's GEMMs: all products inside are those of the events."""
        return self.here.inside or self.here.running is not None

    def call(self, forward: Forward | None, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a function as a part of a forward. Its products have events: no mode looks at it."""
        return self._call(forward, False, function, arguments, keywords)

    def call_backward(
        self, forward: Forward | None, function: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> Any:
        """Call a function as a part of the backward of a forward, likewise."""
        return self._call(forward, True, function, arguments, keywords)

    def _call(
        self,
        forward: Forward | None,
        backward: bool,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        here = self.here
        before, here.running = here.running, forward
        try:
            if not self.has_ranges and not modes_are_active():
                return function(*arguments, **keywords)
            with self._range(forward, backward=backward), unseen() if modes_are_active() else nullcontext():
                return function(*arguments, **keywords)
        finally:
            here.running = before

    def _range(self, forward: Forward | None, *, backward: bool) -> AbstractContextManager[Any]:
        if not self.has_ranges or forward is None or not forward.layers:
            return nullcontext()
        return record_function(LayerRange(module_of(forward.layers), "", backward).name)

    def range_of_gemm(self, forward: Forward | None, gemm: str, *, grouped: bool) -> AbstractContextManager[Any]:
        """The range around a GEMM of a layer; around those of all experts where one call runs them."""
        if forward is None or not forward.layers:
            return nullcontext()
        layer = module_of(forward.layers) if grouped else forward.layers[forward.next_number_of(gemm)]
        return record_function(LayerRange(layer, gemm, gemm != "fprop").name)


class CurrentForward(threading.local):
    """The forward of an armed module that was asked last in this thread.

    Attributes:
        kind: its kind.
        module: its module.
        input_needs_gradient: whether its backward is going to run dgrad, judged by its input.
        has_quantized_input: whether its input is quantized already.
        dgrad: the quantizer of the dgrad that was built last, until it is paired with another one.
    """

    kind: ForwardKind
    module: Any
    input_needs_gradient: bool = True
    has_quantized_input: bool = False
    dgrad: Any = None
