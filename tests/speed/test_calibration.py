"""Measured times: on the reference backend, by the code that measures on a GPU, and in the file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from te_precision_callbacks.speed import Calibration, CalibrationError, Shape, Time, calibrate, device_named
from te_precision_callbacks.speed.calibration import gemm_key, high_key
from te_precision_callbacks.speed.expected import timed, total, with_recipes
from tests.capability import any_capability, stand_for
from tests.speed.test_expected import layer

FORMATS = {
    "fp8_delayed_scaling": "9",
    "fp8_current_scaling": "9",
    "fp8_block_scaling": "9",
    "mxfp8": "10",
    "nvfp4": "10",
}


@pytest.mark.parametrize("recipe", FORMATS)
def test_everything_that_is_needed_is_measured(recipe: str) -> None:
    """As the same code does it on a GPU: each time then comes from the table."""
    capability = (int(FORMATS[recipe]), 0)
    device = device_named("h200" if capability == (9, 0) else "b300").model_copy(update={"title": "cpu"})
    with any_capability():
        stand_for(capability)
        products = with_recipes(layer("fc", 128, (64, 96)), recipe)
        table = calibrate(products, device="cpu")
    assert {key.split()[0] for key in table.times} == {"high", "gemm", "cast"}
    times = timed(products, device, table=table)
    assert {time.source for time in times} == {"calibrated"}
    for time in times:
        assert time.high_ms == table.times[high_key(time.shape)].ms
        assert time.low_ms > 0
    table.check_device(device)
    times_before = dict(table.times)
    assert calibrate(products, device="cpu", table=table).times == times_before, "nothing is measured twice"


def test_what_is_refused_is_left_to_the_model(caplog: pytest.LogCaptureFixture) -> None:
    device = device_named("h200").model_copy(update={"title": "cpu"})
    products = with_recipes(layer("fc", 7, (30, 10), low=("fprop",)), "fp8_current_scaling")
    table = calibrate(products, device="cpu")
    assert "was not measured; using the model's time" in caplog.text
    time = timed(products, device, table=table)[0]
    assert time.source == "model"
    assert time.high_ms == timed(products, device)[0].high_ms, "both sides of a speed-up come from one source"


def test_a_gemm_without_a_measured_cast_is_modeled() -> None:
    device = device_named("h200").model_copy(update={"title": "cpu"})
    products = with_recipes(layer("fc", 128, (64, 96)), "fp8_current_scaling")
    table = calibrate(products, device="cpu")
    whole = timed(products, device, table=table)
    table.times = {key: time for key, time in table.times.items() if not key.startswith("cast")}
    fprop, dgrad, wgrad = timed(products, device, table=table)
    assert [fprop, dgrad] == timed(products, device)[:2]
    assert wgrad.source == "calibrated", "its casts count with the others"
    spread = math.hypot(
        *(table.times[key].spread for key in (high_key(wgrad.shape), gemm_key(wgrad.shape, wgrad.recipe)))
    )
    assert math.log(wgrad.interval[1] / wgrad.interval[0]) == pytest.approx(2 * 1.96 * spread)
    assert total([fprop, dgrad, wgrad], device).source == "model"
    assert total(whole, device).source == "calibrated"


def test_the_file(tmp_path: Path) -> None:
    table = Calibration("NVIDIA H200", {"torch": torch.__version__}, {"high 1x2x3": Time(0.5, 0.01)})
    table.write(tmp_path / "table.json")
    assert Calibration.read(tmp_path / "table.json") == table
    assert table.times[high_key(Shape(1, 2, 3))].ms == 0.5
    assert high_key(Shape(1, 2, 4)) not in table.times


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "Invalid JSON"),
        (json.dumps({"device": "x", "versions": {}, "times": {"a": 3}}), r"times\.a"),
        (json.dumps({"device": "x", "times": {"a": {"ms": -1, "spread": 0}}}), r"(?s)times\.a\.ms.*greater than 0"),
    ],
)
def test_a_file_that_cannot_be_used(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(CalibrationError, match=said):
        Calibration.read(tmp_path / "table.json")


def test_a_table_of_another_device() -> None:
    with pytest.raises(CalibrationError, match="Choose another file"):
        calibrate([], device="cpu", table=Calibration("NVIDIA H200"))
