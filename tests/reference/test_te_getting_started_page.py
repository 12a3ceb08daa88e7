"""Transformer Engine's getting-started page for precision debugging, followed literally: its script, config and logs.

The script is a GPU script (it calls ``.cuda()``); ``te-precision run`` runs it here. The config is the one of the page,
which is also the one of the demo.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
import transformer_engine.debug.features
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper
from tests.forked import executable
from tests.lightning.models import board_scalars
from tests.training import train

CONFIG = Path(__file__).parents[2] / "examples" / "config.yaml"
TE_FEATURES = Path(transformer_engine.debug.features.__path__[0])
STATISTICS = ["max", "min", "mean", "std", "l1_norm"]

SCRIPT = """
    import sys
    import torch
    import torch.nn as nn
    import torch.optim as optim
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import TransformerLayer
    import nvdlfw_inspect.api as debug_api

    config, features, log_dir, board, kept = sys.argv[1:]
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(board)
    debug_api.initialize(config_file=config, feature_dirs=[features], log_dir=log_dir, default_logging_enabled=True,
                         tb_writer=writer)

    hidden_size = 512
    transformer_layer = TransformerLayer(
        name="transformer_layer", hidden_size=hidden_size, ffn_hidden_size=hidden_size, num_attention_heads=8).cuda()
    dummy_input = torch.randn(10, 32, hidden_size).cuda()
    criterion = nn.MSELoss()
    optimizer = optim.Adam(transformer_layer.parameters(), lr=1e-4)
    dummy_target = torch.randn(10, 32, hidden_size).cuda()

    norm = transformer_layer.self_attention.layernorm_qkv
    states = []
    for epoch in range(5):
        transformer_layer.train()
        optimizer.zero_grad()
        states.append((norm.layer_norm_weight.detach().clone(), norm.layer_norm_bias.detach().clone()))
        with te.fp8_autocast(enabled=True):
            output = transformer_layer(dummy_input)
        loss = criterion(output, dummy_target)
        loss.backward()
        optimizer.step()
        debug_api.step()
    torch.save({"input": dummy_input, "states": states}, kept)
    writer.close()  # which the page leaves to the end of the process
"""


def independent_statistics(kept: Path) -> dict[tuple[str, int], float]:
    saved = torch.load(kept)
    results = {}
    for iteration, (weight, bias) in enumerate(saved["states"]):
        normed = torch.nn.functional.layer_norm(saved["input"].double(), (512,), weight.double(), bias.double(), 1e-5)
        values = [normed.max(), normed.min(), normed.mean(), normed.std(), normed.abs().sum()]
        results.update({(name, iteration): value.item() for name, value in zip(STATISTICS, values, strict=True)})
    return results


@pytest.mark.extended
@pytest.mark.processes
def test_the_pages_script_gives_the_pages_logs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    arguments = [CONFIG, TE_FEATURES, *(tmp_path / name for name in ("log", "board", "kept.pt"))]
    program = Path(sys.executable).with_name("te-precision")
    command = [executable(), str(program), "run", "train.py", *map(str, arguments)]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr

    events = (tmp_path / "log" / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()
    plans = re.findall(r"LAYER=(\S+): Tensor: (\w+), gemm (\w+) - (Quantize|High Precision)$", events, re.MULTILINE)
    layers = ["self_attention.layernorm_linear_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2"]
    operands = [
        ("activation", "fprop"),
        ("activation", "wgrad"),
        ("weight", "fprop"),
        ("weight", "dgrad"),
        ("gradient", "dgrad"),
        ("gradient", "wgrad"),
    ]
    expected = [
        (
            f"transformer_layer.{layer}",
            tensor,
            gemm,
            "High Precision" if layer[-3:] in ("fc1", "fc2") and gemm == "fprop" else "Quantize",
        )
        for layer in layers
        for tensor, gemm in operands
    ]
    assert sorted(plans) == sorted(expected)

    numbers = (tmp_path / "log" / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()
    name = "transformer_layer.self_attention.layernorm_linear_qkv_activation"
    lines = re.findall(rf"INFO - {re.escape(name)}_(\w+)\s+iteration=(\d+)\s+value=(\S+)$", numbers, re.MULTILINE)
    assert len(lines) == len(numbers.splitlines()) == 15
    exact = independent_statistics(tmp_path / "kept.pt")
    for statistic, iteration, value in lines:
        half_a_unit = 0.5 * 10 ** -len(value.partition(".")[2])
        # Transformer Engine's buffers are float32, which near the l1_norm of 130,000 has steps of 0.008.
        step = float(np.spacing(np.float32(abs(exact[statistic, int(iteration)]))))
        assert float(value) == pytest.approx(exact[statistic, int(iteration)], abs=half_a_unit + step, rel=0)
    assert {(statistic, int(iteration)) for statistic, iteration, _ in lines} == {
        (statistic, iteration) for statistic in STATISTICS for iteration in (2, 3, 4)
    }

    scalars = board_scalars(tmp_path / "board")
    assert {(tag.removeprefix(f"{name}_"), step) for tag, steps in scalars.items() for step in steps} == {
        (statistic, iteration) for statistic in STATISTICS for iteration in (2, 3, 4)
    }


def test_the_pages_config_does_the_same_under_a_session(tmp_path: Path) -> None:
    """There the layer is called by its path, ``layernorm_qkv``, and ``layernorm_linear`` selects it by its class."""
    layer = te.TransformerLayer(64, 64, 4)
    keeper = Keeper()
    with InspectSession(CONFIG, model=layer, log_dir=tmp_path, sinks=[keeper]) as session:
        train(session, layer, 7, x=torch.randn(16, 4, 64), recipe=te.get_default_recipe())
    assert keeper.iterations == [2, 3, 4, 5]
    assert {(row.layer, row.tensor) for row in keeper.steps[0]} == {
        ("transformer_layer.self_attention.layernorm_qkv", "activation")
    }
    assert [row.statistic for row in keeper.steps[0]] == STATISTICS
    high_precision = {(e.layer.rpartition(".")[2], e.gemm) for e in session.precision if "FP32" in e.operands.values()}
    assert high_precision == {("fc1", "fprop"), ("fc2", "fprop")}
    assert len(session.precision) == 12
