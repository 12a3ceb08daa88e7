"""Replay: right on records of every format, healthy and with each planted fault."""

import math
from pathlib import Path

import pytest

from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.replay import replay_file, replay_folder
from tests.combinations import half
from tests.dumps.gemms import RECIPES, train
from tests.replay import faults

pytestmark = pytest.mark.usefixtures("any_gpu")

FLOORS = {"nvfp4": (0.08, 0.3), "nvfp4 without": (0.08, 0.3)}
"""The format's share of the error; 0.02 to 0.08 for FP8 (E4M3 3.7 %, E5M2 times E4M3 5 %)."""


@pytest.mark.parametrize(("name", "accumulates"), half(RECIPES, (False, True)))
def test_healthy(tmp_path: Path, name: str, accumulates: bool) -> None:
    files = train(tmp_path, name, accumulates=accumulates)
    folder = replay_folder(tmp_path)
    assert (list(folder.records), folder.unread, folder.first_bad) == (files, {}, None)
    for record in folder.records.values():
        lanes = {lane.name: lane.error for lane in record.lanes}
        assert record.faults == ()
        assert lanes["codes"] < 0.004
        assert record.gain == pytest.approx(1, abs=1e-2)
        if record.gemm.gemm == "wgrad":
            assert lanes["original"] is None
            assert "the quantizer of activation" in record.verdict
        elif name != "delayed":  # whose first scale is 1
            low, high = FLOORS.get(name, (0.02, 0.08))
            assert low < lanes["original"] < high


@pytest.mark.parametrize(("name", "broken"), half(RECIPES, [math.inf, math.nan]))
def test_an_inf_or_nan_is_neither_the_quantizers_fault_nor_the_kernels(
    tmp_path: Path, name: str, broken: float
) -> None:
    for path in train(tmp_path, name, broken=broken, measures=True):
        result = replay_file(path)
        assert result.faults == ()
        if result.gemm.gemm == "fprop":
            assert "1 element of activation with inf or nan, and their scales" in result.not_checked
        if result.gain is None:
            assert "the kernel, since each row of the product has inf or nan" in result.not_checked
    assert not [item for item in diagnose(tmp_path) if item.rule.startswith("gemm")]


@pytest.mark.parametrize(("name", "fault"), half(RECIPES, faults.KERNEL))
def test_faults_of_a_kernel(tmp_path: Path, name: str, fault: str) -> None:
    damage, stated = faults.KERNEL[fault]
    with faults.kernel(damage):
        train(tmp_path, name)
    result = replay_folder(tmp_path)
    assert len(result.records) == 3
    for replayed in result.records.values():
        assert [fault.cause for fault in replayed.faults] == ["kernel"]
        assert stated in replayed.verdict


@pytest.mark.parametrize("fault", faults.QUANTIZER)
@pytest.mark.parametrize("name", RECIPES)
def test_faults_of_a_quantizer(tmp_path: Path, name: str, fault: str) -> None:
    with faults.quantizer(faults.QUANTIZER[fault]):
        (file,) = train(tmp_path, name, gemms="fprop")
    result = replay_file(file)
    assert {(fault.cause, fault.operand) for fault in result.faults} == {
        ("quantizer", "activation"),
        ("quantizer", "weight"),
    }
