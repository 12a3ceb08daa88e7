"""What PerTensorScaling and FakeQuant make of a tensor, beside Transformer Engine's features and the formats' rules."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import nvdlfw_inspect.api as debug_api
import pytest
import torch
from transformer_engine.pytorch import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

from te_precision_callbacks.base.errors import FeatureError
from tests.engine.recipes import quantize
from tests.features.plain import plain

FP8 = {"FP8E4M3": (448.0, DType.kFloat8E4M3), "FP8E5M2": (57344.0, DType.kFloat8E5M2)}
ALL: dict[str, Any] = {
    "enabled": True,
    "gemms": ["fprop", "dgrad", "wgrad"],
    "tensors": ["activation", "weight", "gradient"],
}


@pytest.fixture
def values() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(48, 80) * torch.logspace(-6, 4, 80)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[None]:
    """Features of upstream can only be imported while it is running."""
    with plain({}, tmp_path):
        yield


def modified(
    feature: dict[str, Any],
    log_dir: Path,
    tensor: torch.Tensor,
    *,
    name: str = "activation",
    gemm: str = "fprop",
    **keywords: Any,
) -> Any:
    with plain(feature, log_dir):
        return debug_api.transformer_engine.modify_tensor(
            layer_name="linear", tensor_name=name, gemm=gemm, tensor=tensor, iteration=0, **keywords
        )


def delayed(dtype: DType = DType.kFloat8E4M3) -> Float8Quantizer:
    """A quantizer as delayed scaling has it, with a scale that fits nothing."""
    return Float8Quantizer(torch.full((1,), 3.0), torch.zeros(1), dtype)


def empty_like(tensor: torch.Tensor, dtype: DType = DType.kFloat8E4M3) -> Any:
    return delayed(dtype).make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@pytest.mark.parametrize("dtype", [DType.kFloat8E4M3, DType.kFloat8E5M2])
@pytest.mark.parametrize("type_", [torch.float32, torch.bfloat16])
def test_per_tensor_scaling_without_margin_is_transformer_engines(
    tmp_path: Path, values: torch.Tensor, started: None, dtype: DType, type_: torch.dtype
) -> None:
    from transformer_engine.debug.features.per_tensor_scaling import per_tensor_cast

    values = values.to(type_)
    theirs = per_tensor_cast(values, dtype)
    their_out = empty_like(values, dtype)
    per_tensor_cast(values, dtype, out=their_out)
    debug_api.end_debug()
    features = {"PerTensorScaling": ALL}
    ours = modified(features, tmp_path / "1", values, default_quantizer=delayed(dtype), dtype=type_)
    out = empty_like(values, dtype)
    assert modified(features, tmp_path / "2", values, default_quantizer=delayed(dtype), out=out) is None
    for mine, his in ((ours, theirs), (out, their_out)):
        assert torch.equal(mine._data, his._data)
        assert torch.equal(mine._transpose, his._transpose)
        assert torch.equal(mine._scale_inv, his._scale_inv)
        assert (mine.dtype, mine._fp8_dtype) == (his.dtype, his._fp8_dtype) == (type_, dtype)


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("margin", [-2, 1, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_per_tensor_scaling_with_margin(
    tmp_path: Path, values: torch.Tensor, fp8: str, margin: int, in_place: bool
) -> None:
    """scale = fp8_max / (amax * 2^margin), and the codes are those of a cast with that scale, saturated."""
    largest, dtype = FP8[fp8]
    out = empty_like(values, dtype) if in_place else None
    features = {"PerTensorScaling": {**ALL, "margin": margin}}
    returned = modified(features, tmp_path, values, default_quantizer=delayed(dtype), out=out)
    result = returned if out is None else out
    scale = np.float32(largest) / (np.float32(values.abs().max()) * np.float32(2.0**margin))
    assert result._scale_inv.tolist() == [float(np.float32(1) / scale)]
    codes = (values * torch.tensor(scale)).clamp(-largest, largest).to(_torch_type(fp8))
    assert torch.equal(result._data, codes.view(torch.uint8))


def test_per_tensor_scaling_under_another_recipe_says_so(tmp_path: Path, values: torch.Tensor) -> None:
    with pytest.raises(FeatureError, match=r"PerTensorScaling.*'linear'.*DelayedScaling.*no FP8 recipe"):
        modified({"PerTensorScaling": ALL}, tmp_path, values, default_quantizer=None)


def _torch_type(fp8: str) -> torch.dtype:
    return torch.float8_e4m3fn if fp8.endswith("E4M3") else torch.float8_e5m2


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("type_", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_quant_without_margin_is_transformer_engines(
    tmp_path: Path, values: torch.Tensor, started: None, fp8: str, type_: torch.dtype
) -> None:
    from transformer_engine.debug.features.fake_quant import fake_quantize

    values = values.to(type_)
    theirs, their_out = fake_quantize(values, fp8), torch.empty_like(values)
    fake_quantize(values, fp8, out=their_out)
    debug_api.end_debug()
    features = {"FakeQuant": {**ALL, "quant_format": fp8}}
    ours = modified(features, tmp_path / "1", values, dtype=type_)
    out = torch.empty_like(values)
    assert modified(features, tmp_path / "2", values, out=out) is None
    assert ours.dtype == type_
    assert torch.equal(ours, theirs)
    assert torch.equal(out, their_out)


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("margin", [-1, 2])
def test_fake_quant_with_margin(tmp_path: Path, values: torch.Tensor, fp8: str, margin: int) -> None:
    largest, _ = FP8[fp8]
    rounded = modified({"FakeQuant": {**ALL, "quant_format": fp8, "margin": margin}}, tmp_path, values)
    scale = torch.tensor(np.float32(largest) / (np.float32(values.abs().max()) * np.float32(2.0**margin)))
    codes = (values * scale).clamp(-largest, largest).to(_torch_type(fp8))
    assert torch.equal(rounded, codes.float() * (1 / scale))


ROWWISE = {("activation", "fprop"), ("weight", "fprop"), ("gradient", "dgrad")}
COLUMNWISE = {("activation", "wgrad"), ("weight", "dgrad"), ("gradient", "wgrad")}


@pytest.mark.parametrize("fp8", ["MXFP8E4M3", "MXFP8E5M2"])
@pytest.mark.parametrize(("tensor", "gemm"), sorted(ROWWISE | COLUMNWISE))
def test_fake_quant_to_mxfp8(tmp_path: Path, values: torch.Tensor, fp8: str, tensor: str, gemm: str) -> None:
    """Blocks of 32 run along the dimension that the GEMM sums over; at an edge they are shorter."""
    values[3] = 0.0
    features = {"FakeQuant": {**ALL, "quant_format": fp8}}
    rounded = modified(features, tmp_path, values, name=tensor, gemm=gemm, dtype=torch.float32)
    columnwise = (tensor, gemm) in COLUMNWISE
    expected = quantize("mxfp8", values.numpy(), columnwise=columnwise, e5m2=fp8.endswith("E5M2")).values
    assert np.array_equal(rounded.numpy(), expected)
