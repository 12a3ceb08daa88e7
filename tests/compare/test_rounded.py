"""A weight that something rounds to few mantissa bits in each step: which statistic sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.views.compare import compare
from tests.conftest import feature

STEPS = 6
OF_THE_TENSOR = ["cur_amax", "std", "mean", "l1_norm", "l2_norm", "zeros%"]


def train(folder: Path, dtype: torch.dtype | None) -> RecordedRun:
    """Train a layer whose weight is rounded to a type before each step."""
    torch.manual_seed(0)
    layer = te.Linear(64, 64)
    config = {
        "plain": feature("LogTensorStats", ["all"], tensors=["weight"], stats=OF_THE_TENSOR),
        "quantized": feature("LogFp8TensorStats", ["all"], tensors=["weight"], stats=["mxfp8_sqnr_db"]),
    }
    with InspectSession(config, model=layer, log_dir=folder) as session:
        for _ in range(STEPS):
            with torch.no_grad():
                layer.weight.add_(torch.randn_like(layer.weight), alpha=1e-4)
                if dtype is not None:
                    layer.weight.copy_(layer.weight.to(dtype))
            layer(torch.randn(32, 64)).square().mean().backward()
            session.step()
    return open_run(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_what_mxfp8_would_lose_of_it_says_that_it_is_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its numbers fit E4M3 whose scale is a power of two; no statistic of its magnitude changes."""
    (parting,) = compare(train(tmp_path / "a", None), train(tmp_path / "b", dtype)).parted
    (departure,) = parting.departures
    assert (parting.tensor, parting.origin, departure.statistic) == ("weight", "made here", "mxfp8_sqnr_db")
    assert 28 < departure.a < 34
    assert departure.b > 50
