"""Two ranks with DistributedDataParallel: over gloo on one GPU or on the CPU, and over NCCL where there are two GPUs.

The reduced statistics must equal float64 statistics of both ranks' tensors together, on both ranks, and training
must be bit-identical to training without a session.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_parts.rows import Rows, Settings, of_all_layers, values_of
from te_precision_callbacks.session import InspectSession

RANKS, STEPS, ROWS, WIDTH = 2, 3, 64, 128
CONFIG = of_all_layers(
    {"LogTensorStats": {"enabled": True, "tensors": ["activation", "weight"], "stats": ["max", "mean", "std"]}}
)
_TOLERANCE = 1e-6


def _inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(ROWS, WIDTH, generator=generator) + rank).bfloat16()


def _train(settings: Settings, device: torch.device, rank: int, folder: Path, *, watched: bool) -> dict[str, Any]:
    """Train, and return the weights and the session's values of each step."""
    te = settings.transformer_engine()
    torch.manual_seed(0)
    layer = te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device=device)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(layer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    session = InspectSession(CONFIG, model=model, log_dir=folder / f"{rank}", observe="fused")
    with session if watched else contextlib.nullcontext():
        for step in range(STEPS):
            model(_inputs(rank, step).to(device)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if watched:
                steps.append(values_of(session.step()))
    return {"weight": layer.weight.detach().double().cpu().tolist(), "steps": steps}


def _run_rank(rank: int, settings: Settings, folder: Path, backend: str) -> None:
    logging.getLogger("te_precision_callbacks").setLevel(logging.ERROR)
    device = settings.device
    if settings.on_gpu:
        device = torch.device("cuda", rank if backend == "nccl" else 0)
        torch.cuda.set_device(device)
    settings.transformer_engine()
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    ways = {"alone": False, "beside": True}
    results = {name: _train(settings, device, rank, folder, watched=watched) for name, watched in ways.items()}
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _expected(step: int) -> dict[str, float]:
    """Of the activations of both ranks together."""
    both = torch.cat([_inputs(rank, step) for rank in range(RANKS)]).double()
    return {
        "activation max": float(both.max()),
        "activation mean": float(both.mean()),
        "activation std": float(both.std(correction=1)),
    }


def _check(name: str, results: list[dict[str, Any]], rows: Rows, note: str) -> None:
    for rank, result in enumerate(results):
        same = result["alone"]["weight"] == result["beside"]["weight"]
        rows.same(f"{name}: weights of rank {rank} with a session", same, note)
        steps = result["beside"]["steps"]
        rows.equal(f"{name}: steps of rank {rank}", len(steps), STEPS)
        for number, step in enumerate(steps):
            for key, right in _expected(number).items():
                value = step.get(key, float("nan"))
                near = abs(value - right) <= _TOLERANCE * max(1.0, abs(right))
                rows.add(f"{name}: {key}, step {number}, rank {rank}", value, expected=right, ok=near)
    rows.same(f"{name}: numbers of both ranks", results[0]["beside"]["steps"] == results[1]["beside"]["steps"])


def check(settings: Settings, rows: Rows) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ways = {"gloo": ""}
    if not settings.on_gpu:
        rows.left_out("two ranks on a GPU", "needs a GPU")
    if settings.on_gpu and torch.cuda.device_count() >= RANKS:
        ways["nccl"] = f"{torch.cuda.device_count()} GPUs"
    else:
        rows.left_out("two ranks over NCCL", "needs two GPUs")
    for backend, note in ways.items():
        name = f"two ranks over {backend}"
        with rows.of(name), tempfile.TemporaryDirectory() as folder:
            # It raises what a rank has raised.
            torch.multiprocessing.spawn(_run_rank, (settings, Path(folder), backend), RANKS)  # type: ignore[attr-defined,no-untyped-call]
            results = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(RANKS)]
            _check(name, results, rows, note)
