"""A healthy training of 12 steps, and then code that ends it: script.py MODE FOLDER CODE.

``session``: started, not stopped. ``with``: in a block. ``watch``: no session, started by ``startup/__main__.py``.
``watched child``: without that, as by torchrun. ``plain`` and ``watched plain``: CODE does all. ``resume``: a run from
the state in the folder, in a block.
"""

import ctypes  # noqa: F401  # for CODE
import math  # noqa: F401
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
from te_precision_callbacks.watch import ScriptWatch

STEPS = 12

mode, folder, code = sys.argv[1:]
os.environ["TE_PRECISION_QUIET"] = "0"
signal.signal(signal.SIGINT, signal.default_int_handler)
rank = int(os.environ.get("RANK", "0"))
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
sessions: list[InspectSession] = []
# Written after the session's own end.
Finalize(None, lambda: sessions and Path(folder, "healthy").write_text(str(sessions[-1].healthy)), exitpriority=0)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def backward(model: torch.nn.Module, factor: float = 1.0) -> torch.Tensor:
    with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        loss = (model(torch.randn(32, 32)) - 1).square().mean() * factor
    loss.backward()
    return loss


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    session: Any = None,
    *,
    steps: int = STEPS,
    factor: float = 1.0,
) -> None:
    for _ in range(steps):
        loss = backward(model, factor)
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.log({"loss": loss})
            session.step()
    if rank == 0:
        sessions.append(session or running_session())


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def f(status: object) -> None:
    raise SystemExit(status)


if mode.startswith("watch"):
    ScriptWatch({"log_dir": folder}).begin()
if mode in ("plain", "watched plain"):
    exec(code)
elif mode == "resume":
    model, optimizer = build()
    with InspectSession(model=model, log_dir=folder) as session:
        for part, state in zip(
            (session, model, optimizer), torch.load(Path(folder, "state"), weights_only=False), strict=True
        ):
            part.load_state_dict(state)
        train(model, optimizer, session)
else:
    model, optimizer = build()
    if mode in ("watch", "watched child"):
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
