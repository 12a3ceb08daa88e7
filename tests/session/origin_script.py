"""A training on two ranks; the second one's model gets a nan: ``origin_script.py FOLDER STEP``."""

import math
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession

folder, step_of_nan = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = torch.nn.Sequential(te.Linear(32, 32), te.LayerNormLinear(32, 32), te.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with InspectSession(log_dir=folder, model=model) as session:
    for step in range(step_of_nan + 4):
        with te.autocast(enabled=True):
            x = torch.randn(32, 32)
            hidden = model[1](model[0](x))
            if step == step_of_nan and dist.get_rank() == 1:
                hidden = hidden * math.nan
            model[2](hidden).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        session.step()
    if dist.get_rank() == 0:
        first = session.findings[0]
        print(first.rule, first.layers, first.tensor, first.since, first.ranks)
dist.destroy_process_group()
