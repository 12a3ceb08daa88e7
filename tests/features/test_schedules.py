"""In which iterations a feature acts: its own schedule, whatever else watches the same tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Keeper
from tests.features.plain import in_session, linear, plain, train


def stats(**options: Any) -> dict[str, dict[str, Any]]:
    """Activations, unless the options say something else."""
    tensors = {} if "tensors_struct" in options else {"tensors": ["activation"]}
    return {"LogTensorStats": {"enabled": True, "stats": ["max"], **tensors, **options}}


def acted(features: dict[str, Any], steps: int, log_dir: Path, **keywords: Any) -> dict[str, list[int]]:
    """Statistic -> iterations, with Transformer Engine's own forward."""
    with plain(features, log_dir, **keywords) as logged:
        train(linear(), steps)
    return {name.removeprefix("linear_"): logged.iterations(name) for name in logged.rows}


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"freq": 3}, [0, 3, 6, 9]),
        ({"freq": 3, "start_step": 1}, [3, 6, 9]),  # not 1, 4, 7
        ({"freq": 3, "start_step": 3, "end_step": 6}, [3, 6]),
        ({"start_step": 8, "end_step": -1}, [8, 9]),
        ({"start_step": None, "end_step": None, "freq": 5}, [0, 5]),
        ({"end_step": 0}, [0]),
        ({"start_end_list": [[1, 2], [5, 6]]}, [1, 2, 5, 6]),
        ({"start_end_list": [[1, 2], [8, -1]], "start_step": 4, "end_step": 5}, [1, 2, 8, 9]),
        ({"start_end_list": [[0, 4], [7, 9]], "freq": 4}, [0, 4, 8]),
    ],
)
def test_the_keys_of_a_schedule(tmp_path: Path, keeper: Keeper, options: dict[str, Any], iterations: list[int]) -> None:
    features = stats(**options)
    assert acted(features, 10, tmp_path / "alone") == {"activation_max": iterations}
    in_session(features, tmp_path / "session", 10, sinks=[keeper])
    assert sorted(keeper.values("max")) == iterations


def test_keys_beside_the_struct_hold_for_its_entries(tmp_path: Path) -> None:
    """As LogFp8TensorStats has start_step and end_step in Transformer Engine's examples; an entry's own goes before."""
    struct = [
        {"tensor": "activation", "stats": ["max"], "freq": 1},
        {"tensor": "weight", "end_step": 2},
        {"tensor": "gradient", "start_end_list": [[0, 0], [6, 6]]},
    ]
    result = acted(stats(tensors_struct=struct, stats=["min"], start_step=1, end_step=4, freq=2), 7, tmp_path)
    assert result == {"activation_max": [1, 2, 3, 4], "weight_min": [2], "gradient_min": [0, 6]}


def test_nothing_is_asked_again_after_the_last_iteration(tmp_path: Path) -> None:
    """Transformer Engine's fused path is back for good then."""
    with plain(stats(freq=4, end_step=4), tmp_path) as logged:
        net = linear()
        runs = []
        for _ in range(8):
            train(net)
            runs.append(net.next_iter_when_debug_should_be_run)
        assert logged.iterations("linear_activation_max") == [0, 4]
    assert runs == [4, 4, 4, 4, None, None, None, None]
