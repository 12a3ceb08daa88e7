"""FP8 block scaling and MXFP8 on the reference backend, bit for bit against numpy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference import target
from te_precision_callbacks.reference.errors import ReferenceBackendError
from tests.capability import extension_of
from tests.combinations import grouped
from tests.quantizers import quantizer
from tests.reference import block_formats as spec

FORMATS = {False: spec.E4M3, True: spec.E5M2}  # e5m2?
KIND = {torch.float32: tex.DType.kFloat32, torch.bfloat16: tex.DType.kBFloat16, torch.float16: tex.DType.kFloat16}
Options = dict[str, bool]
# Recipes, and options of their quantizers.
VARIANTS: list[tuple[str, Options]] = [
    *(
        ("fp8_block_scaling", {"weight": weight, "force_pow_2_scales": power_of_2})
        for weight in (False, True)
        for power_of_2 in (False, True)
    ),
    ("mxfp8", {}),
    ("mxfp8", {"with_2d_quantization": True}),
]
SHAPES = {
    "fp8_block_scaling": [(128, 128), (256, 384), (1, 16), (130, 257), (2, 3, 50, 72), (300,)],
    "mxfp8": [(32, 32), (64, 96), (160, 32), (2, 3, 32, 64), (128, 256)],
}


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    with extension_of((9, 0)):
        yield


def _assert_is(out: Any, x: torch.Tensor, recipe: str, *, e5m2: bool = False, **options: bool) -> None:
    """Codes and scales of both directions as they lie in memory, not swizzled."""
    for columnwise, direction in ((False, "rowwise"), (True, "columnwise")):
        codes, scales, block = spec.quantized(x, columnwise, recipe, FORMATS[e5m2], **options)
        is_transposed = columnwise and recipe != "mxfp8"
        shape = (*x.shape[-1:], *x.shape[:-1]) if is_transposed else x.shape
        stored = spec.stored(scales, block, columnwise)
        assert torch.equal(getattr(out, f"_{direction}_data"), torch.from_numpy(codes).reshape(shape))
        assert torch.equal(getattr(out, f"_{direction}_scale_inv"), torch.from_numpy(stored))


@pytest.mark.few
@pytest.mark.parametrize(("kind", "others"), grouped(spec.KINDS, spec.DTYPES, (False, True), VARIANTS))
def test_bytes_and_scales(kind: str, others: list[tuple[torch.dtype, bool, tuple[str, Options]]]) -> None:
    for dtype, e5m2, variant in others:
        recipe, options = variant
        for seed, shape in enumerate(SHAPES[recipe]):
            x = spec.example(kind, shape, dtype, seed)
            out = tex.quantize(x, quantizer(recipe, e5m2=e5m2, **options))
            assert out.shape == shape
            _assert_is(out, x, recipe, e5m2=e5m2, **options)


@pytest.mark.parametrize(
    ("recipe", "options", "columnwise"),
    [
        ("fp8_block_scaling", {"weight": False, "force_pow_2_scales": False}, False),
        ("fp8_block_scaling", {"weight": True, "force_pow_2_scales": False}, False),
        *(
            ("mxfp8", {"e5m2": e5m2, "swizzled": swizzled}, columnwise)
            for e5m2 in (False, True)
            for swizzled in (False, True)
            for columnwise in (False, True)
        ),
    ],
    ids=str,
)
def test_dequantizing_gives_the_numbers_of_codes_and_scales(recipe: str, options: Options, columnwise: bool) -> None:
    options = dict(options)
    swizzled, e5m2 = options.pop("swizzled", False), options.pop("e5m2", False)
    for shape in [(32, 32), (2, 80, 96), (128, 256), *([(130, 257)] if recipe == "fp8_block_scaling" else [])]:
        x = spec.example("spread", shape, torch.float32 if recipe == "fp8_block_scaling" else torch.bfloat16)
        usages = {"rowwise": not columnwise, "columnwise": columnwise}
        out = tex.quantize(x, quantizer(recipe, e5m2=e5m2, optimize_for_gemm=swizzled, **options, **usages))
        numbers = spec.decoded(*spec.quantized(x, columnwise, recipe, FORMATS[e5m2], **options), FORMATS[e5m2])
        expected = torch.from_numpy(numbers.astype(np.float32)).view(shape)
        for dtype, kind in KIND.items():
            assert torch.equal(tex.dequantize(out, kind), expected.to(dtype))
        # Transformer Engine's own way to it, which moves data that are not on "cuda" there.
        assert torch.equal(out.dequantize(dtype=torch.float32), expected)


# --- FP8 block scaling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", spec.DTYPES, ids=str)
def test_a_scale_beyond_float32_is_the_largest_number_of_the_inputs_type(dtype: torch.dtype) -> None:
    x = torch.full((1, 128), 2.0**-149 if dtype == torch.float32 else torch.finfo(dtype).smallest_normal / 4).to(dtype)
    if dtype == torch.bfloat16:
        x.fill_(2.0**-133)
    out = tex.quantize(x, quantizer("fp8_block_scaling", force_pow_2_scales=False))
    scale = 1 / out._rowwise_scale_inv[0, 0].double().item()
    # float16 has no number that is so small.
    largest = 448 / x[0, 0].item() if dtype == torch.float16 else torch.finfo(dtype).max
    assert scale == pytest.approx(largest, rel=1e-6)
    _assert_is(out, x, "fp8_block_scaling", force_pow_2_scales=False)


@pytest.mark.parametrize("weight", [False, True])
def test_blackwell_has_powers_of_two_alone(weight: bool) -> None:
    x = spec.example("random", (32, 144), torch.float32)
    target.choose((10, 0))
    with pytest.raises(ReferenceBackendError, match="power of two scaling factors"):
        tex.quantize(x, quantizer("fp8_block_scaling", weight=weight, force_pow_2_scales=False))
    out = tex.quantize(x, quantizer("fp8_block_scaling", weight=weight))
    _assert_is(out, x, "fp8_block_scaling", weight=weight)


# --- MXFP8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("e5m2", FORMATS)
def test_scales_at_the_edges_of_their_range(e5m2: bool) -> None:
    largest = float(FORMATS[e5m2].max)
    amaxes = [largest, np.nextafter(np.float32(largest), np.float32(np.inf)), largest * 2.0**-120, 2.0**-149]
    amaxes += [float(np.float32(largest * 2.0**-127)), 3.4028235e38, float("inf"), 0.0]
    x = torch.zeros(32, 32 * len(amaxes))
    x[:, ::32] = torch.tensor(amaxes)
    out = tex.quantize(x, quantizer("mxfp8", e5m2=e5m2))
    _assert_is(out, x, "mxfp8", e5m2=e5m2)
    assert out._rowwise_scale_inv[0, :2].tolist() == [127, 128]
    assert out._rowwise_scale_inv[0, 6:8].tolist() == [254, 0]


@pytest.mark.parametrize("dtype", spec.DTYPES, ids=str)
def test_swizzled_scales(dtype: torch.dtype) -> None:
    for shape in [(32, 32), (160, 96), (128, 640), (384, 128)]:
        x = spec.example("spread", shape, dtype)
        out = tex.quantize(x, quantizer("mxfp8", optimize_for_gemm=True))
        compact = tex.quantize(x, quantizer("mxfp8"))
        assert torch.equal(out._rowwise_data, compact._rowwise_data)
        assert torch.equal(out._columnwise_data, compact._columnwise_data)
        rowwise, columnwise = compact._rowwise_scale_inv.numpy(), compact._columnwise_scale_inv.numpy()
        rowwise, columnwise = spec.swizzled(rowwise), spec.swizzled(columnwise.T).reshape(columnwise.shape)
        tex.swizzle_scales_for_gemm_(compact)
        for _ in range(2):  # the same afterwards, and not twice
            for tensor in (out, compact):
                assert tensor._with_gemm_swizzled_scales
                assert torch.equal(tensor._rowwise_scale_inv, torch.from_numpy(rowwise))
                assert torch.equal(tensor._columnwise_scale_inv, torch.from_numpy(columnwise))
            tex.swizzle_scales_for_gemm_(compact)


def test_an_old_tensor_follows_the_order_of_scales() -> None:
    x, other = (spec.example("random", (32, 64), torch.float32, seed) for seed in (0, 1))
    its = quantizer("mxfp8")
    out = tex.quantize(other, its)
    its.optimize_for_gemm = True
    tex.quantize(x, its, out)
    assert out._with_gemm_swizzled_scales
    expected = tex.quantize(x, its)
    assert torch.equal(out._columnwise_scale_inv, expected._columnwise_scale_inv)
    assert torch.equal(out._rowwise_scale_inv, expected._rowwise_scale_inv)
    its.optimize_for_gemm = False
    tex.quantize(other, its, out)
    _assert_is(out, other, "mxfp8")


@pytest.mark.parametrize("shape", [(31, 32), (32, 48), (2, 8, 32), (32,), ()])
def test_shapes_that_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ReferenceBackendError, match=r"divisible by 32 \(got shape="):
        tex.quantize(torch.ones(shape), quantizer("mxfp8"))


def test_master_weights_in_shards() -> None:
    weight = spec.example("spread", (64, 96), torch.bfloat16)
    whole = tex.quantize(weight, quantizer("mxfp8"))
    empty = tex.create_empty_quantized_tensor(quantizer("mxfp8"), (64, 96), torch.bfloat16, torch.device("cpu"))
    cuts = [(0, 1000), (1000, 1001), (1001, 64 * 96)]
    amaxes = [
        torch.zeros(scales.shape, dtype=torch.bfloat16)
        for scales in (whole._rowwise_scale_inv, whole._columnwise_scale_inv)
    ]
    for start, end in cuts:
        mine = [torch.full_like(amax, 9.0) for amax in amaxes]
        tex.mxfp8_scaling_compute_partial_amax(weight.view(-1)[start:end], *mine, 64, 96, start)
        for amax, of_shard in zip(amaxes, mine, strict=True):
            torch.maximum(amax, of_shard, out=amax)  # the reduction over ranks
    scales = [empty._rowwise_scale_inv, empty._columnwise_scale_inv]
    tex.multi_tensor_compute_scale_inv_e8m0(2048, None, [amaxes, scales])
    for start, end in cuts:
        parts = [data.view(-1)[start:end] for data in (empty._rowwise_data, empty._columnwise_data)]
        tex.mxfp8_scaling_partial_cast(weight.view(-1)[start:end], *parts, *scales, 64, 96, start)
    for name in ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv"):
        assert torch.equal(getattr(empty, name), getattr(whole, name)), name
