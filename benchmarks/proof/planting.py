"""A training with a defect in it, recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from defects import Defect, planted
from running import with_statistics_every

from te_precision_callbacks.session import InspectSession


def train_with_defect(defect: Defect, log_dir: Path, device: str = "cpu") -> dict[str, Any]:
    """Train, and return the truth about the defect, and the losses."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    built = defect.build(device)
    losses = []
    with planted(defect, built):
        config = with_statistics_every(defect.freq, gemms=defect.kind == "wrong-kernel")
        with InspectSession(config, model=built.model, log_dir=log_dir, statistics_log="off") as session:
            for _ in range(defect.steps):
                losses.append(built.train_step())
                session.log({"loss": losses[-1], "lr": built.optimizer.param_groups[0]["lr"]})
                session.step()
    FP8GlobalStateManager.reset()
    live = [str(each) for each in session.findings]
    return {**defect.truth(built), "losses": [round(loss, 4) for loss in losses], "live": live}
