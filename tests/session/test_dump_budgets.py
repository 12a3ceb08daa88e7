"""A budget is of each rank, and what one rank may not write does not change what the others wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

SCRIPT = Path(__file__).with_name("dump_budgets_script.py")


@pytest.mark.processes
def test_one_rank_has_no_budget_left(tmp_path: Path) -> None:
    """Its layers are still looked at: debugged layers gather their tensors with other collectives."""
    full = tmp_path / "log" / "tensor_dumps" / "rank_1"
    full.mkdir(parents=True)
    (full / "of_an_earlier_run").write_bytes(b"0" * 2_000_000)
    ranks = forked.ranks(SCRIPT, [[str(tmp_path), str(rank)] for rank in range(2)])
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert list((tmp_path / "log" / "tensor_dumps" / "rank_0").rglob("*.safetensors"))
    assert [path.name for path in full.rglob("*") if path.is_file()] == ["of_an_earlier_run"]
