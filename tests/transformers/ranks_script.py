"""A training script for two CPU processes under torchrun or as under it: ranks_script.py FOLDER WHAT [FAILING_RANK]"""

import sys
from pathlib import Path

import torch
import transformers

from te_precision_callbacks.transformers import PrecisionDebugTrainerCallback, Trainer
from tests.preparing import prepare

prepare()  # before the models need the reference backend

from tests.conftest import statistics
from tests.transformers.models import Net, arguments, trainer


def main(folder: Path, what: str, failing_rank: int | None) -> None:
    args = arguments(folder, report_to="tensorboard", ddp_backend="gloo", ddp_timeout=30, gradient_accumulation_steps=2)
    rank = args.process_index
    model = Net()
    if failing_rank == rank:
        model.fail_at = {3: ValueError(f"rank {rank} has a bad batch")}
    config = statistics(tensors=["activation", "gradient"])
    callback = PrecisionDebugTrainerCallback(config, log_dir=folder / "debug")
    kind = Trainer if what == "ours" else transformers.Trainer
    debug = {"debug": "activation_overflow"} if what == "overflow" else {}
    made = trainer(args, *([] if debug else [callback]), model=model, kind=Trainer if debug else kind, **debug)
    if debug and rank == 1:
        model.net[1].register_forward_pre_hook(
            lambda _, inputs: inputs[0] * float("inf") if len(model.trained_on) == 3 else None
        )
    try:
        made.train()
    finally:
        (folder / f"trained_on_{rank}.txt").write_text(repr(model.trained_on))
        (folder / f"finite_{rank}.txt").write_text(repr(all(torch.isfinite(p).all() for p in model.parameters())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
