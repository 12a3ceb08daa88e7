"""The calls of a model, and their kinds: calls with the same evidence run the same products.

The evidence costs little, so it is taken of every call: the shapes, types and flags of the input, the modules that the
call reaches with the shapes of their inputs, and the number of nodes that it adds to autograd's graph. One call of each
kind is counted.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.coverage.coverage import MOST_WITHOUT_BACKWARD
from te_precision_callbacks.coverage.nodes import found_in_graph, made_in_thread, mark_call

_DEEPEST = 8

MOST_COUNTED = 32
"""The most calls that are counted after the first step."""

_MOST_IN_VAIN = 6
"""So many calls with the input of an uncounted one may turn out to be of a known kind, before the search ends."""

_ENOUGH_ALIKE = 2
"""So many calls with other Python numbers in the input, and equal products, show that these numbers decide nothing."""

NOT_CALLED = (
    "all products of torch: in this step the script has not called the session's model itself with gradients (it has"
    " only called modules in it, or a checkpoint with use_reentrant=True is around it), so these products are not seen"
)
"""The text for a step in which layers ran, and the model was not called."""

OUTSIDE = "outside"
"""The form of what a step runs outside of calls of the model."""


class Kind(NamedTuple):
    """The evidence of a call: calls with an equal one run equal products.

    Attributes:
        form: what of the input decides sizes, with the model, its mode and its frozen parameters.
        path: a hash of the modules that it reaches, with the shapes of their inputs.
        nodes: the number of its nodes of autograd outside of Transformer Engine's modules, in which it
            depends on the precision.
        numbers: a hash of the Python numbers in the input and in those of its modules; 0 where they decide nothing.
    """

    form: int | str
    path: int = 0
    nodes: int = 0
    numbers: int = 0


class _Mark:
    """Is kept with the graph of a call, and ends with it."""

    def __init__(self, call: ModelCall) -> None:
        self.call = call


@dataclasses.dataclass(eq=False, slots=True)
class ModelCall:
    """A call of a model, with its backward.

    Attributes:
        form, path, nodes, numbers: as of :class:`Kind`.
        is_counted: whether its products are counted.
        forwards: so many calls of the step are represented by this counted one.
        has_backward: whether its backward has begun.
        has_ended: whether its forward has ended well.
        goes_by_values: whether sizes in it depend on the values of tensors.
        is_known: whether its backward is recognized.
        graph: what ends with its graph; None while it runs.
        behind: the calls whose results it has been given.
    """

    form: int | str
    is_counted: bool
    path: int = 0
    nodes: int = 0
    numbers: int = 0
    forwards: int = 1
    has_backward: bool = False
    has_ended: bool = False
    goes_by_values: bool = False
    is_known: bool = False
    graph: weakref.ref[_Mark] | None = None
    behind: Sequence[ModelCall] = ()

    @property
    def may_have_backward(self) -> bool:
        """Whether its backward has run, or is not recognized."""
        return self.has_backward or not self.is_known

    @property
    def is_thrown_away(self) -> bool:
        """Whether its graph is gone without a backward."""
        return not self.may_have_backward and self.graph is not None and self.graph() is None

    def reach(self, number: int, values: Iterable[Any]) -> None:
        """Note that the call has reached a module, with these arguments."""
        path = self.path
        for value in values:
            if isinstance(value, torch.Tensor):
                path = hash((path, number, value.shape))
            elif isinstance(value, (bool, str)):
                path = hash((path, value))
            elif isinstance(value, (int, float)):
                self.numbers = hash((self.numbers, value))
        self.path = hash((path, number))


class _RunningCall(threading.local):
    """The call that runs in a thread."""

    call: ModelCall | None = None


class _CallSearch:
    """The search for calls to count, among those of one form.

    Attributes:
        is_new: whether none has been counted, or the last one says nothing.
        sought: kinds that have been met and not counted.
        in_vain: how many calls were counted since, and turned out to be of a known kind.
        last: the call that was counted last.
        numbers: hashes of the Python numbers in inputs that were counted.
        alike: how many kinds have shown that numbers decide nothing; negative where they decide.
        by_values: whether sizes depend on the values of tensors.
    """

    def __init__(self) -> None:
        self.is_new = True
        self.sought: set[Kind] = set()
        self.in_vain = 0
        self.last: ModelCall | None = None
        self.numbers: set[int] = set()
        self.alike = 0
        self.by_values = False

    @property
    def is_wanted(self) -> bool:
        return self.is_new or (bool(self.sought) and self.in_vain < _MOST_IN_VAIN)

    @property
    def ignores_numbers(self) -> bool:
        return self.alike >= _ENOUGH_ALIKE

    def seek(self, kind: Kind) -> None:
        """Count calls until one is of this kind."""
        if kind not in self.sought and len(self.sought) < MOST_COUNTED:
            self.sought.add(kind)
            self.in_vain = 0

    def find(self, kind: Kind) -> None:
        """Note that a counted call is of this kind."""
        self.in_vain += kind not in self.sought
        self.sought.discard(kind)


Parts = Mapping[Kind, tuple[int, int]]
"""Kind -> how many calls of it a step has, and how many of their backwards."""


class ModelCalls:
    """The calls of a model's steps.

    Attributes:
        is_first: whether the first step runs, in which counting costs no part of :data:`MOST_COUNTED`. Steps without a
            backward, as of batches that are skipped, count as such up to :data:`MOST_WITHOUT_BACKWARD`.
        outside: what the step runs outside of calls of the model.
    """

    def __init__(self) -> None:
        self.is_first = True
        self.here_in_thread = _RunningCall()
        self.outside = ModelCall(OUTSIDE, True)
        self._forms: dict[int | str, _CallSearch] = {OUTSIDE: _CallSearch()}
        self._forms[OUTSIDE].is_new = False
        self._known: set[Kind] = set()
        self._lack_backward: set[Kind] = set()
        self._all: list[ModelCall] = []
        self._left = MOST_COUNTED
        self._without_backward = 0
        self._parameters: dict[int, list[torch.nn.Parameter]] = {}

    @property
    def here(self) -> ModelCall | None:
        """The call that runs in this thread."""
        return self.here_in_thread.call

    def begin(
        self, root: torch.nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any], *, by_numbers: bool = True
    ) -> ModelCall:
        """Begin a call of a model in this thread.

        Args:
            by_numbers: whether Python numbers in the arguments may decide sizes.
        """
        if id(root) not in self._parameters:
            self._parameters[id(root)] = list(root.parameters())
        flags = hash(tuple([parameter.requires_grad for parameter in self._parameters[id(root)]]))
        numbers: list[Any] = []
        try:
            given: Hashable = _form(arguments, numbers), _form(keywords, numbers)
        except _UnknownFormError:
            given = None
        form = hash((id(root), root.training, flags, given))
        of_form = self._forms.setdefault(form, _CallSearch())
        call = ModelCall(form, False, behind=list(_calls_in(leaves([arguments, keywords]))))
        call.numbers = hash(tuple(numbers)) if by_numbers and numbers else 0
        call.is_counted = self._is_to_count(of_form, call.numbers)
        if call.is_counted:
            self._left -= not self.is_first
            of_form.is_new, of_form.last = False, call
            of_form.numbers.add(call.numbers)
        call.nodes = -made_in_thread()
        self.here_in_thread.call = call
        return call

    def _is_to_count(self, form: _CallSearch, numbers: int) -> bool:
        if self.is_first and (form.by_values or (form.last is not None and form.last.is_thrown_away)):
            return True
        is_new = form.is_wanted or (numbers not in form.numbers and not form.ignores_numbers)
        return is_new and (self.is_first or self._left > 0)

    def leave(self) -> None:
        """The call of this thread has ended, well or not. One that has raised stands for no other."""
        call, self.here_in_thread.call = self.here_in_thread.call, None
        if call is not None and call.is_counted and not call.has_ended:
            self._forms[call.form].is_new = True

    def end(self, call: ModelCall, results: Any) -> None:
        """Note that a call has ended well."""
        call.nodes += made_in_thread()
        call.has_ended = True
        mark = _Mark(call)
        call.is_known = mark_call(leaves(results), mark)
        call.graph = weakref.ref(mark)
        self._all.append(call)
        form, kind = self._forms[call.form], self.kind_of(call)
        form.by_values |= call.goes_by_values
        if call.is_counted:
            form.find(kind)
            self._known.add(kind)
        elif kind not in self._known:
            form.seek(kind)

    def begin_backward(self, roots: Iterable[Any]) -> ModelCall | None:
        """A call whose backward begins, a counted one if there is one; None if there is none."""
        here = self.here  # a backward inside of a call, as in a training step that optimizes by itself
        waiting = list(_calls_in(roots)) if here is None else [here]
        known = set(map(id, waiting))
        found: ModelCall | None = None
        while waiting:
            call = waiting.pop()
            found = call if found is None or call.is_counted else found
            call.has_backward = True
            if not call.is_counted and self._lack_backward and call.has_ended:
                kind = self.kind_of(call)
                if kind in self._lack_backward:
                    self._forms[call.form].seek(kind)
            waiting += [other for other in call.behind if id(other) not in known]
            known.update(map(id, call.behind))
        return found

    def kind_of(self, call: ModelCall) -> Kind:
        """The kind of a call that has ended."""
        ignores = self._forms[call.form].ignores_numbers
        return Kind(call.form, call.path, call.nodes, 0 if ignores else call.numbers)

    def ignores_numbers(self, kind: Kind) -> bool:
        """Whether the Python numbers of calls of this form decide nothing."""
        form = self._forms.get(kind.form)
        return form is not None and form.ignores_numbers

    @property
    def has_wishes(self) -> bool:
        """Whether calls of the next step are to be counted, of forms that were met."""
        return self._left > 0 and any(form.is_wanted for form in self._forms.values())

    def end_step(self) -> list[ModelCall]:
        """The calls of the step, each with the kind of its evidence; counted ones have the number of those that they
        represent."""
        counted: dict[Kind, ModelCall] = {}
        calls, self._all = self._all, []
        for call in calls:
            kind = self.kind_of(call)
            if call.is_counted:
                counted[kind] = call
            elif kind in counted:
                counted[kind].forwards += 1
        for kind, call in counted.items():
            if call.may_have_backward:
                self._lack_backward.discard(kind)
                continue
            self._lack_backward.add(kind)
            if any(other.has_backward for other in calls if self.kind_of(other) == kind):
                self._forms[call.form].seek(kind)
        self._without_backward += 1
        has_backward = not calls or any(call.may_have_backward for call in calls)
        self.is_first = self.is_first and not has_backward and self._without_backward < MOST_WITHOUT_BACKWARD
        if self.is_first:
            for call in calls:
                self._forms[call.form].is_new = True
        return calls

    def begin_step(self, *, counts_outside: bool) -> None:
        """Begin a step; ``counts_outside`` if all GEMMs of Transformer Engine are seen in it."""
        self.outside = ModelCall(OUTSIDE, counts_outside)

    def end_outside(self, *, has_products: bool) -> Kind | None:
        """The kind of what the step ran outside of calls; None if it ran nothing there."""
        if not has_products and not self.outside.path:
            return None
        kind = self.kind_of(self.outside)
        if self.outside.is_counted:
            self._forms[OUTSIDE].find(kind)
            self._known.add(kind)
        elif kind not in self._known:
            self._forms[OUTSIDE].seek(kind)
            self._left -= 1
        return kind

    def note_alike(self, kind: Kind, *, alike: bool) -> None:
        """Note whether a kind has the products of one that differs from it in nothing but numbers."""
        form = self._forms[kind.form]
        form.alike += 1 if alike else -MOST_COUNTED
        if form.ignores_numbers:
            self._known |= {each._replace(numbers=0) for each in self._known if each.form == kind.form}


def _calls_in(roots: Iterable[Any]) -> Iterator[ModelCall]:
    """The calls to which tensors, or edges of the graph, belong."""
    for mark, products in found_in_graph(roots):
        call = mark.call if isinstance(mark, _Mark) else products[0].call
        if call is not None:
            yield call


class _UnknownFormError(Exception):
    """An argument whose contents are unknown."""


def _form(value: Any, numbers: list[Any], depth: int = 0) -> Hashable:
    """What of an argument decides which products there are; Python numbers in it are added to ``numbers``."""
    if depth > _DEEPEST:
        raise _UnknownFormError
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float, complex)):
        numbers.append(value)
        return type(value).__name__
    if isinstance(value, (torch.dtype, torch.device)):
        return type(value).__name__
    if isinstance(value, Mapping):
        return tuple((str(name), _form(part, numbers, depth + 1)) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_form(part, numbers, depth + 1) for part in value)
    if isinstance(value, torch.nn.Module) or callable(value):
        return id(value)
    if hasattr(value, "__next__") or not hasattr(value, "__dict__"):
        raise _UnknownFormError
    return type(value), _form(vars(value), numbers, depth + 1)


def leaves(value: Any, depth: int = 0) -> list[Any]:
    """The tensors in a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values()
    return [] if depth > _DEEPEST else [leaf for part in parts for leaf in leaves(part, depth + 1)]
