"""What Accelerate did not convert to Transformer Engine, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from te_precision_callbacks.errors import OptionError
from te_precision_callbacks.naming import is_wrapper_part, named_roots

logger = logging.getLogger(__name__)

_CONVERTED_MULTIPLE = 16
_LAYERS_IN_WARNING = 5


def warn_of_unconverted(accelerator: Accelerator, model: torch.nn.Module | Sequence[torch.nn.Module]) -> dict[str, str]:
    """Say on the main process which Linear layers ``accelerator.prepare`` left without Transformer Engine, and why.

    Returns:
        What :func:`unconverted_layers` says; nothing where the accelerator does not convert layers.
    """
    if accelerator.fp8_backend != "TE" or accelerator.distributed_type == DistributedType.MEGATRON_LM:
        return {}
    unconverted = unconverted_layers(model)
    if unconverted and accelerator.is_main_process:
        named = [f"{layer}: {why}" for layer, why in unconverted.items()]
        more = len(named) - _LAYERS_IN_WARNING
        logger.warning(
            "Accelerate left %d Linear layer%s unconverted, which run%s without FP8. %s%s.",
            len(named),
            "s"[: len(named) > 1],
            "s"[: len(named) == 1],
            "; ".join(named[:_LAYERS_IN_WARNING]),
            f"; and {more} more: te_precision_callbacks.accelerate.unconverted_layers(model) has all"
            if more > 0
            else "",
        )
    return unconverted


def unconverted_layers(model: torch.nn.Module | Sequence[torch.nn.Module]) -> dict[str, str]:
    """The Linear layers that ``accelerator.prepare`` with Transformer Engine's FP8 left as they were: name -> why.

    Accelerate's ``convert_model`` stops in a container at the first ``torch.nn.Linear`` whose weight has a dimension
    that is no multiple of 16, and skips all that comes after it there. Read from Accelerate 1.10 to 1.15,
    ``utils/transformer_engine.py``. What it did is read off the model, which holds the rest of the story.

    Args:
        model: the prepared model, or a list of them.
    """
    found: dict[str, str] = {}

    def visit(module: torch.nn.Module, path: str, why: str | None) -> str | None:
        """Visit what is below; gives why what follows in the same container was skipped."""
        if isinstance(module, torch.nn.Linear):
            indivisible = [size for size in (module.in_features, module.out_features) if size % _CONVERTED_MULTIPLE]
            if why is None and not path:
                found[type(module).__name__] = "Accelerate converts the layers inside of a model, not the model itself"
            elif why is not None or not indivisible:
                found[path] = why or "it was added later, or stands under another name too, where it was converted"
            else:
                numbers = " and ".join(map(str, indivisible))
                are = "is no multiple" if len(indivisible) == 1 else "are no multiples"
                found[path] = f"{module.in_features} x {module.out_features}: {numbers} {are} of {_CONVERTED_MULTIPLE}"
                return f"skipped, because {path} before it stopped the conversion"
            return why
        of_children = why
        for name, child in module.named_children():
            if is_wrapper_part(module, name):
                return visit(child, path, why)
            of_children = visit(child, f"{path}.{name}" if path else name, of_children)
        return why

    for prefix, root in roots_of(model):
        visit(root, prefix, None)
    return found


def roots_of(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """A model, or several, each with what the names in it begin with.

    Raises:
        OptionError: something else.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    if isinstance(chunks, (list, tuple)) and chunks and all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        return named_roots(model)
    raise OptionError(
        f"model= is the torch.nn.Module that accelerator.prepare() gave back, or a list of them, not a"
        f" {type(model).__name__}."
    )
