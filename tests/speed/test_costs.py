"""Operations, bytes and launches of products, computed by hand, and the times that follow from them."""

import re
from pathlib import Path

import pytest

from te_precision_callbacks.base.vocabulary import OperandName
from te_precision_callbacks.speed import (
    Device,
    DeviceError,
    Shape,
    SpeedError,
    device_named,
    device_reported,
    known_devices,
)
from te_precision_callbacks.speed.costs import cast_bytes, cast_ms, gemm_ms, padded

HOPPER, BLACKWELL = (9, 0), (10, 0)
ELEMENTS = 128 * 128 * 2


@pytest.fixture
def round_device() -> Device:
    """One whose times are counted in the head: 1 TFLOPS is 1e9 operations a millisecond."""
    return Device.model_validate(
        {
            "title": "a round one",
            "capability": HOPPER,
            "bf16_tflops": 100,
            "fp8_tflops": 200,
            "bandwidth_tbs": 1,
            "constants": {
                "measured_on": "a round one",
                "kernel": {"bf16": 0.5, "fp8": 0.5, "fp8_block": 0.5},
                "cast": {"fp8_current_scaling": 0.5, "fp8_delayed_scaling": 0.5, "fp8_block_scaling": 0.5},
                "launch_ms": 0.01,
                "bandwidth": 0.5,
                "scatter": {"kernel": 0.05, "cast": 0.1, "run": 0.0, "transfer": 0.0, "quantile": 2.0},
                "source": "",
            },
        }
    )


@pytest.mark.parametrize(
    ("recipe", "operand", "capability", "both", "rows_alone"),
    [
        # bytes an element: amax and cast read 2 + 2, and write the codes of each direction
        ("fp8_delayed_scaling", "activation", HOPPER, 2 + 1 + 1, 2 + 1),
        ("fp8_delayed_scaling", "weight", BLACKWELL, 2 + 1, 2 + 1),
        ("fp8_current_scaling", "activation", HOPPER, 2 + 2 + 1 + 1, 2 + 2 + 1),
        ("fp8_current_scaling", "gradient", BLACKWELL, 2 + 2 + 1, 2 + 2 + 1),
        ("fp8_block_scaling", "activation", HOPPER, 2 + 2 * (1 + 4 / 128), 2 + 1 + 4 / 128),
        ("fp8_block_scaling", "weight", HOPPER, 2 + 2 * (1 + 4 / 16384), 2 + 1 + 4 / 16384),
        # scales of E8M0 for 32 elements are written, and read and written again by the swizzle
        ("mxfp8", "activation", BLACKWELL, 2 + 2 * (1 + 3 / 32), 2 + 1 + 3 / 32),
        # scales of E4M3 for 16 elements; the Hadamard transform of the columns is a pass of its own
        ("nvfp4", "gradient", BLACKWELL, 6 + 2 * (0.5 + 3 / 16), 4 + 0.5 + 3 / 16),
        ("nvfp4", "weight", BLACKWELL, 4 + 2 * (0.5 + 3 / 16), 4 + 0.5 + 3 / 16),
    ],
)
def test_the_bytes_of_a_cast(
    recipe: str, operand: OperandName, capability: tuple[int, int], both: float, rows_alone: float
) -> None:
    assert cast_bytes(recipe, operand, ELEMENTS, capability)[0] == pytest.approx(both * ELEMENTS)
    rows, _ = cast_bytes(recipe, operand, ELEMENTS, capability, columnwise=False)
    assert rows == pytest.approx(rows_alone * ELEMENTS)
    assert cast_bytes(recipe, operand, ELEMENTS, capability, rowwise=False, columnwise=False) == (0, 0)


def test_the_times_of_a_gemm_and_its_casts(round_device: Device) -> None:
    shape = Shape(1000, 2000, 4000)
    assert shape.operations == 16e9
    assert gemm_ms(shape, "", round_device) == pytest.approx(16e9 / 50e9)
    recipe = "fp8_current_scaling"
    assert gemm_ms(shape, recipe, round_device) == pytest.approx(16e9 / 100e9)
    activation = cast_ms(recipe, "activation", 1000 * 2000, round_device)
    weight = cast_ms(recipe, "weight", 2000 * 4000, round_device, columnwise=False)
    # the input in both directions, 6 bytes an element; the weight for the forward alone, 5
    assert activation + weight == pytest.approx((6 * 2e6 + 5 * 8e6) / 0.5e9 + 8 * 0.01)


def test_a_thin_product_takes_the_time_of_its_bytes(round_device: Device) -> None:
    shape = Shape(16, 4096, 4096)
    moved = 2 * (16 * 4096 + 4096 * 4096 + 16 * 4096)
    assert gemm_ms(shape, "", round_device) == pytest.approx(moved / 0.5e9)
    assert gemm_ms(Shape(1, 1, 1), "", round_device) == pytest.approx(0.002), "a launch"


def test_padding(round_device: Device) -> None:
    assert padded(Shape(100, 4100, 4090), "fp8_current_scaling", HOPPER) == Shape(100, 4112, 4096)
    assert padded(Shape(100, 4100, 4090), "mxfp8", BLACKWELL) == Shape(128, 4128, 4096)
    padded_ms = gemm_ms(Shape(1000, 2000, 4001), "fp8_current_scaling", round_device)
    assert padded_ms == pytest.approx(2 * 1000 * 2000 * 4008 / 100e9)


def test_the_known_devices() -> None:
    for name, device in known_devices().items():
        assert device.fp8_tflops == pytest.approx(2 * device.bf16_tflops, rel=0.002), name
        assert device.bandwidth_tbs < 10, "not in GB/s"
        assert device.sources.keys() >= {"peaks", "bandwidth"}
        assert device.fitted.measured_on
    assert device_named("H200").title == "NVIDIA H200 SXM"
    assert device_named("h100-pcie").bandwidth_tbs == 2.0
    assert device_reported("NVIDIA B300 SXM6 AC").is_measured  # type: ignore[union-attr]
    assert device_reported("NVIDIA A100") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title: [", "cannot be read"),
        ("- 1", "is not valid: : Input should be a valid dictionary"),
        ("title: mine\nbf16_tflop: 3", "bf16_tflop: Extra inputs are not permitted"),
        ("bandwidth_tbs: -1", "bandwidth_tbs: Input should be greater than 0"),
        ("constants: h200", "constants: there is no set 'h200'. Did you mean 'h200_nvl'"),
    ],
)
def test_a_device_file_that_cannot_be_used(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(DeviceError, match=rf"{re.escape(str(path))}.*{re.escape(said)}"):
        device_named(str(path))


def test_a_device_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"no device 'b20'\. Did you mean 'b200'"):
        device_named("b20")
    with pytest.raises(DeviceError, match="cannot be read"):
        device_named(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("device", "recipe", "said"),
    [
        ("h100", "nvfp4", "does not run nvfp4: it needs compute capability 10.0"),
        ("h200", "mxfp8", "does not run mxfp8"),
        ("rtx_pro_6000", "mxfp8", "12.0"),
        ("b300", "mxfp", "Did you mean 'mxfp8'"),
    ],
)
def test_a_recipe_that_a_device_does_not_run(device: str, recipe: str, said: str) -> None:
    with pytest.raises(SpeedError, match=re.escape(said)):
        device_named(device).check_recipe(recipe)
