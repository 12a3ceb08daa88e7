"""What DumpTensors says, and how often: conditions of a recipe, what cannot be written, budgets, wrong options."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession
from tests.features.plain import linear, plain
from tests.session.test_dumps import config, files, messages, random, step


def test_a_small_budget_holds_small_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An activation has 2,048 bytes here, and its file less than 4,000: five or more fit."""
    net = te.Linear(32, 32)
    with InspectSession(config(max_bytes="20KB"), model=net, log_dir=tmp_path) as session:
        for number in range(12):
            step(session, net, random(number))
    sizes = [path.stat().st_size for path in files(tmp_path).values()]
    assert sum(sizes) <= 20_000 < sum(sizes) + max(sizes) + 8_000
    assert len(sizes) >= 5
    (message,) = messages(caplog, "DumpTensors stops")
    assert "max_bytes=20,000 leaves no room for the next file, of up to " in message
    assert f"{sum(sizes):,} bytes are in use." in message


# --- wrong options under plain nvidia-dlfw-inspect -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_byte": "10 Mo"}, r"'DumpTensors' has no key 'max_byte' (given: '10 Mo'). Did you mean 'max_bytes'"),
        ({"max_bytes": "10 MBytes"}, "10 MBytes"),
        ({"when": "non_finite"}, "Did you mean 'nonfinite'?"),
        ({"high_precision_tensor": False}, "would write nothing"),
    ],
)
def test_wrong_options_are_told_once_and_training_goes_on(
    tmp_path: Path, wrong: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"enabled": True, "tensors": ["activation", "weight"], "high_precision_tensor": True, **wrong}
    statistics = {"enabled": True, "tensors": ["activation"], "stats": ["max"]}
    for _ in range(2):  # each run says it
        caplog.clear()
        with plain({"DumpTensors": options, "LogTensorStats": statistics}, tmp_path) as logged:
            net = linear()
            for number in range(3):
                net(random(number).requires_grad_()).sum().backward()
                debug_api.step()
        assert logged.iterations("linear_activation_max") == [0, 1, 2], "other features act"
        (message,) = messages(caplog, "DumpTensors", level=logging.ERROR)
        assert words in message
        assert message.endswith("Nothing is dumped by these options. Training goes on.")
        assert not files(tmp_path)
