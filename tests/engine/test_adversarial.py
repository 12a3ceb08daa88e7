"""Every statistic of tensors that were made to be difficult, against a small oracle in numpy and float64.

The tensors are drawn with a seed: any dtype, shape and strides, magnitudes from subnormal to huge, zeros, an outlier,
inf and nan, in one or more micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from te_precision_callbacks.base.vocabulary import recipe_of
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import quantized_request, tensor_request
from te_precision_callbacks.statistics.table import (
    BLOCKWISE,
    QUANTIZED_STATISTICS,
    STATISTICS,
    TENSOR_STATISTICS,
)
from tests.engine import exact
from tests.engine.exact import BLOCK_STATISTICS
from tests.engine.recipes import BLOCKS, Pair, Quantized, by_block, factors_of, quantize
from tests.engine.test_blockwise import by_loop
from tests.engine.test_real_quantizers import SET, current, quantizer

Found = dict[str, Any]
SEEDS = range(24)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def drawn(seed: int, *, columns: int | None = None, rows: int | None = None) -> torch.Tensor:
    """One tensor; of so many rows and columns where they are given."""
    random = np.random.default_rng(seed)
    dtype = DTYPES[seed % 4] if rows is None else DTYPES[1 + seed % 2]
    shapes = [(1,), (0,), (7,), (1, 1), (33, 65), (3, 5, 37), (2, 130), (128, 17), (48, 144)]
    shape = shapes[random.integers(len(shapes))] if rows is None else (rows, columns or 1)
    x = random.standard_normal(shape) * np.exp(random.choice([0.0, 2.0, 8.0]) * random.standard_normal(shape))
    x = x * 10.0 ** random.choice([-44, -38, -12, 0, 0, 0, 12, 37])
    for value in random.choice([0.0, math.inf, -math.inf, math.nan, 1e30, 1e-30, -0.0], 3):
        if random.random() < 0.5:
            x = np.where(random.random(shape) < random.choice([0.02, 0.3, 1.0], p=[0.6, 0.3, 0.1]), value, x)
    if random.random() < 0.2 and x.size:
        x.reshape(-1)[random.integers(x.size)] *= 1e7
    values = torch.from_numpy(np.asarray(x)).to(dtype)
    if rows is None and random.random() < 0.4:
        values = values.transpose(0, -1) if values.ndim > 1 else torch.stack([values, values], -1)[:, 1]
    return values


def measured(watched: Sequence[Watched], names: Sequence[Any], *, of_tensor: bool) -> Found:
    engine = StatisticsEngine()
    engine.on_failure = lambda doing, of, error: pytest.fail(f"{doing} {of}: {error}")
    for item in watched:
        requests = [tensor_request(name).of(item.tensor) if of_tensor else quantized_request(name) for name in names]
        engine.note(item, requests)
        engine.measure()
    results: Found = {}
    for item in engine.flush(reduce=False):
        value = item.value
        results[item.statistic] = (
            {place: count for place, count in enumerate(value) if count} if isinstance(value, tuple) else value
        )
    return results


def same(found: float, expected: float, size: float = 0.0) -> bool:
    """To the rounding of sums in float over short runs; nan where nan is."""
    return bool(found == pytest.approx(expected, rel=exact.STD_IN_FLOAT, abs=1e-12 * size, nan_ok=True))


# --- of a tensor ------------------------------------------------------------------------------------------------------


def of_tensor(batches: Sequence[torch.Tensor]) -> Found:
    """From all elements of all micro-batches together."""
    everything = np.concatenate([exact.as_array(values) for values in batches])
    x = everything[np.isfinite(everything)]
    n, magnitude = len(x), np.abs(x)
    nonzero = magnitude[magnitude > 0]
    mean = math.fsum(x) / n if n else 0.0
    return {
        "min": x.min() if n else 0.0,
        "max": x.max() if n else 0.0,
        "mean": mean,
        "std": math.sqrt(math.fsum((x - mean) ** 2) / (n - 1)) if n > 1 else 0.0,
        "l1_norm": math.fsum(magnitude),
        "l2_norm": math.sqrt(math.fsum(x**2)),
        "cur_amax": magnitude.max(initial=0.0),
        "dynamic_range": math.log2(nonzero.max()) - math.log2(nonzero.min()) if len(nonzero) else 0.0,
        "numel": len(everything),
        "zeros%": 100 * (x == 0).mean() if n else 0.0,
        "nonfinite_num": len(everything) - n,
        "exponent_histogram": {place: count for place, count in enumerate(exact.histogram(everything)) if count},
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_statistics_of_tensors(seed: int) -> None:
    batches = [drawn(seed + 1000 * number) for number in range(1 + seed % 3)]
    result = measured([Watched("l", "gradient", 0, x) for x in batches], TENSOR_STATISTICS, of_tensor=True)
    expected = of_tensor(batches)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert result[name] == value
        else:
            assert same(result[name], value, expected["cur_amax"] if name in ("mean", "std") else 0.0), name
    for dims in (1, 2):
        request = tensor_request({BLOCKWISE: {"block_size": 16, "dims": dims}}).of("activation")
        blocks = request.blocks
        assert blocks is not None
        ranges = measured(
            [Watched("l", "activation", 0, x) for x in batches],
            [{BLOCKWISE: {"block_size": 16, "dims": dims}}],
            of_tensor=True,
        )
        largest = max([by_loop(x, blocks) for x in batches if x.numel()], default=-math.inf)
        assert same(ranges[request.label], max(largest, 0.0), 1.0)


# --- of its quantized form --------------------------------------------------------------------------------------------


def matrix(x: torch.Tensor) -> Any:
    return x.double().reshape(-1, x.shape[-1]).numpy()


def of_quantized(recipe: str, pairs: Sequence[Pair]) -> Found:
    """From the codes and factors that numpy makes."""
    x = np.concatenate([pair.x.reshape(-1) for pair in pairs])
    y = np.concatenate([pair.quantized.values.astype(np.float64).reshape(-1) for pair in pairs])
    limit = np.concatenate([pair.quantized.limits.astype(np.float64).reshape(-1) for pair in pairs])
    columns = exact.comparison(x, y, limit)
    n, error, signal = columns["compared"], columns["error_square_sum"], columns["signal_square_sum"]
    factors = factors_of(recipe, pairs)
    with np.errstate(divide="ignore"):
        sqnr = math.inf if error == 0 else float(10 * np.log10(signal / error))
    return {
        "underflows%": 100 * columns["underflows"] / n if n else 0.0,
        "overflows%": 100 * columns["overflows"] / n if n else 0.0,
        "mse": error / n if n else 0.0,
        "sqnr_db": sqnr,
        "scale_inv_min": factors.min() if len(factors) else 0.0,
        "scale_inv_max": factors.max() if len(factors) else 0.0,
        "scale_inv_std": factors.std(ddof=1) if len(factors) > 1 else 0.0,
        **(by_block(recipe, pairs) if BLOCKS[recipe][0] else {}),
    }


def assert_same(found: Found, expected: Found, form: str) -> None:
    assert found.keys() == {form.format(name) for name in expected}
    for name, value in expected.items():
        first = found[form.format(name)]
        if isinstance(value, dict):
            assert first == value, name
        else:
            size = max(expected["scale_inv_max"], 1e-300) * 1e6 if name == "scale_inv_std" else 0.0
            assert same(first, value, size), (name, first, value)


@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_recipes_would_give(seed: int, recipe: str) -> None:
    weight, columnwise = bool(seed % 2), bool(seed // 2 % 2) and BLOCKS[recipe][0] is not None
    batches = [x for x in (drawn(seed + 1000 * number) for number in range(1 if weight else 2)) if x.numel()]
    if not batches:
        batches = [torch.zeros(3, 4)]
    form = f"{recipe}_{{}}{'_columnwise' if columnwise else ''}"
    names = [name for name in QUANTIZED_STATISTICS if BLOCKS[recipe][0] or name not in BLOCK_STATISTICS]
    tensor = "weight" if weight else "activation"
    result = measured(
        [Watched("l", tensor, 0, x) for x in batches], [form.format(name) for name in names], of_tensor=False
    )
    with np.errstate(over="ignore"):
        pairs = [Pair(matrix(x), quantize(recipe, matrix(x), weight=weight, columnwise=columnwise)) for x in batches]
        assert_same(result, of_quantized(recipe, pairs), form)


OWN = {
    **{recipe: lambda recipe=recipe: quantizer(recipe) for recipe in ("mxfp8", "fp8_block_scaling", "nvfp4")},
    "nvfp4 of a weight": SET["NVFP4 squares"],
    "fp8_current_scaling": current,
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("seed", range(4))
def test_of_the_layers_own_recipe(seed: int, name: str) -> None:
    """Read from Transformer Engine's quantized tensor, whose inf and nan are made finite before."""
    x = drawn(seed, rows=64, columns=96).nan_to_num(0.0, 1.0, -1.0)
    its = OWN[name]()
    recipe, weight = recipe_of(its), name.endswith("weight")
    assert recipe is not None
    real = its(x)
    names = [statistic for statistic in QUANTIZED_STATISTICS if BLOCKS[recipe][0] or statistic not in BLOCK_STATISTICS]
    for columnwise in (False, True):
        form = f"{{}}{'_columnwise' if columnwise else ''}"
        watched = Watched("l", "weight" if weight else "activation", 0, x, real, real, its)
        result = measured([watched], [form.format(name) for name in names], of_tensor=False)
        with np.errstate(over="ignore"):
            by_numpy: Quantized = quantize(recipe, matrix(x), weight=weight, columnwise=columnwise)
            assert_same(result, of_quantized(recipe, [Pair(matrix(x), by_numpy)]), form)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_the_oracle_knows_every_statistic_and_each_has_many_values() -> None:
    seen: dict[str, set[str]] = {}
    for x in filter(torch.Tensor.numel, map(drawn, SEEDS)):
        pairs = [Pair(matrix(x), quantize("nvfp4", matrix(x)))]
        for name, value in {**of_tensor([x]), **of_quantized("nvfp4", pairs)}.items():
            seen.setdefault(name, set()).add(str(value))
    assert seen.keys() == {name for name in STATISTICS if not name.startswith("gemm_")} - {BLOCKWISE}
    assert {name for name, values in seen.items() if len(values) < 5} == set()
    assert "inf" in seen["sqnr_db"]
