"""Recomputes in high precision the tensors that a fused kernel writes only in low precision.

The same TE function runs again without a quantizer; training uses the first result.

Read from Transformer Engine 2.20.2 (``pytorch/module``): the modules call ``apply_normalization``, and the functions
returned by ``_act_func``: the activation function, its derivative, and the derivative fused with the bias gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from te_precision_callbacks.instrumentation.running import Running

_QUANTIZER_OF_NORM = 5


class UnfusedTensors:
    def __init__(self, running: Running, report: Callable[[str, str, Exception], None]) -> None:
        self._running = running
        self._report = report

    def around_norm(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``apply_normalization``, which returns the activation of a module's first layer."""

        @functools.wraps(upstream)
        def apply_normalization(*arguments: Any) -> Any:
            result = upstream(*arguments)

            if arguments[_QUANTIZER_OF_NORM] is None:
                self._note(0, "activation", result[0])
            else:
                unquantized = *arguments[:_QUANTIZER_OF_NORM], None, *arguments[_QUANTIZER_OF_NORM + 1 :]
                self._note_again(0, "activation", lambda: upstream(*unquantized)[0])
            return result

        return apply_normalization

    def around_act_func(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``_act_func`` of LayerNormMLP: its functions return fc2's activation and fc1's gradient."""

        @functools.wraps(upstream)
        def act_func(*arguments: Any, **keywords: Any) -> Any:
            forward, backward, with_bias = upstream(*arguments, **keywords)
            return (
                self._around(forward, forward, 1, "activation"),
                self._around(backward, backward, 0, "gradient"),
                with_bias and self._around(with_bias, backward, 0, "gradient"),
            )

        return act_func

    def _around(self, function: Any, unfused: Any, number: int, tensor: str) -> Callable[..., Any]:
        """Wrap a function whose last argument is its result's quantizer; ``unfused`` returns the result in high
        precision.
        """

        def around(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            *of_values, quantizer = arguments
            if quantizer is None:
                self._note(number, tensor, result)
            else:
                self._note_again(number, tensor, lambda: unfused(*of_values, None, **keywords))
            return result

        return around

    def _note(self, number: int, tensor: str, high: Any) -> None:
        forward = self._running.here.running
        if forward is not None and forward.high is not None and forward.wants(number, tensor):
            forward.high[number, tensor] = high

    def _note_again(self, number: int, tensor: str, compute: Callable[[], Any]) -> None:
        forward = self._running.here.running
        if forward is not None and forward.high is not None and forward.wants(number, tensor):
            try:
                forward.high[number, tensor] = compute()
                forward.recomputed.add((number, tensor))
            except Exception as error:
                self._report("recomputing", f"{forward.layers[number]} {tensor}", error)
