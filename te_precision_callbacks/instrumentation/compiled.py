"""Finds the forward of a GEMM of ``te.Linear`` in a graph of ``torch.compile``.

Read from Transformer Engine 2.20.2 (``pytorch/module/linear.py`` and ``pytorch/dynamo/custom_op.py``): with torch 2.14,
a compiled ``te.Linear`` is one operator of the graph. When the graph runs, the operator calls ``_linear_forward_impl``
or ``_linear_backward_impl``, without the module and its autograd Function. The module is recognized by its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from te_precision_callbacks.base.vocabulary import GemmName
from te_precision_callbacks.instrumentation.arguments import gradients, plain_tensors
from te_precision_callbacks.instrumentation.current_call import UNOBSERVED, Forward
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.tensors import is_quantized


class CompiledLinears:
    """The forwards of compiled ``te.Linear`` in an iteration.

    Args:
        begin: makes the forward of a module, given the operator's arguments.

    Attributes:
        modules: the modules to recognize.
    """

    def __init__(self, begin: Callable[[Any, Any], Forward]) -> None:
        self.modules: Collection[Any] = ()
        self._begin = begin
        self._by_weight: dict[int, list[Any]] = {}
        self._forwards: dict[int, list[tuple[Forward, set[GemmName]]]] = {}

    def begin_iteration(self) -> None:
        self._by_weight.clear()
        self._forwards.clear()

    def find(self, gemm: GemmName) -> Forward | None:
        """Return the forward of the GEMM that an operator is about to run; None outside of operators.

        Backwards take the forwards in their order; each forward has at most one dgrad and one wgrad.
        """
        arguments = te_modules.arguments_of_operator()
        if arguments is None:
            return None
        module = self.module_of(arguments.weight if gemm == "fprop" else arguments.saved_weight)
        if module is None:
            raise LookupError("its weight is no parameter of one module alone")
        forwards = self._forwards.setdefault(id(module), [])
        if gemm == "fprop":
            forward = self._begin(module, arguments)
            if forward.high is not None:
                forward.high = plain_tensors({(0, "activation"): arguments.inp, (0, "weight"): arguments.weight})
            if arguments.is_grad_enabled:
                forwards.append((forward, set()))
            return forward
        for forward, gemms in forwards:
            if gemm not in gemms:
                if forward.high is not None and not gemms:
                    forward.high = gradients(arguments, arguments.grad_output, 1)
                gemms.add(gemm)
                return forward
        return UNOBSERVED

    def module_of(self, weight: Any) -> Any:
        """Return the module with a weight; None if no module or several have it."""
        key = _address(weight)
        if key not in self._by_weight:  # the first of the iteration, or gathered since
            self._by_weight = {}
            for module in self.modules:
                for first in te_modules.of(module).weights(module, 0)[:1]:
                    self._by_weight.setdefault(_address(first), []).append(module)
        modules = self._by_weight.get(key, ())
        if key and len(modules) == 1:
            return modules[0]
        return None


def _address(weight: Any) -> int:
    """Return the address of a weight's data, which views and the concatenation of adjacent parameters share."""
    if is_quantized(weight):
        weight = next((part for part in weight.get_metadata().values() if hasattr(part, "data_ptr")), None)
    if hasattr(weight, "data_ptr"):
        return int(weight.data_ptr())
    return 0
