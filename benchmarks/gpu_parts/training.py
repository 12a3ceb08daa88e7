"""Training steps of Transformer Engine's layers, and the sessions that watch them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from step import Config, EndOfStep, config, fused_config

from gpu_parts.rows import Settings
from te_precision_callbacks.base.vocabulary import Observe

PATHS: Mapping[Observe, Callable[..., Config]] = {"fused": fused_config, "debug": config}
"""How a session observes -> statistics of all tensors that it can observe so; with ``fp8=True`` also FP8 statistics."""


def transformer_layers(
    settings: Settings, layers: int, hidden: int, heads: int, **options: Any
) -> list[torch.nn.Module]:
    """Causal te.TransformerLayer in bfloat16, without dropout; options are further arguments of theirs."""
    te = settings.transformer_engine()
    return [
        te.TransformerLayer(
            hidden,
            4 * hidden,
            heads,
            self_attn_mask_type="causal",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.bfloat16,
            device=settings.device,
            **options,
        )
        for _ in range(layers)
    ]


class Training:
    """A stack of te.TransformerLayer in bfloat16, trained in FP8 with delayed scaling, which runs on every FP8 GPU.

    Args:
        settings: where it trains.
        layers, hidden, sequence, batch: the sizes.
    """

    def __init__(self, settings: Settings, *, layers: int, hidden: int, sequence: int, batch: int) -> None:
        te = settings.transformer_engine()
        from transformer_engine.common.recipe import DelayedScaling

        torch.manual_seed(0)
        self._autocast = functools.partial(te.autocast, enabled=True, recipe=DelayedScaling())
        heads = max(1, hidden // 128)
        self.model = torch.nn.Sequential(*transformer_layers(settings, layers, hidden, heads, attn_input_format="bshd"))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=settings.on_gpu)
        self._inputs = torch.randn(batch, sequence, hidden, device=settings.device, dtype=torch.bfloat16)

    def forward_and_backward(self) -> None:
        """All of a step that must not wait for the device."""
        with self._autocast():
            output: torch.Tensor = self.model(self._inputs)
        loss = output.float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]

    def finish(self, end: EndOfStep) -> None:
        """The optimizer's step, and what comes at the end of a step."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        end()

    def step(self, end: EndOfStep) -> None:
        self.forward_and_backward()
        self.finish(end)
