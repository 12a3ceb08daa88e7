"""The examples of Transformer Engine's page "Debug features", under the Lightning callback.

Each one puts its statistics into the log in its steps, or changes the formats of the operands that it names. The
numbers are tested in tests/test_parity.py and tests/features/test_precision_features.py.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformer_engine.pytorch as te
import yaml
from lightning.pytorch.loggers import TensorBoardLogger

from te_precision_callbacks import PrecisionDebugCallback
from tests.conftest import Keeper, statistics
from tests.functions import Function
from tests.lightning.models import board, loader, logged_lines, trainer
from tests.te_debug_features import FAKE_QUANT, LOG_FP8_TENSOR_STATS, LOG_TENSOR_STATS, PER_TENSOR_SCALING


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


def fit(folder: Path, text: str, steps: int, model: Model | None = None, **keywords: Any) -> PrecisionDebugCallback:
    callback = PrecisionDebugCallback(yaml.safe_load(text), log_dir=folder, **keywords)
    trainer(folder, callbacks=[callback]).fit(model or Model(), loader(steps, size=16))
    return callback


def formats(callback: PrecisionDebugCallback, layer: str) -> dict[str, dict[str, str]]:
    """GEMM -> the formats of the operands that it was handed."""
    return {entry.gemm: entry.operands for entry in callback.session.precision if entry.layer.endswith(layer)}


def iterations(folder: Path) -> dict[str, list[int]]:
    """Statistic -> its iterations in the log."""
    results: dict[str, list[int]] = {}
    for name, iteration in logged_lines(folder):
        results.setdefault(name.removeprefix("transformer_layer."), []).append(iteration)
    return results


@pytest.mark.slow
def test_log_tensor_stats(tmp_path: Path) -> None:
    fit(tmp_path, LOG_TENSOR_STATS, 12)
    even = list(range(0, 12, 2))
    assert iterations(tmp_path) == {
        f"{layer}_{statistic}": steps
        for layer in ("layernorm_mlp.fc1", "self_attention.layernorm_qkv", "self_attention.proj")
        for statistic, steps in (
            ("activation_mean", [10]),
            ("gradient_mean", even),
            ("gradient_max", even),
            ("gradient_min", even),
            ("weight_dynamic_range", list(range(12))),
        )
    }


def test_log_fp8_tensor_stats(tmp_path: Path) -> None:
    """``layernorm_linear`` is the class of the layer that is called layernorm_qkv here."""
    fit(tmp_path, LOG_FP8_TENSOR_STATS, 6)
    layer = "self_attention.layernorm_qkv"
    assert iterations(tmp_path) == {
        f"{layer}_activation_underflows%": [0, 1, 2, 3, 4, 5],
        f"{layer}_activation_overflows%": [0, 1, 2, 3, 4, 5],
        f"{layer}_gradient_overflows%": [0, 5],
    }


def test_per_tensor_scaling(tmp_path: Path) -> None:
    """Of the two tensors the weight alone takes part in dgrad."""
    # A self-attention with a separate LayerNorm and GEMM of the queries, as ``layernorm_q`` on the page.
    attention = te.MultiheadAttention(32, 2, attention_type="cross", input_layernorm=True)
    layer = Function(lambda x: attention(x, encoder_output=x), self_attention=attention)
    of_layer = formats(fit(tmp_path, PER_TENSOR_SCALING, 2, Model(layer)), "layernorm_query")
    assert of_layer["dgrad"] == {"weight": "FP8 E4M3 (modified)", "gradient": "FP8 E5M2"}
    assert of_layer["fprop"] == {"activation": "FP8 E4M3", "weight": "FP8 E4M3"}


def test_fake_quant(tmp_path: Path) -> None:
    callback = fit(tmp_path, FAKE_QUANT, 2)
    assert formats(callback, "fc1") == {
        "fprop": {"activation": "FP32 (modified)", "weight": "FP32 (modified)"},
        "dgrad": {"gradient": "FP32 (modified)", "weight": "FP32"},
        "wgrad": {"gradient": "FP8 E5M2", "activation": "FP8 E4M3"},
    }
    assert formats(callback, "fc2")["fprop"] == {"activation": "FP8 E4M3", "weight": "FP8 E4M3"}


def test_a_histogram_is_one_in_tensorboard_and_beside_it_are_the_numbers(tmp_path: Path, keeper: Keeper) -> None:
    logger = TensorBoardLogger(tmp_path, name="board")
    config = statistics(layers=["fc1"], stats=["zeros%", "exponent_histogram"])
    callback = PrecisionDebugCallback(config, log_dir=tmp_path, sinks=[keeper], strict=True)
    trainer(tmp_path, callbacks=[callback], logger=logger).fit(Model(), loader(3, size=16))
    logged = board(logger.log_dir)
    name = "te.transformer_layer.layernorm_mlp.fc1/activation"
    events = logged.Histograms(f"{name}/exponent_histogram")
    zeros = keeper.values("zeros%")
    assert [event.histogram_value.num for event in events] == [16 * 32 * (1 - zeros[step] / 100) for step in range(3)]
    assert f"{name}/zeros%" in logged.Tags()["scalars"]
    assert not any("exponent_histogram" in tag for tag in logged.Tags()["scalars"])
