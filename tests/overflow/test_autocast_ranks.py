"""Two ranks under DDP with unused outputs, as the Trainer and Accelerate train in mixed precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import launched


@pytest.mark.processes
def test_an_overflow_stops_both_ranks_in_every_precision(tmp_path: Path) -> None:
    """One launch for all cases: DDP's gradients of unused outputs are None, and float16 has a GradScaler that skips."""
    ended = launched(Path(__file__).with_name("autocast_script.py"), [str(tmp_path)])
    assert [rank.returncode for rank in ended] == [0, 0], [rank.stderr for rank in ended]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    assert list(ranks[0]) == [
        f"with_{front} {precision}" for front in ("trainer", "accelerate") for precision in ("bf16", "fp8", "fp16")
    ]
    for case, ended in ranks[0].items():
        in_every_batch = case.endswith("fp16")
        path = "model.layers.0.mlp.down_proj"
        assert ended["path"] == (path if "trainer" in case else f"llama.{path}"), (case, ended)
        assert (ended["batch"], ended["rank"]) == ((0, 0) if in_every_batch else (2, 1)), (case, ended)
        assert ended["in_transformer_engine"] == case.endswith("fp8")
        assert ("output has infs" in ended["error"]) == in_every_batch
