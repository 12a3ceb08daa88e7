"""A training script for two CPU processes: python ddp_script.py STRATEGY FOLDER [FAILING_RANK]"""

import sys
from datetime import timedelta
from pathlib import Path

from te_precision_callbacks import reference

reference.install()

import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

from te_precision_callbacks import PrecisionDebugCallback
from tests.conftest import statistics
from tests.lightning.models import Plain, samples, trainer


class FailsOnOneRank(Plain):
    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self.rank = rank
        self.net = torch.nn.Sequential()  # TE modules cannot be pickled, so each rank builds its own

    def configure_model(self) -> None:
        if not len(self.net):
            self.net.extend(Plain().net)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        # Lightning's own sampler would shuffle: here the two ranks' batches of a step are the next 16 samples.
        data = samples(64)
        sampler = DistributedSampler(data, num_replicas=2, rank=self.global_rank, shuffle=False)
        return DataLoader(data, batch_size=8, sampler=sampler)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.global_rank == self.rank:
            raise ValueError(f"rank {self.rank} has a bad batch")
        return loss


def main(strategy: str, folder: Path, failing_rank: int | None) -> None:
    start_method = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork"}[strategy]
    callback = PrecisionDebugCallback(statistics(tensors=["activation", "gradient"]), log_dir=folder / "debug")
    made = trainer(
        folder,
        devices=2,
        strategy=DDPStrategy(start_method=start_method, process_group_backend="gloo", timeout=timedelta(seconds=30)),
        logger=CSVLogger(folder, name="csv", version=""),
        callbacks=[callback],
        use_distributed_sampler=False,
    )
    made.fit(FailsOnOneRank(failing_rank))
    if strategy == "ddp":
        made.save_checkpoint(folder / "saved.ckpt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
