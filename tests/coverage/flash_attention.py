"""Stand-ins for the operators of flash-attn 2.8 (``flash_attn/flash_attn_interface.py``): its schemas, on a CPU.

Each computes with numbers of numpy's, so that no operator of torch multiplies.
"""

from typing import Any

import numpy as np
import torch


def _attend(q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], v: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Of one sequence: [length, heads, size]."""
    scores = np.einsum("qhd,khd->hqk", q, k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights, np.einsum("hqk,khd->qhd", weights, v)


def _gradients(dout: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    weights, _ = _attend(q, k, v)
    of_weights = np.einsum("qhd,khd->hqk", dout, v)
    scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True))
    return (
        np.einsum("hqk,khd->qhd", scores, k),
        np.einsum("hqk,qhd->khd", scores, q),
        np.einsum("hqk,qhd->khd", weights, dout),
    )


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy()


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), device_types="cpu")
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    out = np.stack([_attend(*item)[1] for item in zip(*map(_array, (q, k, v)), strict=True)])
    return torch.from_numpy(out), torch.zeros(1), torch.zeros(1), torch.zeros(1)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), device_types="cpu")
def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    for number, item in enumerate(zip(*map(_array, (dout, q, k, v)), strict=True)):
        for into, gradient in zip((dq, dk, dv), _gradients(*item), strict=True):
            assert into is not None
            _array(into)[number] = gradient
    return torch.zeros(1)


class FlashAttention(torch.autograd.Function):
    """As ``FlashAttnFunc``: [batch, length, heads, size]."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse, *_ = torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0, 1.0, False, -1, -1, 0.0, None, False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        made = [torch.empty_like(item) for item in (q, k, v)]
        rest = 0.0, 1.0, False, -1, -1, 0.0, None, False
        torch.ops.flash_attn._flash_attn_backward(dout.contiguous(), q, k, v, out, lse, *made, *rest)
        return tuple(made)
