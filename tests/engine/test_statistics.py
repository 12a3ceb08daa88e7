"""Statistics through the engine, against float64 on all micro-batches together, and against Transformer Engine's."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.engine.kernels import native
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import (
    logged_request,
    quantized_request,
    tensor_request,
)
from te_precision_callbacks.statistics.table import (
    BLOCKWISE,
    GEMM_STATISTICS,
    QUANTIZED_STATISTICS,
    STATISTICS,
    TENSOR_STATISTICS,
)
from tests.drawn import normal
from tests.engine import exact
from tests.engine.forms import drawn
from tests.engine.one_step import Found, statistics
from tests.quantizers import quantizer
from tools.statistics_page import table

INF, NAN = math.inf, math.nan
PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"


def statistics_of(micro_batches: Sequence[torch.Tensor], names: Sequence[Any], *, tensor: str = "gradient") -> Found:
    watched = [Watched("layer", tensor, 3, values) for values in micro_batches]
    return statistics(watched, names, lambda name: tensor_request(name).of(tensor))


def from_float64(micro_batches: Sequence[torch.Tensor]) -> Found:
    everything = np.concatenate([exact.as_array(values) for values in micro_batches])
    x = everything[np.isfinite(everything)]
    n, magnitude = len(x), np.abs(x)
    nonzero = magnitude[magnitude > 0]
    return {
        "min": x.min() if n else 0.0,
        "max": x.max() if n else 0.0,
        "mean": math.fsum(x) / n if n else 0.0,
        "std": x.std(ddof=1) if n > 1 else 0.0,
        "l1_norm": math.fsum(magnitude),
        "l2_norm": math.sqrt(math.fsum(x**2)),
        "cur_amax": magnitude.max(initial=0.0),
        "dynamic_range": math.log2(nonzero.max()) - math.log2(nonzero.min()) if len(nonzero) else 0.0,
        "numel": len(everything),
        "zeros%": 100 * (x == 0).mean() if n else 0.0,
        "nonfinite_num": len(everything) - n,
        "exponent_histogram": tuple(exact.histogram(everything)),
    }


def micro_batches(change: Callable[[torch.Tensor, int], torch.Tensor]) -> list[torch.Tensor]:
    return [change(normal(rows, 97, seed=rows), number) for number, rows in enumerate((50, 1, 171))]


BATCHES = {
    "alike": micro_batches(lambda x, number: x),
    "with different means": micro_batches(lambda x, number: x + 5 * number),
    "with a mean of 1000 std": micro_batches(lambda x, number: x * 0.01 + 10),
    "with a mean of -1000 std in bfloat16's range": micro_batches(lambda x, number: (x - 1000).bfloat16()),
    "with zeros": micro_batches(lambda x, number: x.where(x.abs() > 0.5, 0.0)),
    "of 1e20": micro_batches(lambda x, number: x * 1e20),
    "of 1e-30": micro_batches(lambda x, number: x * 1e-30),
    "of different magnitudes": micro_batches(lambda x, number: x * 10.0 ** (8 * number)),
    "float16": micro_batches(lambda x, number: (100 * x).half()),
    "float8": micro_batches(lambda x, number: x.to(torch.float8_e5m2)),
    "of different dtypes": micro_batches(lambda x, number: x.to([torch.float32, torch.bfloat16, torch.half][number])),
    "float64 beyond float32": micro_batches(lambda x, number: x.double() * 10.0 ** (60 * (number - 1))),
    "float64 between float32": micro_batches(lambda x, number: 1 + x.double() * 1e-10),
    "not finite": micro_batches(lambda x, number: x.where(x.abs() < 1.5, [INF, NAN, -INF][number])),
    "transposed": micro_batches(lambda x, number: x.t()),
    **{f"drawn {seed}": [drawn(seed + 1000 * number) for number in range(1 + seed % 3)] for seed in range(24)},
}


def test_every_statistic_of_a_tensor() -> None:
    for name in BATCHES:
        result = statistics_of(BATCHES[name], TENSOR_STATISTICS)
        expected = from_float64(BATCHES[name])
        assert result.keys() == expected.keys()
        for statistic, value in expected.items():
            rel = exact.STD_IN_FLOAT if statistic in ("mean", "std", "l1_norm", "l2_norm") else 1e-9
            if name == "float64 between float32" and statistic == "std":
                rel = 5  # below the resolution of the moments: within the bounds of the extremes
            size = expected["l1_norm"] / max(expected["numel"], 1) if statistic == "mean" else 0.0
            assert result[statistic] == pytest.approx(value, rel=rel, abs=rel * size), statistic


def test_the_largest_range_of_blocks() -> None:
    request = {BLOCKWISE: {"block_size": 2, "dims": 1}}
    batches = [torch.tensor([[1.0, 8.0, 1.0, 2.0]]), torch.tensor([[4.0, 1.0, 1.0, 0.0]])]
    label = "max_blockwise_dynamic_range_block_size_2_dims_1"
    assert statistics_of(batches, [request]) == {label: 3.0}
    with_orientations = statistics_of(batches[:1] * 2, [request], tensor="activation")
    assert with_orientations == {f"{label}_max_over_orientations": 3.0}


def test_every_statistic_has_an_oracle() -> None:
    """Statistics of tensors here, of quantized tensors in test_quantization.py, the range of blocks in
    test_kernels.py, of GEMMs in tests/instrumentation/test_gemm_errors.py. Each of these tests compares all
    statistics of its kind."""
    assert {*TENSOR_STATISTICS, *QUANTIZED_STATISTICS, BLOCKWISE, *GEMM_STATISTICS} == set(STATISTICS)


EMPTY = dict.fromkeys(TENSOR_STATISTICS, 0.0) | {"exponent_histogram": (0.0,) * 256}


DEFINED = [
    (torch.empty(0), {}),
    (torch.zeros(4, 5), {"numel": 20, "zeros%": 100}),
    (torch.full((4, 5), NAN), {"numel": 20, "nonfinite_num": 20}),
    (torch.full((4, 5), -INF), {"numel": 20, "nonfinite_num": 20}),
    (
        torch.tensor(-3.0),
        {
            "min": -3,
            "max": -3,
            "mean": -3,
            "l1_norm": 3,
            "l2_norm": 3,
            "cur_amax": 3,
            "numel": 1,
            "exponent_histogram": tuple(1.0 * (number == 128) for number in range(256)),
        },
    ),
]


def test_every_value_is_defined() -> None:
    for values, expected in DEFINED:
        assert statistics_of([values], TENSOR_STATISTICS) == EMPTY | expected
        assert list(statistics_of([values], [BLOCKWISE]).values()) == [0.0]
        # And in the midst of others they change nothing but the counts.
        others = [normal(30), values, normal(40, seed=1)]
        results, alone = (
            statistics_of(others, TENSOR_STATISTICS),
            statistics_of([others[0], others[2]], TENSOR_STATISTICS),
        )
        if not values.isfinite().any():
            assert results == alone | {"numel": 70 + values.numel(), "nonfinite_num": values.numel()}


@pytest.mark.filterwarnings("error")
def test_float64_whose_squares_are_beyond_float64() -> None:
    x = torch.tensor([1e200, -3e200, 1e-200, 0.0], dtype=torch.float64)
    result = statistics_of([x, x], TENSOR_STATISTICS)
    assert (result["min"], result["max"], result["cur_amax"]) == (-3e200, 1e200, 3e200)
    assert result["mean"] == pytest.approx(-0.5e200)
    assert result["l1_norm"] == pytest.approx(8e200)
    assert (result["l2_norm"], result["std"]) == (INF, INF)
    assert result["dynamic_range"] == pytest.approx(math.log2(3e200) - math.log2(1e-200))
    assert {place: count for place, count in enumerate(result["exponent_histogram"]) if count} == {0: 2, 255: 4}
    assert statistics_of([x[:1], x[:1]], ["std"]) == {"std": 0.0}
    (blocks,) = statistics_of([x], [BLOCKWISE]).values()
    assert blocks == pytest.approx(result["dynamic_range"])


def test_a_weight_counts_once_a_step() -> None:
    engine = StatisticsEngine()
    weight = normal(20, 30)
    for step in range(2):
        for _ in range(3):
            engine.note(Watched("layer", "weight", step, weight + step), [tensor_request("l1_norm").of("weight")])
            engine.measure()
        (result,) = engine.flush(reduce=False)
        assert result.value == pytest.approx((weight + step).double().abs().sum().item(), rel=1e-12)


def test_inference_mode_before_training() -> None:
    """As Lightning's sanity check is; a tensor made in inference mode cannot be written to outside of it. Each step
    starts again."""
    engine = StatisticsEngine()
    for mode, value in ((True, 8.0), (False, 4.0), (True, 2.0), (False, 1.0)):
        with torch.inference_mode(mode):
            engine.note(Watched("layer", "activation", 0, torch.full((3,), value)), [tensor_request("max")])
            engine.measure()
            assert [item.value for item in engine.flush(reduce=False)] == [value]
            assert not engine.flush(reduce=False)


# --- the histogram of exponents ---------------------------------------------------------------------------------------


def test_underflows_of_any_format_follow_from_the_histogram() -> None:
    """By the formulas of docs/statistics.md, with the scale computed again."""
    values = normal(100, 100) * torch.exp(6 * normal(100, 100, seed=1))
    values[0] = 2.0 ** torch.arange(-50, 50)
    values[1] = torch.tensor([0.0, NAN, INF, -1e-40]).repeat(25)
    (histogram,) = statistics_of([values], ["exponent_histogram"]).values()
    x = values[values.isfinite()]
    assert sum(histogram) == (x != 0).sum()
    formats = {
        torch.float8_e4m3fn: (448.0, -9, 8),
        torch.float8_e5m2: (57344.0, -16, 15),
        torch.float16: (65504.0, -24, 15),
    }
    for dtype, (largest, smallest_exponent, b) in formats.items():
        for k in range(-12, 12):
            scaled = x * 2.0**-k
            underflows = ((scaled.clamp(-largest, largest).to(dtype).float() == 0) & (x != 0)).sum().item()
            t = smallest_exponent + k - 1
            ties = (x.abs() == 2.0**t).sum().item()
            assert sum(histogram[: t + 127]) == underflows - ties
            overflows = (scaled.abs() > largest).sum().item()
            assert sum(histogram[b + k + 128 :]) <= overflows <= sum(histogram[b + k + 127 :])


# --- names ------------------------------------------------------------------------------------------------------------


QUANTIZED_NAMES = [
    ("mse", "", False, None),
    ("mse_columnwise", "", True, None),
    ("mxfp8_mse", "mxfp8", False, None),
    ("mxfp8_scale_inv_min_columnwise", "mxfp8", True, None),
    ("delayed_scaling_overflows%", "fp8_delayed_scaling", False, None),
    ("fp8_delayed_scaling_overflows%", "fp8_delayed_scaling", False, None),
    ("mxfp8_e4m3_mse", "mxfp8", False, False),
    ("mxfp8_e5m2_block_underflows%_max_columnwise", "mxfp8", True, True),
    ("fp8_block_scaling_e5m2_mse", "fp8_block_scaling", False, True),
    ("block_scaling_e4m3_mse", "fp8_block_scaling", False, False),
    ("fp8_block_e4m3_mse", "fp8_block_scaling", False, False),
    ("fp8_current_scaling_e4m3_sqnr_db", "fp8_current_scaling", False, False),
    ("fp8_current_e5m2_underflows%", "fp8_current_scaling", False, True),
    ("fp8_current_underflows%", "fp8_current_scaling", False, None),
]


def test_names_of_quantized_statistics() -> None:
    for name, recipe, columnwise, e5m2 in QUANTIZED_NAMES:
        request = quantized_request(name)
        assert (request.label, request.recipe, request.columnwise, request.e5m2) == (name, recipe, columnwise, e5m2)
        assert logged_request(name) == request


def test_a_recipe_by_default_is_part_of_the_name() -> None:
    assert (quantized_request("mse", "nvfp4").label, quantized_request("mse", "nvfp4").recipe) == ("nvfp4_mse", "nvfp4")
    assert quantized_request("mse").under("mxfp8").label == "mxfp8_mse"


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_table_of_the_page_is_the_code() -> None:
    """Generated by: python -m tools.statistics_page"""
    assert table() in PAGE.read_text()


def test_each_statistic_has_one_row() -> None:
    rows = re.findall(r"^\| `(.+?)` \|", table(), re.MULTILINE)
    assert len(rows) == len(set(rows)) <= len(STATISTICS)
    patterns = [_pattern_of(row) for row in rows]
    for name in STATISTICS:
        assert sum(re.fullmatch(pattern, name) is not None for pattern in patterns) == 1, name


def _pattern_of(row: str) -> str:
    choices = re.sub(r"\{([^}]+)\}", lambda found: f"(?:{found[1].replace(',', '|')})", row)
    return re.sub(r"_X(?=%?$)", "_[ab]", choices).replace("_pN", r"_p\d+")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_micro_batch_is_one_pass_while_slots_move(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """While more layers come, with the same values a second time."""
    requests = [tensor_request(name).of("activation") for name in ("std", "max", "dynamic_range", "exponent_histogram")]
    of_codes = [quantized_request(name) for name in ("mse", "underflows%", "scale_inv_min", "scale_inv_max")]
    added: list[int] = []

    def step() -> list[Any]:
        engine = StatisticsEngine()
        for batch in range(2):
            for layer in range(60):
                values = normal(16, 48, seed=100 * batch + layer).to(dtype) * 2.0**layer
                quantized = quantizer("fp8_current_scaling")(values) if layer % 3 else None
                own = None if quantized is None else quantized._quantizer
                watched = Watched(f"layer{layer}", "activation", 3, values, quantized, quantized, own)
                engine.note(watched, requests)
                if quantized is not None:
                    engine.note(watched, of_codes)
                engine.measure()
        return [(item.layer, item.statistic, item.value) for item in engine.flush(reduce=False)]

    add = native.add
    with monkeypatch.context() as patch:
        patch.setattr(native, "add", lambda *given: added.append(1) or add(*given))
        result = step()
    assert len(added) == 2 * 60
    assert result == step()
    assert len(result) == 60 * 4 + 40 * 4


def test_a_pass_that_fails_leaves_nothing_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has no memory left: the tensors of that pass have no numbers, and the next pass has its own."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    engine = StatisticsEngine()
    requests = (tensor_request("max"),)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "add", fail)
        engine.note(Watched("layer", "weight", 3, torch.tensor([5.0])), requests)
        engine.note(Watched("layer", "output", 3, torch.tensor([6.0])), requests)
        with pytest.raises(torch.OutOfMemoryError):
            engine.measure()
    assert len(engine.collect(reduce=False)) == 0
    engine.note(Watched("layer", "weight", 3, torch.tensor([4.0])), requests)
    engine.measure()
    assert [(item.tensor, item.value) for item in engine.flush(reduce=False)] == [("weight", 4.0)]


def test_tensors_that_are_noted_together() -> None:
    """A tensor that exists in its quantized form only differs from all other such tensors."""
    engine = StatisticsEngine(on_failure=lambda *_: None)
    requests = (quantized_request("scale_inv_max"),)
    for number, tensor in enumerate(("activation", "weight")):
        made = quantizer("fp8_current_scaling")(torch.full((16, 16), 2.0**number))
        engine.note(Watched("layer", tensor, 3, None, made, made, made._quantizer), requests)
    engine.measure()
    results = {measured.tensor: measured.value for measured in engine.flush(reduce=False)}
    assert results["weight"] == 2 * results["activation"]
