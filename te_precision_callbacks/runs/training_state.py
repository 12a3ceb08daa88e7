"""What optimizers step and keep, as samples in the fingerprint of a checkpoint."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.optimizers import state_of
from te_precision_callbacks.parameters.optimizers import Held
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
        return dict.fromkeys(name for entries in self.settings.values() for name in entries)


def read_training_state(optimizers: Iterable[tuple[torch.optim.Optimizer, Iterable[Held]]]) -> TrainingState:
    """Sample what optimizers step and keep; waits for the device."""
    tensors: list[tuple[str, tuple[str, float | TensorSample]]] = []
    settings = []
    for optimizer, held in optimizers:
        for parameter, tensor, group, _ in held:
            kept = {"weights": parameter.weight, **state_of(optimizer, tensor)}
            if tensor is not parameter.weight:
                kept["master weights"] = tensor
            for kind, value in kept.items():
                if (entry := _sampled(value)) is not None:
                    tensors.append((kind, (parameter.name, entry)))
            settings += [(key, (parameter.name, number)) for key, number in _settings(group)]
    by_kind = {kind: dict(pairs) for kind, pairs in group_by_key(tensors).items()}
    return TrainingState(by_kind, {key: dict(pairs) for key, pairs in group_by_key(settings).items()})


def _settings(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in group.items():
        if isinstance(value, (tuple, list)):
            values = {f"{key}[{index}]": part for index, part in enumerate(value)}
        else:
            values = {key: value}
        for name, part in values.items():
            if (number := _number(part)) is not None and key != "initial_lr":
                yield name, number


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
    """Return what differs -> the parameters in question, of those that an optimizer steps before and after."""
    names = restored.parameters
    absent: list[tuple[str, str]] = []
    differences: list[tuple[str, str]] = []
    for kind, saved_entries in saved.tensors.items():
        restored_entries = restored.tensors.get(kind, {})
        for name in filter(saved_entries.__contains__, names):
            if name not in restored_entries:
                absent.append((name, kind))
            elif difference := _difference(saved_entries[name], restored_entries[name]):
                differences.append((difference.format(kind), name))
    for key, saved_numbers in saved.settings.items():
        for name, number in restored.settings.get(key, {}).items():
            if name in saved_numbers and _is_other_setting(saved_numbers[name], number):
                differences.append((f"{key} {number:.4g} instead of {saved_numbers[name]:.4g}", name))
    if "master weights" in saved.tensors and not restored.settings:
        differences += [
            ("Master weights, as copies of the weights, not found", name) for name in saved.tensors["master weights"]
        ]
    lost = [(f"{', '.join(kinds)} absent", name) for name, kinds in group_by_key(absent).items()]
    return group_by_key([*lost, *differences])


def _difference(saved: float | TensorSample, restored: float | TensorSample) -> str:
    if not (isinstance(saved, TensorSample) and isinstance(restored, TensorSample)):
        return "" if saved == restored else f"{{}} {restored:g} instead of {saved:g}"
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
    """Return whether a setting, or the distance from 1 of one that averages, differs by more than a schedule's step."""
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
