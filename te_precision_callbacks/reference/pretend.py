"""The pretended CUDA: "cuda" means the CPU everywhere in the process, after ``reference.install(pretend_cuda=True)``.

Every function of torch that takes a device also accepts "cuda", and uses the CPU. ``torch.device("cuda")`` keeps its
value, for libraries that check its type; ``tensor.is_cuda`` is true for tensors on the CPU. ``tensor.device`` is still
the CPU, since torch's compiler, optimizers and distributed wrappers would otherwise take paths that need a GPU.

Functions and methods are replaced individually: a mode that intercepts every call of torch would be slow, and would
apply to one thread only.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed

from te_precision_callbacks.reference import cuda_on_cpu, pretended_random
from te_precision_callbacks.reference.collectives import make_gloo_stand_for_nccl, replace
from te_precision_callbacks.reference.errors import MissingFunctionError
from te_precision_callbacks.reference.pretended_types import (
    Device,
    Generator,
    cpu_for_cuda,
    is_cuda,
    is_device_number,
)

NCCL_VERSION = (2, 27, 3)
"""Replaces ``torch.cuda.nccl.version()``: new enough for what scripts ask a version for."""


class Options:
    """Options of an NCCL group: accepted, and ignored for new groups, since gloo does not have them."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


class ProcessGroupNCCL:
    """Replaces torch 2.13's class, since gloo replaces NCCL. It has no instances."""

    Options = Options

    def __init__(self, *_arguments: Any, **_options: Any) -> NoReturn:
        raise MissingFunctionError(
            "ProcessGroupNCCL: NCCL is not in the reference backend. init_process_group('nccl') and new_group give a "
            "group of gloo."
        )


_CPU = torch.device("cpu")


def make_cuda_mean_cpu() -> None:
    """Replace torch's functions that take a device or report on CUDA. For the rest of the process."""
    _answer_for_cuda()
    pretended_random.separate_generators()
    _create_on_cpu()
    _move_to_cpu()
    _load_to_cpu()
    _autocast_on_cpu()
    _communicate_on_cpu()
    _compile_for_cpu()
    _profile_cpu()
    _pin_on_cpu()


def _device_for_number(device: Any) -> Any:
    if is_device_number(device):
        return torch.device("cuda", device)
    return device


def _type_for_cuda(device_type: Any) -> Any:
    if isinstance(device_type, str) and device_type.split(":")[0] == "cuda":
        return "cpu"
    return device_type


def _answer_for_cuda() -> None:
    answers = {name: getattr(cuda_on_cpu, name) for name in cuda_on_cpu.__all__}
    replace(torch.cuda, **answers)
    cuda = torch.cuda
    for module in (cuda.graphs, cuda.memory, cuda.profiler, cuda.random, cuda.streams):
        replace(module, **{name: answer for name, answer in answers.items() if hasattr(module, name)})
    replace(torch.cuda.nccl, version=lambda: NCCL_VERSION)
    replace(torch.version, cuda=cuda_on_cpu.cuda_version)
    replace(torch, Stream=cuda_on_cpu.Stream, Event=cuda_on_cpu.Event)
    # As in a torch without CUDA. A torch with CUDA would query the missing driver, for example in Adam's step.
    compiled: Any = torch._C
    replace(compiled, _accelerator_getAccelerator=lambda: None)
    for element in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"):
        replace(torch.cuda, **{f"{element}Tensor": getattr(torch, f"{element}Tensor")})


def _create_on_cpu() -> None:
    from torch.utils import _device

    # torch's list of the functions that create tensors. It is cached with the original functions, which a default
    # device compares with.
    constructors = _device._device_constructors() | {torch.normal}  # missing in torch's list
    likes = {function for name, function in vars(torch).items() if name.endswith("_like") and callable(function)}
    for namespace in (torch, torch.fft, torch.nested):
        for name, function in list(vars(namespace).items()):
            if callable(function) and not isinstance(function, type) and function in constructors | likes:
                replace(namespace, **{name: _with_device_on_cpu(function)})
    for name in dir(torch.Tensor):
        if name.startswith("new_"):
            replace(torch.Tensor, **{name: _with_device_on_cpu(getattr(torch.Tensor, name))})
    # Tensor subclasses, such as Transformer Engine's, pass their device.
    wrapper = _with_device_on_cpu(torch.Tensor._make_wrapper_subclass)
    replace(torch.Tensor, _make_wrapper_subclass=staticmethod(wrapper))
    pretended_random.remember_default_device()
    replace(torch, Generator=Generator, device=Device)


def _move_to_cpu() -> None:
    """Replace CUDA, and mark tensors as moved to the pretended GPU."""
    tensor = torch.Tensor
    on_cpu = _with_arguments_on_cpu(tensor.to, cpu_for_cuda)

    @functools.wraps(tensor.to)
    def to(*arguments: Any, **options: Any) -> Any:
        moved = on_cpu(*arguments, **options)
        if not torch.compiler.is_dynamo_compiling() and any(map(is_cuda, (*arguments, options.get("device")))):
            pretended_random.mark(moved, on_host=False)
        return moved

    replace(
        tensor,
        to=to,
        type=_type_on_cuda(tensor.type),
        cuda=lambda tensor, device=None, non_blocking=False, **options: tensor.to("cuda", **options),
        record_stream=lambda tensor, stream: None,
        is_cuda=property(cuda_on_cpu.is_on_device),
    )
    modules: Any = torch._C._nn  # parses the arguments of Module.to
    replace(modules, _parse_to=_with_arguments_on_cpu(modules._parse_to, _device_for_number))


def _load_to_cpu() -> None:
    """Make ``torch.load`` load tensors that were saved from, or are requested on, a GPU to the CPU."""
    torch.serialization.register_package(
        0,  # before torch's entry for CUDA
        lambda _storage: None,
        lambda storage, location: storage if location.startswith("cuda") else None,
    )


def _autocast_on_cpu() -> None:
    autocast = torch.amp.autocast_mode.autocast
    original_init: Callable[..., None] = autocast.__init__
    original_is_enabled: Callable[[str], bool] = torch.is_autocast_enabled

    @functools.wraps(original_init)
    def init(self: Any, device_type: str, dtype: Any = None, *arguments: Any, **options: Any) -> None:
        if _type_for_cuda(device_type) != device_type and dtype is None:
            dtype = torch.float16  # the default of CUDA's autocast
        original_init(self, _type_for_cuda(device_type), dtype, *arguments, **options)

    # After a graph break in its block, Dynamo rebuilds autocast and would trace this function, but it skips functions
    # with torch's file name.
    init.__code__ = init.__code__.replace(co_filename=original_init.__code__.co_filename)  # type: ignore[attr-defined]
    replace(autocast, __init__=init)
    replace(
        torch,
        is_autocast_enabled=_constant_to_dynamo(
            lambda device_type="cuda": original_is_enabled(_type_for_cuda(device_type))
        ),
        get_autocast_dtype=_constant_to_dynamo(_with_arguments_on_cpu(torch.get_autocast_dtype, _type_for_cuda)),
        get_autocast_gpu_dtype=functools.partial(torch.get_autocast_dtype, "cpu"),
        set_autocast_enabled=_with_arguments_on_cpu(torch.set_autocast_enabled, _type_for_cuda),
        set_autocast_dtype=_with_arguments_on_cpu(torch.set_autocast_dtype, _type_for_cuda),
    )


def _constant_to_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark ``function`` so that Dynamo calls it while tracing, like torch's queries of the autocast state, which have
    guards.

    ``torch.compiler.assume_constant_result`` does the same, but imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _communicate_on_cpu() -> None:
    """Use gloo instead of NCCL, and make distributed wrappers ignore GPUs."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import device_mesh, distributed_c10d, fsdp

    make_gloo_stand_for_nccl()
    compiled: Any = torch._C
    for module in (distributed_c10d, torch.distributed, compiled._distributed_c10d):
        replace(module, ProcessGroupNCCL=ProcessGroupNCCL)
    for name in ("init_process_group", "new_group"):
        function = _with_arguments_on_cpu(_without_devices(getattr(distributed_c10d, name)), _gloo_for_nccl)
        replace(distributed_c10d, torch.distributed, device_mesh, **{name: function})
    _save_before_training_goes_on()
    for name in ("barrier", "monitored_barrier"):
        function = _without_devices(getattr(distributed_c10d, name))
        replace(distributed_c10d, torch.distributed, **{name: function})
    replace(distributed_c10d, torch.distributed, is_nccl_available=lambda: True)
    mesh = device_mesh.DeviceMesh
    replace(mesh, __init__=_with_arguments_on_cpu(mesh.__init__, _type_for_cuda))
    data_parallel = torch.nn.parallel.DistributedDataParallel
    replace(data_parallel, __init__=_without_devices(data_parallel.__init__))
    original_init: Callable[..., None] = fsdp.FullyShardedDataParallel.__init__

    @functools.wraps(original_init)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        original_init(self, *arguments, **options | {"device_id": _CPU})  # without device_id a CPU is rejected

    replace(fsdp.FullyShardedDataParallel, __init__=init)


def _save_before_training_goes_on() -> None:
    """Make torch's asynchronous checkpoints wait: their thread would use the same gloo as the training at once.

    They stage with blocking copies, since other copies need streams of an accelerator. Read from torch 2.13.
    """
    from torch.distributed.checkpoint import _async_thread_executor, staging

    executor = _async_thread_executor._ThreadBasedAsyncCheckpointExecutor
    original_init: Callable[..., None] = staging.DefaultStager.__init__
    original_save: Callable[..., Future[Any]] = executor.execute_save

    @functools.wraps(original_init)
    def init(self: Any, config: Any = staging.StagingOptions()) -> None:  # noqa: B008  # as in torch
        original_init(self, dataclasses.replace(config, use_non_blocking_copy=False))

    @functools.wraps(original_save)
    def save(self: Any, *arguments: Any, **options: Any) -> Future[Any]:
        future = original_save(self, *arguments, **options)
        wait([future])
        return future

    replace(staging.DefaultStager, __init__=init)
    replace(executor, execute_save=save)


def _compile_for_cpu() -> None:
    """Make ``torch.compile`` treat the CPU as without CUDA. Read from torch 2.13.

    Otherwise Inductor makes Triton's driver load libcuda, even for CPU kernels (torch/utils/_triton.py), and requests
    CUDA's allocator before it excludes a CPU graph from CUDA graphs (torch/_inductor/cudagraph_utils.py).
    """
    from torch.utils import _triton

    has_triton = _triton.has_triton
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and vars(module).get("has_triton") is has_triton:
            replace(module, has_triton=lambda **_: False)
    replace(torch._C, _cuda_cudaCachingAllocator_is_enabled=lambda: True)


def _profile_cpu() -> None:
    """Make the profilers record only the CPU: requesting CUDA from a torch without CUDA ends the process."""
    profile = torch.autograd.profiler.profile  # the other profilers use it
    original_init: Callable[..., None] = profile.__init__

    @functools.wraps(original_init)
    def init(self: Any, *arguments: Any, use_cuda: bool = False, **options: Any) -> None:
        if options.get("use_device") == "cuda":
            options |= {"use_device": None, "use_cpu": True}
        original_init(self, *arguments, **options)

    replace(profile, __init__=init)
    emit_nvtx = torch.autograd.profiler.emit_nvtx
    replace(emit_nvtx, __enter__=lambda self: self, __exit__=lambda self, *error: None)


def _pin_on_cpu() -> None:
    """Replace pinned memory by ordinary memory: ``pin_memory`` copies, and a ``DataLoader`` does not warn."""
    replace(torch.Tensor, pin_memory=lambda tensor, device=None: tensor.clone())
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")


def _with_device_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    draws = function.__name__ in pretended_random.DRAWING_CONSTRUCTORS

    @functools.wraps(function)
    def on_cpu(*arguments: Any, **options: Any) -> Any:
        on_host = pretended_random.creates_on_host(arguments, options)
        if "device" in options:
            options["device"] = cpu_for_cuda(options["device"])
        options.pop("pin_memory", None)  # pinning needs a GPU
        if on_host and draws:
            options |= pretended_random.generator_for(arguments, options)
        created = function(*arguments, **options)
        if on_host:
            pretended_random.mark(created, on_host=True)
        return created

    return pretended_random.for_torchscript(on_cpu, function)


def _with_arguments_on_cpu(function: Callable[..., Any], replace: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_cpu(*arguments: Any, **options: Any) -> Any:
        return function(*map(replace, arguments), **{name: replace(value) for name, value in options.items()})

    return on_cpu


def _without_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` to drop keywords that name GPUs, and NCCL's options, which gloo does not accept."""

    @functools.wraps(function)
    def on_cpu(*arguments: Any, **options: Any) -> Any:
        for name in ("device_id", "device_ids", "output_device"):
            options.pop(name, None)
        if isinstance(options.get("pg_options"), Options):
            del options["pg_options"]
        return function(*arguments, **options)

    return on_cpu


def _type_on_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.Tensor.type`` to return and accept the names of GPU tensor types."""

    @functools.wraps(type_of)
    def type_on_cuda(tensor: torch.Tensor, dtype: Any = None, *arguments: Any, **options: Any) -> Any:
        if dtype is None:
            name: str = type_of(tensor)
            if tensor.is_cuda:
                return name.replace("torch.", "torch.cuda.", 1)
            return name
        cpu_type = dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype
        return type_of(tensor, cpu_type, *arguments, **options)

    return type_on_cuda


def _gloo_for_nccl(backend: Any) -> Any:
    """Return gloo for ``nccl`` and ``cpu:gloo,cuda:nccl``; other values, such as paths, are unchanged."""
    names = [part.rpartition(":")[2].lower() for part in backend.split(",")] if isinstance(backend, str) else []
    if "nccl" in names:
        return "gloo"
    return backend
