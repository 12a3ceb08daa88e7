"""What DumpTensors says, and how often: conditions of a recipe, what cannot be written, budgets, wrong options."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks import dumps
from te_precision_callbacks.dumps.contents import dump_of
from te_precision_callbacks.dumps.dump_files import write
from te_precision_callbacks.dumps.writer import _most_bytes
from te_precision_callbacks.session import InspectSession
from tests.features.plain import linear, plain
from tests.session.test_dumps import config, files, messages, random, step

MSE = {"LogFp8TensorStats": {"tensors": ["activation"], "stats": ["mse"]}}


def layers(number: int, size: int = 32) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(te.Linear(size, size) for _ in range(number)))


# --- conditions on the statistic of a recipe -------------------------------------------------------------------------


def test_the_statistic_of_the_layers_own_recipe_by_its_recipes_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds in the step whose numbers E4M3 does not have, and not where they are powers of two."""
    asked = config(when="fp8_current_scaling_mse > 0", stats=MSE)
    net = te.Linear(32, 32)
    with InspectSession(asked, model=net, log_dir=tmp_path) as session:
        for x in (torch.full((16, 32), 448.0), random(0)):
            step(session, net, x, recipe=Float8CurrentScaling())
    assert list(files(tmp_path)) == ["iter_000001/linear.activation.safetensors"]
    assert not messages(caplog, "DumpTensors")


def test_the_statistic_of_another_recipe_is_told_with_what_to_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = config(when="mxfp8_mse > -1", stats=MSE)
    net = layers(3)
    with InspectSession(asked, model=net, log_dir=tmp_path) as session:
        for number in range(2):
            step(session, net, random(number), recipe=Float8CurrentScaling())
    assert not files(tmp_path)
    (message,) = messages(caplog, "DumpTensors")
    assert "'mxfp8_mse > -1' of activation of 0 is not met in iteration 0: 'mse' in 'stats' is computed" in message
    assert "which is fp8_current_scaling, so 'mxfp8_mse' is not among its statistics" in message
    assert "; add 'mxfp8_mse' to 'stats'" in message
    assert "further tensors are not named" in message


def test_a_statistic_that_cannot_be_had_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stats = {"LogFp8TensorStats": {"tensors": ["activation"], "stats": ["underflow_blocks%"]}}
    net = te.Linear(32, 32)
    with InspectSession(config(when="underflow_blocks% >= 0", stats=stats), model=net, log_dir=tmp_path) as session:
        step(session, net, random(0), recipe=Float8CurrentScaling())
    (message,) = messages(caplog, "DumpTensors")
    assert "the statistic was due, but could not be computed" in message


# --- once ------------------------------------------------------------------------------------------------------------


def test_what_lacks_a_quantized_tensor_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = config(tensors=["activation", "weight", "gradient"], high_precision_tensor=False, quantized_tensor=True)
    net = layers(4)
    with InspectSession(asked, model=net, log_dir=tmp_path) as session:
        for number in range(2):
            step(session, net, random(number))
    (message,) = messages(caplog, "nothing is written")
    assert message.endswith("of weight of 0: it has no quantized_tensor. Further such tensors are not named.")


def test_nonfinite_on_the_cpu_has_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    net = te.Linear(32, 32)
    asked = config(tensors=["activation", "output"], when="nonfinite")
    with InspectSession(asked, model=net, log_dir=tmp_path) as session:
        for number in range(3):
            x = random(number)
            x[0, 0] = float("inf") if number == 1 else 0.0
            step(session, net, x)
    assert len(files(tmp_path)) == 2
    lines = messages(caplog, "tensors are dumped", level=logging.INFO)
    assert lines == ["Iteration 1: 2 tensors are dumped: nonfinite."]


def test_a_dump_that_fails_says_nothing_of_statistics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensor_dumps").write_text("a file where a folder should be")
    net = te.Linear(32, 32)
    with InspectSession(config(), model=net, log_dir=tmp_path) as session:
        for number in range(2):
            step(session, net, random(number))
    (message,) = messages(caplog, "No more tensors are dumped", level=logging.ERROR)
    assert ".." not in message.replace(str(tmp_path), "")
    assert "No more tensors are dumped. Training goes on without what failed." in message


# --- sizes -----------------------------------------------------------------------------------------------------------

QUANTIZERS: dict[str, Callable[[], Any]] = {
    "delayed": lambda: te.Float8Quantizer(torch.ones(1), torch.zeros(1), te.DType.kFloat8E4M3),
    "current": lambda: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=torch.device("cpu")),
    "block": lambda: te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True),
    "mxfp8": lambda: te.MXFP8Quantizer(te.DType.kFloat8E4M3),
    "nvfp4": te.NVFP4Quantizer,
}


@pytest.mark.parametrize("internals", [True, False])
@pytest.mark.parametrize("shape", [(32, 32), (2, 3, 32, 128)])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_files_are_not_larger_than_was_reckoned(
    tmp_path: Path, kind: str, shape: tuple[int, ...], internals: bool
) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    dump = dump_of(
        x,
        QUANTIZERS[kind]()(x),
        internals=internals,
        layer="a_name" * 30,
        tensor="activation",
        iteration=3,
        recipe=kind,
    ).copied()
    reckoned = _most_bytes(replace(dump, tensors=dump.complete()))
    assert 0 <= reckoned - write(dump, tmp_path / "file") <= 6_000


@pytest.mark.parametrize("shape", [(), (0,), (3,), (1,) * 12, (7, 11)])
def test_small_files_of_plain_tensors(tmp_path: Path, shape: tuple[int, ...]) -> None:
    dump = dump_of(torch.ones(shape), None, layer='größe/"~"' * 9, tensor="activation", iteration=10**9)
    nbytes = write(dump, tmp_path / "file")
    assert nbytes <= _most_bytes(dump)
    assert _most_bytes(dump) <= nbytes + 8_000


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


def test_right_options_are_checked_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"enabled": True, "tensors": "activation", "high_precision_tensor": True, "max_bytes": "10MB"}
    with plain({"DumpTensors": options}, tmp_path):
        linear()(random(0)).sum().backward()
        debug_api.step()
    assert len(files(tmp_path)) == 1
    dump = dumps.load(next(iter(files(tmp_path).values())))
    assert torch.equal(dump.tensors["high_precision"], random(0))
    assert not messages(caplog, "DumpTensors")
