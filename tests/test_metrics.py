"""Metrics of a trainer's loggers: selection, names, and the worst values."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks import PrecisionDebugError
from te_precision_callbacks.sinks import LoggerSink, MetricSelection, Row, StepRecords
from te_precision_callbacks.sinks.metrics import (
    LATER_PLACES,
    MOST_SERIES,
    PLACES,
    metric_name,
    names_for_mlflow,
    worst_of_all,
)
from te_precision_callbacks.statistics.series import Series, family_of
from tests.conftest import feature
from tests.step_records import records_from_rows
from tests.training import observed

INF, NAN = math.inf, math.nan


def step(iteration: int, rows: Iterable[tuple[str, str, float]], tensor: str = "activation") -> StepRecords:
    made = [Row(layer, tensor, None, statistic, value) for layer, statistic, value in rows]
    return records_from_rows(iteration, iteration + 100, made)


def of_layers(metrics: Iterable[str]) -> set[str]:
    return {name for name in metrics if name.startswith("te.")}


# ---------------------------------------------------------------------- names


METRIC_NAMES = [
    ("te", Series("net.fc1", family_of("weight", "max")), "te.net.fc1/weight/max"),
    ("te", Series("net.fc1", family_of("weight", "max", "dgrad")), "te.net.fc1/weight/dgrad/max"),
    ("debug", Series("", family_of("", "my_number")), "debug/my_number"),
    ("", Series("net.fc1", family_of("weight", "max")), "net.fc1/weight/max"),
]


def test_metric_names() -> None:
    for prefix, series, name in METRIC_NAMES:
        assert metric_name(prefix, series) == name
    for_mlflow = names_for_mlflow({"te.net[0]:a/activation/underflows%": 1.0})
    assert for_mlflow == {"te.net_0__a/activation/underflows_pct": 1.0}


def test_each_layer_is_a_group_and_the_whole_model_is_one() -> None:
    """TensorBoard and W&B group by what stands before the first slash."""
    names = MetricSelection()(step(0, [(f"layers.{n}.fc1", "underflows%", n / 7) for n in range(500)]))
    assert {name.split("/")[0] for name in names} == {"te", *(f"te.layers.{n}.fc1" for n in range(500))}
    assert {name for name in names if name.startswith("te/")} == {
        "te/findings",
        "te/worst_underflows%",
        "te/all/activation/underflows%/min",
        "te/all/activation/underflows%/median",
        "te/all/activation/underflows%/max",
    }


# ---------------------------------------------------------------------- worst


BEST_TO_WORST = [
    ("underflows%", [0.0, 0.1, 99.0, INF]),
    ("min", [0.0, -2.0, 3.0, -INF]),
    ("mean", [0.0, 0.1, -0.2, 3.0, -INF]),
    ("mxfp8_sqnr_db_columnwise", [INF, 60.0, 20.0, -3.0, -INF]),
    ("mxfp8_e5m2_sqnr_db", [INF, 60.0, 20.0, -3.0, -INF]),
    ("nvfp4_scale_inv_max", [0.0, 1.0, 2.0]),
    ("block_dynamic_range_min", [0.0, 4.0]),
    ("a_users_own", [0.0, 1.0, -2.0, INF]),
]


def test_values_from_the_best_to_the_worst() -> None:
    for statistic, values in BEST_TO_WORST:
        badness = family_of("activation", statistic).badness
        bad = [badness(value) for value in values]
        assert bad == sorted(set(bad))
        assert badness(NAN) == INF


def test_the_worst_is_of_the_statistic_that_it_is_named_for() -> None:
    """Not of a longer name with it as a part: of the block that lost most, of the share of blocks."""
    rows = [
        ("a", "mxfp8_block_underflows%_max", 90.0),
        ("b", "underflows%", 1.0),
        ("c", "nvfp4_underflows%_columnwise", 2.0),
        ("d", "my_underflows%", 50.0),
        ("e", "overflows%", 3.0),
        ("f", "sqnr_db", INF),
    ]
    worst = worst_of_all(step(0, rows).families)
    assert worst == {"worst_underflows%": 2.0, "worst_overflows%": 3.0}
    assert "te/worst_sqnr_db" not in MetricSelection()(step(0, rows)), "an exact tensor is nobody's worst"


@pytest.mark.parametrize(
    ("layers", "log_filter", "of_series", "of_model"),
    [
        (MOST_SERIES, None, MOST_SERIES, 4),  # up to the limit everything is logged
        (3 * MOST_SERIES, "*", 3 * MOST_SERIES, 4),
        (3 * MOST_SERIES, ["*.layer.7/*", "nothing"], 1, 0),
        (3 * MOST_SERIES, lambda name: "layer.8/" in name, 1, 0),
        (3 * MOST_SERIES, "te/*", 0, 4),
    ],
)
def test_a_filter_decides_instead_of_the_limit(layers: int, log_filter: Any, of_series: int, of_model: int) -> None:
    rows = [(f"layer.{index}", "max", float(index)) for index in range(layers)]
    metrics = MetricSelection(log_filter=log_filter)(step(0, rows))
    assert (len(of_layers(metrics)), len(metrics)) == (of_series, of_series + of_model)
    with pytest.raises(PrecisionDebugError, match="log_filter= takes patterns"):
        MetricSelection(log_filter=3)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- which series


def test_above_the_limit_the_worst_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        (f"layer.{index}", statistic, sign * float(index))
        for index in range(1500)
        for statistic, sign in (("underflows%", 1.0), ("min", -1.0), ("sqnr_db", 1.0))
    ]
    rows[0] = (*rows[0][:2], NAN)
    select = MetricSelection()
    metrics = select(step(0, rows))
    assert len(of_layers(metrics)) == 3 * PLACES
    underflows = {number for number in range(1500) if f"te.layer.{number}/activation/underflows%" in metrics}
    assert underflows == {0, *range(1500 - PLACES + 1, 1500)}, "what is not finite is the worst"
    assert "te.layer.1499/activation/min" in metrics, "the lowest minimum"
    assert "te.layer.0/activation/sqnr_db" in metrics, "the lowest ratio of signal to noise"
    assert metrics["te/all/activation/min/min"] == -1499.0
    assert metrics["te/all/activation/min/median"] == -749.5
    assert metrics["te/all/activation/underflows%/max"] == 1499.0
    select(step(1, rows))
    assert caplog.text.count("log_filter") == 1, "said once"


def test_a_layer_that_is_not_finite_joins_later() -> None:
    """Else a series has no gap, and a run few series, though others are the worst soon."""
    select = MetricSelection()

    def names(n: int, **worse: float) -> set[str]:
        layers = {f"l{k}": 1.0 + k / 1e4 for k in range(MOST_SERIES + 1)} | worse
        return of_layers(select(step(n, [(layer, "max", value) for layer, value in layers.items()])))

    first = names(0)
    assert len(first) == PLACES
    for n in range(30):
        assert names(n, **{f"l{n}": 9.0}) == first
    assert names(2, l7=NAN) == first | {"te.l7/activation/max"}, "a value that is not finite joins at once"
    assert names(3) == first | {"te.l7/activation/max"}, "also when it is finite again"
    everything = names(4, **{f"l{k}": INF for k in range(1000)})
    assert len(everything) == PLACES + LATER_PLACES, "which bounds them over a run"


def test_over_all_is_over_all_layers() -> None:
    """In a step with only some of them due, their median would be another number under the same name."""
    select = MetricSelection()
    rows = [(f"l{k}", "max", float(k)) for k in range(5)]
    steps = [select(step(n, own)) for n, own in enumerate((rows, rows[3:], rows))]
    assert [metrics.get("te/all/activation/max/median") for metrics in steps] == [2.0, None, 2.0]
    assert not [name for name in select(step(3, [("l0", "std", 1.0)])) if "/all/" in name], "one layer is not all"


def test_histograms_are_bounded_too() -> None:
    layers = [f"l{k}" for k in range(MOST_SERIES)]
    rows = [Row(layer, "weight", None, "max", float(k)) for k, layer in enumerate(layers)]
    vectors = {(layer, "weight", "exponent_histogram"): (1.0,) * 256 for layer in layers}
    select = MetricSelection()
    logged = [select.histograms(records_from_rows(n, n, rows, vectors=vectors)) for n in range(2)]
    assert list(logged[0]) == list(logged[1])
    assert set(logged[0]) == {f"te.l{k}/weight/exponent_histogram" for k in range(MOST_SERIES - PLACES, MOST_SERIES)}


def test_a_loop_of_ones_own_has_the_same_metrics(tmp_path: Path) -> None:
    """The sink of every integration, in a plain session."""

    class Board(LoggerSink):
        def __init__(self) -> None:
            super().__init__(MetricSelection())
            self.logged: dict[int, set[str]] = {}

        def log(self, metrics: dict[str, float], histograms: Any, step: int) -> None:
            self.logged[step] = {*metrics, *histograms}
            assert all(len(counts) == 256 for counts in histograms.values())

    board = Board()
    stats = ["nonfinite_num", "exponent_histogram"]
    config = {"s": feature("LogTensorStats", ["all"], tensors=["activation"], stats=stats, freq=2)}
    model = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    observed(tmp_path, config, net=model, sinks=[board])
    assert sorted(board.logged) == [0, 2]
    assert board.logged[2] == {
        *(f"te.{layer}/activation/{statistic}" for layer in (0, 1) for statistic in stats),
        *(f"te/all/activation/nonfinite_num/{part}" for part in ("min", "median", "max")),
        "te/nonfinite_num",
        "te/findings",
    }
