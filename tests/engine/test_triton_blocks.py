"""The Triton kernel for tensors in blocks, in Triton's interpreter, and plain torch in its place, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.engine import StatisticsEngine
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
    BlockPlaces,
    ColumnPlaces,
    InBlocks,
    Pending,
)
from te_precision_callbacks.engine.quantization import read
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import quantized_request, tensor_request
from tests.engine import exact, recipes
from tests.engine.recipes import INF, NAN, Pair, Quantized, quantize
from tests.engine.test_block_statistics import spread, swizzled
from tests.engine.test_quantization import fp8_dtype, packed, padded, scales_of, te
from tests.engine.test_triton_kernel import (
    BOUNDS,
    Launch,
    compiled_launch,
    compiles,
    disassembled,
    fresh_kernel,
    interpreted,
    loads,
    triton_folder,
)

pytestmark = [
    pytest.mark.usefixtures("nothing_is_compiled"),
    pytest.mark.slow,  # the interpreter is
    pytest.mark.filterwarnings(
        "ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"
    ),  # numpy
]

__all__ = ["compiles", "triton_folder"]  # fixtures that are used by their names

Add = Callable[[Sequence[Pending], torch.Tensor, torch.Tensor], None]

SUMS = {
    "moments": MOMENT_SUMS,
    "compared": COMPARISON_SUMS,
    "scales": SCALE_SUMS,
    "limits": LIMIT_SUMS,
    "losses": LOSS_SUMS,
    "ranges": RANGE_SUMS,
    "exponents": range(EXPONENT_BINS),
}
EXTREMES = {
    "maxima": MAXIMA,
    "scale_maxima": SCALE_MAXIMA,
    "loss_maxima": LOSS_MAXIMA,
    "range_maxima": RANGE_MAXIMA,
}
"""Places -> the columns there."""


@pytest.fixture
def kernel() -> Iterator[ModuleType]:
    with interpreted("triton_blocks") as module:
        yield module


def by_kernel(kernel: ModuleType) -> Add:
    def add(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
        for item in pending:
            kernel.add(item, sums, maxima)

    return add


# --- a tensor, and what a recipe made of it ---------------------------------------------------------------------------


class Form(NamedTuple):
    """How a tensor is quantized, and how that lies in memory."""

    recipe: str
    columnwise: bool = False
    square: bool = False
    swizzled: bool = False
    e5m2: bool = False


def storage_of(form: Form, quantized: Quantized, shape: Sequence[int]) -> Any:
    """Transformer Engine's storage of one direction; what pads the scales is no scale."""
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    direction = "columnwise" if form.columnwise else "rowwise"
    none = dict.fromkeys(["rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"])
    codes = torch.from_numpy(quantized.codes)

    def of(data: torch.Tensor, scales: torch.Tensor) -> dict[str, Any]:
        return {**none, f"{direction}_data": data, f"{direction}_scale_inv": scales}

    if form.recipe == "mxfp8":
        block = (32, 1) if form.columnwise else (1, 32)
        scales = padded(scales_of(quantized, *block, np.uint8), *((4, 128) if form.columnwise else (128, 4)), 250)
        if form.swizzled:
            scales = swizzled(scales.t().contiguous()).reshape(scales.shape) if form.columnwise else swizzled(scales)
        return MXFP8TensorStorage(
            **of(codes.view(*shape), scales), fp8_dtype=fp8_dtype(form.e5m2), quantizer=None,
            with_gemm_swizzled_scales=form.swizzled,
        )  # fmt: skip
    if form.recipe == "nvfp4":
        matrix, scales = quantized.codes, scales_of(quantized, *((16, 1) if form.columnwise else (1, 16)), np.uint8)
        if form.columnwise:
            matrix, scales = np.ascontiguousarray(matrix.T), scales.T
        in_memory = padded(scales, 128, 4, 0x7E)
        amax = torch.tensor([quantized.tensor_amax])
        storage = NVFP4TensorStorage(
            **of(packed(matrix), swizzled(in_memory) if form.swizzled else in_memory),
            amax_rowwise=amax, amax_columnwise=amax, fp4_dtype=te().DType.kFloat4E2M1, quantizer=None,
            with_gemm_swizzled_scales=form.swizzled,
        )  # fmt: skip
        storage._quantizer = type("Quantizer", (), {"with_2d_quantization": form.square})()
        return storage
    block = (128, 128) if form.square else (128, 1) if form.columnwise else (1, 128)
    scales = scales_of(quantized, *block, np.float32)
    if form.columnwise:
        codes = codes.view(*shape).movedim(-1, 0).contiguous()
    turned = form.square is form.columnwise  # squares lie as they are, pieces of rows in columns; and the transpose
    return Float8BlockwiseQTensorStorage(
        **of(codes if form.columnwise else codes.view(*shape), padded(scales.T if turned else scales, 1, 4, 1e9)),
        fp8_dtype=fp8_dtype(form.e5m2), quantizer=None, is_2D_scaled=form.square,
    )  # fmt: skip


def in_blocks(form: Form, quantized: Quantized, shape: Sequence[int]) -> InBlocks:
    result = read(storage_of(form, quantized, shape), columnwise=form.columnwise)
    assert isinstance(result, InBlocks)
    return result


def quantized_by(form: Form, x: torch.Tensor) -> Quantized:
    matrix = x.double().reshape(-1, x.shape[-1]).numpy()
    return quantize(form.recipe, matrix, e5m2=form.e5m2, weight=form.square, columnwise=form.columnwise)


# --- what must come out, and what comes out ---------------------------------------------------------------------------


@np.errstate(invalid="ignore", over="ignore")
def expected(form: Form, x: torch.Tensor, quantized: Quantized) -> dict[str, Any]:
    """All columns by their place, from a loop over the blocks; those of bins as bin -> count."""
    matrix = x.double().reshape(-1, x.shape[-1]).numpy()
    flat = [matrix.reshape(-1), *(a.astype(np.float64).reshape(-1) for a in (quantized.values, quantized.limits))]
    moments = exact.moments(flat[0])
    by_block = recipes.columns_by_block(form.recipe, Pair(matrix, quantized))
    histogram = {place: count for place, count in enumerate(exact.histogram(flat[0])) if count}
    return {
        "moments": {name: moments[name] for name in MOMENT_SUMS},
        "maxima": {name: moments[name] for name in MAXIMA},
        "compared": exact.comparison(*flat),
        "exponents": histogram,
        **by_block,
    }


def measured(add: Add, pending: Pending, *, begin: int = 3, without: Sequence[str] = ()) -> dict[str, Any]:
    """All columns by their place, of which some may be not wanted."""
    at: dict[str, int] = {}
    ends = []
    for sections in (SUMS, EXTREMES):
        end = begin
        for name, names in sections.items():
            at[name] = -1 if name in without else end
            end += 0 if name in without else len(names) + 1
        ends.append(end)
    places = ColumnPlaces(*(at[name] for name in ColumnPlaces._fields))
    of_blocks = BlockPlaces(*(at[name] for name in BlockPlaces._fields))
    sums = torch.zeros(ends[0], dtype=torch.float64)
    maxima = torch.full((ends[1],), NOTHING, dtype=torch.float64)
    add([pending._replace(places=places, of_blocks=of_blocks)], sums, maxima)
    results: dict[str, Any] = {}
    for vector, sections, neutral in ((sums, SUMS, 0.0), (maxima, EXTREMES, NOTHING)):
        kept = vector.tolist()
        for name, names in sections.items():
            if at[name] >= 0:
                values = kept[at[name] : at[name] + len(names)]
                kept[at[name] : at[name] + len(names)] = [neutral] * len(names)
                is_binned = isinstance(names, range)
                results[name] = dict(zip(names, values, strict=True))
                results[name] = {bin_: n for bin_, n in results[name].items() if n} if is_binned else results[name]
        assert set(kept) == {neutral}, "nothing goes where nothing is wanted"
    return results


def assert_same(found: dict[str, Any], right: dict[str, Any], *, bounds: dict[str, float] = BOUNDS) -> None:
    """Counts and extremes are exact; sums of elements keep their bounds, and those of blocks are of float64."""
    assert found.keys() <= right.keys()
    for place, columns in found.items():
        assert columns.keys() == right[place].keys(), place
        for name, value in columns.items():
            expected = right[place][name]
            if isinstance(name, int):
                assert value == expected, (place, name)
                continue
            size = right["moments"]["abs_sum"] if name == "sum" else abs(expected)
            rel = bounds.get(name, 1e-13 if "sum" in name or "range" in name else 0.0)
            close = pytest.approx(expected, rel=rel, abs=rel * size if math.isfinite(size) else 0.0, nan_ok=True)
            assert value == close, (place, name)


# --- every form, in every layout --------------------------------------------------------------------------------------

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


def shape_of(form: Form) -> tuple[int, ...]:
    """No multiple of a block or a tile, where the format allows it; of several tiles and bands of tiles."""
    return (2, 40, 160) if form.recipe == "nvfp4" else (2, 37, 150) if not form.square else (2, 70, 150)


def tensor_of(form: Form, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Of many magnitudes, with blocks of zeros, and with what is not finite."""
    x = spread(*shape_of(form), by=2)
    x.view(-1)[::7] = 0
    x[:, :, :32] = 0
    x[1, 5] = 0
    x.view(-1)[1::97] = torch.tensor([INF, -INF, NAN]).repeat(1000)[: len(x.view(-1)[1::97])]
    return x.to(dtype)


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, kernel: ModuleType) -> Add:
    """The kernel, and plain torch, which is held to the same."""
    return by_kernel(kernel) if request.param == "kernel" else kernels.add


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_a_form_beside_its_tensor(way: Add, form: Form) -> None:
    x = tensor_of(form)
    quantized = quantized_by(form, x)
    # Neither all that is compared nor nothing of it may be right by chance.
    x = torch.where(torch.arange(x.shape[-1]) % 5 > 0, x, x * 3)
    result = measured(way, Pending(x, None, None, False, ColumnPlaces(), in_blocks(form, quantized, x.shape)))
    right = expected(form, x, quantized)
    assert_same(result, right)
    assert 0 < right["compared"]["underflows"] < right["compared"]["compared"] or form.e5m2
    assert right["losses"]["overflow_blocks"] > 0
    assert right["limits"]["zero_blocks"] > 0 or form.square


Scales = list[tuple[Any, float]]

SPECIAL_SCALES: list[tuple[Form, Scales]] = [
    (FORMS[3], [(0, 2.0**-127), (254, 2.0**127), (1, 2.0**-126)]),
    (FORMS[3], [(255, NAN)]),
    (FORMS[4], [(0, 0.0), (0x7E, 448.0), (1, 2.0**-9)]),
    (FORMS[4], [(0x7F, NAN)]),
    (FORMS[9], [(np.float32(f), f) for f in (0.0, 1e-40, 2.0**127, 2.0**-127, 0.3)]),
    (FORMS[9], [(np.float32(INF), INF)]),
    (FORMS[9], [(np.float32(NAN), NAN)]),
]
"""How they are stored, and the number that this stands for; inf and nan are all that is left of a sum, so alone."""


@pytest.mark.parametrize(("form", "scales"), SPECIAL_SCALES)
@np.errstate(over="ignore")
def test_scales_at_their_ends(way: Add, form: Form, scales: Scales) -> None:
    """In some blocks, one after the other."""
    x = tensor_of(form)[:, : 20 if form.recipe != "nvfp4" else 16]
    quantized = quantized_by(form, x)
    unit = quantized.tensor_amax * np.float32(1 / (448 * 6)) if form.recipe == "nvfp4" else np.float32(1)
    blocks = list(quantized.blocks)
    assert len(blocks) > 5 * len(scales)
    for at, place in enumerate(range(1, len(blocks), 5)):
        stored, number = scales[at % len(scales)]
        blocks[place] = blocks[place]._replace(stored_scale=stored, factor=np.float32(number) * unit)
    quantized = quantized._replace(blocks=blocks)
    result = measured(way, Pending(x, None, None, False, ColumnPlaces(), in_blocks(form, quantized, x.shape)))
    assert_same(result, expected(form, x, quantized))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a transpose": lambda x: x.t().contiguous().t(),
    "some columns": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "not a matrix": lambda x: x.view(8, 10, -1).transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize(
    ("form", "view"), [*((FORMS[3], view) for view in VIEWS), (FORMS[7], "a transpose"), (FORMS[7], "not a matrix")]
)
def test_views(kernel: ModuleType, form: Form, view: str) -> None:
    """Codes and scales lie along the tensor's neighbours, or across."""
    x = VIEWS[view](spread(80, 96))
    quantized = quantized_by(form, x)
    pending = Pending(x, None, None, False, ColumnPlaces(), in_blocks(form, quantized, x.shape))
    assert_same(measured(by_kernel(kernel), pending), expected(form, x, quantized))


# --- what is wanted, and what cannot be -------------------------------------------------------------------------------


def test_two_tensors_are_added(kernel: ModuleType) -> None:
    """As micro-batches are: with the bits of one after the other."""
    form = FORMS[0]
    tensors = [tensor_of(form)[:1], 3 * tensor_of(form)[1:]]
    pending = []
    for x in tensors:
        quantized = quantized_by(form, x)
        pending.append(Pending(x, None, None, False, ColumnPlaces(), in_blocks(form, quantized, x.shape)))

    def twice(given: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
        for item in pending:
            by_kernel(kernel)([item._replace(places=given[0].places, of_blocks=given[0].of_blocks)], sums, maxima)

    both, (first, second) = (
        measured(twice, pending[0]),
        [measured(by_kernel(kernel), item) for item in pending],
    )
    for place, columns in both.items():
        for name in {*first[place], *second[place]}:
            values = first[place].get(name, 0.0), second[place].get(name, 0.0)
            assert columns[name] == (sum(values) if place in SUMS else max(values)), (place, name)


def test_wrong_arguments(kernel: ModuleType) -> None:
    x = tensor_of(FORMS[0])
    result = in_blocks(FORMS[0], quantized_by(FORMS[0], x), x.shape)
    vectors = torch.zeros(9, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    for values, error, message in (
        (x.double(), TypeError, r"values.*torch\.float64"),
        (x[:1], ValueError, r"values.*\(1, 37, 150\).*\(2, 37, 150\)"),
        (x.to("meta"), ValueError, "in_blocks: is on cpu.*meta"),
    ):
        with pytest.raises(error, match=message):
            kernel.add(Pending(values, None, None, False, ColumnPlaces(moments=0), result), *vectors)
    with pytest.raises(ValueError, match="in_blocks: must be given"):
        kernel.add(Pending(x, None, None, False, ColumnPlaces(moments=0)), *vectors)


# --- what the host does -----------------------------------------------------------------------------------------------

TENSORS = tuple(map(tensor_request, ("mean", "std", "max")))
OF_BLOCKS = (
    "mse",
    "underflows%",
    "scale_inv_max",
    "saturated_scales%",
    "underflow_blocks%",
    "block_dynamic_range_mean",
)


def noted(engine: StatisticsEngine, form: Form, x: torch.Tensor, storage: Any) -> None:
    end = "_columnwise" if form.columnwise else ""
    quantizer = type("MXFP8Quantizer", (), {})()
    watched = Watched("fc1", "activation", 0, x, rowwise=storage, columnwise=storage, quantizer=quantizer)
    engine.note(watched, TENSORS)
    engine.note(watched, tuple(quantized_request(f"{name}{end}") for name in OF_BLOCKS))


@pytest.mark.parametrize("form", FORMS[:2], ids=NAMES[:2])
def test_the_engine_with_the_kernel(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    """In micro-batches, of which one is of other magnitudes; the same as plain torch gives."""

    def found() -> dict[str, Any]:
        engine = StatisticsEngine(on_failure=lambda doing, of, error: pytest.fail(f"{doing} {of}: {error}"))
        for factor in (1.0, 1e-3):
            x = (tensor_of(form)[:, :20].float() * factor).bfloat16()
            noted(engine, form, x, storage_of(form, quantized_by(form, x), x.shape))
            engine.measure()
        return {row.statistic: row.value for row in engine.flush(reduce=False)}

    in_torch = found()
    launches: list[Pending] = []

    def add(pending: Sequence[Pending], *into: torch.Tensor) -> None:
        launches.extend(pending)
        by_kernel(kernel)(pending, *into)

    monkeypatch.setattr(kernels, "_pass_for", lambda values: add)
    assert found() == pytest.approx(in_torch, rel=1e-5)
    assert len(launches) == 2, "one for each micro-batch gives all"


# --- what Triton compiles ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize(
    ("form", "capability"),
    [(FORMS[0], 100), (FORMS[5], 90), (FORMS[11], 100)],
    ids=[NAMES[0], NAMES[5], NAMES[11]],
)
def test_it_compiles_without_spilling_registers(tmp_path: Path, form: Form, capability: int) -> None:
    """With the statistics that every recipe has: those of blocks, all together, take more registers than there are."""
    made = compiled_for(form, capability, without=[name for name in (*SUMS, *EXTREMES) if name not in OF_ANY_RECIPE])
    instructions = disassembled(made["_measure"]["cubin"], tmp_path)
    assert "LDG" in instructions
    assert "STL" not in instructions
    assert ".ftz" not in made["_measure"]["ptx"], "subnormal numbers stay"
    assert "fma.rn.f32" not in made["_measure"]["ptx"], "the product of code and factor is rounded"
    if form == FORMS[0]:
        assert sorted(loads(made["_measure"]["ptx"])) == ["v2.b32"] * 2 + ["v4.b32"] * 2, "16 bytes, and their codes"


@pytest.mark.usefixtures("compiles")
def test_everything_compiles() -> None:
    assert all(made["cubin"] for made in compiled_for(FORMS[7], 90).values())


OF_ANY_RECIPE = ("moments", "maxima", "compared", "scales", "scale_maxima")


def compiled_for(form: Form, capability: int, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """What Triton and ptxas make of both launches."""
    module = fresh_kernel("triton_blocks")
    functions = {name: getattr(module, name) for name in ("_measure", "_merge")}
    launches = {name: Launch() for name in functions}
    vars(module).update(launches)
    x = torch.ones(128, 256, dtype=torch.bfloat16)
    pending = Pending(x, None, None, False, ColumnPlaces(), in_blocks(form, quantized_by(form, x), x.shape))
    measured(by_kernel(module), pending, without=without)
    return {name: compiled_launch(capability, functions[name], launches[name]) for name in functions}
