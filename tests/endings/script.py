"""A healthy training of 22 steps, and then code that ends it: script.py session|with|watch|plain FOLDER CODE.

``session``: started, not stopped. ``with``: in a block. ``plain``: CODE does all.
"""

import ctypes  # noqa: F401  # for CODE
import json
import os
import signal
import sys
import threading  # noqa: F401
import time  # noqa: F401
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks import InspectSession
from te_precision_callbacks.session.session import running_session
from te_precision_callbacks.watch import begin_from_environment
from tests.full_disk import files_up_to  # noqa: F401

STEPS = 22

mode, folder, code = sys.argv[1:]
os.environ["TE_PRECISION_QUIET"] = "0"
signal.signal(signal.SIGINT, signal.default_int_handler)
sessions: list[InspectSession] = []
# Written after the session's own end.
Finalize(None, lambda: Path(folder, "healthy").write_text(str(sessions[0].healthy)), exitpriority=0)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def backward(model: torch.nn.Module, factor: float = 1.0) -> torch.Tensor:
    with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        loss = (model(torch.randn(32, 32)) - 1).square().mean() * factor
    loss.backward()
    return loss


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, session: Any = None, steps: int = STEPS) -> None:
    for _ in range(steps):
        loss = backward(model)
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.log({"loss": loss})
            session.step()
    sessions.append(session or running_session())


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def f(status: object) -> None:
    raise SystemExit(status)


if mode == "watch":
    os.environ["TE_PRECISION_WATCH"] = json.dumps({"log_dir": folder})
    begin_from_environment()
if mode == "plain":
    exec(code)
else:
    model, optimizer = build()
    if mode == "watch":
        train(model, optimizer)
        exec(code)
    else:
        session = InspectSession(model=model, log_dir=folder)
        if mode == "session":
            session.start()
            train(model, optimizer, session)
            exec(code)
        else:
            with session:
                train(model, optimizer, session)
                exec(code)
