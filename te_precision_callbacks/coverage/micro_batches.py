"""Groups the calls of a model into kinds: calls of one kind run equal products, so only one of them is counted.

The kind is cheap to compute for every call: from the shapes, dtypes and flags of the input, the called modules with the
shapes of their inputs, and the number of nodes added to the autograd graph.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from te_precision_callbacks.coverage.coverage import MOST_WITHOUT_BACKWARD
from te_precision_callbacks.coverage.marks import calls_in_graph, made_in_thread, mark_call, tensors_in

_DEEPEST = 8

MOST_COUNTED = 32
"""The most calls that are counted after the first step."""

_MOST_MISSES = 6
"""The number of counted calls that turn out to be of a known kind before a search ends."""

_ENOUGH_EQUAL = 2
"""The number of calls with other integers in the input and equal products that show that integers decide nothing."""

NOT_CALLED = (
    "torch's own products, because the script (or a checkpoint with use_reentrant=True) calls modules of the model,"
    " not the model itself"
)


class Kind(NamedTuple):
    """The kind of a call.

    Attributes:
        form: a hash of the model, its mode, its frozen parameters, and everything in the input that affects sizes.
        base: the form without the values of integers in the input.
        path: a hash of the called modules, with the shapes of their inputs.
        nodes: the number of autograd nodes, except Transformer Engine's, which depend on the precision.
    """

    form: int
    base: int
    path: int = 0
    nodes: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class ModelCall:
    """A call of a model, with its backward.

    Attributes:
        forwards: the number of calls in the step that this counted call represents.
        has_backward: whether its backward has begun.
        has_data_dependent_sizes: whether sizes in it depend on the values of tensors.
        is_marked: whether its backward can be recognized.
        producers: the calls that produced its inputs.
        seen: the products of a counted call, in execution order (:class:`.products.SeenProduct`).
    """

    form: int
    base: int
    is_counted: bool
    path: int = 0
    nodes: int = 0
    forwards: int = 1
    has_backward: bool = False
    has_ended: bool = False
    has_data_dependent_sizes: bool = False
    is_marked: bool = False
    producers: Sequence[ModelCall] = ()
    seen: list[Any] = dataclasses.field(default_factory=list)

    @property
    def kind(self) -> Kind:
        return Kind(self.form, self.base, self.path, self.nodes)

    @property
    def may_have_backward(self) -> bool:
        """Return whether its backward has run, or cannot be recognized."""
        return self.has_backward or not self.is_marked


class _RunningCall(threading.local):
    call: ModelCall | None = None


@dataclasses.dataclass
class _CallSearch:
    """The search for calls to count, among the calls with one form.

    Attributes:
        is_new: whether no call was counted, or the last one was useless: it raised, or its step had no backward.
        sought: kinds that occurred and were not counted.
        misses: the number of counted calls, since a kind was last added, that were not of a sought kind.
    """

    is_new: bool = True
    sought: set[Kind] = dataclasses.field(default_factory=set)
    misses: int = 0
    is_data_dependent: bool = False

    @property
    def is_wanted(self) -> bool:
        return self.is_new or (bool(self.sought) and self.misses < _MOST_MISSES)

    def seek(self, kind: Kind) -> None:
        if kind not in self.sought and len(self.sought) < MOST_COUNTED:
            self.sought.add(kind)
            self.misses = 0

    def find(self, kind: Kind) -> None:
        self.misses += kind not in self.sought
        self.sought.discard(kind)


Parts: TypeAlias = "Counter[tuple[Kind, bool]]"
"""A kind of calls, and whether of backwards -> their number in a step."""


class ModelCalls:
    """The calls of a model's steps.

    Attributes:
        is_first: whether this is the first step, which :data:`MOST_COUNTED` does not limit; up to
            :data:`MOST_WITHOUT_BACKWARD` steps without a backward are first steps too.
        has_graphs: whether layers run in CUDA graphs, so that the kind of a call is its form alone.
    """

    def __init__(self) -> None:
        self.is_first = True
        self.has_graphs = False
        self.thread_call = _RunningCall()
        self._forms: dict[int, _CallSearch] = {}
        self._equal_counts: Counter[int] = Counter()  # base -> how often other integers gave equal products
        self._known: set[Kind] = set()
        self._lack_backward: set[Kind] = set()
        self._all: list[ModelCall] = []
        self._left = MOST_COUNTED
        self._without_backward = 0
        self._parameters: dict[int, list[torch.nn.Parameter]] = {}

    @property
    def current(self) -> ModelCall | None:
        return self.thread_call.call

    def begin(
        self,
        root: torch.nn.Module,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        *,
        integers_count: bool,
    ) -> ModelCall:
        """Begin a call of a model in this thread.

        Args:
            integers_count: whether integers in the arguments may affect sizes.
        """
        if id(root) not in self._parameters:
            self._parameters[id(root)] = list(root.parameters())
        flags = hash(tuple([parameter.requires_grad for parameter in self._parameters[id(root)]]))
        inputs = list(leaves([arguments, keywords]))
        numbers = tuple([leaf for leaf in inputs if type(leaf) is int])
        form = hash((id(root), root.training, flags, *map(_form, inputs)))
        base = form
        if integers_count and numbers and self._equal_counts[base] < _ENOUGH_EQUAL:
            form = hash((base, numbers))
        search = self._forms.setdefault(form, _CallSearch())
        is_wanted = search.is_wanted and (self.is_first or self._left > 0)
        is_wanted = is_wanted or (self.is_first and search.is_data_dependent)
        call = ModelCall(form, base, is_wanted, producers=list(calls_in_graph(tensors_in(inputs))))
        if call.is_counted:
            self._left -= not self.is_first
            search.is_new = False
        call.nodes = -made_in_thread()
        self.thread_call.call = call
        return call

    def leave(self) -> None:
        """End the call of this thread, also after an exception. A call that raised does not represent others."""
        call = self.thread_call.call
        self.thread_call.call = None
        if call is not None and call.is_counted and not call.has_ended:
            self._forms[call.form].is_new = True

    def end(self, call: ModelCall, results: Any) -> None:
        call.nodes += made_in_thread()
        if self.has_graphs:
            call.path = 0
            call.nodes = 0
        call.has_ended = True
        call.is_marked = mark_call(leaves(results), call)
        self._all.append(call)
        form = self._forms[call.form]
        form.is_data_dependent |= call.has_data_dependent_sizes
        if call.is_counted:
            form.find(call.kind)
            self._known.add(call.kind)
        elif call.kind not in self._known:
            form.seek(call.kind)

    def begin_backward(self, roots: Iterable[Any]) -> ModelCall | None:
        current = self.current  # a backward inside a call, as with manual optimization in a training step
        waiting = [current] if current else list(calls_in_graph(roots))
        waiting_ids = set(map(id, waiting))
        counted: ModelCall | None = None
        while waiting:
            call = waiting.pop()
            if counted is None or call.is_counted:
                counted = call
            call.has_backward = True
            for producer in call.producers:
                if id(producer) not in waiting_ids:
                    waiting_ids.add(id(producer))
                    waiting.append(producer)
        return counted

    @property
    def should_count(self) -> bool:
        return self._left > 0 and any(form.is_wanted for form in self._forms.values())

    def end_step(self) -> list[ModelCall]:
        """Return the calls of the step; ``forwards`` of counted calls is then complete."""
        counted: dict[Kind, ModelCall] = {}
        calls = self._all
        self._all = []
        for call in calls:
            if call.is_counted:
                counted[call.kind] = call
            elif call.kind in counted:
                counted[call.kind].forwards += 1
        for kind, call in counted.items():
            if call.may_have_backward:
                self._lack_backward.discard(kind)
            else:
                self._lack_backward.add(kind)
        for call in calls:
            if call.has_backward and not call.is_counted and call.kind in self._lack_backward:
                self._forms[call.form].seek(call.kind)
        self._without_backward += 1
        has_backward = not calls or any(call.may_have_backward for call in calls)
        self.is_first = self.is_first and not has_backward and self._without_backward < MOST_WITHOUT_BACKWARD
        if self.is_first:
            for call in calls:
                self._forms[call.form].is_new = True
        return calls

    def note_integers(self, base: int, *, decide: bool) -> None:
        """Note whether a call with other integers in its input than an equal one had other products."""
        if decide:
            self._equal_counts[base] -= MOST_COUNTED
        else:
            self._equal_counts[base] += 1


def _form(leaf: Any) -> Any:
    """Return the properties of a part of the input that affect products, except for the value of an integer."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    if leaf is None or isinstance(leaf, (bool, str)):
        return leaf
    return type(leaf)


def leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the parts of a value that are no containers, also of the attributes of objects."""
    parts: Iterable[Any] | None = None
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif not isinstance(value, (torch.Tensor, torch.nn.Module)) and not callable(value):
        parts = getattr(value, "__dict__", {}).values() or None
    if parts is None or depth > _DEEPEST:
        yield value
        return
    for part in parts:
        yield from leaves(part, depth + 1)
