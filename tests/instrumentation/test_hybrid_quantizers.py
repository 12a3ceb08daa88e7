"""Layers whose quantizers are Transformer Engine's hybrid ones, its reference ones, or a user's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

from tests.conftest import Keeper, feature
from tests.instrumentation.steps import stepped


def current(dtype: DType) -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(dtype, device="cuda")


def hybrid(role: Any) -> Any:
    if role is not None and role.tensor_type == "input":
        return HybridQuantizer(rowwise_quantizer=current(DType.kFloat8E5M2), columnwise_quantizer=IdentityQuantizer())
    if role is not None and role.tensor_type == "weight":
        return HybridQuantizer(rowwise_quantizer=current(DType.kFloat8E4M3), columnwise_quantizer=IdentityQuantizer())
    return IdentityQuantizer()


def test_statistics_are_of_what_the_gemm_reads(tmp_path: Path, keeper: Keeper) -> None:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) * torch.linspace(-12, 0, 32).exp2()
    stats = ["mse", "scale_inv_max", "underflows%"]
    config = {"s": feature("LogFp8TensorStats", ["all"], tensors=["activation", "gradient"], stats=stats)}
    net = te.Linear(32, 64, bias=False)
    inputs = x.clone().requires_grad_()
    session = stepped(net, tmp_path, [CustomRecipe(qfactory=hybrid)], config, inputs=lambda: inputs, sinks=[keeper])
    scale = torch.finfo(torch.float8_e5m2).max / x.abs().amax()
    rounded = (x * scale).to(torch.float8_e5m2).float() / scale
    assert keeper.values("scale_inv_max")[0] == pytest.approx(1 / scale.item(), rel=1e-6)
    assert keeper.values("mse")[0] == pytest.approx((rounded - x).double().pow(2).mean().item(), rel=1e-5)
    stated = {entry.gemm: entry.operands for entry in session.precision}
    assert stated == {
        "fprop": {"activation": "FP8 E5M2", "weight": "FP8 E4M3"},
        "dgrad": {"gradient": "FP32", "weight": "FP32"},
        "wgrad": {"gradient": "FP32", "activation": "FP32"},
    }
    assert all(entry.seen for entry in session.precision)
