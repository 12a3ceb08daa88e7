"""Takes the fingerprint of modules of Transformer Engine.

    before = with_layers(facts, modules, overrides)      # before the first forward: as it was restored
    now = with_recipes(before, modules, trained_in_fp8)  # after a forward, which decides about the recipe

Read from Transformer Engine 2.20.2: ``pytorch/module/base.py`` (``fp8_meta``; a restored recipe is replaced, and a new
state made or an old one adapted, in the first forward), ``pytorch/quantization.py`` (recipe states),
``common/recipe`` (recipes).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from te_precision_callbacks.base.numerics.layouts import PER_TENSOR, gemm_operand, is_quantized, scaling_mode, stored
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.layers.fp8_state import delayed_state, is_in_checkpoints
from te_precision_callbacks.layers.naming import NamedModule
from te_precision_callbacks.runs.fingerprints.fingerprint import (
    HIGH_PRECISION,
    Fingerprint,
    LayerFingerprint,
    Recipe,
    ScalingState,
    TensorDigest,
    Value,
    Weights,
)

_PIECE = 1 << 24
"""The bytes of a tensor that are hashed at once."""

QUANTIZED = frozenset({"QuantizedTensorStorage", "GroupedTensorStorage"})


def with_layers(
    facts: Fingerprint, modules: Iterable[NamedModule], overrides: Mapping[str, tuple[str, ...]]
) -> Fingerprint:
    """A fingerprint with the states and weights of modules, without recipes.

    Args:
        facts: the facts about the run.
        modules: the modules of this rank.
        overrides: layer -> the features that can change its precision.
    """
    layers: list[LayerFingerprint] = []
    for named in modules:
        of_layers = len(named.layers)
        forward, backward = (_states(named.module, key, of_layers) for key in ("scaling_fwd", "scaling_bwd"))
        unsaved = not is_in_checkpoints(named.module)
        for number, layer in enumerate(named.layers):
            layers.append(
                LayerFingerprint(
                    scope=layer.scope,
                    name=layer.name,
                    recipe=None,
                    kept_format="",
                    weights=_weights(named.module, number),
                    forward=forward[number],
                    backward=backward[number],
                    overrides=overrides.get(layer.name, ()),
                    unsaved=unsaved and forward[number] is not None,
                )
            )
    return dataclasses.replace(facts, layers=tuple(layers))


def with_recipes(
    fingerprint: Fingerprint, modules: Iterable[NamedModule], trained_in_fp8: Callable[[str], bool | None]
) -> Fingerprint:
    """A fingerprint with the recipes that its layers have now.

    Args:
        fingerprint: with the layers.
        modules: the modules of this rank.
        trained_in_fp8: whether a layer trained in FP8 in its last step; None if that is unknown. (The last forward of
            a module, which its state tells of, may have been an evaluation in another precision.)
    """
    module_of = {layer.name: named.module for named in modules for layer in named.layers}
    recipes: list[Recipe] = []
    layers = []
    for layer in fingerprint.layers:
        meta = vars(module_of[layer.name])["fp8_meta"] if layer.name in module_of else {}
        recipe = meta.get("recipe")
        found: Recipe | None = None
        if trained_in_fp8(layer.name) is False:
            found, recipe = Recipe(HIGH_PRECISION, {}), None
        elif recipe is not None:
            found = recipe_fingerprint(recipe)
        number = None
        if found is not None:
            if found not in recipes:
                recipes.append(found)
            number = recipes.index(found)
        layers.append(dataclasses.replace(layer, recipe=number, kept_format=_kept_format(meta, recipe)))
    return dataclasses.replace(fingerprint, recipes=tuple(recipes), layers=tuple(layers))


def recipe_fingerprint(recipe: Any) -> Recipe:
    """A recipe of Transformer Engine, or a user's own, in plain values.

    Fields are those of the dataclass, and public attributes of the class and the object that are no methods, such as
    ``fp8_quant_fwd_inp``.
    """
    names = {entry.name for entry in dataclasses.fields(recipe)} if dataclasses.is_dataclass(recipe) else set()
    names |= vars(recipe).keys()
    names |= {name for base in type(recipe).__mro__ for name, value in vars(base).items() if _is_plain(value)}
    public = sorted(name for name in names if not name.startswith("_"))
    return Recipe(type(recipe).__name__, dict(_flat((name, getattr(recipe, name)) for name in public)))


def _is_plain(value: Any) -> bool:
    return not callable(value) and not hasattr(value, "__get__")


def _flat(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Value]]:
    for name, value in values:
        if isinstance(value, enum.Enum):
            yield name, value.name
        elif value is None or isinstance(value, (bool, int, float, str)):
            yield name, value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inside = ((f"{name}.{entry.name}", getattr(value, entry.name)) for entry in dataclasses.fields(value))
            yield from _flat(inside)
        else:  # a function of the user's; its repr has an address
            yield name, f"{type(value).__name__} {getattr(value, '__qualname__', '')}".rstrip()


def _kept_format(meta: Mapping[str, Any], recipe: Any) -> str:
    """The format of the recipe that the state was made for, if the recipe in force has another one."""
    made_for = getattr(delayed_state(meta, "scaling_fwd"), "recipe", None)
    formats = [getattr(getattr(each, "fp8_format", None), "name", "") for each in (made_for, recipe)]
    return formats[0] if all(formats) and formats[0] != formats[1] else ""


def _states(module: torch.nn.Module, direction: str, layers: int) -> list[ScalingState | None]:
    """The state of each layer of a module: its quantizers follow one another, layer by layer."""
    state = delayed_state(vars(module).get("fp8_meta"), direction)
    if state is None:
        return [None] * layers
    scale, history = state.scale.detach().cpu(), state.amax_history.detach().cpu()
    width = len(scale) // layers
    parts = [slice(number * width, (number + 1) * width) for number in range(layers)]
    return [ScalingState(_digest(scale[part]), _digest(history[:, part])) for part in parts]


def _digest(tensor: torch.Tensor) -> TensorDigest:
    return TensorDigest(len(tensor), float(tensor.min()), float(tensor.max()), content_hash(tensor))


def weights_of(module: Any, number: int) -> list[Any]:
    """The weights of one of a module's layers, as they are on this rank."""
    if "LayerNormMLP" in class_names(module):
        names = [("fc1_weight", "fc2_weight")[number]]
    else:
        names = getattr(module, "weight_names", None) or [f"weight{number}", "weight"]
    return [found for name in names if (found := getattr(module, name, None)) is not None]


def _weights(module: Any, number: int) -> Weights:
    weights = weights_of(module, number)
    local = [getattr(weight, "_local_tensor", weight) for weight in weights]  # a DTensor holds its shard (torch 2.13)
    sharded = getattr(module, "tp_size", 1) > 1 or any(hasattr(weight, "_local_tensor") for weight in weights)
    quantized = [weight for weight in local if not QUANTIZED.isdisjoint(class_names(weight))]
    if not quantized:
        return Weights("high", _joined(str(weight.dtype).partition(".")[2] for weight in local), {}, sharded)
    hashes = {}
    for direction, columnwise in (("rowwise", False), ("columnwise", True)):
        parts = [part for weight in quantized for part in _data(weight, columnwise=columnwise)]
        if parts:
            hashes[direction] = content_hash(*parts)
    return Weights("quantized", _joined(type(weight).__name__ for weight in quantized), hashes, sharded)


def _joined(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _data(weight: Any, *, columnwise: bool) -> list[torch.Tensor]:
    """The codes and scales of one direction; none of a class that is not known, or of what follows from the other."""
    held = gemm_operand(weight, columnwise=columnwise)
    if not is_quantized(held) or (columnwise and scaling_mode(held) == PER_TENSOR):
        return []
    part = stored(held, columnwise=columnwise)
    return [] if part is None else [each for each in (part.codes, part.scales, part.amax) if each is not None]


def content_hash(*tensors: torch.Tensor) -> str:
    """The hash of the bytes of tensors: 16 hexadecimal digits.

    It is the sum of the 64-bit words w, each as ``w ^ (w >> 32)`` times an odd number that follows from its position,
    modulo 2^64: a change of one word always changes the sum. (Without the shift, two words that change their highest
    bits, the signs of two numbers, would cancel.) Cryptographic hashes would need all weights on the host. For each
    tensor the host waits once.

    Args:
        tensors: plain tensors of any shape and dtype, on any device.
    """
    total = 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        found = torch.zeros((), dtype=torch.int64, device=data.device)
        for start in range(0, data.numel(), _PIECE):
            piece = data[start : start + _PIECE]
            words = torch.zeros(-(-piece.numel() // 8), dtype=torch.int64, device=data.device)
            words.view(torch.uint8)[: piece.numel()] = piece
            first = start // 4 + 1
            odd = torch.arange(first, first + 2 * words.numel(), 2, device=data.device)
            words ^= (words >> 32) & 0xFFFFFFFF  # torch's shift of a negative number fills in ones
            found += (words * odd).sum()
        total = total * 0x9E3779B97F4A7C15 + int(found) + data.numel()
    return f"{total % 2**64:016x}"
