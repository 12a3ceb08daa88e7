"""The examples of Transformer Engine's page "Debug features", under the Lightning callback.

Of each one, what the features did is read off the tensors that the GEMMs were handed, or off the recorded values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
import yaml
from lightning.pytorch.loggers import TensorBoardLogger

from te_precision_callbacks import PrecisionDebugCallback
from tests.conftest import Keeper
from tests.lightning.models import loader, logged_lines, trainer
from tests.te_debug_features import (
    DISABLE_FP8_GEMM,
    FAKE_QUANT,
    LOG_FP8_TENSOR_STATS,
    LOG_TENSOR_STATS,
    PER_TENSOR_SCALING,
)

SEEN: dict[tuple[str, str, int], dict[str, Any]] = {}
"""(layer, tensor, iteration) -> the last arguments of inspect_tensor that :class:`Spy` got."""


class Spy:
    """A feature that keeps the tensors."""

    def inspect_tensor_enabled(self, config: Any, layer_name: str, tensor_name: str, iteration: int) -> bool:
        return True

    def inspect_tensor(self, config: Any, layer_name: str, **call: Any) -> None:
        # The optimizer changes weights in place, and Transformer Engine frees quantized data after their last use.
        kept = {**call, "tensor": call["tensor"].detach().clone()}
        for direction in ("rowwise_quantized_tensor", "columnwise_quantized_tensor"):
            quantized = call[direction]
            if hasattr(quantized, "_scale_inv"):
                codes = quantized._data if quantized._data is not None else quantized._transpose.t()
                kept[direction] = codes.clone(), quantized._scale_inv.clone()
        SEEN[layer_name, call["tensor_name"], call["iteration"]] = kept


class QueryAttention(torch.nn.Module):
    """A self-attention whose queries have a LayerNorm and a GEMM of their own, as ``layernorm_q`` on the page."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = te.MultiheadAttention(32, 2, attention_type="cross", input_layernorm=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.self_attention(x, encoder_output=x)


class Model(L.LightningModule):
    """The model of the page: a TransformerLayer under delayed scaling."""

    def __init__(self, transformer_layer: torch.nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer_layer = transformer_layer or te.TransformerLayer(
            32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="no_mask"
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with te.autocast(enabled=True):
            return self.transformer_layer(batch.view(16, 1, 32)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    folder: Path, text: str, steps: int, model: Model | None = None, *, spy: str | None = None, **keywords: Any
) -> PrecisionDebugCallback:
    """Train under a config; ``spy`` names layers whose tensors are kept."""
    SEEN.clear()
    config = yaml.safe_load(text)
    if spy is not None:
        config["spy"] = {
            "enabled": True,
            "layers": {"layer_types": [spy]},
            "transformer_engine": {
                "Spy": {"enabled": True, "tensors": ["activation", "weight", "gradient", "output", "dgrad"]}
            },
        }
    callback = PrecisionDebugCallback(config, log_dir=folder, features=[Spy], **keywords)
    trainer(folder, callbacks=[callback]).fit(model or Model(), loader(steps, size=16))
    return callback


def formats(callback: PrecisionDebugCallback, layer: str) -> dict[str, dict[str, str]]:
    """GEMM -> the formats of the operands that it was handed."""
    return {entry.gemm: entry.operands for entry in callback.session.precision if entry.layer.endswith(layer)}


@pytest.mark.slow
def test_log_tensor_stats(tmp_path: Path) -> None:
    fit(tmp_path, LOG_TENSOR_STATS, 12, spy="fc1")
    lines = logged_lines(tmp_path)
    layer = "transformer_layer.layernorm_mlp.fc1"
    logged = {name.removeprefix(f"{layer}_"): set() for name, _ in lines if name.startswith(layer)}
    for name, iteration in lines:
        if name.startswith(layer):
            logged[name.removeprefix(f"{layer}_")].add(iteration)
    even = set(range(0, 12, 2))
    assert logged == {
        "activation_mean": {10},
        "gradient_mean": even,
        "gradient_max": even,
        "gradient_min": even,
        "weight_dynamic_range": set(range(12)),
    }
    assert {name.partition("_activation")[0] for name, _ in lines if "_activation_mean" in name} == {
        layer,
        "transformer_layer.self_attention.layernorm_qkv",
        "transformer_layer.self_attention.proj",
    }
    activation = SEEN[layer, "activation", 10]["tensor"].double().numpy()
    assert lines[f"{layer}_activation_mean", 10] == pytest.approx(activation.mean(), rel=1e-6)
    gradient = SEEN[layer, "gradient", 4]["tensor"].double().numpy()
    assert lines[f"{layer}_gradient_max", 4] == gradient.max()
    assert lines[f"{layer}_gradient_min", 4] == gradient.min()
    weight = np.abs(SEEN[layer, "weight", 0]["tensor"].double().numpy())
    assert lines[f"{layer}_weight_dynamic_range", 0] == pytest.approx(np.log2(weight.max()) - np.log2(weight.min()))


def test_log_fp8_tensor_stats(tmp_path: Path) -> None:
    """``layernorm_linear`` is the class of the layer that is called layernorm_qkv here."""
    fit(tmp_path, LOG_FP8_TENSOR_STATS, 6, spy="layernorm_linear")
    lines = logged_lines(tmp_path)
    layer = "transformer_layer.self_attention.layernorm_qkv"
    assert set(lines) == {
        *((f"{layer}_activation_{name}", step) for name in ("underflows%", "overflows%") for step in range(6)),
        *((f"{layer}_gradient_overflows%", step) for step in (0, 5)),
    }
    for step in range(6):
        call = SEEN[layer, "activation", step]
        x = call["tensor"].numpy()
        codes, scale_inv = (part.numpy() for part in call["rowwise_quantized_tensor"])
        assert lines[f"{layer}_activation_underflows%", step] == 100 * np.mean((x != 0) & (codes % 128 == 0))
        beyond = np.abs(x) > np.float32(448) * scale_inv
        assert lines[f"{layer}_activation_overflows%", step] == 100 * np.mean(beyond)


def test_disable_fp8_gemm(tmp_path: Path) -> None:
    callback = fit(tmp_path, DISABLE_FP8_GEMM, 2)
    assert formats(callback, "fc1") == {
        "fprop": {"activation": "FP8 E4M3", "weight": "FP8 E4M3"},
        "dgrad": {"gradient": "FP32", "weight": "FP32"},
        "wgrad": {"gradient": "FP32", "activation": "FP32"},
    }
    assert formats(callback, "fc2")["dgrad"] == {"gradient": "FP8 E5M2", "weight": "FP8 E4M3"}


def test_per_tensor_scaling(tmp_path: Path) -> None:
    """The weight of dgrad, which alone of the two tensors takes part in that GEMM, gets its scale from its own amax."""
    callback = fit(tmp_path, PER_TENSOR_SCALING, 2, Model(QueryAttention()), spy="layernorm_q")
    layer = "transformer_layer.self_attention.layernorm_query"
    call = SEEN[layer, "weight", 1]
    weight = call["tensor"]
    codes, scale_inv = call["columnwise_quantized_tensor"]
    scale = 448.0 / (2 * weight.abs().max())
    assert scale_inv.item() == (1 / scale).item()
    assert torch.equal(codes.view(torch.float8_e4m3fn).float(), (weight * scale).to(torch.float8_e4m3fn).float())
    assert call["rowwise_quantized_tensor"][1].item() != scale_inv.item(), "fprop keeps the scale of delayed scaling"
    assert formats(callback, "layernorm_query")["dgrad"]["weight"] == "FP8 E4M3 (modified)"
    assert formats(callback, "layernorm_query")["fprop"]["activation"] == "FP8 E4M3"


def test_fake_quant(tmp_path: Path) -> None:
    callback = fit(tmp_path, FAKE_QUANT, 2, spy="fc1")
    layer = "transformer_layer.layernorm_mlp.fc1"
    handed = {
        ("activation", "fprop"): "rowwise_quantized_tensor",
        ("weight", "fprop"): "rowwise_quantized_tensor",
        ("gradient", "dgrad"): "rowwise_quantized_tensor",
    }
    for (tensor, _), direction in handed.items():
        call = SEEN[layer, tensor, 1]
        original, rounded = call["tensor"], call[direction]
        assert rounded.dtype == torch.float32
        scale = 57344.0 / original.abs().max()
        by_torch = (original * scale).clamp(-57344, 57344).to(torch.float8_e5m2).float() * (1 / scale)
        assert torch.equal(rounded, by_torch)
        assert not torch.equal(rounded, original)
    assert formats(callback, "fc1")["fprop"] == {"activation": "FP32 (modified)", "weight": "FP32 (modified)"}
    assert formats(callback, "fc1")["wgrad"] == {"gradient": "FP8 E5M2", "activation": "FP8 E4M3"}
    assert formats(callback, "fc2")["fprop"] == {"activation": "FP8 E4M3", "weight": "FP8 E4M3"}


def test_every_feature_at_once(tmp_path: Path, keeper: Keeper) -> None:
    """On different layers, with both loggers of a run looked at."""
    everything = yaml.safe_load(
        """
        tensors:
          enabled: True
          layers: {layer_types: [layernorm_qkv]}
          transformer_engine:
            LogTensorStats:
              enabled: True
              tensors: [activation, weight, gradient, output, wgrad, dgrad]
              stats:
                - min
                - max
                - mean
                - std
                - l1_norm
                - l2_norm
                - cur_amax
                - dynamic_range
                - numel
                - zeros%
                - nonfinite_num
                - exponent_histogram
                - max_blockwise_dynamic_range: {block_size: 16, dims: 1}
                - max_blockwise_dynamic_range: {block_size: 16, dims: 2}
            LogFp8TensorStats:
              enabled: True
              tensors: [activation, weight, gradient]
              stats: [underflows%, overflows%, mse, sqnr_db, scale_inv_min, scale_inv_max, scale_inv_std,
                      fp8_current_scaling_mse, mxfp8_mse, mxfp8_mse_columnwise, fp8_block_scaling_mse]
            LogNvfp4TensorStats:
              enabled: True
              tensors: [activation, weight, gradient]
              stats: [underflows%, mse]
        gemm:
          enabled: True
          layers: {layer_types: [proj]}
          transformer_engine:
            DisableQuantizationGEMM: {enabled: True, gemms: [wgrad]}
            PerTensorScaling: {enabled: True, gemms: [fprop], tensors: [activation], margin: 0}
        fake:
          enabled: True
          layers: {layer_types: [fc1]}
          transformer_engine:
            FakeQuant: {enabled: True, quant_format: MXFP8E4M3, gemms: [fprop, dgrad, wgrad],
                        tensors: [activation, weight, gradient]}
        off:
          enabled: True
          layers: {layer_types: [fc2]}
          transformer_engine:
            DisableQuantizationLayer: {enabled: True}
            LogFp8TensorStats: {enabled: True, tensors: [activation], stats: [mse]}
        """
    )
    board = TensorBoardLogger(tmp_path, name="board")
    callback = PrecisionDebugCallback(everything, log_dir=tmp_path, sinks=[keeper], strict=True)
    trainer(tmp_path, callbacks=[callback], logger=board).fit(Model(), loader(3, size=16))
    assert formats(callback, "proj")["fprop"]["activation"] == "FP8 E4M3 (modified)"
    assert formats(callback, "proj")["wgrad"] == {"gradient": "FP32", "activation": "FP32"}
    assert formats(callback, "fc1")["dgrad"] == {"gradient": "FP32 (modified)", "weight": "FP32 (modified)"}
    assert formats(callback, "fc2")["fprop"] == {"activation": "FP32", "weight": "FP32"}

    assert keeper.iterations == [0, 1, 2]
    last = {(row.layer, row.tensor, row.statistic): row.value for row in keeper.steps[-1]}
    qkv = "transformer_layer.self_attention.layernorm_qkv"
    assert len([key for key in last if key[0] == qkv]) == 6 * 13 + 3 * 11 + 3 * 2
    assert all(np.isfinite(value) for value in last.values())
    assert last[qkv, "activation", "numel"] == 16 * 32
    own, nvfp4 = (last[qkv, "activation", f"{name}mse"] for name in ("", "nvfp4_"))
    assert 0 < last[qkv, "activation", "mxfp8_mse"] < nvfp4
    assert 0 < own < nvfp4
    in_high_precision = "transformer_layer.layernorm_mlp.fc2", "activation", "fp8_current_scaling_mse"
    assert last[in_high_precision] > 0, "what its recipe would give, under the name of that recipe"
    counts = keeper.steps[-1].vectors[qkv, "activation", "exponent_histogram"]
    assert sum(counts) == 16 * 32 * (1 - last[qkv, "activation", "zeros%"] / 100)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(board.log_dir, size_guidance={"histograms": 0, "scalars": 0})
    accumulator.Reload()
    tag = f"te.{qkv}/activation/exponent_histogram"
    histogram = accumulator.Histograms(tag)[-1].histogram_value
    assert histogram.num == sum(counts)
    assert not any("exponent_histogram" in name for name in accumulator.Tags()["scalars"])
    assert f"te.{qkv}/activation/mse" in accumulator.Tags()["scalars"]
