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

_READ = {"A", "B", "out", "layout", "accumulate", "m_splits"}


def argument_namer(function: Callable[..., Any], positional_names: Sequence[str]) -> ArgumentNamer:
    """Return a function that names the positional arguments of a TE function.

    Args:
        positional_names: the first parameters in TE 2.20.

    Raises:
        TypeError: a parameter is missing, as in another TE version.
    """
    parameters = inspect.signature(function).parameters
    missing = sorted(_READ.intersection(positional_names).difference(parameters))
    if not missing:
        return lambda arguments: dict(zip(parameters, arguments, strict=False))
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()):
        return lambda arguments: dict(zip(positional_names, arguments, strict=False))
    raise _missing(function, missing)


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
    positions = {name: position for position, name in enumerate(inspect.signature(forward).parameters)}
    names = ("inp", "m_splits", "weights_and_biases") if row.groups else tuple(row.arguments())
    missing = [name for name in names if name not in positions]
    if missing:
        raise _missing(forward, missing)
    if row.groups:
        inp, splits, first = map(positions.__getitem__, names)
        return lambda arguments: _tensors_of_experts(arguments[inp], _rows(arguments[splits]), arguments[first:])
    positions_of_fields = [(positions[name], field) for name, field in row.arguments().items()]

    def find(arguments: Sequence[Any]) -> PlainTensors:
        tensors: PlainTensors = {}
        for position, field in positions_of_fields:
            tensor = arguments[position]
            if type(tensor) in PLAIN or _is_plain_subclass(tensor):
                tensors[field] = tensor
        return tensors

    return find


def _missing(function: Callable[..., Any], names: Iterable[str]) -> TypeError:
    name = getattr(function, "__qualname__", str(function))
    return TypeError(
        f"{name} of this Transformer Engine has no parameter {', '.join(names)}; its tensors are not observed"
    )


def _tensors_of_experts(activation: torch.Tensor, splits: list[int], weights: Sequence[Any]) -> PlainTensors:
    tensors: PlainTensors = {}
    for expert, rows in enumerate(torch.split(activation.reshape(-1, activation.shape[-1]), splits)):
        tensors[expert, "activation"] = rows
        tensors[expert, "weight"] = weights[expert]
    return plain_tensors(tensors)


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
        return plain_tensors({(layers - 1, "gradient"): matrix})
    return plain_tensors({(expert, "gradient"): part for expert, part in enumerate(torch.split(matrix, _rows(splits)))})


def plain_tensors(tensors: PlainTensors) -> PlainTensors:
    plain: PlainTensors = {}
    for key, tensor in tensors.items():
        if type(tensor) in PLAIN or _is_plain_subclass(tensor):
            plain[key] = tensor
    return plain


def _is_plain_subclass(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and not is_quantized(tensor)
