"""Reports fused attention, and the forwards of all attention modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.coverage.seen_products import ModelProducts
from te_precision_callbacks.instrumentation.handed import arguments_of_forward
from te_precision_callbacks.instrumentation.running import Forward, Running, unobserved
from te_precision_callbacks.layers.forwards import Classify
from te_precision_callbacks.layers.gemm_events import AttentionEvent, AttentionSizes


class AttentionTap:
    def __init__(
        self,
        classify: Classify,
        report: Callable[[str, str, Exception], None],
        running: Running,
        listener: ModelProducts | None,
    ) -> None:
        self.names: Mapping[int, str] = {}
        self._classify = classify
        self._report = report
        self._running = running
        self._listener = listener

    def enter(self, module: Any) -> Forward:
        layer = self.names[id(module)]
        try:
            entered = Forward((layer,), self._classify(module), "", halves=False)
            if self._listener is not None:
                self._listener.enter_attention(layer, entered.kind)
        except Exception as error:
            self._report("observing the forward of", layer, error)
            return unobserved()
        return entered

    def leave(self, module: Any, entered: Forward) -> None:
        if self._listener is None:
            return
        try:
            self._listener.leave_attention(entered.layers[0], entered.kind, arguments_of_forward(module))
        except Exception as error:
            self._report("observing the forward of", entered.layers[0], error)

    def around(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(upstream)

        @functools.wraps(upstream)
        def tapped(*operands: Any, **keywords: Any) -> Any:
            result = upstream(*operands, **keywords)
            running = self._running.here.running
            if running is not None and running.layers and self._listener is not None:
                running.events += 1
                try:
                    given = signature.bind(*operands, **keywords)
                    given.apply_defaults()
                    self._listener.note_attention(_event(running, given.arguments))
                except ObservationError:  # reported already; must be raised
                    raise
                except Exception as error:
                    self._report("observing the products of", running.layers[0], error)
            return result

        return tapped


def _event(forward: Forward, given: Mapping[str, Any]) -> AttentionEvent:
    query, key, value = given["q"], given["k"], given["v"]
    form = given["qkv_layout"].replace("3", "").replace("2", "").partition("_")[0]
    return AttentionEvent(
        forward.layers[0],
        "d_o" in given,
        query,
        key,
        value,
        given.get("d_o"),
        given["s_quantizer"],
        given.get("dp_quantizer"),
        AttentionSizes.of(query, key, value, form),
        forward.kind,
        given,
    )
