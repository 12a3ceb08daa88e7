"""What there is to say of a model when it is attached, in words: ``te-precision check`` says it beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from te_precision_callbacks.layers.naming import Layer, by_given_name

_MOST_NAMES = 5

_BY_ACCELERATE = {
    "accelerate": " To have its Linear layers made into Transformer Engine's, prepare the model with"
    " Accelerator(mixed_precision='fp8', kwargs_handlers=[TERecipeKwargs()]).",
    "transformers": " Accelerate makes Linear layers into Transformer Engine's: with mixed_precision: fp8 and"
    " fp8_config: {backend: TE} in the file of accelerate launch --config_file, or with ACCELERATE_MIXED_PRECISION=fp8"
    " and ACCELERATE_FP8_BACKEND=TE in the environment of a script that is started without it.",
}
"""Front door -> how Accelerate converts a model."""


def without_layers(goes_on: str, front_door: str = "") -> str:
    """That the model has no layer of Transformer Engine, and how to get some.

    Args:
        goes_on: what training goes on with.
        front_door: what has started the session.
    """
    return (
        "The model has no Transformer Engine layer with GEMMs (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear),"
        f" so there are no statistics. Training goes on {goes_on}.{_BY_ACCELERATE.get(front_door, '')}"
    )


def alike_in_words(layers: Sequence[Layer]) -> str:
    """That several layers have got one name from the script; empty if none have."""
    alike = {given: those for given, those in by_given_name(layers).items() if len(those) > 1}
    if not alike:
        return ""
    given, those = next(iter(alike.items()))
    more = f" and {len(those) - _MOST_NAMES} more" if len(those) > _MOST_NAMES else ""
    return (
        f"{'One name is' if len(alike) == 1 else f'Each of {len(alike)} names is'} the name of several layers, such as"
        f" {given!r} of {', '.join(those[:_MOST_NAMES])}{more}. Records and logs distinguish these layers; a selector"
        " with such a name selects all of them."
    )
