"""Samples of the tensors and states of optimizers, in the fingerprint of a checkpoint."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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

_CHUNK_BYTES = 1 << 24  # size of the pieces that are hashed at once


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
class TrainingState:
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


def read_training_state(optimizers: Mapping[torch.optim.Optimizer, SteppedParameters]) -> TrainingState:
    """Sample the tensors and states of optimizers; waits for the device."""
    tensors: dict[str, dict[str, float | TensorSample]] = {}
    settings: dict[str, dict[str, float]] = {}
    for optimizer, stepped in optimizers.items():
        for parameter, tensor, group, _ in stepped.held:
            values = {"weights": parameter.weight, **state_of(optimizer, tensor)}
            if tensor is not parameter.weight:
                values["master weights"] = tensor
            for kind, value in values.items():
                entry = _sampled(value)
                if entry is not None:
                    tensors.setdefault(kind, {})[parameter.name] = entry
            for key, number in _settings(group):
                settings.setdefault(key, {})[parameter.name] = number
    return TrainingState(tensors, settings)


def _settings(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in group.items():
        number = _number(value)
        if number is not None and key != "initial_lr":
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
    elements = sampled_view(local).cpu()
    values = elements.double()
    zeros = (values == 0).double().mean().item()
    size = values.square().mean().sqrt().item()
    return TensorSample(str(local.dtype).partition(".")[2], tuple(local.shape), size, zeros, content_hash(elements))


def lost_state(saved: TrainingState, restored: TrainingState) -> dict[str, list[str]]:
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


def content_hash(*tensors: torch.Tensor) -> str:
    """Hash the bytes of tensors on their device: 16 hexadecimal digits.

    The hash is a sum over the 64-bit words w, modulo 2^64: ``w ^ (w >> 32)`` times an odd number that depends on the
    position. A change of one word always changes the sum. Without the shift, two changed signs would cancel.
    """
    total = 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        subtotal = torch.zeros((), dtype=torch.int64, device=data.device)
        for start in range(0, data.numel(), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            words = torch.zeros(-(-chunk.numel() // 8), dtype=torch.int64, device=data.device)
            words.view(torch.uint8)[: chunk.numel()] = chunk
            first = start // 4 + 1
            odd = torch.arange(first, first + 2 * words.numel(), 2, device=data.device)
            words ^= (words >> 32) & 0xFFFFFFFF  # torch shifts negative numbers arithmetically
            subtotal += (words * odd).sum()
        total = total * 0x9E3779B97F4A7C15 + int(subtotal) + data.numel()
    return f"{total % 2**64:016x}"
