"""Two ranks of a tensor- and sequence-parallel layer, with dumps: python dump_budgets_script.py FOLDER RANK"""

# ruff: noqa: E402  # the backend is installed before what imports Transformer Engine

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from te_precision_callbacks import reference

reference.install()

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks.session import InspectSession

OPTIONS = {
    "enabled": True,
    "tensors": ["activation", "gradient", "weight"],
    "high_precision_tensor": True,
    "quantized_tensor": True,
    "max_bytes": "1MB",
}
CONFIG = {
    "dumps": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "transformer_engine": {"DumpTensors": OPTIONS},
    }
}


def main(folder: Path, rank: int) -> None:
    init = f"file://{folder}/init"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    net = te.TransformerLayer(
        128,
        256,
        4,
        tp_group=dist.group.WORLD,
        tp_size=2,
        set_parallel_mode=True,
        sequence_parallel=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    with InspectSession(CONFIG, model=net, log_dir=folder / "log", strict=True) as session:
        for _ in range(3):
            x = torch.randn(32, 2, 128, dtype=torch.bfloat16, requires_grad=True)
            with te.autocast(recipe=Float8CurrentScaling(), amax_reduction_group=dist.group.WORLD):
                output = net(x)
            output.float().sum().backward()
            session.step()
            # So that a rank knows by its next step that it has stopped.
            session._run.observation.recorder.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
