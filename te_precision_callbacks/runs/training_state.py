"""Samples of the tensors and states of optimizers, in the fingerprint of a checkpoint."""

from __future__ import annotations

import hashlib
import itertools
import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from te_precision_callbacks.base.optimizers import state_of
from te_precision_callbacks.parameters.optimizers import SteppedParameters
from te_precision_callbacks.parameters.weight_samples import local_part, sampled_view
from te_precision_callbacks.te.tensors import is_quantized

FLUSHED = 0.02
"""Share of a tensor's elements that have become 0, such as second moments below 3e-8 in float16."""

ROUNDED = 2e-3
"""Change of a sample's size up to which other values are called rounded."""

SCHEDULED = 2.0
"""Factor up to which a setting may differ: a schedule may step between a checkpoint and the next step."""


@dataclass(frozen=True)
class TensorSample:
    """Sampled elements of a tensor, or of its local part.

    Attributes:
        size: root mean square of the elements.
        zeros: the share of elements that are 0.
        content: hash of the elements.
    """

    dtype: str
    shape: tuple[int, ...]
    size: float
    zeros: float
    content: str


@dataclass(frozen=True)
class StateSamples:
    """The state of the parameters that optimizers step.

    Attributes:
        tensors: ``weights``, ``master weights``, or a key of the optimizer's state such as ``exp_avg`` -> parameter ->
            its tensor or number.
        settings: key of a group, such as ``lr`` -> parameter -> number.
    """

    tensors: Mapping[str, Mapping[str, float | TensorSample]]
    settings: Mapping[str, Mapping[str, float]]

    @property
    def parameters(self) -> dict[str, None]:
        return dict.fromkeys(itertools.chain.from_iterable(self.settings.values()))


def sample_state(optimizers: Mapping[torch.optim.Optimizer, SteppedParameters]) -> StateSamples:
    """Sample the tensors and states of optimizers; waits for the device."""
    tensors: dict[str, dict[str, float | TensorSample]] = {}
    settings: dict[str, dict[str, float]] = {}
    for optimizer, stepped in optimizers.items():
        settings_of = {id(group): dict(_settings(group)) for group in stepped.groups}
        for parameter, tensor, group, _ in stepped.held:
            values = {"weights": parameter.weight, **state_of(optimizer, tensor)}
            if tensor is not parameter.weight:
                values["master weights"] = tensor
            for kind, value in values.items():
                entry = _sampled(value)
                if entry is not None:
                    tensors.setdefault(kind, {})[parameter.name] = entry
            for key, number in settings_of[id(group)].items():
                settings.setdefault(key, {})[parameter.name] = number
    return StateSamples(tensors, settings)


def _settings(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in group.items():
        if key in ("params", "initial_lr"):
            continue
        number = _number(value)
        if number is not None:
            yield key, number
        if isinstance(value, (tuple, list)):
            for index, part in enumerate(value):
                number = _number(part)
                if number is not None:
                    yield f"{key}[{index}]", number


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.Tensor)):
        return None
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return None
    return float(value)


def _sampled(value: Any) -> float | TensorSample | None:
    if not isinstance(value, torch.Tensor) or value.numel() == 1:
        return _number(value)
    local = local_part(value)
    if not local.numel() or local.is_meta or is_quantized(local):  # whose codes are hashed as a whole
        return None
    elements = sampled_view(local).cpu().contiguous()
    values = elements.double().numpy().reshape(-1)
    size = math.sqrt(values @ values / values.size)
    zeros = 1 - np.count_nonzero(values) / values.size
    content = hashlib.blake2b(elements.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    return TensorSample(str(local.dtype).partition(".")[2], tuple(local.shape), size, zeros, content)


def lost_state(saved: StateSamples, restored: StateSamples) -> dict[str, list[str]]:
    """Return difference -> parameters, of the parameters in both states."""
    lost: dict[str, list[str]] = {}
    for name in restored.parameters:
        absent = []
        for kind, entries in saved.tensors.items():
            if name not in entries:
                continue
            if name not in restored.tensors.get(kind, {}):
                absent.append(kind)
            elif difference := _difference(entries[name], restored.tensors[kind][name]):
                lost.setdefault(difference.format(kind), []).append(name)
        if absent:
            lost.setdefault(f"{', '.join(absent)} absent", []).append(name)
        for key, restored_numbers in restored.settings.items():
            saved_number = saved.settings.get(key, {}).get(name)
            number = restored_numbers.get(name)
            if saved_number is not None and number is not None and _is_other_setting(saved_number, number):
                lost.setdefault(f"{key} {number:.4g} instead of {saved_number:.4g}", []).append(name)
    if "master weights" in saved.tensors and not restored.settings:
        lost["Master weights, as copies of the weights, not found"] = list(saved.tensors["master weights"])
    return lost


def _difference(saved: float | TensorSample, restored: float | TensorSample) -> str:
    if not (isinstance(saved, TensorSample) and isinstance(restored, TensorSample)):
        if saved == restored:
            return ""
        return f"{{}} {restored:g} instead of {saved:g}"
    if saved.shape != restored.shape:
        return f"{{}} of the shape {list(restored.shape)} instead of {list(saved.shape)}"
    if saved.dtype != restored.dtype:
        return f"{{}} in {restored.dtype} instead of {saved.dtype}"
    if saved.content == restored.content:
        return ""
    if restored.zeros > saved.zeros + FLUSHED:
        return "Elements of {} have become 0"
    if abs(restored.size - saved.size) <= ROUNDED * saved.size:
        return "{} with slightly different values, as after rounding"
    return "{} with other values"


def _is_other_setting(saved: float, restored: float) -> bool:
    """Return whether a setting, or its distance from 1, as of a decay rate, differs by more than a schedule's step."""
    pairs = [(abs(saved), abs(restored))]
    if 0.5 < saved < 1 and 0.5 < restored < 1:
        pairs.append((1 - saved, 1 - restored))
    return saved != restored and any(max(pair) > SCHEDULED * min(pair) for pair in pairs)
