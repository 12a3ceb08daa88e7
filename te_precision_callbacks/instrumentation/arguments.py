"""The parameters of Transformer Engine's functions, and the tensors in them.

Read from Transformer Engine 2.20.2: ``general_gemm`` and its siblings (``pytorch/cpp_extensions/gemm.py``), and the
arguments of the modules' autograd Functions (``pytorch/module``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.layers.forwards import running_forward
from te_precision_callbacks.te.modules import MODULES, ModuleRow
from te_precision_callbacks.te.tensors import is_quantized

ArgumentNamer = Callable[[Sequence[Any]], dict[str, Any]]

PlainTensors = dict[tuple[int, str], Any]
"""(Layer index, tensor name) -> tensor before quantization."""

FindTensors = Callable[[Sequence[Any]], PlainTensors]
"""Finds the tensors before quantization among the arguments of an autograd Function's forward."""

GemmTensors = tuple[Any, Any, Any]
"""A, B and the result of a GEMM."""

GemmsOfCall = Callable[[Mapping[str, Any], Any], Iterable[GemmTensors]]
"""Arguments and result of a GEMM function -> the tensors of each GEMM."""

GEMM = ("A", "B", "out_dtype", "quantization_params", "gelu", "gelu_in", "alpha", "beta", "accumulate", "layout", "out")
GROUPED_GEMM = ("A", "B", "out", "quantization_params", "out_dtype", "layout", "m_splits", "gelu", "grad", "accumulate")
GROUPED_TENSOR_GEMM = ("A", "B", "out")
"""First parameters in 2.20 of ``general_gemm``, ``general_grouped_gemm``, and the function for grouped tensors: for a
user's wrapper with ``*arguments``.
"""

_READ = {"A", "B", "out", "layout", "accumulate", "m_splits", "inp"}


def argument_namer(function: Callable[..., Any], known: Sequence[str]) -> ArgumentNamer:
    """Return a function that names the positional arguments of a TE function.

    Args:
        known: the first parameters in TE 2.20.

    Raises:
        TypeError: a parameter is missing, as in another TE version.
    """
    parameters = inspect.signature(function).parameters
    fixed: list[str] = []
    rest: str | None = None
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            fixed.append(name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rest = name
    missing = ", ".join(sorted(_READ.intersection(known).difference(parameters)))
    if missing and rest is not None:
        return lambda arguments: dict(zip(known, arguments, strict=False))
    if missing:
        raise _missing(function, missing)

    def named(arguments: Sequence[Any]) -> dict[str, Any]:
        given = dict(zip(fixed, arguments, strict=False))
        if rest is None:
            return given
        return {**given, rest: arguments[len(fixed) :]}

    return named


def single_gemm(arguments: Mapping[str, Any], result: Any) -> Iterable[GemmTensors]:
    return [(arguments["A"], arguments["B"], result[0])]


def gemms_of_experts(arguments: Mapping[str, Any], result: Any) -> Iterable[GemmTensors]:
    outs = arguments["out"]
    if arguments.get("single_output"):
        outs = [None] * len(arguments["A"])
        whole = arguments["out"][0]
        if type(whole) in PLAIN:
            outs = torch.split(whole, list(arguments["m_splits"]))
    return zip(arguments["A"], arguments["B"], outs, strict=True)


def gemms_of_grouped_tensors(arguments: Mapping[str, Any], result: Any) -> Iterable[GemmTensors]:
    return zip(*(_matrices(arguments[name]) for name in GROUPED_TENSOR_GEMM), strict=True)


def _matrices(operand: Any) -> Sequence[Any]:
    # Splitting changes a grouped tensor.
    return operand if isinstance(operand, (list, tuple)) else operand.copy().split_into_quantized_tensors()


def is_grouped_tensor(operand: Any) -> bool:
    return hasattr(operand, "split_into_quantized_tensors")


def autograd_functions() -> Iterator[tuple[Any, Callable[[], FindTensors], Sequence[int]]]:
    """Yield the modules' autograd Functions, what finds the tensors before quantization in their forwards, and the
    places of the weights among their inputs; no places for groups."""
    for row in MODULES.values():
        function = row.function()
        inputs = list(inspect.signature(function.forward).parameters)[1:]
        weights = [name for name, (_, tensor) in row.arguments().items() if tensor == "weight" and name in inputs]
        yield function, functools.partial(_tensors_of, row, function.forward), list(map(inputs.index, weights))


def _tensors_of(row: ModuleRow, forward: Callable[..., Any]) -> FindTensors:
    """Raises TypeError: a parameter is missing, as in another TE version."""
    if row.groups:
        named = argument_namer(forward, ("inp", "m_splits", "weights_and_biases"))
        return lambda arguments: _tensors_of_experts(named(arguments))
    positions = list(inspect.signature(forward).parameters)
    places = []
    for name, place in row.arguments().items():
        if name not in positions:
            raise _missing(forward, name)
        places.append((positions.index(name), place))

    def find(arguments: Sequence[Any]) -> PlainTensors:
        tensors: PlainTensors = {}
        for position, place in places:
            tensor = arguments[position]
            if type(tensor) in PLAIN or _is_plain_subclass(tensor):
                tensors[place] = tensor
        return tensors

    return find


def _missing(function: Callable[..., Any], names: str) -> TypeError:
    name = getattr(function, "__qualname__", str(function))
    return TypeError(f"{name} of this Transformer Engine has no parameter {names}; its tensors are not observed")


def forward_arguments(module: Any) -> dict[str, Any]:
    frame = running_forward(module)
    if frame is None:
        return {}
    return dict(frame.f_locals)


def _tensors_of_experts(given: Mapping[str, Any]) -> PlainTensors:
    activation = given["inp"]
    splits = _rows(given["m_splits"])
    weights = given["weights_and_biases"]
    rows = torch.split(activation.reshape(-1, activation.shape[-1]), splits)
    activations = {(expert, "activation"): part for expert, part in enumerate(rows)}
    return plain_tensors(activations | {(expert, "weight"): weights[expert] for expert in range(len(splits))})


def _rows(splits: Any) -> list[int]:
    if isinstance(splits, torch.Tensor):
        splits = splits.tolist()
    return list(map(int, splits))


def gradients(ctx: Any, gradient: Any, layers: int) -> PlainTensors:
    if not isinstance(gradient, torch.Tensor):
        return {}
    matrix = gradient.reshape(-1, gradient.shape[-1])
    splits = getattr(ctx, "m_splits", None)
    if splits is None:
        if type(matrix) in PLAIN or _is_plain_subclass(matrix):
            return {(layers - 1, "gradient"): matrix}
        return {}
    return plain_tensors({(expert, "gradient"): part for expert, part in enumerate(torch.split(matrix, _rows(splits)))})


def plain_tensors(tensors: PlainTensors) -> PlainTensors:
    return {key: tensor for key, tensor in tensors.items() if type(tensor) in PLAIN or _is_plain_subclass(tensor)}


def _is_plain_subclass(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and not is_quantized(tensor)
