"""Sees fused attention, and the forwards of all attention of Transformer Engine; a part of the tap."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.coverage.gemm_events import (
    UNFUSED,
    AttentionEvent,
    AttentionListener,
    AttentionSizes,
    UnfusedListener,
)
from te_precision_callbacks.coverage.precision_audit import recipe_text
from te_precision_callbacks.instrumentation.handed import arguments_of_forward, as_fused_attention
from te_precision_callbacks.instrumentation.running import UNHEARD, Forward, Running
from te_precision_callbacks.layers.forwards import Classify, outside_of_dynamo


class AttentionTap:
    """Tells listeners of attention.

    Args:
        classify: decides the kind of a forward.
        report: receives failures of listeners.
        running: what threads run.
        listeners: receive the events of fused attention.
        unfused: is called behind each forward of unfused attention.

    Attributes:
        names: id of a module of attention -> its name.
    """

    def __init__(
        self,
        classify: Classify,
        report: Callable[[str, str, Exception], None],
        running: Running,
        listeners: Sequence[AttentionListener],
        unfused: UnfusedListener | None = None,
    ) -> None:
        self.names: Mapping[int, str] = {}
        self._classify = classify
        self._report = report
        self._running = running
        self._listeners = listeners
        self._unfused = unfused

    def hear(self, names: Mapping[int, str]) -> None:
        """Set the modules that are listened to: id -> name."""
        self.names = names

    def enter(self, module: Any) -> Forward:
        """The forward of attention that begins."""
        layer = self.names[id(module)]
        try:
            meta = module.fp8_meta
            local = meta.get("local_recipes") or [meta.get("recipe")]  # its recipe is that of the products alone
            entered = Forward(
                (layer,), self._classify(module), recipe_text(local[0] if module.fp8 else None), halves=False
            )
            entered.high = {}
            entered.handled = id(sys.exc_info()[1])
            for listener in self._listeners:
                listener.enter_attention(layer, entered.kind)
        except Exception as error:
            self._report("looking at the forward of", layer, error)
            return UNHEARD
        return entered

    def leave(self, module: Any, entered: Forward) -> None:
        """Tell the listeners that a forward ends; nothing of one that an error ends."""
        if id(sys.exc_info()[1]) != entered.handled:
            return
        try:
            given = arguments_of_forward(module)
            for listener in self._listeners:
                listener.leave_attention(entered.layers[0], entered.kind, given)
        except Exception as error:
            self._report("looking at the forward of", entered.layers[0], error)

    def around(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """A function of fused attention that reports its products to the listeners."""
        signature = inspect.signature(upstream)

        @functools.wraps(upstream)
        def tapped(*operands: Any, **keywords: Any) -> Any:
            result = upstream(*operands, **keywords)
            running = self._running.here.running
            if running is not None and running is not UNHEARD and self._listeners:
                running.events += 1
                try:
                    given = signature.bind(*operands, **keywords)
                    given.apply_defaults()
                    event = self._event(running, given.arguments, result)
                    for listener in self._listeners:
                        listener.note_attention(event)
                except ObservationError:  # reported already, and to be raised
                    raise
                except Exception as error:
                    self._report("looking at the products of", running.layers[0], error)
            return result

        return tapped

    def around_unfused(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of unfused attention, which is reported to those who listen to it."""
        signature = inspect.signature(upstream)

        @functools.wraps(upstream)
        @outside_of_dynamo
        def forward(module: Any, *operands: Any, **keywords: Any) -> Any:
            result = upstream(module, *operands, **keywords)
            entered = self._running.here.entered
            if self._unfused is not None and entered is not None and entered is not UNHEARD:

                def event() -> AttentionEvent:
                    given = signature.bind(module, *operands, **keywords)
                    given.apply_defaults()
                    as_fused, output = as_fused_attention(module, given.arguments, result)
                    return self._event(entered, as_fused, (output, ()))

                try:
                    self._unfused(entered.layers[0], entered.kind, event)
                except ObservationError:
                    raise
                except Exception as error:
                    self._report("looking at the products of", entered.layers[0], error)
            return result

        return forward

    def _event(self, forward: Forward, given: Mapping[str, Any], result: Any) -> AttentionEvent:
        high, forward.high = forward.high or {}, None  # the backward's are not looked at
        query, key, value = given["q"], given["k"], given["v"]
        form = given["qkv_layout"].replace("3", "").replace("2", "").partition("_")[0]
        backward = "d_o" in given
        return AttentionEvent(
            forward.layers[0],
            backward,
            query,
            key,
            value,
            given.get("d_o"),
            given["s_quantizer"],
            given.get("dp_quantizer"),
            AttentionSizes.of(query, key, value, form),
            None if backward else result[0],
            {name: tensor for (_, name), tensor in high.items()},
            next(self._running.numbers),
            forward.kind,
            forward.recipe,
            given,
            result[:3] if backward else (),
            given["aux_ctx_tensors"] if backward else result[1] or (),
            _kernel(given),
        )


def _kernel(given: Mapping[str, Any]) -> str:
    """What has run attention, in words."""
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    backend = given["fused_attention_backend"]
    return UNFUSED if backend is None else f"fused, {FusedAttnBackend.cast(backend).name}"
