"""The replacement for ``torch.cuda`` if the CPU replaces the GPU.

Transformer Engine's modules see this module instead of ``torch.cuda``; with ``pretend_cuda=True`` the names in
``__all__`` are also set in the real ``torch.cuda``. Other names are looked up there.

Each process that a launcher starts on this machine has a device; all are the CPU. Streams, events and synchronization
are no-ops. Random numbers come from the default generator of torch's C++, which is the CPU's unless
``pretend_cuda=True`` gives the CPU a separate one. CUDA graphs raise an error.

Functions that a GPU runs as one kernel are computed in float32, and rounded once at the end. ``torch.compile`` fuses a
function that Transformer Engine marks ``jit_fuser`` into one kernel, which computes bfloat16 and float16 inputs in
float32 (``triton.codegen_upcast_to_fp32`` of torch's ``_inductor/config.py``); without compilation it would round after
every operation.
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map, tree_map_only

from te_precision_callbacks.reference.collectives import one_by_one as one_by_one
from te_precision_callbacks.reference.errors import MissingFunctionError
from te_precision_callbacks.reference.target import capability

_HALF = {torch.bfloat16, torch.float16}
FUSED_IN = "transformer_engine.pytorch.jit"
"""The module whose compiled functions are pure: they return new tensors, and do not write to their arguments."""

ELEMENTWISE = ("bias_gelu_fused_", "gelu_fused_", "dgelu_fused_", "bgrad_dgelu_fused_")
"""Functions of that module of a dozen elementwise operations, of the largest activation of a layer. The last one also
returns, first, the sum of its gradient over the rows."""

_ELEMENTS_AT_ONCE = 1 << 17
"""Elements for which all intermediate results fit into a cache."""


def rounding_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a pure function of positional tensors to compute half-precision inputs in float32.

    Results and gradients are rounded once, to the dtypes that ``function`` itself returns.
    """
    results_on_meta: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(function)
    def rounded(*arguments: Any) -> Any:
        dtypes = tuple(getattr(value, "dtype", None) for value in arguments)
        if _HALF.isdisjoint(dtypes):
            return function(*arguments)
        if dtypes not in results_on_meta:
            on_meta = tree_map_only(torch.Tensor, functools.partial(torch.empty_like, device="meta"), arguments)
            with torch.no_grad():
                results_on_meta[dtypes] = function(*on_meta)
        widened = (value.float() if dtype in _HALF else value for value, dtype in zip(arguments, dtypes, strict=True))
        return tree_map(lambda result, rounded: result.to(rounded.dtype), function(*widened), results_on_meta[dtypes])

    return rounded


def in_row_chunks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of :data:`ELEMENTWISE` to process a few rows at a time, which stay in the CPU's caches; bit-identical.

    With gradients, all rows are processed at once.
    """

    @functools.wraps(function)
    def parted(*arguments: torch.Tensor) -> Any:
        first = arguments[0]
        rows = max(1, _ELEMENTS_AT_ONCE // max(1, first[:1].numel()))
        if len(first) <= rows or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments)):
            return function(*arguments)
        whole = torch.empty_like(first)
        sums = False
        for begin in range(0, len(first), rows):
            part = slice(begin, begin + rows)
            result = function(*(tensor[part] if tensor.shape == first.shape else tensor for tensor in arguments))
            sums = isinstance(result, tuple)
            whole[part] = result[1] if sums else result
        if sums:
            return (whole.sum(dim=0), whole)
        return whole

    return parted


cuda_version = "13.0"
"""Replaces ``torch.version.cuda``: new enough for everything that Transformer Engine 2.20 asks a version for."""


# --- for rewritten modules only: these have no counterpart in torch.cuda ---------------------------------------------


def is_on_device(tensor: Any) -> bool:
    """Replaces ``tensor.is_cuda``: True on the CPU, False on "meta"."""
    return bool(tensor.device.type == "cpu")


def current_torch_device() -> torch.device:
    """Replaces ``torch.cuda.current_device()``, which Transformer Engine passes to torch as a device."""
    return torch.device("cpu")


def run_eagerly(function: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
    """Replaces ``torch.compile``, with and without arguments: returns the function, eager or rounding once."""
    if function is None:
        return run_eagerly
    if function.__module__ != FUSED_IN:
        return function
    return rounding_once(in_row_chunks(function) if function.__name__ in ELEMENTWISE else function)


def exact_norm(tensor: torch.Tensor, p: float = 2) -> torch.Tensor:
    """Replaces ``torch.norm(tensor, p)``, which on the CPU sums float32 sequentially, by a sum in float64."""
    exact: torch.Tensor = torch.linalg.vector_norm(tensor, ord=p, dtype=torch.float64)
    return exact.to(tensor.dtype)


def no_attention(error: ValueError, context_parallel: bool) -> Exception:
    """Replaces ``error``, which Transformer Engine raises if no attention supports the inputs; adds advice."""
    if not context_parallel:
        return MissingFunctionError(
            f"{error} The reference backend has no fused attention, and Transformer Engine's unfused attention does"
            " not support this case. Use the compiled Transformer Engine on a GPU."
        )
    return MissingFunctionError(
        "The reference backend does not support context parallelism, because it has no fused attention. Use cp_size"
        " 1 with data or tensor parallelism, or the compiled Transformer Engine on GPUs."
    )


def scaled_mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> torch.Tensor:
    """Replaces ``torch._scaled_mm`` with one scale per matrix; as on a GPU, the scales multiply the sums."""
    if scale_a.numel() != 1 or scale_b.numel() != 1:
        rest = {"bias": bias, "out_dtype": out_dtype, **options}
        result: torch.Tensor = torch._scaled_mm(input, mat2, scale_a, scale_b, **rest)
        return result
    # A GPU's GEMM is column-major, so its first matrix is mat2.
    sums = (input.float() @ mat2.float()) * scale_b.view(()) * scale_a.view(())
    if bias is not None:
        sums += bias.float()
    return sums.to(out_dtype or input.dtype)


# --- constant functions -----------------------------------------------------------------------------------------------


def _nothing(*_arguments: Any, **_options: Any) -> None:
    pass


def _yes(*_arguments: Any, **_options: Any) -> bool:
    return True


def _no(*_arguments: Any, **_options: Any) -> bool:
    return False


def _zero(*_arguments: Any, **_options: Any) -> int:
    return 0


# --- the device ------------------------------------------------------------------------------------------------------


is_available = _yes
is_initialized = _yes
is_bf16_supported = _yes
can_device_access_peer = _no
init = _nothing
_lazy_init = _nothing
_initialized = True  # torch's checkpoints check it before saving the state of the GPU's generator


def _lazy_call(callable: Callable[[], Any], **_options: Any) -> None:
    callable()


def device_count() -> int:
    """One device for each process that a launcher has started on this machine."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


_current_device = 0


def current_device() -> int:
    return _current_device


def set_device(device: Any) -> None:
    """Choose the device that ``current_device`` returns; any number without a launcher."""
    global _current_device
    number = _number(device)
    if number >= 0:  # a negative number is none, as in torch
        _current_device = number


def _number(device: Any) -> int:
    if isinstance(device, int):
        return device
    number: int | None = None if device is None else torch.device(device).index
    if number is None:
        return _current_device
    return number


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return capability()


def get_device_name(device: Any = None) -> str:
    return "CPU (reference backend of te-precision-callbacks, compute capability {}.{})".format(*capability())


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Return the properties of the pretended device, with the limits of an H100."""
    major, minor = capability()
    return SimpleNamespace(
        name=get_device_name(),
        major=major,
        minor=minor,
        total_memory=_memory("SC_PHYS_PAGES"),
        multi_processor_count=132,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 * 2**20,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
    )


def get_arch_list() -> list[str]:
    return ["sm_{}{}".format(*capability())]


class device:
    def __init__(self, device: Any) -> None:
        self.idx = _number(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(self, *error: object) -> None:
        set_device(self.prev_idx)


class device_of(device):
    """Context manager that chooses the device of a tensor: a no-op, since all tensors are on the current device."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(None)


# --- time ------------------------------------------------------------------------------------------------------------


synchronize = _nothing
set_stream = _nothing


class Stream:
    """Replaces ``torch.cuda.Stream``, and ``torch.Stream``: a stream without pending work."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **_options: Any) -> None:
        self.device = torch.device("cpu")

    query = _yes
    synchronize = wait_event = wait_stream = __exit__ = _nothing

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def __enter__(self) -> Stream:
        return self


class Event:
    """Replaces ``torch.cuda.Event``, and ``torch.Event``: an event with its wall-clock time."""

    cuda_event = 0
    event_id = 0

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self.device = torch.device("cpu")
        self._recorded_at = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded_at = time.perf_counter()

    query = _yes
    wait = synchronize = _nothing

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event._recorded_at - self._recorded_at) * 1e3


ExternalStream = Stream
_stream = Stream()


def current_stream(device: Any = None) -> Stream:
    return _stream


default_stream = current_stream


class StreamContext:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    __enter__ = __exit__ = _nothing


stream = StreamContext


# --- random numbers: one generator for all devices, the default of torch's C++; torch's other functions use these -----


class _Generators(tuple[torch.Generator, ...]):
    """One generator for every index; Transformer Engine's index here is the result of ``current_torch_device``."""

    def __getitem__(self, index: Any) -> Any:
        return torch._C.default_generator


default_generators = _Generators([torch._C.default_generator] * device_count())


def manual_seed(seed: int) -> None:
    """Seeds the generator; ``torch.manual_seed`` calls ``manual_seed_all``, which calls this, with the same seed."""
    torch._C.default_generator.manual_seed(int(seed))


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch._C.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch._C.default_generator.set_state(new_state)


# --- memory: the machine's; torch does not track that of CPU tensors, so what it derives from memory_stats is 0 -------


def _memory(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def mem_get_info(device: Any = None) -> tuple[int, int]:
    free = "SC_AVPHYS_PAGES"  # not known on every system
    return _memory(free if free in os.sysconf_names else "SC_PHYS_PAGES"), _memory("SC_PHYS_PAGES")


def memory_stats(device: Any = None) -> dict[str, Any]:
    return defaultdict(int)


def memory_snapshot(*_arguments: Any, **_options: Any) -> list[Any]:
    return []


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return "The reference backend has no memory statistics."


reset_accumulated_memory_stats = _nothing
reset_peak_memory_stats = _nothing
empty_cache = _nothing
ipc_collect = _nothing
set_per_process_memory_fraction = _nothing


# --- CUDA graphs -----------------------------------------------------------------------------------------------------


is_current_stream_capturing = _no


def _no_graphs(name: str, *_arguments: Any, **_options: Any) -> NoReturn:
    raise MissingFunctionError(
        f"torch.cuda.{name}: the reference backend does not support CUDA graphs. Run without them, or on a GPU with"
        " the compiled Transformer Engine."
    )


class CUDAGraph:
    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        _no_graphs("CUDAGraph")


graph, make_graphed_callables, graph_pool_handle = (
    functools.partial(_no_graphs, name) for name in ("graph", "make_graphed_callables", "graph_pool_handle")
)


# --- profiler ranges -------------------------------------------------------------------------------------------------


class nvtx:
    range_push = range_pop = range_start = staticmethod(_zero)
    mark = range_end = staticmethod(_nothing)

    @staticmethod
    def range(msg: str, *_arguments: Any, **_options: Any) -> nullcontext[None]:
        return nullcontext()


class _Runtime:
    """The functions of the CUDA runtime that scripts and torch call by name; they return 0, success."""

    cudaProfilerStart = cudaProfilerStop = cudaHostRegister = cudaHostUnregister = staticmethod(_zero)


def cudart() -> type[_Runtime]:
    return _Runtime


check_error = _nothing


__all__ = [
    name
    for name, own in globals().items()
    if hasattr(torch.cuda, name) and not name.startswith("__") and own is not getattr(torch.cuda, name)
]


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)
