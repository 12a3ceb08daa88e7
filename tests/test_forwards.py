"""The kind of the running forward, read from the frames on the stack."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_precision_callbacks.layers.forwards import in_evaluation, innermost_autograd_frame, running_functions
from tests.functions import Function

told: list[Any] = []


def look() -> None:
    told.append((innermost_autograd_frame(), [context is not None for context in running_functions()], in_evaluation()))


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_more(*arguments: Any) -> Any:
        return function(*arguments)

    return with_more


class Doubles(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        look()
        return gradient * 2


class WithContext(Doubles):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        look()
        return x * 2


class WithSetUp(Doubles):
    """Of the newer kind, whose forward has no context."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        look()
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class Decorated(WithSetUp):
    forward = staticmethod(decorated(WithSetUp.forward))


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    told.clear()


@pytest.mark.parametrize(
    ("function", "has_context"),
    [(WithContext, [True]), (WithSetUp, [False]), (Decorated, [False])],
    ids=["with a context", "with setup_context", "decorated"],
)
def test_a_function_of_either_kind_is_known_in_forward_and_backward(function: Any, has_context: list[bool]) -> None:
    function.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert told == [("forward", has_context, False), ("backward", [], True)]


def test_a_module_and_a_plain_function_are_no_autograd_function() -> None:
    def forward() -> None:
        look()

    Function(look)()
    with torch.no_grad():
        forward()
    assert told == [(None, [], False), (None, [], True)]
