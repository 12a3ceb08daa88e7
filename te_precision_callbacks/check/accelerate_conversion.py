"""Converts a model as Accelerate does for FP8, without an Accelerator, so that what it will train in can be planned.

converted = convert_by_accelerate(model)     # in place; a model on the meta device stays there
converted.left_out                           # layer -> why Accelerate left it out
converted.notes                              # what Accelerate warns of, and what may not be meant
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_precision_callbacks.base.errors import PrecisionDebugError

if TYPE_CHECKING:
    import torch

_AUTO, _DELAYED = "auto", "fp8_delayed_scaling"
_RECIPES = (_DELAYED, "mxfp8", "none")
"""What Accelerate sets up, or leaves out."""


class ConversionError(PrecisionDebugError, RuntimeError):
    """A trainer's conversion of a model to Transformer Engine fails."""


class Conversion(str, enum.Enum):
    """Who converts a model before it is planned."""

    ACCELERATE = "accelerate"
    """Accelerate, with ``mixed_precision: fp8`` and Transformer Engine as its backend."""


@dataclass(frozen=True)
class Converted:
    """What a conversion has done.

    Attributes:
        by: whose conversion.
        left_out: layer -> why it was left out.
        notes: what there is to say of it.
    """

    by: Conversion
    left_out: Mapping[str, str]
    notes: tuple[str, ...]


def recipe_of_accelerate(name: str) -> tuple[str, tuple[str, ...]]:
    """The recipe that Accelerate takes for a name of ``--recipe``, and a note if Accelerate has none such."""
    if name in (_AUTO, *_RECIPES):
        return (_DELAYED if name == _AUTO else name), ()
    return name, (
        f"--recipe {name}: Accelerate itself sets up fp8_delayed_scaling, or mxfp8 with use_mxfp8_block_scaling: true."
        " Another recipe needs a te.autocast of your own inside of the model's forward.",
    )


_FREEZE_AGAIN = (
    "Call accelerate.utils.convert_model(model) yourself before you make the optimizer, and freeze or tie them again"
    " after it, as docs/accelerate.md shows."
)


def convert_by_accelerate(model: torch.nn.Module) -> Converted:
    """Convert a model in place, where it is.

    Raises:
        MissingExtraError: Accelerate is not installed.
        ConversionError: Accelerate cannot convert the model; on the meta device that may be the device's fault.
    """
    from te_precision_callbacks.accelerate.conversion import convert_to_te
    from te_precision_callbacks.accelerate.unconverted import unconverted_in_words
    from te_precision_callbacks.check.factory import failed, meta_device
    from te_precision_callbacks.layers.replaced import BeforeConversion

    notes = []
    if _has_transformer_engine(model):
        notes.append(
            "The model has layers of Transformer Engine before Accelerate converts it: they stay as they are, and"
            " Accelerate converts the Linear and LayerNorm layers of torch beside them."
        )
    before = BeforeConversion(model)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    try:
        with meta_device() if on_meta else contextlib.nullcontext():
            convert_to_te(model)
    except Exception as error:
        raise ConversionError(
            failed("Accelerate's conversion of the model failed", error)
            + " accelerator.prepare() fails in the same way: change the layer, or train without Accelerate's FP8."
        ) from error
    left_out, text = unconverted_in_words(model)
    notes += [text] if text else []
    notes += before.lost_in(model, by="Accelerate's conversion", remedy=_FREEZE_AGAIN)
    return Converted(Conversion.ACCELERATE, left_out, tuple(notes))


def _has_transformer_engine(model: torch.nn.Module) -> bool:
    from te_precision_callbacks.layers.naming import named_operations, named_te_modules

    return bool(named_te_modules(model) or named_operations(model))
