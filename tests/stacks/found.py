"""What the scripts of this folder find, for the test that starts them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.conftest import Keeper


def write_found(keeper: Keeper, path: Path) -> None:
    """Write the statistics of the first layer by step, on rank 0."""
    if torch.distributed.get_rank() == 0:
        results = {
            f"{tensor} {key}": keeper.values(key, "net.0", tensor)
            for tensor in ("activation", "gradient")
            for key in ("max", "l1_norm")
        }
        path.write_text(json.dumps(results))
