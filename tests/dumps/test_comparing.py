"""Dumps compared, against numpy."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex

from te_precision_callbacks import dumps
from te_precision_callbacks.dumps import difference
from te_precision_callbacks.dumps.contents import Dump, dump_of
from tests.drawn import normal
from tests.dumps.storages import mxfp8, random_bytes, some_mxfp8, some_nvfp4

INF, NAN = math.inf, math.nan


def plain(tensor: torch.Tensor) -> Dump:
    return dump_of(tensor, None, tensor="activation")


@pytest.mark.parametrize("piece", [1 << 16, 100], ids=["one piece", "pieces"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_high_precision(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece: int) -> None:
    monkeypatch.setattr(difference, "_PIECE", piece)
    a = normal(3, 50, 7).to(dtype)
    b = a.clone()
    b[:, 10:30] += (0.01 * normal(3, 20, 7, seed=1)).to(dtype)
    b[2, 20, 5] = a[2, 20, 5] + 9
    result = dumps.compare(plain(a), plain(b))
    (actual,) = result.differences
    x, y = a.double().numpy(), b.double().numpy()
    error = np.abs(x - y)
    assert not result.equal
    assert actual.what == "high_precision"
    assert actual.differing == np.count_nonzero(x != y) > 300
    assert actual.share == actual.differing / 1050
    assert actual.max_abs_error == error.max()
    assert actual.max_at == (2, 20, 5)
    assert actual.mean_abs_error == pytest.approx(error.mean(), rel=1e-12)
    assert actual.sqnr_db == pytest.approx(10 * np.log10(np.sum(x**2) / np.sum(error**2)), rel=1e-12)
    assert (actual.nan, actual.inf, actual.internals) == ((0, 0), (0, 0), None)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    a = torch.tensor([1.0, NAN, INF, INF, -INF, 2.0, 0.0, NAN])
    b = torch.tensor([1.0, NAN, INF, -INF, 3.0, 2.5, -0.0, 4.0])
    (result,) = dumps.compare(plain(a), plain(b)).differences
    assert result.differing == 4  # not NaN and NaN, nor 0 and -0
    assert (result.nan, result.inf) == ((2, 1), (3, 2))
    assert (result.max_abs_error, result.max_at) == (0.5, (5,))
    assert result.mean_abs_error == 0.5 / 3
    assert result.sqnr_db == pytest.approx(10 * math.log10((1 + 4) / 0.25))


@pytest.mark.parametrize(
    ("a", "b", "sqnr"),
    [([NAN, INF], [NAN, INF], NAN), ([0.0], [1.0], -INF), ([0.0], [0.0], INF), ([], [], NAN)],
    ids=["nothing finite", "no signal", "zeros", "empty"],
)
def test_sqnr_at_its_ends(a: list[float], b: list[float], sqnr: float) -> None:
    (result,) = dumps.compare(plain(torch.tensor(a)), plain(torch.tensor(b))).differences
    assert result.sqnr_db == pytest.approx(sqnr, nan_ok=True)


def test_the_counts_of_codes_and_scales() -> None:
    codes, scales = random_bytes(40, 96, seed=0), torch.full((40, 3), 127, dtype=torch.uint8)
    other_codes, other_scales = codes.clone(), scales.clone()
    other_codes[7, 70:73] ^= 1
    other_codes[30, 0] ^= 1
    other_scales[9, 0] += 1
    other_scales[2, 1] -= 3
    result = dumps.compare(dump_of(None, mxfp8(codes, scales)), dump_of(None, mxfp8(other_codes, other_scales)))
    (actual,) = result.differences
    assert actual.what == "rowwise"
    assert (actual.internals.blocks, actual.internals.codes_differing, actual.internals.scales_differing) == (120, 4, 2)


def test_a_difference_that_the_numbers_do_not_show() -> None:
    """The same numbers from other codes with another scale."""
    codes, scales = torch.full((1, 32), 0x38, dtype=torch.uint8), torch.full((1, 1), 127, dtype=torch.uint8)
    result = dumps.compare(dump_of(None, mxfp8(codes, scales)), dump_of(None, mxfp8(codes + 8, scales - 1)))
    (actual,) = result.differences
    assert (actual.differing, actual.equal, result.equal) == (0, False, False)


def test_quantized_against_high_precision() -> None:
    x, quantized = normal(40, 96).bfloat16(), some_mxfp8()
    alone = dumps.compare(dump_of(x, quantized))
    apart = dumps.compare(dump_of(x, None), dump_of(None, quantized))
    for result in (alone, apart):
        (actual,) = result.differences
        assert actual.what == "high_precision / rowwise"
        error = (x.double() - quantized.dequantize(dtype=torch.float32).double()).abs()
        assert actual.max_abs_error == float(error.max())
        assert actual.mean_abs_error == pytest.approx(float(error.mean()))


def columnwise_nvfp4(x: torch.Tensor) -> Any:
    """A storage class with columnwise data only: it knows a matrix."""
    quantizer = te.NVFP4Quantizer(tex.DType.kFloat4E2M1)
    quantizer.internal = True
    quantizer.set_usage(rowwise=False, columnwise=True)
    return quantizer(x)


def test_a_matrix_of_nvfp4_is_compared_with_all_dimensions(tmp_path: Path) -> None:
    x = normal(2, 32, 64).bfloat16()
    columns = columnwise_nvfp4(x)
    dumps.save(columns, tmp_path / "both", high_precision=x)
    both = dumps.load(tmp_path / "both")
    assert both.header.quantized.shape == (2, 32, 64)
    (result,) = dumps.compare(both).differences
    assert result.shape == (2, 32, 64)
    numbers = dumps.dequantize(both, columnwise=True, dtype=torch.float32)
    assert numbers.shape == (2, 32, 64)
    error = (x.double() - numbers.double()).abs()
    assert 0 < result.max_abs_error == float(error.max())
    # Alone it has no other dimensions than a matrix's.
    dumps.save(columns, tmp_path / "alone")
    alone = dumps.load(tmp_path / "alone")
    assert alone.header.quantized.shape == (64, 64)
    for pair in ((dump_of(x, None), alone), (alone, dump_of(x, None))):
        (again,) = dumps.compare(*pair).differences
        assert (again.max_abs_error, again.max_at, again.shape) == (result.max_abs_error, result.max_at, (2, 32, 64))
    (same,) = dumps.compare(dump_of(None, columnwise_nvfp4(x)), both).differences[:1]
    assert same.equal
    with pytest.raises(dumps.DifferentShapesError, match=r"\(2, 64, 32\)"):
        dumps.compare(dump_of(x.reshape(2, 64, 32), None), alone)


def test_two_formats_of_one_tensor() -> None:
    result = dumps.compare(dump_of(None, some_mxfp8(16, 32)), dump_of(None, some_nvfp4(16, 32)))
    (actual,) = result.differences
    assert actual.internals is None
    assert actual.differing > 0
    assert result.not_compared == (
        "rowwise: codes and scales, which are E4M3 in blocks of 1 x 32 in a and E2M1 in blocks of 1 x 16 in b",
    )


def test_different_shapes() -> None:
    with pytest.raises(dumps.DifferentShapesError, match=r"high_precision: a has the shape \(2, 3\) and b \(3, 2\)"):
        dumps.compare(plain(normal(2, 3)), plain(normal(3, 2)))
    with pytest.raises(dumps.DifferentShapesError, match="rowwise"):
        dumps.compare(dump_of(None, some_mxfp8(40, 96)), dump_of(None, some_mxfp8(96, 32)))


def test_nothing_to_compare() -> None:
    with pytest.raises(dumps.NothingToCompareError, match="quantized form in the dump"):
        dumps.compare(plain(normal(2, 3)))
