"""Work of the host when it observes on a GPU, measured on a CPU.

    python benchmarks/host_path.py [--layers 4] [--json]

``te.TransformerLayer`` train in FP8 on the reference backend. All statistics of all tensors are collected in every
step, on the fused path. Triton's binder and its launcher in C run against a stub of libcuda, which is compiled into a
temporary folder: kernels are compiled for a Hopper GPU, launched, and do nothing, so the statistics are wrong.

Counts are of one step, and exact: a step with a session minus a step without one; for *every step*, a step that only
the watch of every step observes, minus one without it. Calls inside the reference backend are not counted. On a GPU,
torch's own calls for streams come on top. The time is the best of several loops, by processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import inspect
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from ctypes import CDLL, RTLD_GLOBAL, c_long
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gpu_parts.layout import layout
from gpu_parts.rows import Settings
from gpu_parts.training import PATHS, Training
from measuring import Case, arguments, report
from step import Run, with_ours, without
from torch.utils._python_dispatch import TorchDispatchMode

from te_precision_callbacks import reference
from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.kernels import largest
from te_precision_callbacks.engine.kernels.columns import (
    E4M3,
    FORMATS,
    MAGNITUDE,
    ColumnPlaces,
    LargestOf,
    Pending,
    Repeat,
)
from te_precision_callbacks.instrumentation import tap_parts
from te_precision_callbacks.instrumentation.statistics import StatisticsConsumer
from te_precision_callbacks.parameters import gradients

GEMMS_OF_LAYER = 12
"""fprop, dgrad and wgrad of qkv, proj, fc1 and fc2."""

_NOTHING: dict[str, Any] = {}
"""A config without sections."""

_CPU = torch.device("cpu")
_REFERENCE = str(Path(reference.__file__).parent)

_STUB = """
static long launches = 0;
long launch_count(void) { return launches; }
int cuLaunchKernel(void) { launches++; return 0; }
int cuLaunchKernelEx(void) { launches++; return 0; }
int cuCtxGetCurrent(void **context) { *context = &launches; return 0; }
int cuDeviceGetAttribute(int *value) { *value = 1 << 16; return 0; }
int cuFuncGetAttribute(int *value) { *value = 1024; return 0; }
int cuPointerGetAttribute(void) { return 0; }
"""


# --- a GPU without a GPU ----------------------------------------------------------------------------------------------


def stub_driver(folder: Path) -> Callable[[], int]:
    """Make Triton launch through a stub of libcuda; return the function that counts launches."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia import driver
    except ImportError as error:
        raise SystemExit(f"Triton is missing: pip install triton ({error}).") from error
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit("There is no C compiler: install gcc, or set CC.")
    source, library = folder / "libcuda.c", folder / "libcuda.so.1"
    needed = set(re.findall(r"\b(cu[A-Z]\w*)\(", Path(driver.__file__).with_name("driver.c").read_text()))
    others = [f"int {name}(void) {{ return 0; }}\n" for name in needed if f" {name}(" not in _STUB]
    source.write_text(_STUB + "".join(others))
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    os.environ |= {"TRITON_LIBCUDA_PATH": str(folder), "TRITON_INTERPRET": "0"}
    stub = CDLL(str(library), mode=RTLD_GLOBAL)

    class Driver(driver.CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.get_device_capability = lambda device=0: (9, 0)
            self.get_current_device = lambda: 0
            self.get_current_stream = abs  # of device 0 stream 0, from a function in C as torch's
            self.set_current_device = lambda device: None

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    triton.runtime.driver.set_active(Driver())
    stub.launch_count.restype = c_long
    launch_count: Callable[[], int] = stub.launch_count
    return launch_count


def _take_triton(values: torch.Tensor) -> kernels.Pass:
    return kernels._on_gpu


class TritonPass:
    """The pass of a GPU, for tensors on a CPU."""

    def __init__(self) -> None:
        self.tensors = 0
        self._add = kernels.add

    def __call__(self, pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> Repeat | None:
        self.tensors += len(pending)
        repeat = self._add(pending, sums, maxima)
        return None if repeat is None else functools.partial(self.repeat, repeat)

    def repeat(self, repeat: Repeat, pending: Sequence[Pending], *arguments: Any) -> Sequence[Pending]:
        left = repeat(pending, *arguments)
        self.tensors += len(pending) - len(left)
        return left

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        original = kernels._on_gpu, largest._on_gpu
        with (
            # No Mock, which would add its own calls.
            mock.patch.multiple(kernels, add=self, _pass_for=_take_triton),
            mock.patch.object(largest, "add", largest._with_triton),
            mock.patch.object(tap_parts, "unquantized", SimpleNamespace(result=None)),  # a GPU leaves nothing
            mock.patch.object(gradients, "SLOW_NORM", ()),
        ):
            yield
        if (kernels._on_gpu, largest._on_gpu) != original:
            raise SystemExit("A Triton kernel failed; the reason is logged above.")


_OF_THE_BENCHMARK = (TritonPass.__call__.__code__, TritonPass.repeat.__code__)

# --- what is counted --------------------------------------------------------------------------------------------------


class Calls:
    """Counts calls in this thread, outside of the reference backend."""

    def __init__(self) -> None:
        self.functions = 0
        self.builtins = 0
        self._depth = 0  # of calls inside the reference backend

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self._depth:
            self._depth += (event == "call") - (event == "return")
        elif event == "c_call":
            self.builtins += 1
        elif event == "call":
            if _is_of_reference(frame):
                self._depth = 1
            elif frame.f_code not in _OF_THE_BENCHMARK:
                self.functions += 1


def _is_of_reference(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name == "decorate_context":  # torch.no_grad() around a function
        function: Any = frame.f_locals.get("func")
        function = inspect.unwrap(getattr(function, "func", function))  # also of a functools.partial
        code = getattr(function, "__code__", code)
    return code.co_filename.startswith(_REFERENCE)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations of torch, and those that allocate their result, outside of the reference backend.

    Attributes:
        planned: operations of GEMMs that follow a plan.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.allocations = 0
        self.planned = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: FrameType | None = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(_REFERENCE):
            self.planned += frame.f_code is StatisticsConsumer.repeat.__code__
            frame = frame.f_back
        if frame is None:
            self.operations += 1
            self.allocations += any(made.alias_info is None for made in function._schema.returns)
        return function(*args, **kwargs or {})


def counted(training: Training, way: Run, launch_count: Callable[[], int]) -> dict[str, int]:
    """Count in steps 6 and 7: the first ones set things up, and step 5 samples weights."""
    calls, operations, triton_pass = Calls(), Operations(), TritonPass()
    with triton_pass.taken(), way() as end:
        for _ in range(6):
            training.step(end)
        launches, tensors = launch_count(), triton_pass.tensors
        with operations:
            training.step(end)
        launches, tensors = launch_count() - launches, triton_pass.tensors - tensors
        gc.collect()
        gc.disable()  # a collection would call finalizers
        sys.setprofile(calls)
        try:
            training.step(end)
        finally:
            sys.setprofile(None)
            gc.enable()
    return {
        "launches": launches,
        "tensors": tensors,
        "functions": calls.functions,
        "calls": calls.functions + calls.builtins,
        "operations": operations.operations,
        "allocations": operations.allocations,
        "planned": operations.planned,
    }


def launch_microseconds(repeats: int = 7, loop: int = 500) -> float:
    """Time the repeated launch for the two operands of a GEMM, with their codes."""
    from te_precision_callbacks.engine.kernels import triton_kernel

    places, width, _ = layout(codes=True, histogram=False)
    moved = ColumnPlaces(*(place + width if place >= 0 else place for place in places))
    values = torch.zeros(64, 64, dtype=torch.bfloat16)
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    operands = [Pending(values.clone(), codes.clone(), torch.ones(1), False, at) for at in (places, moved)]
    sums, maxima = torch.zeros(2 * width, dtype=torch.float64), torch.zeros(2 * width, dtype=torch.float64)
    groups = triton_kernel.group_by_launch(operands)
    added = [triton_kernel.add_group(operands, group, sums, maxima) for group in groups]
    launches = [launch for launch in added if launch is not None]
    if len(launches) < len(groups):
        raise SystemExit("Triton's launcher has another interface.")
    return _best_microseconds(lambda: triton_kernel.repeat(launches, operands, sums, maxima, 0), repeats, loop)


def watch_microseconds(repeats: int = 7, loop: int = 500) -> float:
    """Time the launch that the watch of every step makes for two operands in FP8 and a result."""
    operands: list[LargestOf] = [
        (torch.zeros(64, 64, dtype=torch.uint8), E4M3, torch.ones(1), place, place, MAGNITUDE) for place in range(2)
    ]
    operands.append((torch.zeros(64, 64), FORMATS[torch.float32], None, 2, 2, MAGNITUDE))
    row = largest.new_rows(1, 4, _CPU)[0]
    largest._with_triton(operands, row)
    return _best_microseconds(lambda: largest._with_triton(operands, row), repeats, loop)


def _best_microseconds(call: Callable[[], object], repeats: int, loop: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(loop):
            call()
        times.append(time.process_time() - start)
    return 1e6 * min(times) / loop


def cases_of(options: argparse.Namespace, launch_count: Callable[[], int]) -> list[Case]:
    settings = Settings(_CPU, "reference")
    training = Training(settings, layers=options.layers, hidden=16, sequence=8, batch=2)
    model = training.model
    session = functools.partial(with_ours, model, PATHS["fused"](fp8=True), "fused", every_step=False)
    base, observed = (counted(training, way, launch_count) for way in (without, session))
    idle, watched = (
        counted(training, functools.partial(with_ours, model, _NOTHING, "fused", every_step=every_step), launch_count)
        for every_step in (False, True)
    )
    extra = {name: observed[name] - base[name] for name in base}
    tensors, gemms = extra["tensors"], GEMMS_OF_LAYER * options.layers
    values = {
        "launches in a step": extra["launches"],
        "observed tensors": tensors,
        "Python functions per observed tensor": extra["functions"] / tensors,
        "calls per observed tensor, with builtins": extra["calls"] / tensors,
        "aten calls per observed GEMM": extra["operations"] / gemms,
        "aten calls of all planned GEMMs": extra["planned"],
        "allocations per observed GEMM": extra["allocations"] / gemms,
        "microseconds of a launch, two tensors with codes": launch_microseconds(),
        "every step: microseconds of a launch, three tensors": watch_microseconds(),
        "every step: launches in a step": watched["launches"] - idle["launches"],
        "every step: Python functions per GEMM": (watched["functions"] - idle["functions"]) / gemms,
        "every step: calls per GEMM, with builtins": (watched["calls"] - idle["calls"]) / gemms,
        "every step: aten calls per GEMM": (watched["operations"] - idle["operations"]) / gemms,
    }
    return [{"case": name, "value": value, "layers": options.layers} for name, value in values.items()]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="Transformer layers (default: %(default)s)")
    options = parser.parse_args()
    logging.getLogger("te_precision_callbacks").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        cases = cases_of(options, stub_driver(Path(folder)))
    report(cases, {"host path": "case", "value": "value"}, _CPU, as_json=options.json)


if __name__ == "__main__":
    main()
