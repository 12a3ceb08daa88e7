"""The grammar of conditions, and the values that satisfy them."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from te_precision_callbacks.config import load_config
from te_precision_callbacks.config.conditions import Condition, EventCondition, Threshold, parse_condition
from te_precision_callbacks.statistics.names import quantized_request, tensor_request
from te_precision_callbacks.statistics.series import Measured, SeriesTable
from te_precision_callbacks.statistics.table import STATISTICS
from tests.conftest import feature


def threshold(text: str) -> Threshold:
    condition = parse_condition(text)
    assert isinstance(condition, Threshold)
    return condition


@pytest.mark.parametrize(
    ("text", "statistic", "comparison", "number"),
    [
        ("underflows% > 5", quantized_request("underflows%"), ">", 5.0),
        ("max<=-1e3", tensor_request("max"), "<=", -1000.0),
        ("mxfp8_e5m2_mse_columnwise >= inf", quantized_request("mxfp8_e5m2_mse_columnwise"), ">=", math.inf),
        ("delayed_scaling_mse < .5", quantized_request("delayed_scaling_mse"), "<", 0.5),
    ],
)
def test_a_comparison(text: str, statistic: object, comparison: str, number: float) -> None:
    result = threshold(text)
    assert (result.statistic, result.comparison, result.number) == (statistic, comparison, number)
    assert str(result) == text
    assert result.statistic.statistic is STATISTICS[result.statistic.statistic.name]


@pytest.mark.parametrize(("comparison", "below", "at", "above"), [(">", 0, 0, 1), (">=", 0, 1, 1), ("<", 1, 0, 0)])
def test_when_it_holds(comparison: str, below: bool, at: bool, above: bool) -> None:
    result = threshold(f"mse {comparison} 2")
    assert [result.holds(value) for value in (1.5, 2.0, 2.5)] == [below, at, above]
    assert not result.holds(math.nan)
    assert not threshold("mse <= 2").holds(math.nan)


@pytest.mark.parametrize("event", EventCondition)
def test_an_event(event: EventCondition) -> None:
    assert parse_condition(str(event)) is event


def test_conditions_read_these_statistics() -> None:
    """The recipe may be spelled in another way, and a statistic of blocks is that of any blocks."""
    assert threshold("fp8_current_mse > 1").reads(quantized_request("current_scaling_mse"))
    assert not threshold("mse > 1").reads(quantized_request("mxfp8_mse"))
    sizes = [{"max_blockwise_dynamic_range": {"block_size": size}} for size in (16, 32)]
    of_blocks = [tensor_request(entry).of("weight") for entry in sizes]
    assert all(threshold("max_blockwise_dynamic_range > 1").reads(request) for request in of_blocks)
    assert [threshold(f"{of_blocks[0].label} > 1").reads(request) for request in of_blocks] == [True, False]
    with pytest.raises(ValueError, match="there is no statistic 'max_blockwise_dynamic_range_of_size_3'"):
        parse_condition("max_blockwise_dynamic_range_of_size_3 > 1")


def test_the_numbers_of_a_step() -> None:
    table = SeriesTable()
    numbers = [table.intern("fc1", "activation", name) for name in ("max", "min")]
    table.intern("fc1", "weight", "max")
    step = Measured(table, np.array(numbers[::-1], np.int32), np.array([-2.0, 7.0]))
    assert step.value("fc1", "activation", "max") == 7.0
    assert step.value("fc1", "weight", "max") is None, "a series that this step has not"
    assert step.value("fc2", "activation", "max") is None


@pytest.mark.parametrize("condition", [parse_condition("nonfinite"), parse_condition("mxfp8_mse > 1")])
def test_it_comes_whole_out_of_a_pickle(condition: Condition) -> None:
    """A config goes to the processes of ddp_spawn."""
    assert pickle.loads(pickle.dumps(condition)) == condition
    sections = {
        "a": feature("DumpTensors", ["fc1"], tensors=["weight"], high_precision_tensor=True, when=[str(condition)]),
        "b": feature("LogTensorStats", ["fc1"], tensors=["weight"], stats=["max"], freq=7),
    }
    config = load_config(sections)
    loaded = pickle.loads(pickle.dumps(config))
    for section, own in zip(loaded.sections, config.sections, strict=True):
        ((name, options),) = own.features["transformer_engine"].items()
        result = section.features["transformer_engine"][name]
        assert result == options == sections[section.name]["transformer_engine"][name]
        (target,) = result.schema.targets
        assert target.options.schedule == options.schema.targets[0].options.schedule
        assert result.schema == options.schema
