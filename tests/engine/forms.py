"""Tensors quantized by numpy in the layouts of Transformer Engine's storages, and the expected result of a pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

from te_precision_callbacks.engine.kernels.columns import (
    COMPARISON_SUMS,
    EXPONENT_BINS,
    LIMIT_SUMS,
    LOSS_MAXIMA,
    LOSS_SUMS,
    MAXIMA,
    MOMENT_SUMS,
    NOTHING,
    RANGE_MAXIMA,
    RANGE_SUMS,
    SCALE_MAXIMA,
    SCALE_SUMS,
    ColumnPlaces,
    Pending,
)
from te_precision_callbacks.engine.quantization import read
from tests.drawn import normal
from tests.engine import exact, recipes
from tests.engine.recipes import INF, NAN, Pair, Quantized, quantize
from tests.quantizers import fp8_dtype
from tests.reference import block_formats

# A pass over tensors, into sums and maxima.
Add = Callable[[Sequence[Pending], torch.Tensor, torch.Tensor], None]

SUMS = {
    "moments": MOMENT_SUMS,
    "compared": COMPARISON_SUMS,
    "scales": SCALE_SUMS,
    "limits": LIMIT_SUMS,
    "losses": LOSS_SUMS,
    "ranges": RANGE_SUMS,
    "exponents": tuple(f"exponent {number}" for number in range(EXPONENT_BINS)),
}
# Places -> the columns there.
EXTREMES = {
    "maxima": MAXIMA,
    "scale_maxima": SCALE_MAXIMA,
    "loss_maxima": LOSS_MAXIMA,
    "range_maxima": RANGE_MAXIMA,
}


def spread(*shape: int, seed: int = 0, by: float = 3.0) -> torch.Tensor:
    """Of many magnitudes, in blocks and between them."""
    return normal(*shape, seed=seed) * torch.exp(by * normal(*shape, seed=seed + 1))


def matrix(x: torch.Tensor) -> Any:
    return x.double().reshape(-1, x.shape[-1] if x.ndim else 1).numpy()


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (0,), (7,), (1, 1), (33, 65), (3, 5, 37), (2, 130), (128, 17), (48, 144)]


def drawn(seed: int, *, columns: int | None = None, rows: int | None = None) -> torch.Tensor:
    """A tensor made to be difficult; with the given numbers of rows and columns, if any."""
    random = np.random.default_rng(seed)
    dtype = DTYPES[seed % 4] if rows is None else DTYPES[1 + seed % 2]
    shape = SHAPES[random.integers(len(SHAPES))] if rows is None else (rows, columns or 1)
    x = random.standard_normal(shape) * np.exp(random.choice([0.0, 2.0, 8.0]) * random.standard_normal(shape))
    x = x * 10.0 ** random.choice([-44, -38, -12, 0, 0, 0, 12, 37])
    for value in random.choice([0.0, INF, -INF, NAN, 1e30, 1e-30, -0.0], 3):
        if random.random() < 0.5:
            x = np.where(random.random(shape) < random.choice([0.02, 0.3, 1.0], p=[0.6, 0.3, 0.1]), value, x)
    if random.random() < 0.2 and x.size:
        x.reshape(-1)[random.integers(x.size)] *= 1e7
    values = torch.from_numpy(np.asarray(x)).to(dtype)
    if rows is None and random.random() < 0.4:
        values = values.transpose(0, -1) if values.ndim > 1 else torch.stack([values, values], -1)[:, 1]
    return values


class Form(NamedTuple):
    recipe: str
    columnwise: bool = False
    square: bool = False
    swizzled: bool = False
    e5m2: bool = False


FORMS = [
    Form("mxfp8"),
    Form("mxfp8", columnwise=True, e5m2=True),
    Form("mxfp8", swizzled=True, e5m2=True),
    Form("mxfp8", columnwise=True, swizzled=True),
    Form("nvfp4"),
    Form("nvfp4", columnwise=True),
    Form("nvfp4", square=True),
    Form("nvfp4", columnwise=True, square=True, swizzled=True),
    Form("nvfp4", swizzled=True),
    Form("fp8_block_scaling"),
    Form("fp8_block_scaling", columnwise=True),
    Form("fp8_block_scaling", square=True, e5m2=True),
    Form("fp8_block_scaling", columnwise=True, square=True),
]
NAMES = [" ".join([form.recipe, *(name for name in Form._fields[1:] if getattr(form, name))]) for form in FORMS]

Scales = list[tuple[Any, float]]

# How they are stored, and the number that this stands for; inf and nan are all that is left of a sum, so alone.
SPECIAL_SCALES: list[tuple[Form, Scales]] = [
    (FORMS[3], [(0, 2.0**-127), (254, 2.0**127), (1, 2.0**-126)]),
    (FORMS[3], [(255, NAN)]),
    (FORMS[4], [(0, 0.0), (0x7E, 448.0), (1, 2.0**-9)]),
    (FORMS[4], [(0x7F, NAN)]),
    (FORMS[9], [(np.float32(f), f) for f in (0.0, 1e-40, 2.0**127, 2.0**-127, 0.3)]),
    (FORMS[9], [(np.float32(INF), INF)]),
    (FORMS[9], [(np.float32(NAN), NAN)]),
]


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(block_formats.swizzled(scales.numpy()))


def padded(scales: npt.NDArray[Any], height: int, width: int, filler: float) -> torch.Tensor:
    """As upstream lays scales out: sides are multiples of these; what fills them up is left as it was allocated."""
    rows, columns = (-(-side // unit) * unit for side, unit in zip(scales.shape, (height, width), strict=True))
    whole = np.full((rows, columns), filler, scales.dtype)
    whole[: scales.shape[0], : scales.shape[1]] = scales
    return torch.from_numpy(whole)


def scales_of(quantized: Quantized, height: int, width: int, dtype: Any) -> npt.NDArray[Any]:
    return quantized.over([block.stored_scale for block in quantized.blocks], dtype)[::height, ::width]


def storage_of(form: Form, quantized: Quantized, shape: Sequence[int]) -> Any:
    """Transformer Engine's storage of one direction; what pads the scales is no scale."""
    direction = "columnwise" if form.columnwise else "rowwise"
    none = dict.fromkeys(["rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"])
    codes = torch.from_numpy(quantized.codes)

    def of(data: torch.Tensor, scales: torch.Tensor) -> dict[str, Any]:
        return {**none, f"{direction}_data": data, f"{direction}_scale_inv": scales, "quantizer": None}

    if form.recipe == "mxfp8":
        block = (32, 1) if form.columnwise else (1, 32)
        scales = padded(scales_of(quantized, *block, np.uint8), *((4, 128) if form.columnwise else (128, 4)), 250)
        if form.swizzled:
            scales = swizzled(scales.t().contiguous()).reshape(scales.shape) if form.columnwise else swizzled(scales)
        options = {"fp8_dtype": fp8_dtype(form.e5m2), "with_gemm_swizzled_scales": form.swizzled}
        return MXFP8TensorStorage(**of(codes.view(*shape), scales), **options)
    if form.recipe == "nvfp4":
        as_matrix, of_blocks = (
            quantized.codes,
            scales_of(quantized, *((16, 1) if form.columnwise else (1, 16)), np.uint8),
        )
        if form.columnwise:
            as_matrix, of_blocks = np.ascontiguousarray(as_matrix.T), of_blocks.T
        packed = torch.from_numpy(
            as_matrix[:, ::2] | as_matrix[:, 1::2] << 4
        )  # the even code is the low half of a byte
        in_memory = padded(of_blocks, 128, 4, 0x7E)
        amax = torch.tensor([quantized.tensor_amax])
        storage = NVFP4TensorStorage(
            **of(packed, swizzled(in_memory) if form.swizzled else in_memory),
            amax_rowwise=amax, amax_columnwise=amax, fp4_dtype=te.DType.kFloat4E2M1,
            with_gemm_swizzled_scales=form.swizzled,
        )  # fmt: skip
        storage._quantizer = type("Quantizer", (), {"with_2d_quantization": form.square})()
        return storage
    block = (128, 128) if form.square else (128, 1) if form.columnwise else (1, 128)
    of_blocks = scales_of(quantized, *block, np.float32)
    codes = codes.view(*shape)
    turned = form.square is form.columnwise  # squares lie as they are, pieces of rows in columns; and the transpose
    return Float8BlockwiseQTensorStorage(
        **of(
            codes.movedim(-1, 0).contiguous() if form.columnwise else codes,
            padded(of_blocks.T if turned else of_blocks, 1, 4, 1e9),
        ),
        fp8_dtype=fp8_dtype(form.e5m2), is_2D_scaled=form.square,
    )  # fmt: skip


def quantized_by(form: Form, x: torch.Tensor) -> Quantized:
    return quantize(form.recipe, matrix(x), e5m2=form.e5m2, weight=form.square, columnwise=form.columnwise)


def pending_of(form: Form, x: torch.Tensor, quantized: Quantized | None = None) -> Pending:
    storage = storage_of(form, quantized or quantized_by(form, x), x.shape)
    return Pending(x, None, None, False, ColumnPlaces(), read(storage, columnwise=form.columnwise))


def tensor_of(form: Form) -> torch.Tensor:
    """Many magnitudes, blocks of zeros, inf and nan.

    Of several tiles and bands of tiles, no multiple of a block or a tile where the format allows it.
    """
    x = spread(*((2, 40, 160) if form.recipe == "nvfp4" else (2, 70 if form.square else 37, 150)), by=2)
    x.view(-1)[::7] = 0
    x[:, :, :32] = 0
    x[1, 5] = 0
    x.view(-1)[1::97] = torch.tensor([INF, -INF, NAN]).repeat(1000)[: len(x.view(-1)[1::97])]
    return x.bfloat16()


@np.errstate(invalid="ignore", over="ignore")
def expected(form: Form, x: torch.Tensor, quantized: Quantized) -> dict[str, exact.Columns]:
    flat = [exact.as_array(x), *(a.astype(np.float64).reshape(-1) for a in (quantized.values, quantized.limits))]
    moments = exact.moments(flat[0])
    return {
        "moments": {name: moments[name] for name in MOMENT_SUMS},
        "maxima": {name: moments[name] for name in MAXIMA},
        "compared": exact.comparison(*flat),
        "exponents": dict(zip(SUMS["exponents"], exact.histogram(flat[0]), strict=True)),
        **recipes.columns_by_block(form.recipe, Pair(matrix(x), quantized)),
    }


def measured(add: Add, pending: Pending, *, begin: int = 3, without: Sequence[str] = ()) -> dict[str, exact.Columns]:
    """All columns by their place; some may be unwanted."""
    at: dict[str, int] = {}
    ends = []
    for sections in (SUMS, EXTREMES):
        end = begin
        for name, names in sections.items():
            at[name] = -1 if name in without else end
            end += 0 if name in without else len(names) + 1
        ends.append(end)
    places = ColumnPlaces(*(at[name] for name in ColumnPlaces._fields))
    sums = torch.zeros(ends[0], dtype=torch.float64)
    maxima = torch.full((ends[1],), NOTHING, dtype=torch.float64)
    add([replace(pending, places=places)], sums, maxima)
    results: dict[str, exact.Columns] = {}
    for vector, sections, neutral in ((sums, SUMS, 0.0), (maxima, EXTREMES, NOTHING)):
        kept = vector.tolist()
        for name, names in sections.items():
            if at[name] >= 0:
                place = slice(at[name], at[name] + len(names))
                results[name] = dict(zip(names, kept[place], strict=True))
                kept[place] = [neutral] * len(names)
        assert set(kept) == {neutral}, "nothing goes where nothing is wanted"
    return results


def check(add: Add, form: Form, x: torch.Tensor, quantized: Quantized | None = None) -> dict[str, exact.Columns]:
    quantized = quantized or quantized_by(form, x)
    right = expected(form, x, quantized)
    for place, columns in measured(add, pending_of(form, x, quantized)).items():
        exact.assert_same(columns, right[place], rel=exact.IN_TRITON)
    return right


def check_form(add: Add, form: Form) -> None:
    """In which neither all that is compared nor nothing of it may be right by chance."""
    x = tensor_of(form)
    right = check(add, form, torch.where(torch.arange(x.shape[-1]) % 5 > 0, x, x * 3), quantized_by(form, x))
    assert 0 < right["compared"]["underflows"] < right["compared"]["compared"] or form.e5m2
    assert right["losses"]["overflow_blocks"] > 0
    assert right["limits"]["zero_blocks"] > 0 or form.square


@np.errstate(over="ignore")
def check_scales(add: Add, form: Form, scales: Scales) -> None:
    x = tensor_of(form)[:, : 20 if form.recipe != "nvfp4" else 16]
    quantized = quantized_by(form, x)
    unit = quantized.tensor_amax * np.float32(1 / (448 * 6)) if form.recipe == "nvfp4" else np.float32(1)
    blocks = list(quantized.blocks)
    assert len(blocks) > 5 * len(scales)
    for at, place in enumerate(range(1, len(blocks), 5)):
        stored, number = scales[at % len(scales)]
        blocks[place] = blocks[place]._replace(stored_scale=stored, factor=np.float32(number) * unit)
    check(add, form, x, quantized._replace(blocks=blocks))
