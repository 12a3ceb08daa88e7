"""The Triton kernel in Triton's interpreter, against float64; and what Triton makes of it for a Hopper GPU."""

import importlib
import inspect
import itertools
import math
import operator
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.engine.kernels.columns import SCALE_SUMS, ColumnPlaces, Pending, Repeat
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import quantized_request, tensor_request
from tests.combinations import half
from tests.drawn import normal
from tests.engine import exact
from tests.engine.exact import columns, layout, measured_by, named, quantized
from tests.quantizers import quantizer

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")

INF, NAN = math.inf, math.nan
BYTES = torch.arange(256, dtype=torch.uint8)
BITS = torch.arange(2**16, dtype=torch.int32).to(torch.int16)

Measure = Callable[..., dict[str, Any]]

pytestmark = [
    pytest.mark.slow,  # the interpreter is
    pytest.mark.filterwarnings(
        "ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"
    ),  # numpy
]


# --- running the kernel without a GPU ---------------------------------------------------------------------------------


def fresh_kernel(name: str = "triton_kernel") -> ModuleType:
    """A copy of the module, in no list of modules: whether triton.jit compiles or interprets is decided on import."""
    names = [
        f"{kernels.__name__}.{part}" for part in ("triton_parts", "triton_kernel", "triton_blocks", "triton_largest")
    ]
    kept, attributes = {name: sys.modules.pop(name, None) for name in names}, dict(vars(kernels))
    try:
        return importlib.import_module(f"{kernels.__name__}.{name}")
    finally:
        for item, module in kept.items():
            sys.modules.pop(item, None)
            if module is not None:
                sys.modules[item] = module
        vars(kernels).clear()
        vars(kernels).update(attributes)


class OncePatched:
    """Triton's patching of its language (triton 3.9.0, ``_patch_lang``), once for a kernel.

    The interpreter does it again for each call of a function in a kernel, and takes two thirds of its time for that.
    """

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch, self._patched, self._is_running = patch, set[int](), False

    def __call__(self, function: Any) -> Any:
        languages = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if self._is_running and languages <= self._patched:
            return interpreter._LangPatchScope()
        scope = self._patch(function)
        self._patched |= languages
        if not self._is_running:
            self._is_running, restore = True, scope.restore
            scope.restore = lambda: (self._end(), restore())
        return scope

    def _end(self) -> None:
        self._is_running = False
        self._patched.clear()


# The interpreter's rewritten kernels; rewriting takes a fifth of its time.
_rewritten: dict[Any, Any] = {}


@cache
def _interpreted_function(name: str) -> Any:
    return triton.jit(getattr(tl, name).fn)


_interpreted_kernel = cache(fresh_kernel)


@contextmanager
def interpreted(name: str = "triton_kernel") -> Iterator[ModuleType]:
    """The kernel as TRITON_INTERPRET=1 makes it, in a process that has imported triton without it."""
    modules = (tl, tl.core, tl.standard)
    before = [dict(vars(module)) for module in modules]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(interpreter.InterpretedFunction, "rewritten_fn", _rewritten)
        if hasattr(interpreter, "_LangPatchScope"):
            patch.setattr(interpreter, "_patch_lang", OncePatched(interpreter._patch_lang))
        try:
            for function in ("sum", "max"):  # the functions that the kernel calls
                setattr(tl, function, _interpreted_function(function))
            yield _interpreted_kernel(name)
        finally:  # the interpreter puts numpy's functions into these modules, and leaves some there
            for module, names in zip(modules, before, strict=True):
                vars(module).clear()
                vars(module).update(names)
                for function in [item for item in _rewritten if item.__globals__ is vars(module)]:
                    del _rewritten[function]


@pytest.fixture
def kernel() -> Iterator[ModuleType]:
    with interpreted() as module:
        yield module


def by_kernel(kernel: ModuleType) -> Callable[[Sequence[Pending], torch.Tensor, torch.Tensor], None]:
    def add(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
        for together in kernel.group_by_launch(pending):
            kernel.add_group(pending, together, sums, maxima)

    return add


@pytest.fixture
def measure(kernel: ModuleType) -> Measure:
    def measure(values: torch.Tensor, codes: torch.Tensor | None = None, *args: Any, **options: Any) -> dict[str, Any]:
        result = measured_by(by_kernel(kernel), values, codes, *args, **options)
        return named(*result, compared=codes is not None, histogram_too=options.get("histogram", False))

    return measure


# --- the same numbers in float64 --------------------------------------------------------------------------------------

assert_same = partial(exact.assert_same, rel=exact.IN_TRITON | dict.fromkeys(SCALE_SUMS, 0.0))

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.view(96, 60).t(),
    "permuted": lambda x: x.view(20, 32, 9).permute(2, 0, 1),
    "every second": lambda x: x[::2],
    "every second column": lambda x: x.view(96, 60)[:, ::2],
    "some columns": lambda x: x.view(72, 80)[:, 8:51],
    "rows of a multiple of a run": lambda x: x.view(2, 2880)[:, 100:2148],
    "rows of a part of a run": lambda x: x.view(4, 1440)[:, 100:740],
    "rows and columns": lambda x: x.view(72, 80)[3:40, :77].t(),
    "one row": lambda x: x.view(96, 60)[7],
    "expanded in front": lambda x: x[:50].expand(4, 50),
    "expanded behind": lambda x: x[:50].unsqueeze(1).expand(50, 4),
    "one number, expanded": lambda x: x[3].expand(5, 7),
    "overlapping": lambda x: x.as_strided((100, 30), (3, 1)),
    "four dimensions that stay": lambda x: x.view(8, 9, 8, 10)[:7, 1:8, 2:7, 3:9].permute(3, 1, 0, 2),
    "five dimensions that stay": lambda x: x.view(4, 6, 4, 6, 10)[:3, :5, :3, :5, :9],
    "more dimensions than the kernel has": lambda x: x.view(4, 3, 4, 3, 4, 10)[:3, :2, :3, :2, :3, :9],
}
VALUES = {
    # Several tiles for each program, the last one not whole.
    **{f"random {dtype}": normal(3, 5003).to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
    **{f"every {dtype}": BITS.view(dtype) for dtype in (torch.float16, torch.bfloat16)},
    **{f"every {dtype}": BYTES.view(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)},
    "one": torch.tensor([-3.25]),
    "zeros": torch.tensor([0.0, -0.0, 0.0]),
    "subnormal": torch.tensor([1e-45, -3e-45, 2.0**-127, 0.0, 2.0**-126]),
    "squares above the range of float32": torch.tensor([1e20, -3e38, 3.4028234663852886e38, 1e30]),
    "squares below the range of float32": torch.tensor([1e-30, -2e-35, 1e-38, 1e-45]),
    "inf and nan": torch.tensor([INF, 1.0, -INF, NAN, -2.0, 0.0, -NAN]),
    "nothing but nan": torch.tensor([NAN] * 3),
    "nothing but inf": torch.tensor([INF, -INF]),
    "below zero": torch.tensor([-1.0, -2.0, -0.5]),
    **{name: view(normal(5760).to(torch.float8_e5m2)) for name, view in VIEWS.items()},
}


@pytest.mark.few
@pytest.mark.parametrize("name", VALUES)
def test_a_tensor(measure: Measure, name: str) -> None:
    assert_same(measure(VALUES[name], histogram=True), columns(VALUES[name], histogram_too=True))


@pytest.mark.few
@pytest.mark.parametrize(
    ("dtype", "factor", "spoiled"),
    [
        (torch.float32, 1.0, True),
        (torch.float32, 2.0**-60, False),
        (torch.bfloat16, 2.0**70, True),
        (torch.bfloat16, 1.0, False),
    ],
    ids=["float32, with inf", "float32, tiny", "bfloat16, huge, with inf", "bfloat16"],
)
def test_a_mean_of_a_thousand_deviations(measure: Measure, dtype: torch.dtype, factor: float, spoiled: bool) -> None:
    values = ((normal(20_001, seed=1) * 3.0 + 3000.0) * factor).to(dtype)
    values[5:20_000:50] = INF if spoiled else values[5]
    result = measure(values)
    mean = result["sum"] / result["finite"]
    deviation = math.sqrt(result["square_sum"] / result["finite"] - mean**2)
    expected = values[values.isfinite()].double().std(correction=0).item()
    assert deviation == pytest.approx(expected, rel=12 * 2.0**-24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_elements_2_to_the_31_apart(measure: Measure, dtype: torch.dtype) -> None:
    storage = torch.empty(2**31 + 16, dtype=torch.uint8)  # only the pages that are touched take memory
    ends = storage.as_strided((2, 16), (2**31, 1))
    ends.copy_(BYTES[56:88].view(2, 16))
    if dtype == torch.float32:
        values, codes = normal(2, 16), ends
        assert_same(measure(values, codes, torch.ones(1)), columns(values, codes, torch.ones(1)))
    else:
        values = storage.view(dtype).as_strided((2, 16), (2**31, 1))
        assert_same(measure(values), columns(values.clone()))


# --- values and their codes -------------------------------------------------------------------------------------------

MANY = normal(7000) * 10.0 ** normal(7000, seed=1)
LIMIT = torch.tensor(448.0 * exact.ROUNDING) * torch.tensor(0.3)
FINITE = [BYTES[BYTES.view(dtype).float().isfinite()] for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
CODES: dict[str, tuple[torch.Tensor, Any, float, bool]] = {  # values, codes or None for torch's own, scale, E5M2?
    "float32 in E4M3": (MANY, None, 0.0123, False),
    "float16 in E5M2": (MANY.half(), None, 3.0, True),
    "bfloat16 in E4M3": (MANY.bfloat16(), None, 3.0, False),
    "bfloat16 in E5M2": (MANY.bfloat16(), None, 0.0123, True),
    "every E4M3": (normal(len(FINITE[0])), FINITE[0], 0.7, False),
    "every E5M2": (normal(len(FINITE[1])), FINITE[1], 0.7, True),
    "at the limit and above": (
        torch.stack([LIMIT, -LIMIT, LIMIT.nextafter(torch.tensor(INF)), -LIMIT * 2]), None, 0.3, False,
    ),
    "a factor of 0": (normal(1000), torch.full((1000,), 0x38, dtype=torch.uint8), 0.0, False),
    "not finite": (torch.tensor([INF, NAN, -INF, 2.0, 0.0]), [0x7F, 0x7F, 0xFE, 0x38, 0x00], 1.0, False),
    "a code of inf": (torch.ones(2), [0x7C, 0x3C], 1.0, True),
    "a code of nan": (torch.ones(2), [0x7F, 0x3C], 1.0, True),
}  # fmt: skip


def test_a_tensor_and_its_codes(measure: Measure) -> None:
    for name in CODES:
        values, given, scale_inv, e5m2 = CODES[name]
        codes, scale = quantized(values, scale_inv, e5m2=e5m2)
        if given is not None:
            codes = torch.as_tensor(given, dtype=torch.uint8)
        result = measure(values, codes, scale, e5m2=e5m2, histogram=True)
        assert_same(result, columns(values, codes, scale, e5m2=e5m2, histogram_too=True))


# --- whole tiles of dense tensors -------------------------------------------------------------------------------------

# Two whole tiles for each of two programs, and a part of one.
DENSE = normal(4 * 1024 + 160)


@pytest.fixture
def two_programs(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "program_count", lambda device: 2)


def with_at(place: int | slice, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def put(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        values[place] = value
        return values

    return put


A_TILE = slice(2 * 1024, 3 * 1024)
TILES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "usual": lambda x: x,
    "only whole ones": lambda x: x[: 4 * 1024],
    "inf": with_at(1000, INF),
    "-inf in a second tile of a program": with_at(3 * 1024 + 3, -INF),
    "nan": with_at(1024, NAN),
    "nan in the tile that is not whole": with_at(-2, NAN),
    "a tile of nan": with_at(A_TILE, NAN),
    "a large number": with_at(3000, 2.0**70),
    "all large": lambda x: x * 2.0**70,
    "all small": lambda x: x * 2.0**-70,
    "a small tile": lambda x: with_at(A_TILE, 2.0**-70)(x),
    "zeros": lambda x: x * 0,
    "a tile of zeros": with_at(A_TILE, 0.0),
    "many zeros": with_at(slice(0, None, 3), 0.0),
    "far from zero": lambda x: x / 1000 + 3000,
}


@pytest.mark.usefixtures("two_programs")
def test_dense_tiles(measure: Measure) -> None:
    for name, dtype in half(TILES, [torch.float32, torch.bfloat16]):
        values = TILES[name](DENSE).to(dtype)
        assert_same(measure(values, histogram=True), columns(values, histogram_too=True))


def decoded(values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, e5m2: bool) -> torch.Tensor:
    return codes.view(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn).float() * scale


OF_CODES: dict[str, Callable[..., torch.Tensor]] = {
    "no error": decoded,
    "one small error": lambda x, *codes: decoded(x, *codes) + with_at(77, 2.0**-60)(torch.zeros_like(x)),
    "small losses": lambda x, *codes: torch.where(x.abs() < 1, 2.0**-60, x),
    "zeros with codes": lambda x, *codes: x * 0,
    "overflows": lambda x, *codes: x * 4,
}


@pytest.mark.usefixtures("two_programs")
def test_dense_tiles_and_their_codes(kernel: ModuleType, measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, form in zip(
        [*list(TILES)[::2], *OF_CODES], itertools.cycle(itertools.product([False, True], repeat=2)), strict=False
    ):
        e5m2, converts = form
        monkeypatch.setattr(kernel, "converts_fp8", lambda device, converts=converts: converts)
        values = TILES.get(name, TILES["usual"])(DENSE)
        largest = values[values.isfinite()].abs().max().item()
        codes, scale = quantized(values.nan_to_num(0.0), largest / 300 or 1.0, e5m2=e5m2)
        if name in OF_CODES:
            values = OF_CODES[name](values, codes, scale, e5m2)
            if name == "small losses":
                codes = torch.where(values == 2.0**-60, 0, codes)
        assert_same(measure(values, codes, scale, e5m2=e5m2), columns(values, codes, scale, e5m2=e5m2))


@pytest.mark.parametrize("codes", [False, True])
def test_usual_tiles_are_read_once(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, codes: bool) -> None:
    read_again: list[int] = []
    careful = kernel.careful_moments

    def noted(x: Any) -> Any:
        read_again.append(1)
        return careful(x)

    monkeypatch.setattr(kernel, "careful_moments", noted)
    for elements in (6 * 4096, 6 * 4096 + 16):
        read_again.clear()
        values = normal(elements)
        measured_by(by_kernel(kernel), values, *(quantized(values, 0.01) if codes else ()))
        assert len(read_again) == (2 if elements % 4096 else 0), "only the two rows of the tile that is not whole"


# --- work of the host -------------------------------------------------------------------------------------------------


class Launch:
    """In the place of the kernel: keeps the arguments of its launches."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def keep(*arguments: Any, **options: Any) -> None:
            self.arguments, self.options = arguments, options

        return keep


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations between, and the most elements that one of them has made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.names.add(func.overloadpacket.__name__)
        if isinstance(result, torch.Tensor) and result._base is None and not func.is_view:
            self.most = max(self.most, result.numel())
        return result


COPIES = {"clone", "_unsafe_view"}


@pytest.mark.parametrize(
    ("view", "copies"),
    [(lambda x: x, set()), (lambda x: x.t(), set()), (lambda x: x[:, ::2], COPIES)],
    ids=["whole", "transposed", "part"],
)
def test_the_host_does_not_wait_and_whole_tensors_are_not_copied(
    kernel: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    view: Callable[[torch.Tensor], torch.Tensor],
    copies: set[str],
) -> None:
    monkeypatch.setattr(kernel, "_measure", Launch())
    values = view(torch.zeros(400, 300, dtype=torch.bfloat16))
    codes, scale_inv = view(torch.zeros(400, 300, dtype=torch.uint8)), torch.ones(1)
    with Operations() as operations:
        measured_by(by_kernel(kernel), values, codes, scale_inv, histogram=True)
    assert operations.names <= {"detach", "view", "empty", "zeros", "full", "as_strided"} | copies
    most = kernel.program_count(values.device)
    if not copies:
        assert operations.most <= max(most * (6 + 6 + 3 + 3 + 2), 6 + 6 + 3 + 256), "the partial results, or the sums"


# --- several tensors in one launch ------------------------------------------------------------------------------------


def pending_of(
    values: torch.Tensor, at: int, *, codes: bool = False, histogram: bool = False, e5m2: bool = False
) -> Pending:
    places, _, _ = layout(codes=codes, histogram=histogram)
    moved = ColumnPlaces(*(place + at if place >= 0 else -1 for place in places))
    made = quantized(values, 0.0123, e5m2=e5m2) if codes else (None, None)
    return Pending(values, *made, e5m2, moved)


def vectors(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(size, dtype=torch.float64), torch.full((size,), -1.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("codes", "histogram"),
    [((0, 1, 2, 3), False), ((1, 3), False), ((2,), True)],
    ids=["codes", "two with codes", "one with codes, histogram"],
)
def test_tensors_together_have_the_bits_that_they_have_alone(
    kernel: ModuleType, codes: Sequence[int], histogram: bool
) -> None:
    """Small and large ones, with places that are not in their order; codes shorter than tensors without codes."""
    shapes = [(16,), (16, 520), (3, 16, 48), (64, 96)]
    pending = [
        pending_of(
            normal(*shape, seed=at).to(torch.bfloat16), 300 * (at * 3 % 4), codes=at in codes, histogram=histogram
        )
        for at, shape in enumerate(shapes)
    ]
    assert list(map(len, kernel.group_by_launch(pending))) == [4]
    together, by_hand = vectors(1200), vectors(1200)
    by_kernel(kernel)(pending, *together)
    for item in pending:
        sums, maxima = measured_by(by_kernel(kernel), item.values, item.codes, item.scale_inv, histogram=histogram)
        begin = item.places.moments
        by_hand[0][begin : begin + len(sums)] += sums
        kept = by_hand[1][begin : begin + len(maxima)]
        torch.maximum(kept, maxima, out=kept)
    assert torch.equal(together[0], by_hand[0])
    assert torch.equal(together[1], by_hand[1])


# --- launches without Triton's binder ---------------------------------------------------------------------------------


def odd(tensor: torch.Tensor) -> torch.Tensor:
    """A copy at an address that is no multiple of 16."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("codes", [False, True])
def test_tensors_with_one_key_have_one_compiled_kernel(codes: bool) -> None:
    """Triton's specialization of the arguments depends on nothing but the key."""
    module, launch = fresh_kernel(), Launch()
    function = module._measure
    backend = triton.compiler.make_backend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
    binder = triton.runtime.jit.create_function_from_signature(function.signature, function.params, backend)
    vars(module)["_measure"] = launch
    specializations: dict[Any, set[str]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for number, shapes in enumerate(
            [[(16, 1)], [(1, 16), (1, 16)], [(4096, 32), (16, 5), (3, 48)], [(64, 48)] * 4]
        ):
            values = [normal(*shape).to(dtype) for shape in shapes]
            pending = [pending_of(x, (70_000 if number else 0) + 40 * at, codes=codes) for at, x in enumerate(values)]
            if number == 1 and codes:
                pending = [replace(one, scale_inv=odd(one.scale_inv)) for one in pending]
            if number == 2:
                pending[0] = replace(pending[0], places=ColumnPlaces(maxima=3))
            sums, maxima = vectors(80_000)
            (group,) = module.group_by_launch(pending)
            module.add_group(pending, group, *((odd(sums), odd(maxima)) if number == 3 else (sums, maxima)))
            _, specialization, options = binder(*launch.arguments, **launch.options)
            key = module._shared_launch(pending[0])
            specializations.setdefault(key, set()).add(str((specialization, options)))
    assert [len(of_key) for of_key in specializations.values()] == [1, 1]


class Launcher:
    """In the place of Triton's launcher since 3.6: Python that calls a function in C with ``settings``."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl, arg_annotations, kernel_signature = False, True, (1, 2), b"3"
    settings = 7, False, True, (4, 1), None, None, None, None, None, (1, 2), b"3"

    def __init__(self, keep: Callable[..., None]) -> None:
        self._keep = keep

    def __call__(self, *arguments: Any) -> None:
        raise AssertionError("launched by Python")

    def launch(self, *arguments: Any) -> None:
        *launch, given = arguments
        assert tuple(launch[4:]) == self.settings
        self._keep(*launch[:4], 7, (4, 1), None, None, None, *given)


class Compiled:
    """In the place of a kernel and its compiled form: keeps the arguments of launches."""

    function, packed_metadata = 7, (4, 1)

    def __init__(
        self,
        arg_names: Sequence[str] = (),
        error: Exception | None = None,
        fails_from: int = 0,
        launcher: Callable[[Callable[..., None]], Callable[..., None]] = lambda keep: keep,
    ) -> None:
        self.arg_names = arg_names
        self.run = launcher(self._keep)
        self._error = error
        self._fails_from = fails_from
        self.bound: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.bound.append(((*grid, *arguments), constants))
            return self

        return launch

    def _keep(self, *arguments: Any) -> None:
        self.direct.append(arguments)
        if self._error is not None and len(self.direct) > self._fails_from:
            raise self._error


def assert_same_launch(function: Any, bound: tuple[tuple[Any, ...], dict[str, Any]], direct: tuple[Any, ...]) -> None:
    """A direct launch has the arguments of one through the binder in order: tensors as addresses, and constants too."""
    arguments, constants = bound
    named_constants = {name: value for name, value in constants.items() if name in function.arg_names}
    expected = inspect.signature(function.fn).bind(*arguments[1:], **named_constants).arguments.values()
    addresses = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in expected]
    assert (direct[0], *direct[9:]) == (arguments[0], *addresses)


def launched(module: ModuleType, pending: Sequence[Pending], into: Sequence[torch.Tensor]) -> Repeat | None:
    """Measure tensors through the binder; return what repeats it."""
    launches = [module.add_group(pending, together, *into) for together in module.group_by_launch(pending)]
    return partial(module.repeat, launches) if all(launches) else None


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("launcher", [Launcher, lambda keep: keep], ids=["in C", "in Python"])
@pytest.mark.parametrize("codes", [(), (0, 1), (1, 2), (0, 1, 2)])
def test_a_direct_launch_has_all_arguments_in_order(codes: Sequence[int], launcher: Any) -> None:
    """Tensors as addresses, and constants too, of tensors of any size, with and without codes in one launch."""
    module = fresh_kernel()
    function = module._measure
    compiled = Compiled(function.arg_names, launcher=launcher)
    vars(module)["_measure"] = compiled
    into = vectors(200)
    module.scratch(into[0].device, 1 << 12)  # not too small later
    repeat = None
    for sizes in ((3, 4, 5), (3, 4, 5), (3000, 1, 70)):
        pending = [pending_of(normal(16, size), 50 * at, codes=at in codes) for at, size in enumerate(sizes)]
        if repeat is None:
            repeat = launched(module, pending, into)
            assert repeat is not None
        else:
            assert not repeat(pending, *into, 0)
            assert compiled.direct[-1][1:9] == (1, 1, 0, 7, (4, 1), None, None, None)
    compiled.bound.clear()
    by_kernel(module)(pending, *into)
    (bound,) = compiled.bound
    assert_same_launch(function, bound, compiled.direct[-1])


OTHERS: dict[str, tuple[Callable[[Pending], Pending], bool]] = {  # and whether Triton's binder finds the same kernel
    "columns": (lambda one: replace(one, values=normal(16, 6)[:, ::2]), True),
    "transposed codes": (lambda one: replace(one, codes=one.codes.t()), True),
    "an odd size": (lambda one: replace(one, values=normal(15, 3), codes=one.codes[:15]), False),
    "an odd address": (lambda one: replace(one, values=odd(one.values)), False),
    "an odd address of codes": (lambda one: replace(one, codes=odd(one.codes)), False),
    "nothing": (
        lambda one: replace(one, values=torch.empty(0, 3), codes=torch.empty(0, 3, dtype=torch.uint8)), False,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors_are_not_launched_again(name: str) -> None:
    change, has_same_kernel = OTHERS[name]
    module = fresh_kernel()
    compiled = Compiled(module._measure.arg_names)
    vars(module)["_measure"] = compiled
    one, into = pending_of(normal(16, 3), 0, codes=True), vectors(40)
    repeat = launched(module, [one], into)
    assert repeat is not None
    assert not repeat([one], *into, 0)
    other = change(one)
    assert repeat([other], *into, 0) == [other]
    assert (launched(module, [other], into) is not None) == has_same_kernel
    assert len(compiled.direct) == 1


@pytest.mark.usefixtures("compiles")
def test_a_launch_that_fails_leaves_its_tensors_and_the_later_ones() -> None:
    module = fresh_kernel()
    compiled = Compiled(module._measure.arg_names, TypeError("19 arguments"), fails_from=1)
    vars(module)["_measure"] = compiled
    into, of_e5m2 = vectors(200), (False, True, False)
    pending = [pending_of(normal(16, 3 + at), 50 * at, codes=True, e5m2=e5m2) for at, e5m2 in enumerate(of_e5m2)]
    repeat = launched(module, pending, into)
    assert repeat is not None
    assert repeat(pending, *into, 0) == [pending[1]], "the first launch has two tensors"
    assert launched(module, pending, into) is None, "there are no more"


def test_another_interface_of_triton_is_reported_once(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = Compiled(error=TypeError("19 arguments"))
    monkeypatch.setattr(kernel, "_measure", compiled)
    monkeypatch.setitem(kernel.launcher_of.__globals__, "_needs_binder", False)
    repeats = {
        dtype: launched(kernel, [pending_of(normal(16, 3).to(dtype), 0)], vectors(40))
        for dtype in (torch.float32, torch.float16)
    }
    for dtype, repeat in repeats.items():
        pending = [pending_of(normal(16, 3).to(dtype), 0)]
        assert repeat is not None
        assert repeat(pending, *vectors(40), 0) == pending
        assert launched(kernel, pending, vectors(40)) is None
    assert (len(compiled.bound), len(compiled.direct)) == (4, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "19 arguments" in caplog.text


# --- the program that merges ------------------------------------------------------------------------------------------


@contextmanager
def programs_in(order: Sequence[int]) -> Iterator[None]:
    """The interpreter runs a launch's programs one by one, here in another order."""
    builder = interpreter.interpreter_builder
    original = builder.set_grid_idx
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_idx", lambda x, y, z: original(order[x], y, z))
        yield


def in_order(kernel: ModuleType, pending: Sequence[Pending], order: Sequence[int] | None) -> list[torch.Tensor]:
    sums, maxima = vectors(1200)
    with programs_in(order or range(4 * len(pending))):
        by_kernel(kernel)(pending, sums, maxima)
    partials, counters = kernel.scratch(sums.device, 1)
    assert not counters.any(), "the next launch counts from 0"
    partials.fill_(NAN)  # the next launch reads nothing of this one
    return [sums, maxima]


ORDERS = {
    # Each program at each place. Their sums are rounded, so that another order of additions gives other bits.
    "of a tensor": ([(16, 1000)], {}, [[(first - place) % 4 for place in range(4)] for first in range(4)]),
    "of any tensor": (
        [(16, 350), (16, 300), (16, 250)],
        {"codes": True, "histogram": True},
        [[*(program for program in range(11, -1, -1) if program != last), last] for last in (1, 6, 11)],
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended if name == "of any tensor" else ()) for name in ORDERS]
)
def test_any_program_may_be_the_last(kernel: ModuleType, name: str) -> None:
    shapes, options, orders = ORDERS[name]
    pending = [pending_of(normal(*shape, seed=at), 300 * at, **options) for at, shape in enumerate(shapes)]
    assert list(map(len, kernel.group_by_launch(pending))) == [len(shapes)]
    expected = in_order(kernel, pending, None)
    for order in orders:
        assert all(map(torch.equal, in_order(kernel, pending, order), expected)), order


def test_a_captured_launch_has_its_own_memory(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph may be replayed on any stream."""
    kept = kernel.scratch(BYTES.device, 100)
    assert all(map(operator.is_, kernel.scratch(BYTES.device, 50), kept))
    monkeypatch.setitem(kernel.scratch.__globals__, "is_capturing", lambda: True)
    captured = kernel.scratch(BYTES.device, 50)
    assert not any(map(operator.is_, captured, kept))
    assert not captured[1].any()


def test_the_engine_with_the_kernel(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a GEMM, in two micro-batches, with their statistics and the codes'."""
    names = ("mean", "std", "min", "max", "l1_norm", "l2_norm")
    its = quantizer("fp8_current_scaling", columnwise=False)
    launches: list[int] = []

    def add(pending: Sequence[Pending], *into: torch.Tensor) -> None:
        launches.extend(map(len, kernel.group_by_launch(pending)))
        by_kernel(kernel)(pending, *into)

    def found() -> dict[tuple[str, str], float]:
        engine = StatisticsEngine()
        for batch in range(2):
            for number, tensor in enumerate(("activation", "weight", "output")):
                values = normal(16 * (number + 1), 48, seed=10 * batch + number).to(torch.bfloat16)
                real = None if tensor == "output" else its(values)
                engine.note(Watched("fc1", tensor, 0, values, real, real), of_tensor)
                if real is not None:
                    engine.note(Watched("fc1", tensor, 0, values, real, real), of_codes)
            engine.measure()
        return {(row.tensor, row.statistic): row.value for row in engine.flush(reduce=False)}

    of_tensor = tuple(map(tensor_request, names))
    of_codes = tuple(map(quantized_request, ("underflows%", "underflow_norm%", "mse", "scale_inv_max")))
    expected = found()
    monkeypatch.setattr(kernels, "_pass_for", lambda values: add)
    assert found() == pytest.approx(expected, rel=1e-5)
    assert launches == [3, 2], "operands and result; the weight of a step is measured once"


# --- what Triton compiles ---------------------------------------------------------------------------------------------

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.float64: "*fp64",
}


def compiled(
    capability: int, values: torch.Tensor, *arguments: Any, together: int = 1, **options: Any
) -> dict[str, Any]:
    """Output of Triton and ptxas for a launch with these arguments on a GPU: "ptx", "cubin", ..."""
    module = fresh_kernel()
    function, launch = module._measure, Launch()
    vars(module).update(_measure=launch, converts_fp8=lambda device: True)

    def add(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
        (first,) = pending
        apart = ColumnPlaces(*(1000 if place >= 0 else -1 for place in first.places))
        places = [ColumnPlaces(*map(operator.add, first.places, (n * step for step in apart))) for n in range(together)]
        by_kernel(module)([replace(first, places=of_tensor) for of_tensor in places], sums, maxima)

    measured_by(add, values, *arguments, **options)
    return compiled_launch(capability, function, launch)


def compiled_launch(capability: int, function: Any, launch: Launch) -> dict[str, Any]:
    given = launch.options
    compile_options = {name: given.pop(name) for name in ("num_warps", "enable_fp_fusion", "maxnreg") if name in given}
    # Triton makes constants of None and 1, and specializes on numbers and addresses that are multiples of 16.
    signature, constants, multiples = {}, dict(given), {}
    for position, (name, argument) in enumerate(zip(function.arg_names, launch.arguments, strict=False)):
        is_general = name in function.do_not_specialize
        if argument is None or (isinstance(argument, int) and argument == 1 and not is_general):
            signature[name], constants[name] = "constexpr", argument
        elif isinstance(argument, int):
            signature[name] = "i32" if argument < 2**31 else "i64"
        else:
            signature[name] = POINTERS[argument.dtype]
        is_pointer = signature[name].startswith("*")
        if signature[name] != "constexpr" and not is_general and (is_pointer or argument % 16 == 0):
            multiples[(position,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(given, "constexpr")
    source = triton.compiler.ASTSource(function, signature, constants, multiples)
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    made: dict[str, Any] = triton.compile(source, target=target, options=compile_options).asm
    return made


def ptx(values: torch.Tensor, *arguments: Any, **options: Any) -> str:
    """The PTX for compute capability 9.0, after ptxas took it."""
    made = compiled(90, values, *arguments, **options)
    assert made["cubin"]
    return str(made["ptx"])


@pytest.fixture(scope="module")
def triton_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, triton_folder: Path) -> None:
    """Triton compiles, and keeps the results for the other tests of the file that look at them."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton_folder))
    if not isinstance(tl.sum, triton.JITFunction):
        pytest.skip("triton was imported with TRITON_INTERPRET=1")


def loads(code: str) -> list[str]:
    """The loads of a tile: 4 bytes or more a thread."""
    return re.findall(r"ld\.global\.(v[24]\.b32)", code)


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.extended
def test_a_whole_tensor_is_read_16_bytes_at_a_time(dtype: torch.dtype) -> None:
    code = ptx(torch.zeros(64, 64, dtype=dtype).t())
    assert_reads_16_bytes(code, dtype)
    assert ".ftz" not in code  # subnormal numbers stay


def assert_reads_16_bytes(code: str, dtype: torch.dtype) -> None:
    assert loads(code) == ["v4.b32"] * (min(2, dtype.itemsize) + 1), "a whole tile, and a row of a tile with care"


@pytest.mark.usefixtures("compiles")
@pytest.mark.extended
def test_codes_and_histogram_compile() -> None:
    values, codes = torch.zeros(64, 64, dtype=torch.float16), torch.zeros(64, 64, dtype=torch.uint8)
    code = ptx(values, codes, torch.ones(1), e5m2=True, histogram=True, together=2)
    assert "v4.b32" in loads(code)
    assert ".ftz" not in code


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize(("with_codes", "capability"), [(False, 100), (True, 90), (True, 100)])
@pytest.mark.extended
def test_registers_are_not_spilled(tmp_path: Path, with_codes: bool, capability: int) -> None:
    """A launch without codes, and the one with the most registers, of three tensors and their codes, for both GPUs."""
    values, codes = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.uint8)
    of_codes = [codes, torch.ones(1)] if with_codes else []
    made = compiled(capability, values, *of_codes, together=3)
    if not with_codes:
        assert_reads_16_bytes(made["ptx"], values.dtype)
        assert ".ftz" not in made["ptx"]
    instructions = disassembled(made["cubin"], tmp_path)
    loops = re.findall(r"^\.(L_x_\d+):\n(.*?) BRA[^`\n]*`\(\.\1\)", instructions, flags=re.MULTILINE | re.DOTALL)
    (whole_tiles,) = [loop for name, loop in loops if "LDG" in loop and "BAR" not in loop]
    assert len(re.findall(r"\b(STL|LDL)\b", whole_tiles)) <= 10


def disassembled(cubin: bytes, folder: Path) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([tool, "-c", file], check=True, capture_output=True, text=True).stdout
