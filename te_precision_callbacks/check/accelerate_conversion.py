"""Converts a model as Accelerate does for FP8, without an Accelerator, to plan it."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.layers.folding import fold_names

if TYPE_CHECKING:
    import torch

_AUTO = "auto"
_DELAYED = "fp8_delayed_scaling"
_RECIPES = (_DELAYED, "mxfp8", "none")


class ConversionError(PrecisionDebugError, RuntimeError):
    """A trainer's conversion of a model to Transformer Engine failed."""


class Conversion(str, enum.Enum):
    ACCELERATE = "accelerate"


@dataclass(frozen=True)
class ConversionResult:
    """The result of a conversion: skipped layer -> the reason; and warnings."""

    left_out: Mapping[str, str]
    notes: tuple[str, ...]


def recipe_of_accelerate(name: str) -> tuple[str, tuple[str, ...]]:
    """Return Accelerate's recipe for a value of ``--recipe``, and a note if Accelerate does not support it."""
    if name in (_AUTO, *_RECIPES):
        return (_DELAYED if name == _AUTO else name), ()
    return name, (
        f"--recipe {name}: Accelerate sets up only fp8_delayed_scaling, or mxfp8 with use_mxfp8_block_scaling: true."
        " For another recipe, enter te.autocast inside the model's forward.",
    )


_MOST_NAMES = 8

_FREEZE_AGAIN = (
    "Call accelerate.utils.convert_model(model) before creating the optimizer, then freeze or tie the parameters"
    " again: see docs/accelerate.md."
)


def _describe_lost_effects(
    model: torch.nn.Module,
    frozen: Mapping[str, Callable[[], torch.nn.Parameter | None]],
    names_of_parameters: Iterable[list[str]],
) -> Iterator[str]:
    """Describe freezing and tying that a conversion has undone.

    Args:
        frozen: name -> a weak reference to the parameter that was frozen before the conversion.
        names_of_parameters: the names of each tied parameter before the conversion.
    """
    now = dict(model.named_parameters(remove_duplicate=False))
    thawed = [
        name for name, before in frozen.items() if name in now and now[name].requires_grad and now[name] is not before()
    ]
    untied = []
    for names in names_of_parameters:
        parameters = {id(now[name]) for name in names if name in now}
        if len(parameters) > 1:
            untied.append(" and ".join(names))
    if thawed:
        yield (
            f"Accelerate's conversion unfroze these parameters: {', '.join(fold_names(thawed, most=_MOST_NAMES))}. They"
            f" are now trained. {_FREEZE_AGAIN}"
        )
    if untied:
        pairs = "; ".join(fold_names(untied, most=_MOST_NAMES))
        yield f"Accelerate's conversion untied {pairs}: each has its own copy of the weights. {_FREEZE_AGAIN}"


def convert_by_accelerate(model: torch.nn.Module) -> ConversionResult:
    """Convert a model in place.

    Raises:
        MissingExtraError: Accelerate is not installed.
        ConversionError: Accelerate cannot convert the model, possibly because it is on the meta device.
    """
    from te_precision_callbacks.accelerate.unconverted import convert_to_te, describe_unconverted
    from te_precision_callbacks.check.factory import format_failure, meta_device
    from te_precision_callbacks.layers.naming import named_operations, named_te_modules

    notes = []
    if named_te_modules(model) or named_operations(model):
        notes.append(
            "The model already has Transformer Engine layers: Accelerate keeps them and converts only torch's Linear"
            " and LayerNorm layers."
        )
    frozen: dict[str, Callable[[], torch.nn.Parameter | None]] = {}
    names: dict[int, list[str]] = {}
    context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        if not parameter.requires_grad:
            frozen[name] = weakref.ref(parameter)
        if parameter.is_meta:
            context = meta_device()
    try:
        with context:
            convert_to_te(model)
    except Exception as error:
        raise ConversionError(
            format_failure("Accelerate's conversion of the model failed", error)
            + " accelerator.prepare() fails in the same way: change the layer, or train without Accelerate's FP8."
        ) from error
    left_out, text = describe_unconverted(model)
    notes += filter(None, [text])
    notes += _describe_lost_effects(model, frozen, names.values())
    return ConversionResult(left_out, tuple(notes))
