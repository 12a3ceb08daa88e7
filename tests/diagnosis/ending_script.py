"""A healthy training that a signal ends, with SOON in its third step: ending_script.py TERM|KILL FOLDER [SOON]."""

import os
import signal
import sys
import time

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks import InspectSession

os.environ.pop("TE_PRECISION_QUIET", None)
name, folder, *soon = sys.argv[1:]
torch.manual_seed(0)
net = torch.nn.Sequential(te.LayerNormMLP(32, 64), te.LayerNormMLP(32, 64))
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
inputs, targets = torch.randn(32, 32), torch.randn(32, 32)
with InspectSession(model=net, log_dir=folder) as session:
    for _ in range(3 if soon else 25):
        with te.autocast(recipe=DelayedScaling()):
            loss = torch.nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log({"loss": loss.detach()})
        session.step()
    if name == "KILL":
        time.sleep(0.5 if soon else 6)  # records are written every 5 seconds, and the begin of a run at once
    os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
    time.sleep(60)
