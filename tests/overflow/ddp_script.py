"""A rank of two: python ddp_script.py CASE FOLDER RANK. Writes its result to FOLDER/RANK.json."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from te_precision_callbacks.base.ranks.messages import Messages
from te_precision_callbacks.overflow import (
    ActivationOverflowError,
    DebugActivationOverflow,
    DetectionFailedError,
    detector,
)
from te_precision_callbacks.overflow.hooks import FrameRecorder


def counted(owner: Any, name: str) -> mock.Mock:
    counter = mock.Mock(wraps=getattr(owner, name))
    setattr(owner, name, lambda *arguments, **keywords: counter(*arguments, **keywords))
    return counter


def accumulate(model: torch.nn.Sequential, parallel: DistributedDataParallel, rank: int) -> None:
    """Three forwards for one step: rank 1 has an inf in the second, at its third call, rank 0 in the third at once."""
    for micro in range(3):
        inputs = torch.ones(2, 4)
        if rank == 0 and micro == 2:
            inputs[0, 0] = float("inf")
        factor = float("inf") if rank == 1 and micro == 1 else 1.0
        handle = model[1].register_forward_hook(lambda m, i, o, factor=factor: o.abs() * factor)
        with parallel.no_sync():
            parallel(inputs).sum().backward()
        handle.remove()


def main(case: str, folder: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    # The detector's messages to the other rank, and Python's all_reduce, which it never calls: DDP's come from C++.
    counters = [counted(dist, "all_reduce"), counted(Messages, "merge")]
    ended: dict[str, object] = {"rank": rank, "error": None}
    if case == "hooks inside":
        watching = DebugActivationOverflow(model)
    parallel = DistributedDataParallel(model)
    if case != "hooks inside":
        watching = DebugActivationOverflow(parallel, distributed=case != "not distributed")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    steps = 0
    if case == "no room":
        detector.MOST_FRAMES = 1
    try:
        for step in range(5):
            inputs = torch.ones(2, 4)
            bad = step == 3
            if bad and rank == 1 and case in ("first input", "hooks inside", "not distributed"):
                inputs[0, 0] = float("inf")
            if bad and case == "both":  # earlier on rank 1
                (model[0] if rank == 1 else model[2]).register_forward_hook(lambda m, i, o: o.abs() * float("inf"))
            if case == "evaluation" and rank == 0:
                with torch.no_grad():
                    for _ in range(3):
                        model(inputs)
            if case == "failure" and rank == 0 and step == 2:
                FrameRecorder._watch = mock.Mock(  # type: ignore[method-assign]
                    side_effect=LookupError("of the detector's own")
                )
            before = sum(counter.call_count for counter in counters)
            if case == "no room" and bad:
                accumulate(model, parallel, rank)
            parallel(inputs).sum().backward()
            if case == "not distributed" and bad and rank == 0:
                break  # the other one stops alone, before its step
            optimizer.step()
            optimizer.zero_grad()
            ended["collectives in a step"] = sum(counter.call_count for counter in counters) - before
            steps += 1
    except ActivationOverflowError as error:
        ended |= {
            "error": str(error),
            "path": error.path,
            "role": error.role,
            "bad rank": error.rank,
            "report": error.report,
        }
    except DetectionFailedError as failure:
        ended |= {"error": str(failure), "bad rank": failure.rank, "cause": repr(failure.__cause__)}
    ended |= {
        "steps": steps,
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "collectives": sum(counter.call_count for counter in counters),
    }
    watching.close()
    (folder / f"{rank}.json").write_text(json.dumps(ended))
    # gloo waits for collectives that the other rank has not joined.
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
