"""A training script for `accelerate launch`: launch_script.py FOLDER

The reference backend is installed in it as in every process that one with the backend starts.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from te_precision_callbacks import PrecisionDebugger
from tests.accelerate.loops import Plain, prepared, train
from tests.conftest import statistics


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True,
        log_with="tensorboard",
        project_dir=folder,
        gradient_accumulation_steps=2,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=30))],
    )
    accelerator.init_trackers("board")
    model, optimizer, loader = prepared(accelerator, Plain(), batches=12)
    config = statistics(tensors=["activation", "gradient"])
    for part in ("first", "second"):
        debugger = PrecisionDebugger(accelerator, model, config, log_dir=folder / part)
        if part == "second":
            accelerator.wait_for_everyone()  # the main process writes the checkpoint, and no rank waits for it
            accelerator.load_state(str(folder / "checkpoint"))
        with debugger:
            for loss in train(accelerator, debugger, model, optimizer, loader):
                if accelerator.sync_gradients:
                    accelerator.log({"loss": loss.item()}, step=debugger.session.iteration + 1)
            accelerator.save_state(str(folder / "checkpoint"), safe_serialization=False)
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
