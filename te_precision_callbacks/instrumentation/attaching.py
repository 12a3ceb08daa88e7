"""Messages logged when a model is attached, and before that by ``te-precision check``."""

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


def without_layers(goes_on: str, front_door: str = "") -> str:
    """Return the warning that a model has no Transformer Engine layer, with a remedy for the integration."""
    return (
        "The model has no Transformer Engine layer with GEMMs (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear),"
        f" so there are no statistics. Training goes on {goes_on}.{_BY_ACCELERATE.get(front_door, '')}"
    )


def alike_in_words(layers: Sequence[Layer]) -> str:
    """Return the warning that the script gave several layers one name; empty if it did not."""
    alike = {given: names for given, names in by_given_name(layers).items() if len(names) > 1}
    if not alike:
        return ""
    given, names = next(iter(alike.items()))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (
        f"{'One name is' if len(alike) == 1 else f'Each of {len(alike)} names is'} the name of several layers, such as"
        f" {given!r} of {', '.join(names[:_MOST_NAMES])}{more}. Records and logs distinguish these layers; a selector"
        " with such a name selects all of them."
    )
