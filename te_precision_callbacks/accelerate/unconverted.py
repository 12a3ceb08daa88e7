"""Accelerate's conversion of a model to layers of Transformer Engine, the skipped layers, and its low precision."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType, transformer_engine
from torch.nn.modules.conv import _ConvNd

from te_precision_callbacks.base.counts import first_of
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.layers.naming import (
    Model,
    NamedTorchModule,
    is_adapted,
    is_wrapper_part,
    modules_of,
    named_roots,
)
from te_precision_callbacks.te.modules import te_classes

logger = logging.getLogger(__name__)


ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def convert_to_te(model: ModuleT) -> ModuleT:
    """Convert a model in place, as ``accelerator.prepare`` does with FP8, and return it.

    A run in BF16 then has the same layers as a run in FP8, so ``te-precision compare`` can compare their statistics.
    Call this before ``accelerator.prepare`` or ``transformers.Trainer``, and before creating the optimizer: the
    parameters of converted layers are new, require gradients, and are no longer tied.

    Raises:
        OptionError: ``model`` is not a ``torch.nn.Module``.
    """
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"convert_to_te(model): the model must be a torch.nn.Module, not a {type(model).__name__}.")
    devices = {parameter.device for parameter in model.parameters()}
    gathered = transformer_engine.GatheredParameters
    # It queries an Accelerator's state for DeepSpeed's sharding of weights, and creating that state would initialize
    # torch.distributed. Read from Accelerate 1.10 to 1.15, utils/transformer_engine.py.
    if not is_initialized():
        transformer_engine.GatheredParameters = lambda *_, **__: contextlib.nullcontext()
    try:
        with torch.no_grad():
            transformer_engine.convert_model(model)
            if len(devices) == 1:
                model.to(next(iter(devices)))  # Transformer Engine creates layers on the GPU
    finally:
        transformer_engine.GatheredParameters = gathered
    return model


_CONVERTED_MULTIPLE = 16
_LAYERS_IN_WARNING = 5


def warn_of_unconverted(accelerator: Accelerator, model: Model) -> dict[str, str]:
    """Warn on the main process of layers that ``accelerator.prepare`` did not convert, with reasons.

    Returns:
        The result of :func:`unconverted_layers`; empty if the accelerator does not convert layers.
    """
    if accelerator.fp8_backend != "TE" or accelerator.distributed_type == DistributedType.MEGATRON_LM:
        return {}
    layers = _find(model)
    if layers and accelerator.is_main_process:
        more = "and {} more: te_precision_callbacks.accelerate.unconverted_layers(model) has all"
        logger.warning(
            "Accelerate left %d %s without FP8: %s.",
            len(layers),
            "layer unconverted, which runs" if len(layers) == 1 else "layers unconverted, which run",
            "; ".join(first_of([f"{layer}: {why}" for layer, why in layers.items()], _LAYERS_IN_WARNING, more)),
        )
    return layers


def unconverted_layers(model: Model) -> dict[str, str]:
    """List the layers of a prepared model, or of a list of them, that Accelerate did not convert: name -> reason.

    These are ``torch.nn.Linear``, and other classes with a weight that multiplies the input: ``Conv1D`` of
    transformers' GPT-2, routers and experts of its MoE models, ``torch.nn.MultiheadAttention``. A weight counts if it
    has two dimensions and "weight" in its name, or three dimensions, one of them for the experts, in a module that is
    not an embedding, convolution or norm. The name is the module's path, or the path of a parameter that is not called
    ``weight``.

    In a container, Accelerate's ``convert_model`` stops at the first ``torch.nn.Linear`` with a dimension that is not a
    multiple of 16, and skips the modules after it. Read from Accelerate 1.10 to 1.15, ``utils/transformer_engine.py``.
    In a run without FP8, the reason is always the missing ``mixed_precision='fp8'``.
    """
    precision = AcceleratorState().mixed_precision if is_initialized() else "fp8"
    converts_with = f"Accelerate converts layers with mixed_precision='fp8', not {precision!r}"
    without_fp8 = "" if precision == "fp8" else converts_with
    return {layer: without_fp8 or why for layer, why in _find(model).items()}


def _find(model: Model) -> dict[str, str]:
    layers: dict[str, str] = {}
    if any(te_classes(type(module)) for module in modules_of(model)):
        other = "it was added later, or was converted under another name"
    else:
        other = "no layer of this model is converted; pass the model that accelerator.prepare() with FP8 returned"

    def visit(module: torch.nn.Module, path: str, why: str | None) -> str | None:
        """Visit a module and its children; returns the reason if Accelerate skips the rest of the container."""
        if isinstance(module, torch.nn.Linear):
            indivisible = [size for size in (module.in_features, module.out_features) if size % _CONVERTED_MULTIPLE]
            if why is None and not path:
                layers[type(module).__name__] = "Accelerate converts the layers inside a model, not the model itself"
            elif why is not None or not indivisible:
                layers[path] = why or other
            else:
                numbers = " and ".join(map(str, indivisible))
                are = "is not a multiple" if len(indivisible) == 1 else "are not multiples"
                size = f"{module.in_features} x {module.out_features}"
                layers[path] = f"{size}: {numbers} {are} of {_CONVERTED_MULTIPLE}"
                return f"skipped, because the conversion stopped at {path}"
            return why
        for name, shape in _multiplied_parameters(module):
            size = " x ".join(map(str, shape[-2:]))
            what = type(module).__name__ if len(shape) == 2 else f"{type(module).__name__}, {shape[0]} experts"
            child_name = "" if name == "weight" else name
            label = ".".join(filter(None, (path, child_name))) or type(module).__name__
            layers[label] = f"{size} of {what}: Accelerate converts only Linear"
        children_reason = why
        for name, child in module.named_children():
            if is_wrapper_part(module, name):
                return visit(child, path, why)
            below = path
            if not is_adapted(module, name):
                below = f"{path}.{name}" if path else name
            children_reason = visit(child, below, children_reason)
        return why

    for prefix, root in roots_of(model):
        visit(root, prefix, None)
    return layers


def _multiplied_parameters(module: torch.nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return name and shape of the module's own parameters that multiply its input, if it is not a Linear."""
    if te_classes(type(module)) or isinstance(module, _ConvNd):
        return
    if any("Embedding" in base.__name__ or "Norm" in base.__name__ for base in type(module).__mro__):
        return
    for name, parameter in module.named_parameters(recurse=False):
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # DeepSpeed keeps a shard in each process
        matrix = parameter.is_floating_point() and "bias" not in name and min(shape, default=0) > 1
        if matrix and (len(shape) == 3 or (len(shape) == 2 and "weight" in name)):
            yield name, shape


def expects_low_precision(accelerator: Accelerator) -> str:
    """Return the setting that enables low precision in an accelerator; empty without one."""
    if accelerator.mixed_precision == "fp8":
        return "Accelerate's mixed_precision is 'fp8'"
    names = [name for name in os.environ if name.startswith("ACCELERATE_FP8_")]
    if names:
        return f"the environment has {min(names)} (mixed_precision is {accelerator.mixed_precision!r})"
    return ""


def scales_loss(accelerator: Accelerator) -> bool:
    """Return whether DeepSpeed or Megatron-LM scales the loss for float16: an inf in a gradient then lowers the scale,
    and is not an error. torch's GradScaler is detected when it scales.
    """
    is_of_other_engine = accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
    return is_of_other_engine and accelerator.mixed_precision == "fp16"


def roots_of(model: Any) -> list[NamedTorchModule]:
    """Return each model, with the prefix of its names, from a model, a list or a mapping.

    Raises:
        OptionError: ``model`` is none of these.
    """
    if roots := named_roots(model):
        return roots
    raise OptionError(
        f"model= must be the torch.nn.Module that accelerator.prepare() returned, or a list or mapping of them, not a"
        f" {type(model).__name__}."
    )
