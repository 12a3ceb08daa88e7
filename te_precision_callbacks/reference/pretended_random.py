"""Two random generators if "cuda" means the CPU: the pretended GPU's, and the CPU's.

``torch.manual_seed`` seeds both, ``torch.cuda.manual_seed`` the GPU's. All tensors are on the CPU, so draws without a
device use the GPU's generator (dropout, in-place draws on results of operations), as in a script that runs on the GPU.
The CPU's generator is used by functions that create tensors without "cuda", and for in-place draws on such tensors
until they are moved to "cuda": weights of a module that is built on the CPU, samplers of a DataLoader.

The default generator of torch's C++ is the GPU's; ``torch.default_generator`` is the CPU's. Compiled functions always
use the GPU's. Read from torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
import torch.utils.data
from torch.utils._device import DeviceContext

from te_precision_callbacks.reference import cuda_on_cpu
from te_precision_callbacks.reference.pretended_types import cpu_for_cuda, is_cuda

DRAWING_CONSTRUCTORS = ("rand", "randn", "randint", "randperm", "normal")
DRAWING_FROM_TENSORS = ("bernoulli", "multinomial", "poisson", "rand_like", "randn_like", "randint_like")
DRAWING_METHODS = (
    *("bernoulli", "multinomial", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_"),
)

_MARK = "_te_precision_on_host"
_host_generator = torch.Generator()


def separate_generators() -> None:
    """Give the CPU a separate generator, with the state of the common one, for the rest of the process."""
    _host_generator.set_state(torch._C.default_generator.get_state())
    for module in (torch, torch.random):
        module.default_generator = _host_generator  # type: ignore[attr-defined]
    torch.utils.data.random_split.__defaults__ = (_host_generator,)
    for name in DRAWING_FROM_TENSORS:
        setattr(torch, name, _drawing(getattr(torch, name)))
    for name in DRAWING_METHODS:
        setattr(torch.Tensor, name, _drawing(getattr(torch.Tensor, name)))
    # Activation checkpoints save the random state of their tensors' device, which would be the CPU.
    torch.utils.checkpoint.DefaultDeviceType.set_device_type("cuda")
    torch.utils.checkpoint.get_device_states = lambda *_: (
        [cuda_on_cpu.current_device()],
        [cuda_on_cpu.get_rng_state()],
    )


def is_on_host(tensor: Any) -> bool:
    """Return whether ``tensor`` was created explicitly on the CPU and never moved to the pretended GPU."""
    if not isinstance(tensor, torch.Tensor) or torch.compiler.is_dynamo_compiling():
        return False
    try:
        return getattr(tensor.untyped_storage(), _MARK, False)
    except (NotImplementedError, RuntimeError):  # a subclass, or a tensor of functorch, without a storage
        return False


def mark(tensor: Any, *, on_host: bool) -> None:
    if on_host and type(tensor) is not torch.Tensor:
        return
    if on_host or is_on_host(tensor):
        try:
            setattr(tensor.untyped_storage(), _MARK, on_host)
        except (NotImplementedError, RuntimeError):
            return


def creates_on_host(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    if torch.compiler.is_dynamo_compiling():
        return False
    device = options.get("device")
    if device is not None:
        return not is_cuda(device) and torch.device(device).type == "cpu"
    for argument in arguments[:2]:
        if isinstance(argument, torch.Tensor):
            return is_on_host(argument)
    return not _default_is_cuda()


def generator_for(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the option ``generator`` for a call that draws on the CPU without naming a generator."""
    named = any(isinstance(argument, torch.Generator) for argument in (*arguments, options.get("generator")))
    if named or torch._C._len_torch_dispatch_stack():
        return {}
    return {"generator": _host_generator}


def remember_default_device() -> None:
    """Make ``torch.device("cuda")``, as a context and as the default device, remember that it was not the CPU."""
    original_init: Callable[..., None] = DeviceContext.__init__

    @functools.wraps(original_init)
    def init(self: Any, device: Any) -> None:
        original_init(self, cpu_for_cuda(device))
        self.was_cuda = is_cuda(device)

    DeviceContext.__init__ = init  # type: ignore[method-assign]


def _default_is_cuda() -> bool:
    if not torch._C._len_torch_function_stack():
        return False
    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [mode for mode in stack if isinstance(mode, DeviceContext)]
    return bool(modes) and getattr(modes[-1], "was_cuda", False)


def _drawing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that draws into a tensor, or with its values, to use the CPU's generator for a CPU tensor."""

    @functools.wraps(function)
    def drawing(*arguments: Any, **options: Any) -> Any:
        on_host = creates_on_host(arguments, options)
        if "device" in options:
            options["device"] = cpu_for_cuda(options["device"])
        if on_host:
            options |= generator_for(arguments, options)
        return function(*arguments, **options)

    return for_torchscript(drawing, function)


def for_torchscript(wrapper: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Let TorchScript, which identifies functions by their id, use a wrapper as the function."""
    builtins: Any = torch.jit._builtins
    if (operator := builtins._find_builtin(function)) is not None:
        builtins._register_builtin(wrapper, operator)
    return wrapper
