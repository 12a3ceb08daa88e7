"""One of two gloo processes that save, and resume with FSDP2: python resume_script.py RANK FOLDER"""

import io
import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"

from te_precision_callbacks import reference

reference.install()

import torch
import transformer_engine.pytorch as te
from torch.distributed.fsdp import fully_shard
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.session import InspectSession
from tests.conftest import statistics
from tests.training import train

DELAYED = recipes.DelayedScaling(amax_history_len=4)
CURRENT = recipes.Float8CurrentScaling()
State = dict[str, Any]


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    for name, recipe, quantized in (
        ("current", CURRENT, False),
        ("quantized", CURRENT, True),
        ("delayed", DELAYED, False),
    ):
        checkpoint = folder / name
        state = saved(recipe, checkpoint, sharded=True, quantized=quantized)
        tell(rank, checkpoint, resumed(recipe, checkpoint, state, sharded=True, quantized=quantized))
    tell(rank, folder / "sharded without", resumed(DELAYED, checkpoint, without(state), sharded=True))
    checkpoint = folder / "replicas"
    state = saved(DELAYED, checkpoint, sharded=False)
    lost = without(state) if rank == 1 else state
    tell(rank, folder / "replicas", resumed(DELAYED, checkpoint, lost, sharded=False))
    tell(rank, folder / "another recipe", resumed(CURRENT, checkpoint, state, sharded=False))

    def halve_on_one(model: Any) -> None:
        if rank == 1:
            model[0].fp8_meta["scaling_fwd"].scale.mul_(0.5)

    if rank == 1:
        (checkpoint / "te_precision_fingerprint_rank-1.json").unlink()
    torch.distributed.barrier()
    tell(rank, folder / "rank 0's alone", resumed(DELAYED, checkpoint, state, sharded=False, then=halve_on_one))
    torch.distributed.destroy_process_group()


def net(recipe: recipes.Recipe, *, sharded: bool, quantized: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        model = torch.nn.Sequential(te.Linear(64, 64), te.Linear(64, 64))
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model


def train_two_steps(model: torch.nn.Module, session: InspectSession, recipe: recipes.Recipe) -> None:
    train(session, model, 2, torch.optim.SGD(model.parameters(), lr=1e-3), x=torch.randn(32, 64), recipe=recipe)


def saved(recipe: recipes.Recipe, checkpoint: Path, *, sharded: bool, quantized: bool = False) -> State:
    checkpoint.mkdir(exist_ok=True)
    model = net(recipe, sharded=sharded, quantized=quantized)
    with InspectSession(statistics(), model=model, log_dir=checkpoint / "log") as session:
        train_two_steps(model, session, recipe)
        session.save_fingerprint(checkpoint)
        state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.distributed.barrier()
    return state


def without(state: State) -> State:
    return {name: value for name, value in state.items() if not name.endswith("_extra_state")}


def resumed(
    recipe: recipes.Recipe,
    checkpoint: Path,
    state: State,
    *,
    sharded: bool,
    quantized: bool = False,
    then: Callable[[Any], Any] | None = None,
) -> str:
    model, log = net(recipe, sharded=sharded, quantized=quantized), io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("te_precision_callbacks.session.resume").addHandler(handler)
    with InspectSession(statistics(), model=model, log_dir=checkpoint / "log") as session:
        session.load_fingerprint(checkpoint)
        model.load_state_dict(state, strict=False)
        if then is not None:
            then(model)
        train_two_steps(model, session, recipe)
    logging.getLogger("te_precision_callbacks.session.resume").removeHandler(handler)
    return "\n".join([*map(str, session.resume_report.findings), "logged:", log.getvalue()])


def tell(rank: int, folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"told-{rank}.txt").write_text(text)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
