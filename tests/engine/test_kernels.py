"""The passes in plain torch and in C++, and the range inside blocks, against float64; what surrounds a call."""

import functools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformer_engine.debug.features.utils.stats_computation import (
    BlockwiseDynamicRangeStat,
    compute_max_blockwise_dynamic_range,
)

from te_precision_callbacks.base import compiling
from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.kernels import eager, native
from te_precision_callbacks.engine.kernels.eager_blocks import largest_range
from te_precision_callbacks.statistics.names import Blocks
from tests.combinations import grouped
from tests.drawn import normal
from tests.engine import exact
from tests.engine.forms import spread
from tests.reference.processes import python

INF, NAN = math.inf, math.nan
WIDE = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
PRIME = 20_011  # not a multiple of anything, and large enough for what torch compiles

Measure = Callable[..., exact.Columns]
Same = Callable[[exact.Columns, exact.Columns], None]


# Flags of the compiler for this processor, and for smaller ones with a subset of its vectors.
PROCESSORS = {"native": "", "AVX2": "-march=haswell", "SSE2": "-march=x86-64"}


OTHERS = [name for name in PROCESSORS if name != "native" and platform.machine() == "x86_64"]


@pytest.fixture(params=["eager", "native", *(pytest.param(name, marks=pytest.mark.extended) for name in OTHERS)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "eager":
        monkeypatch.setattr(native.ONE_PASS, "functions", native.ONE_PASS.load(PROCESSORS[request.param]))
    return request.param


@pytest.fixture
def measure(way: str) -> Measure:
    """The pass, with its columns by name. In C++, if it would be taken for a tensor of that dtype."""

    def measure(values: torch.Tensor, codes: torch.Tensor | None = None, *args: Any, **options: Any) -> exact.Columns:
        if way != "eager":
            in_cpp = values.dtype in (torch.float32, torch.bfloat16, torch.float16)
            assert kernels._pass_for(values) is (native if in_cpp else eager).add
            sums, maxima = exact.measure(values, codes, *args, **options)
        else:
            sums, maxima = exact.measured_by(eager.add, values, codes, *args, **options)
        return exact.named(sums, maxima, compared=codes is not None, histogram_too=options.get("histogram", False))

    return measure


@pytest.fixture
def assert_same(way: str) -> Same:
    """Sums are as good as float64 can add, in C++ within its bounds."""
    return functools.partial(exact.assert_same, **({} if way == "eager" else {"rel": exact.IN_FLOAT}))


assert_nearly = functools.partial(exact.assert_same, rel=exact.IN_FLOAT)


@pytest.fixture(autouse=True)
def nothing_failed() -> None:
    assert native.ONE_PASS.is_compiled()


# --- moments ----------------------------------------------------------------------------------------------------------


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.view(163, -1).t(),
    "permuted": lambda x: x.view(2, 326, -1).permute(2, 0, 1),
    "every other": lambda x: x[::2],
    "columns": lambda x: x.view(163, -1)[:, 3:150],
    "expanded": lambda x: x[:200].unsqueeze(1).expand(200, 97),
    "with an offset": lambda x: x[1:],
    "0-d": lambda x: x[5],
    "one element": lambda x: x[5:6],
    "short": lambda x: x[:77],
    "whole rows": lambda x: x[:32768],
}


def special(*values: float) -> torch.Tensor:
    """Normal numbers with these among them, also in the last places, which no whole row has."""
    x = normal(PRIME)
    at = torch.tensor([0, 1, 4095, 4096, 8191, 16_383, 16_384, PRIME - 2, PRIME - 1])
    x[at] = torch.tensor(values).repeat(9)[: len(at)]
    return x


SPECIAL = {
    "zeros": torch.zeros(PRIME),
    "negative zeros": torch.full((PRIME,), -0.0),
    "nan": torch.full((PRIME,), NAN),
    "infinite": torch.full((PRIME,), -INF),
    "mixed": special(INF, -INF, NAN, 0.0),
    "a row of nan": torch.cat([torch.full((4096,), NAN), normal(PRIME)]),
    "subnormal": normal(PRIME) * 1e-40,
    "the smallest number": special(1.4e-45, -1.4e-45),
    "1e20": normal(PRIME) * 1e20,
    "1e-30": normal(PRIME) * 1e-30,
    "the largest number": special(torch.finfo(torch.float32).max, torch.finfo(torch.float32).min),
    "both ends": torch.cat([normal(PRIME) * 1e30, normal(PRIME) * 1e-30]),
    "negative": -normal(PRIME).abs() - 1,
    "float16 subnormals": (normal(PRIME) * 1e-6).half(),
    "float64 above float32": normal(PRIME).double() * 1e100,
    "float64 below float32": normal(PRIME).double() * 1e-100,
    "float64 between float32": 1 + normal(PRIME).double() * 1e-9,
    "float64 at both ends": torch.cat(
        [normal(PRIME).double() * 1e150, torch.tensor([5e-324, NAN, -INF, 0.0]).double()]
    ),
}


def every_bit_pattern(dtype: torch.dtype) -> torch.Tensor:
    """Subnormals, both zeros, infinities and every NaN; of float32 and float64 only bfloat16's."""
    if dtype in FP8:
        return torch.arange(256, dtype=torch.uint8).repeat(80).view(dtype)
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype if dtype.itemsize == 2 else torch.bfloat16).to(dtype)


VALUES = {
    **{f"{dtype}": (normal(PRIME) * 3 + 0.5).to(dtype) for dtype in (*WIDE, *FP8)},
    **{f"every {dtype}": every_bit_pattern(dtype) for dtype in (*WIDE, *FP8)},
    **{name: view(normal(163 * 300)) for name, view in LAYOUTS.items()},
    **SPECIAL,
}


@pytest.mark.parametrize("name", VALUES)
def test_moments_and_histogram(measure: Measure, assert_same: Same, name: str) -> None:
    values = VALUES[name]
    assert_same(measure(values, histogram=True), exact.columns(values, histogram_too=True))


def test_an_empty_tensor_adds_nothing() -> None:
    for values in (torch.empty(0), torch.empty(3, 0, 2), torch.empty(0, dtype=torch.bfloat16)):
        sums, maxima = exact.measure(values, histogram=True)
        assert not sums.any()
        assert maxima.tolist() == [-INF] * 3


def test_sums_of_random_numbers_are_nearer_than_their_bounds(measure: Measure) -> None:
    """In C++ roundings go up and down alike."""
    values = normal(2**20).bfloat16() + 0.3
    codes, scale_inv = exact.quantized(values, 0.01)
    exact.assert_same(measure(values, codes, scale_inv), exact.columns(values, codes, scale_inv), rel=1e-8)


def rounded_up(*, terms: int, vectors: int) -> torch.Tensor:
    """Numbers with float sums that are all rounded up, whatever the lanes: one, then what lies just above half of the
    last bit of one, in vectors of 16."""
    row = torch.full((terms,), 2.0**-24 * (1 + 2.0**-20))
    row[0] = 1.0
    return row.repeat_interleave(vectors).repeat(2**18 // (terms * vectors))


def drift(number: float, *, to: float) -> torch.Tensor:
    return torch.linspace(number, to, 2**17)


def off_centre(ratio: float) -> torch.Tensor:
    """Numbers with a squared mean of ``ratio`` times the variance in every block."""
    x = normal(32, 4096).double()
    x = (x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True)
    return (x + math.sqrt(ratio)).float().flatten()


ADVERSARIAL = {
    "all roundings go up": rounded_up(terms=8, vectors=16),
    "all roundings go up, in smaller vectors": rounded_up(terms=8, vectors=8),
    "all roundings of pairs go up": rounded_up(terms=4, vectors=16),
    "a mean that float can just do with": off_centre(0.66),
    "a mean that float can just not do with": off_centre(0.67),
    "a mean of 1000 standard deviations": normal(2**17) + 1000,
    "a mean that drifts": drift(-5.0, to=5.0) + 0.01 * normal(2**17),
    "sorted": normal(2**17).sort().values,
    "an outlier in each block": torch.cat([torch.tensor([1e8]), normal(4095)]).repeat(32),
    "one outlier": torch.cat([torch.tensor([1e18]), normal(2**17)]),
    "squares that nearly overflow": normal(2**17) * 1e17,
    "squares that overflow": normal(2**17) * 1e19,
    "squares that are lost": torch.cat([torch.tensor([2.0**-44]), torch.full((4095,), 0.99 * 2.0**-63)]).repeat(32),
    "squares that would be lost": torch.cat([torch.tensor([2.0**-46]), torch.full((4095,), 0.99 * 2.0**-63)]).repeat(
        32
    ),
    "one of 4096 is not 0": torch.cat([torch.tensor([3.0]), torch.zeros(4095)]).repeat(32),
    "one nan": torch.cat([torch.tensor([NAN]), normal(2**17)]),
    "one inf at the end": torch.cat([normal(2**17 - 1), torch.tensor([-INF])]),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_the_bounds_hold(name: str, measure: Measure, assert_same: Same) -> None:
    values = ADVERSARIAL[name]
    result = measure(values)
    assert_same(result, exact.columns(values))
    x = exact.as_array(values)
    std = x[np.isfinite(x)].std(ddof=1)
    assert exact.statistic("std", result) == pytest.approx(std, rel=exact.STD_IN_FLOAT)


def test_equal_elements_have_no_spread(measure: Measure) -> None:
    """Their sums are rounded; of 2^22 numbers, in C++, by 10^-7 of the value."""
    for value in [0.1, 3.7, 1 / 3, -1e20, 1e-30]:
        many, few = measure(torch.full((2**22,), value)), measure(torch.full((3,), value))
        for passes in ([many], [few], [many, few], [few] * 5):
            assert exact.statistic("std", *passes) == 0.0
        almost = torch.full((1001,), value)
        almost[7] = torch.nextafter(almost[7], torch.tensor(INF))
        expected = exact.as_array(almost).std(ddof=1)
        assert expected / 1.5 < exact.statistic("std", measure(almost)) < expected * 20


def test_a_tensor_of_many_pieces(measure: Measure, assert_same: Same, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C++ a piece has 2^16 elements."""
    monkeypatch.setattr(eager, "PIECE", 10_000)
    values = normal(3 * 2**16 + 4096 + 5)
    codes, scale_inv = exact.quantized(values, 0.01, e5m2=True)
    result = measure(values, codes, scale_inv, e5m2=True, histogram=True)
    assert_same(result, exact.columns(values, codes, scale_inv, e5m2=True, histogram_too=True))


# --- comparison with codes --------------------------------------------------------------------------------------------


def lossy(error: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers with this error where the code is 0; the others are exact."""
    codes = (normal(PRIME) * 2.0**-10).to(torch.float8_e4m3fn)
    return torch.where(codes.float() == 0, error, codes.float()), codes.view(torch.uint8)


def decoded(e5m2: bool, *, finite: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, also NaN's, which make an error of nan."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(100)
    if finite:
        codes = codes[codes.view(exact.FLOAT8[e5m2][0]).float().isfinite()]
    return normal(len(codes)).to(torch.float32 if e5m2 else torch.bfloat16), codes


LIMIT = torch.tensor(448.0 * exact.ROUNDING) * torch.tensor(0.3)
CODES: dict[str, tuple[torch.Tensor, torch.Tensor | None, float, bool]] = {
    # values, codes or None for torch's own, scale, E5M2? Nothing is lost; most underflows; most overflows.
    **{
        f"{name}, {'E5M2' if e5m2 else 'E4M3'}, {scale}": (values.to(dtype), None, scale, e5m2)
        for dtype, e5m2 in ((torch.bfloat16, False), (torch.float32, True))
        for scale in (0.003, 7.5, 1e-9)
        for name, values in {"inf, nan": special(0.0, INF, NAN), "0": special(0.0), "normal": normal(PRIME)}.items()
    },
    # Products of codes and scale may be subnormal, or overflow.
    **{f"of {s}": (normal(PRIME).clamp(-3, 3) * s, None, s, False) for s in (2.0**-120, 2.0**-99, 2.0**99, 2.0**120)},
    "at the limit and above": (torch.stack([LIMIT, -LIMIT.nextafter(LIMIT * 2)]).repeat(5000), None, 0.3, False),
    "a factor of 0": (normal(1000), torch.full((1000,), 0x38, dtype=torch.uint8), 0.0, False),
    # Errors with squares that float could lose.
    **{f"off by {error}": (*lossy(error), 1.0, False) for error in (0.0, *(2.0**-n for n in (40, 50, 51, 64, 70)))},
    **{
        f"every {'finite ' * finite}code of {'E5M2' if e5m2 else 'E4M3'}": (*decoded(e5m2, finite=finite), 0.7, e5m2)
        for e5m2 in (False, True)
        for finite in (False, True)
    },
}


@pytest.mark.parametrize("name", CODES)
def test_the_error_of_codes_equals_float64(measure: Measure, assert_same: Same, name: str) -> None:
    values, codes, scale_inv, e5m2 = CODES[name]
    by_torch, factor = exact.quantized(values, scale_inv, e5m2=e5m2)
    codes = by_torch if codes is None else codes
    expected = exact.columns(values, codes, factor, e5m2=e5m2)
    assert_same(measure(values, codes, factor, e5m2=e5m2), expected)
    if name.startswith("off by"):
        assert (expected["error_square_sum"] > 0) is (name != "off by 0.0")


@pytest.mark.parametrize("threads", [2, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    values, before = normal(9 * 2**16 + 17) * 1e3, torch.get_num_threads()
    codes, scale_inv = exact.quantized(values, 3.0)
    expected = exact.measured_by(native.add, values, codes, scale_inv)
    try:
        torch.set_num_threads(threads)
        result = exact.measured_by(native.add, values, codes, scale_inv)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first, other) for first, other in zip(result, expected, strict=True))


# --- when nothing can be compiled -------------------------------------------------------------------------------------


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, before the search for a compiler."""
    monkeypatch.setattr(native.ONE_PASS, "failed", False)
    monkeypatch.setattr(native.ONE_PASS, "functions", {})


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("has_compiler", [False, True])
def test_without_a_compiler_and_where_compiling_fails(
    has_compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "g++"
    if has_compiler:
        compiler.write_text("#!/bin/sh\necho no space left on device >&2\necho and more >&2\nexit 1\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    values = normal(PRIME)
    for _ in range(2):
        sums, maxima = exact.measure(values)
        assert_nearly(exact.named(sums, maxima), exact.columns(values))
    (record,) = (record for record in caplog.records if record.name == compiling.__name__)
    assert record.levelname == "WARNING"
    reason = "RuntimeError: no space left on device)" if has_compiler else "RuntimeError: no C++ compiler is found)"
    assert reason in record.getMessage()
    assert kernels._pass_for(values) is eager.add


A_PROCESS_OF_ITS_OWN = """
import json, os, sys
import torch
from te_precision_callbacks.base import compiling
from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.kernels import native
from tests.engine import exact

torch.set_num_threads(2)
values = torch.randn(2**20, generator=torch.Generator().manual_seed(0))

def is_same():
    return all(map(torch.equal, exact.measure(values), expected))

expected = exact.measure(values)
same = {"again": is_same()}
"""


def in_a_process(script: str, **environment: str) -> tuple[dict[str, bool], str]:
    done = python(A_PROCESS_OF_ITS_OWN + script, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
@pytest.mark.extended
def test_a_folder_that_cannot_be_written_is_said_and_costs_no_number(tmp_path: Path) -> None:
    """A file stands where the folder must be: the superuser may write to a folder that is read-only."""
    (tmp_path / "file").touch()
    script = "print(json.dumps(same | {'is plain': native.ONE_PASS.failed}))"
    same, stderr = in_a_process(script, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "file" / "folder"))
    assert all(same.values()), same
    assert stderr.count("cannot be compiled") == 1, stderr
    assert "TORCHINDUCTOR_CACHE_DIR" in stderr


@pytest.mark.extended
def test_code_in_the_folder_of_another_user_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert native.ONE_PASS.load()
    monkeypatch.setattr(os, "getuid", lambda: other)  # whose folder this user makes
    with pytest.raises(PermissionError, match=f"te_precision_{other} belongs to another user"):
        native.ONE_PASS.load()


@pytest.mark.extended
def test_processes_that_compile_at_once_leave_one_library(tmp_path: Path) -> None:
    """Each compiles to a name of its own, so that none loads what another has half written."""
    script = "from te_precision_callbacks.engine.kernels.native import ONE_PASS; assert ONE_PASS.load('-O0')"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "a folder")}
    started = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(2)]
    assert [process.wait() for process in started] == [0, 0]
    (library,) = (tmp_path / "a folder").iterdir()
    changed = library.stat().st_mtime_ns
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == 0
    assert library.stat().st_mtime_ns == changed, "and it is compiled no more"


@pytest.mark.slow
def test_what_happens_to_a_process_after_the_first_compilation_changes_no_number() -> None:
    """A child of a fork has one thread: with more, torch's own operations hang in it, as OpenMP's threads are gone."""
    script = """
torch.set_num_threads(1)
same["one thread"] = is_same()
torch.set_num_threads(2)
torch.set_default_dtype(torch.float64)
same["float64 by default"] = is_same()
torch.set_default_dtype(torch.float32)
torch.use_deterministic_algorithms(True)
same["deterministic"] = is_same()
torch.use_deterministic_algorithms(False)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if is_same() else 1)
same["forked"] = os.waitpid(child, 0)[1] == 0
print(json.dumps(same | {"is compiled": native.ONE_PASS.function is not None}))
"""
    same, _ = in_a_process(script)
    assert len(same) == 6
    assert all(same.values()), same


# --- what surrounds a call --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_the_modes_of_the_caller_have_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_TORCH_COMPILE", "0")
    values = normal(PRIME)
    expected = exact.columns(values)

    def check(tensor: torch.Tensor) -> None:
        assert_nearly(exact.named(*exact.measure(tensor)), expected)

    check(values)
    check(values.clone().requires_grad_())
    check(torch.nn.Parameter(values.clone()))
    with torch.no_grad():
        check(values)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            check(values)
        with torch.autocast("cpu", dtype, cache_enabled=False):
            check(values)
    check(values.as_subclass(type("Subclass", (torch.Tensor,), {})))
    with torch.device("meta"):  # as torch.set_default_device
        sums, maxima = exact.measure(values, histogram=True)
        assert_nearly(exact.named(sums, maxima, histogram_too=True), exact.columns(values, histogram_too=True))
    with torch.inference_mode():
        check(values)
        of_inference = values.clone()
        check(of_inference)
    check(of_inference)
    with torch.compiler.set_stance("force_eager"):
        check(values)
    assert native.ONE_PASS.is_compiled()


@pytest.mark.slow
def test_within_a_compiled_model_and_its_backward_pass() -> None:
    """As Transformer Engine's modules are: dynamo leaves their forward alone."""
    results = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            results.append((x.detach().clone(), exact.measure(x)))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            results.append((gradient.detach().clone(), exact.measure(gradient)))
            return gradient

    class Watching(torch.nn.Linear):
        @torch._dynamo.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Watch.apply(super().forward(x))  # type: ignore[no-any-return]

    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), Watching(8, 160)), backend="eager")
    model(normal(130, 8)).square().mean().backward()
    assert len(results) == 2
    for values, (sums, maxima) in results:
        assert_nearly(exact.named(sums, maxima), exact.columns(values))


def test_a_triton_kernel_that_fails_is_replaced_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here it fails since there is no GPU to launch it on."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "_on_gpu", kernels._with_triton)
    x = torch.tensor([1.0, -2.0, 0.0])
    for _ in range(2):
        sums, maxima = exact.measured_by(kernels._on_gpu, x)
        assert sums.tolist() == [3, 0, 1, -1, 5, 3]
        assert maxima.tolist() == [1, 2, -1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "because the Triton kernel failed" in caplog.text


# --- the dynamic range inside blocks ----------------------------------------------------------------------------------


INF, NAN = math.inf, math.nan


def chosen(*shape: int, share: float, seed: int = 5) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def by_loop(values: torch.Tensor, blocks: Blocks) -> float:
    matrix = exact.as_array(values).reshape(-1, values.shape[-1] if values.ndim else 1)
    result = -INF
    for oriented in [matrix, matrix.T] if blocks.both else [matrix]:
        height = blocks.size if blocks.dims == 2 else 1
        for top in range(0, oriented.shape[0], height):
            for left in range(0, oriented.shape[1], blocks.size):
                block = np.abs(oriented[top : top + height, left : left + blocks.size])
                block = block[np.isfinite(block) & (block > 0)]
                if len(block):
                    result = max(result, math.log2(block.max()) - math.log2(block.min()))
    return result


IN_BLOCKS = {
    "whole blocks": spread(16, 32),
    "partial blocks": spread(13, 37),
    "smaller than a block": spread(3, 5),
    "bfloat16": spread(13, 37).bfloat16(),
    "float16": spread(13, 37).half(),
    "float8": spread(13, 37).to(torch.float8_e5m2),
    "3-D": spread(3, 5, 19),
    "1-D": spread(77),
    "0-d": torch.tensor(-3.0),
    "transposed": spread(13, 37).t(),
    "expanded": spread(1, 37).expand(13, 37),
    "not finite": spread(13, 37).where(chosen(13, 37, share=0.9), NAN).where(chosen(13, 37, share=0.9, seed=6), -INF),
    "with zeros": spread(13, 37).where(chosen(13, 37, share=0.3), 0.0),
    "zero blocks": spread(13, 37).where(torch.arange(37) > 16, 0.0),
    "all of float32": torch.tensor([[1.4e-45, 1.0, -3.4e38, 0.0]]),
}


@pytest.mark.parametrize(("name", "others"), grouped(IN_BLOCKS, [1, 8, 16, 10**6], [1, 2], [False, True]))
def test_the_largest_range_equals_a_loop_over_blocks(name: str, others: list[tuple[int, int, bool]]) -> None:
    for size, dims, both in others:
        blocks = Blocks(size, dims, both)
        result = largest_range(IN_BLOCKS[name], blocks)
        assert (result.dtype, result.shape) == (torch.float64, (1,))
        assert result.item() == pytest.approx(by_loop(IN_BLOCKS[name], blocks), rel=1e-12, abs=1e-12)


def test_nothing_to_take_a_range_of() -> None:
    for values in [torch.zeros(8, 8), torch.full((8, 8), NAN), torch.empty(0), torch.empty(3, 0)]:
        for dims in [1, 2]:
            result = largest_range(values, Blocks(4, dims, both=True))
            assert (result.dtype, result.tolist()) == (torch.float64, [-INF])


@pytest.mark.parametrize("both", [False, True], ids=["as it is", "both orientations"])
@pytest.mark.parametrize("dims", [1, 2])
def test_transformer_engines(dims: int, both: bool) -> None:
    """Of whole blocks of finite numbers theirs is the same, in float32."""
    for size in [4, 32]:
        for values in (spread(64, 96), spread(2, 32, 64).where(chosen(2, 32, 64, share=0.5), 0.0), torch.zeros(32, 32)):
            expected = float(compute_max_blockwise_dynamic_range(values, BlockwiseDynamicRangeStat(size, dims, both)))
            result = max(largest_range(values, Blocks(size, dims, both)).item(), 0.0)
            assert result == pytest.approx(expected, rel=1e-6)
