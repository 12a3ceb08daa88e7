"""NVFP4 through Transformer Engine's own quantizer: against the formats' definitions, and TE's pure-torch reference."""

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from transformer_engine.pytorch import NVFP4Quantizer
from transformer_engine.pytorch.custom_recipes import reference_utils
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef

from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference.errors import ReferenceBackendError
from tests.capability import extension_of
from tests.combinations import grouped
from tests.forked import ranks
from tests.reference import block_formats as spec
from tests.reference import nvfp4_numpy as expected

TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
SHAPES = [(16, 16), (48, 80), (112, 176), (256, 272)]


@pytest.fixture(autouse=True)
def blackwell() -> Iterator[None]:
    with extension_of((10, 0)):
        yield


def check(quantized: Any, direction: str, codes: np.ndarray, scales: np.ndarray, amax: Any) -> None:
    data = getattr(quantized, f"_{direction}_data").numpy()
    np.testing.assert_array_equal(expected.unpack(data).reshape(codes.shape), codes)
    stored = getattr(quantized, f"_{direction}_scale_inv")
    np.testing.assert_array_equal(stored.numpy(), spec.pad(scales, 128, 4))
    assert quantized._with_gemm_swizzled_scales is False
    np.testing.assert_array_equal(
        getattr(quantized, f"_amax_{direction}").numpy(), np.asarray(amax, np.float32).reshape(-1)
    )


def check_both(quantized: Any, source: torch.Tensor, *, by_row: bool = False, **options: Any) -> None:
    matrix = spec.matrix(source)
    for direction, part in (("rowwise", matrix), ("columnwise", matrix.T)):
        amax = np.array([expected.amax(row) for row in part]) if by_row else expected.amax(matrix)
        codes, scales, _ = expected.quantize(part, amax, **options)
        check(quantized, direction, codes, scales, amax)


@pytest.mark.parametrize(("shape", "others"), grouped(SHAPES, spec.KINDS, TYPES, (False, True)))
def test_bytes_scales_and_amax_are_those_of_the_definitions(
    shape: tuple[int, int], others: list[tuple[str, str, bool]]
) -> None:
    for kind, dtype, square in others:
        source = spec.example(kind, shape, TYPES[dtype])
        check_both(NVFP4Quantizer(with_2d_quantization=square)(source), source, square=square)


@pytest.mark.parametrize(
    ("kind", "others"), grouped(spec.KINDS, (False, True), (448, 256), ("MAE", "MSE"), (False, True))
)
def test_four_over_six_takes_the_better_scale(
    kind: str, monkeypatch: pytest.MonkeyPatch, others: list[tuple[bool, int, str, bool]]
) -> None:
    for square, largest_scale, error, in_e4m3_units in others:
        monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", str(int(in_e4m3_units)))
        source = spec.example(kind, (48, 80), torch.bfloat16)
        quantizer = NVFP4Quantizer(
            with_2d_quantization=square,
            nvfp4_use_4over6=True,
            nvfp4_e4m3_max=largest_scale,
            nvfp4_4over6_err_mode=error,
        )
        quantized = quantizer(source)
        options = {"largest_scale": largest_scale, "better_of_two": error, "in_e4m3_units": in_e4m3_units}
        check_both(quantized, source, square=square, **options)
        assert (quantized._nvfp4_use_4over6, quantized._nvfp4_e4m3_max) == (True, largest_scale)


def test_row_scaled_has_an_amax_for_each_row_and_for_each_column() -> None:
    for kind in spec.KINDS:
        source = spec.example(kind, (64, 96), torch.bfloat16)
        quantized = NVFP4Quantizer(row_scaled_nvfp4=True)(source)
        check_both(quantized, source, by_row=True)
        assert quantized._row_scaled_nvfp4


@pytest.mark.parametrize("random_signs", [True, False], ids=["random signs", "no signs"])
@pytest.mark.parametrize("shape", [(48, 80), (64, 128)], ids=["unfused", "fused"])
def test_hadamard_transform_of_the_columns(shape: tuple[int, int], random_signs: bool) -> None:
    for kind in spec.KINDS:
        source = spec.example(kind, shape, torch.bfloat16)
        quantizer = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=random_signs)
        quantized = quantizer(source)
        matrix = spec.matrix(source)
        transformed = transformed_columns(matrix, SIGNS if random_signs else [1] * 16)
        for direction, part in (("rowwise", matrix), ("columnwise", transformed)):
            amax = expected.amax(part)
            codes, scales, _ = expected.quantize(part, amax, fused=shape == (64, 128))
            check(quantized, direction, codes, scales, amax)


def transformed_columns(matrix: np.ndarray, signs: list[int]) -> np.ndarray:
    return np.asarray(torch.from_numpy(expected.hadamard(matrix.T, signs)).bfloat16().float().numpy())


REFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (arguments of the quantizer, and of TE's reference)
    "1d": ({}, {}),
    "2d": ({"with_2d_quantization": True}, {"quant_tile_shape": (16, 16)}),
    "row-scaled": ({"row_scaled_nvfp4": True}, {"row_scaled_nvfp4": True}),
    "4over6": ({"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}, {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}),
    "rht": ({"with_rht": True, "with_post_rht_amax": True}, {"with_rht": True}),
}


# Of NaN and -0 TE's reference makes 0, and NaN of a block's amax; its own tests have neither. The kernels, and the
# definitions above, make the largest number of NaN, keep -0, and pass over NaN.
# The transform makes NaN of infinities; and torch's product of bfloat16 matrices, which TE's reference takes for it,
# makes 0 of denormals on a CPU.
NOT_WITH_RHT = ("inf", "denormal")
KINDS = ("random", "spread", "denormal", "huge", "zero", "inf", "sparse")


@pytest.mark.few
@pytest.mark.parametrize(
    ("how", "kind"), [(how, kind) for how in REFERENCES for kind in KINDS if how != "rht" or kind not in NOT_WITH_RHT]
)
def test_as_transformer_engines_reference(how: str, kind: str) -> None:
    ours, theirs = REFERENCES[how]
    for dtype in [torch.bfloat16] if how in ("rht", "row-scaled") else TYPES.values():
        source = spec.example(kind, (96, 160), dtype) + 0.0  # no -0
        quantized = NVFP4Quantizer(**ours)(source)
        wanted = NVFP4QuantizerRef(dtype=reference_utils.Fp4Formats.E2M1, **theirs).quantize(source)
        for suffix, direction in (("", "rowwise"), ("_t", "columnwise")):
            data, scales = getattr(wanted, f"data{suffix}"), getattr(wanted, f"scale{suffix}").view(torch.uint8)
            usable = torch.ones(data.shape[0], dtype=torch.bool)
            if how == "row-scaled" and kind in ("zero", "sparse"):
                usable = getattr(quantized, f"_amax_{direction}") > 0  # 0 is no division by 0 in the kernel
            torch.testing.assert_close(getattr(quantized, f"_{direction}_data")[usable], data[usable], rtol=0, atol=0)
            stored = getattr(quantized, f"_{direction}_scale_inv")[: scales.shape[0], : scales.shape[1]]
            torch.testing.assert_close(stored[usable], scales[usable], rtol=0, atol=0)
        torch.testing.assert_close(quantized._amax_rowwise, wanted.global_amax_row, rtol=0, atol=0)
        torch.testing.assert_close(quantized._amax_columnwise, wanted.global_amax_col, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["plain", "2d", "rht unfused", "rht fused"])
def test_stochastic_rounding_takes_a_neighbour_and_is_repeatable(how: str) -> None:
    rht = "rht" in how
    shape = (64, 128) if how == "rht fused" else (48, 80)
    source = spec.example("spread", shape, torch.bfloat16)
    quantizer = NVFP4Quantizer(
        stochastic_rounding=True, with_2d_quantization=how == "2d", with_rht=rht, with_post_rht_amax=rht
    )
    torch.manual_seed(5)
    quantized, another = quantizer(source), quantizer(source)
    torch.manual_seed(5)
    torch.testing.assert_close(quantizer(source)._rowwise_data, quantized._rowwise_data)
    assert not torch.equal(another._rowwise_data, quantized._rowwise_data)
    assert not torch.equal(another._columnwise_data, quantized._columnwise_data)
    matrix = spec.matrix(source)
    columns = transformed_columns(matrix, SIGNS) if rht else matrix.T
    for direction, part in (("rowwise", matrix), ("columnwise", columns)):
        amax = expected.amax(part)
        _, scales, multiplier = expected.quantize(part, amax, square=how == "2d")
        codes = expected.unpack(getattr(quantized, f"_{direction}_data").numpy())
        check(quantized, direction, codes, scales, amax)
        expected.assert_next_to(codes, part * multiplier.repeat(16, 1))


@pytest.mark.parametrize("how", ["2d", "2d padded", "1d", "rht", "row-scaled", "4over6"])
def test_optimize_for_gemm_swizzles_the_scales(how: str) -> None:
    shape = (96, 160) if how == "2d padded" else (128, 256)
    source = spec.example("random", shape, torch.bfloat16)
    arguments = REFERENCES[how.removesuffix(" padded")][0]
    compact, quantizer = NVFP4Quantizer(**arguments)(source), NVFP4Quantizer(**arguments)
    quantizer.optimize_for_gemm = True
    for quantized in (quantizer(source), tex.quantize(source, quantizer, NVFP4Quantizer(**arguments)(source))):
        assert quantized._with_gemm_swizzled_scales is True
        for direction in ("rowwise", "columnwise"):
            scales = getattr(compact, f"_{direction}_scale_inv").numpy()
            stored = getattr(quantized, f"_{direction}_scale_inv").numpy()
            np.testing.assert_array_equal(stored, spec.swizzled(scales))
            assert not np.array_equal(stored, scales)
            torch.testing.assert_close(getattr(quantized, f"_{direction}_data"), getattr(compact, f"_{direction}_data"))
        torch.testing.assert_close(quantized.dequantize(), compact.dequantize(), rtol=0, atol=0)


def test_dequantize_gives_what_the_definitions_say() -> None:
    source = spec.example("spread", (2, 24, 80), torch.float32)
    quantized = NVFP4Quantizer()(source)
    assert tuple(quantized._columnwise_data.shape) == (80, 24)
    matrix = spec.matrix(source)
    codes, scales, _ = expected.quantize(matrix, expected.amax(matrix))
    wanted = expected.dequantize(codes, scales, expected.amax(matrix), 448)
    result = tex.dequantize(quantized, tex.DType.kFloat32)
    assert result.shape == source.shape
    np.testing.assert_allclose(spec.matrix(result), wanted, rtol=3e-7)


@pytest.mark.parametrize(
    ("options", "dtype", "shape", "message"),
    [
        ({}, torch.float32, (24, 32), "multiples of 16"),
        ({}, torch.float32, (32, 24), "multiples of 16"),
        ({}, torch.float32, (64,), "multiples of 16"),
        ({"with_rht": True, "with_post_rht_amax": True}, torch.float32, (32, 32), "bfloat16"),
        ({"with_rht": True}, torch.bfloat16, (32, 32), "with_post_rht_amax"),
        ({"row_scaled_nvfp4": True}, torch.float32, (32, 32), "bfloat16"),
        ({"row_scaled_nvfp4": True}, torch.bfloat16, (48, 32), "multiples of 32"),
        ({"row_scaled_nvfp4": True, "rowwise": False}, torch.bfloat16, (32, 32), "rowwise usage"),
        ({"row_scaled_nvfp4": True, "with_2d_quantization": True}, torch.bfloat16, (32, 32), "2D"),
        ({"row_scaled_nvfp4": True, "stochastic_rounding": True}, torch.bfloat16, (32, 32), "stochastic"),
        ({"row_scaled_nvfp4": True, "nvfp4_use_4over6": True}, torch.bfloat16, (32, 32), "4over6"),
        ({"nvfp4_use_4over6": True, "with_rht": True}, torch.bfloat16, (32, 32), "4over6"),
        ({"nvfp4_use_4over6": True, "stochastic_rounding": True}, torch.bfloat16, (32, 32), "4over6"),
    ],
    ids=str,
)
def test_what_upstream_refuses_is_refused(
    options: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ReferenceBackendError, match=message):
        NVFP4Quantizer(**options)(torch.ones(shape, dtype=dtype))


@pytest.mark.processes
def test_amax_is_reduced_over_a_group(tmp_path: Path) -> None:
    code = f"""
    import json, sys
    import torch
    from transformer_engine.pytorch import NVFP4Quantizer
    from tests.capability import stand_for
    stand_for((10, 0))
    rank = int(sys.argv[1])
    torch.distributed.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    source = torch.full((16, 16), 3.0 / (1 + rank), dtype=torch.bfloat16)
    plain = NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group)(source)
    transform = dict(with_rht=True, with_post_rht_amax=True)
    rht = NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group, **transform)(source)
    alone = NVFP4Quantizer(**transform)(source)
    answer = [q._amax_rowwise.item() for q in (plain, rht)] + [q._amax_columnwise.item() for q in (plain, rht, alone)]
    answer.append(plain.dequantize().unique().tolist())
    torch.distributed.destroy_process_group()
    print(json.dumps(answer))
    """
    ended = ranks(Path("-c"), [[dedent(code), str(rank)] for rank in range(2)])
    assert not any(rank.returncode for rank in ended), ended[0].stderr
    first, second = (json.loads(rank.stdout) for rank in ended)
    assert first[:4] == second[:4]
    assert first[:3] == [3.0, 3.0, 3.0]
    assert first[3] == first[4] > second[4]
    assert (first[5], second[5]) == ([3.0], [1.5])
