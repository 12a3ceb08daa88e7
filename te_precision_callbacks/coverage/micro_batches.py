"""The calls of a model in a step, of which those that are alike are counted once.

A call is alike if its input has the shapes, the types and the flags of an earlier one. Whether it has taken the same
way through the model is checked by the number of autograd's nodes that it has made, which costs nothing.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.coverage.nodes import found_in_graph, made_in_thread, mark_call

_DEEPEST = 8

NOT_CALLED = (
    "all products of torch: in this step the script has not called the session's model itself with gradients (it has"
    " only called modules in it, or a checkpoint with use_reentrant=True is around it), so these products are not seen"
)
"""The text for a step in which layers ran, and the model was not called."""


class _Mark:
    """Is kept with the graph of a call, and ends with it."""

    def __init__(self, call: Call) -> None:
        self.call = call


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a model, with its backward.

    Attributes:
        like: the call that is counted in its place; None for one that is counted itself.
        forwards, backwards: so many calls have been counted by this one, itself among them; and so many of their
            backwards.
        has_backward: whether its backward has begun.
        nodes: how many nodes of autograd it has made.
        unlike: how many that it was counted in place of have made another number.
        has_ended: whether its forward has ended well.
        goes_by_values: whether sizes in it depend on the values of tensors.
        is_known: whether its backward is recognized.
        graph: what ends with its graph; None while it runs.
        behind: the calls whose results it has been given.
    """

    like: Call | None = None
    forwards: int = 1
    backwards: int = 1
    has_backward: bool = False
    nodes: int = 0
    unlike: int = 0
    has_ended: bool = False
    goes_by_values: bool = False
    is_known: bool = False
    graph: weakref.ref[_Mark] | None = None
    behind: Sequence[Call] = ()

    @property
    def is_whole(self) -> bool:
        """Whether its backward has run, or may come."""
        may_come = not self.is_known or self.graph is None or self.graph() is not None
        return self.has_backward or may_come

    @property
    def misses_backwards(self) -> bool:
        """Whether calls that it is counted in place of had a backward, which only its own would have shown."""
        return self.like is None and self.is_known and not self.has_backward and self.backwards > 1


class _Here(threading.local):
    """The call that runs in a thread."""

    call: Call | None = None


class Calls:
    """The calls of a step."""

    def __init__(self) -> None:
        self._here = _Here()
        self._counted: dict[Hashable, Call] = {}
        self._varying: set[Hashable] = set()
        self._all: list[Call] = []
        self._was_called = False

    @property
    def here(self) -> Call | None:
        """The call that runs in this thread."""
        return self._here.call

    def begin(self, root: torch.nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Call:
        """Begin a call of a model in this thread; it is counted unless another one is in its place."""
        self._was_called = True
        flags = tuple(parameter.requires_grad for parameter in root.parameters())
        try:
            given: Hashable = id(root), root.training, flags, _form(arguments), _form(keywords)
        except _UnknownFormError:
            given = None
        like = None if given is None else self._counted.get(given)
        if like is not None and (like.unlike or like.goes_by_values):
            self._varying.add(given)
        if like is not None and (given in self._varying or not like.is_whole):
            like = None
        call = Call(like, behind=list(_calls_in(leaves([arguments, keywords]))))
        if like is None and given is not None:
            self._counted[given] = call
        call.nodes = -made_in_thread()
        self._here.call = call
        return call

    def leave(self) -> None:
        """The call of this thread has ended, well or not. One that has raised is in the place of no other."""
        call, self._here.call = self._here.call, None
        if call is not None and not call.has_ended:
            self._counted = {form: counted for form, counted in self._counted.items() if counted is not call}

    def end(self, call: Call, results: Any) -> None:
        """Note that a call has ended well."""
        call.nodes += made_in_thread()
        call.has_ended = True
        mark = _Mark(call)
        call.is_known = mark_call(leaves(results), mark)
        call.graph = weakref.ref(mark)
        self._all.append(call)
        if call.like is not None:
            call.like.forwards += 1
            call.like.backwards += not call.is_known and not call.has_backward
            call.like.unlike += call.nodes != call.like.nodes

    def begin_backward(self, roots: Iterable[Any]) -> Call | None:
        """A call that is counted, of those whose backward begins; None if there is none."""
        here = self._here.call  # a backward inside of a call, as in a training step that optimizes by itself
        waiting = list(_calls_in(roots)) if here is None else [here]
        known = set(map(id, waiting))
        counted: Call | None = None
        while waiting:
            call = waiting.pop()
            if call.like is None:
                counted = call
            elif not call.has_backward:
                call.like.backwards += 1
            call.has_backward = True
            waiting += [other for other in call.behind if id(other) not in known]
            known.update(map(id, call.behind))
        return counted

    @property
    def misses_backwards(self) -> bool:
        """Whether a backward of the step is not counted, since that of the first of several calls did not run."""
        return any(call.misses_backwards for call in self._all)

    def left_out(self) -> list[str]:
        """What is not counted of the calls of the step, in words."""
        texts = [] if self._was_called else [NOT_CALLED]
        for call in self._all:
            others = f"{call.forwards - 1} of {call.forwards} micro-batches with the same sizes"
            if call.unlike:
                texts.append(
                    f"{others} are taken as equal to the first, though they took another way through the model"
                )
            if call.misses_backwards:
                texts.append(f"the backward of {others}, since that of the first did not run")
        return texts


def _calls_in(roots: Iterable[Any]) -> Iterator[Call]:
    """The calls to which tensors, or edges of the graph, belong."""
    for mark, products in found_in_graph(roots):
        call = mark.call if isinstance(mark, _Mark) else products[0].call
        if call is not None:
            yield call


class _UnknownFormError(Exception):
    """Nobody can say what an argument holds."""


def _form(value: Any, depth: int = 0) -> Hashable:
    """What of an argument decides which products there are."""
    if depth > _DEEPEST:
        raise _UnknownFormError
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float, complex, torch.dtype, torch.device)):
        return type(value).__name__  # the number of a batch is none of a product's sizes
    if isinstance(value, Mapping):
        return tuple((str(name), _form(part, depth + 1)) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_form(part, depth + 1) for part in value)
    if isinstance(value, torch.nn.Module) or callable(value):
        return id(value)
    if hasattr(value, "__next__") or not hasattr(value, "__dict__"):
        raise _UnknownFormError
    return type(value), _form(vars(value), depth + 1)


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
