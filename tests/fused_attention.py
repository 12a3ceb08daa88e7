"""Stand-in for a fused FP8 attention kernel, which only a GPU has: takes the operands and returns ones."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformer_engine_torch as tex

from te_precision_callbacks.base.vocabulary import recipe_of


def emulate_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Transformer Engine select fused attention for FP8, and call entries that return results of its layout."""
    backends = tex.NVTE_Fused_Attn_Backend

    def backend(params: Any) -> tuple[Any, str]:
        is_fp8 = params.qkv_dtype in (tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2)
        return (backends.NVTE_FP8, "") if is_fp8 else (backends.NVTE_No_Backend, "in high precision")

    monkeypatch.setattr(tex, "get_fused_attn_backend", backend)
    monkeypatch.setattr(tex, "fused_attn_fwd", _forward)
    monkeypatch.setattr(tex, "fused_attn_bwd", _backward)


def _forward(*arguments: Any) -> list[Any]:
    qkv_layout, o_format, q, v, dtype, quantizer = (arguments[place] for place in (6, 7, 16, 18, 19, 25))
    sizes = _sizes(q, _format(tex.NVTE_QKV_Layout(qkv_layout))) | {"d": v.shape[-1]}
    output = torch.ones([sizes[mark] for mark in _format(tex.NVTE_QKV_Format(o_format))], dtype=dtype)
    stats = torch.zeros(sizes["b"], sizes["h"], sizes["s"], 1)
    return [_quantized(output, quantizer), stats, torch.zeros(2, dtype=torch.int64)]


def _backward(*arguments: Any) -> list[Any]:
    qkv_layout, dqkv_layout, operands, dtype = arguments[5], arguments[8], arguments[19:22], arguments[24]
    from_form, to_form = (_format(tex.NVTE_QKV_Layout(layout)) for layout in (qkv_layout, dqkv_layout))
    shapes = [[_sizes(operand, from_form)[mark] for mark in to_form] for operand in operands]
    name = tex.NVTE_QKV_Layout(dqkv_layout).name
    if "3" in name:  # one buffer, which Transformer Engine puts together by addresses
        place = name.removeprefix("NVTE_").index("3")
        packed = torch.ones([*shapes[0][:place], 3, *shapes[0][place:]], dtype=dtype)
        gradients: Sequence[torch.Tensor] = packed.unbind(place)
    else:
        gradients = [torch.ones(shape, dtype=dtype) for shape in shapes]
    return [*(_quantized(gradient, arguments[30]) for gradient in gradients), None, None]


def _sizes(tensor: Any, form: str) -> dict[str, int]:
    return dict(zip(form, tensor.shape, strict=True))


def _format(member: Any) -> str:
    return "".join(filter(str.isalpha, member.name.removeprefix("NVTE_").split("_")[0])).lower()


def _quantized(value: torch.Tensor, quantizer: Any) -> Any:
    return quantizer(value) if recipe_of(quantizer) == "fp8_delayed_scaling" else value
