"""The checked keywords of the detector."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from typing_extensions import TypedDict

from te_precision_callbacks.overflow.errors import OverflowOptionError

Mode = Literal["deferred", "immediate"]

OnFailure = Literal["raise", "warn"]


class NamesOfTransformers(TypedDict, total=False):
    """Keywords that both detectors have, by their names in ``transformers.debug_utils.DebugUnderflowOverflow``."""

    trace_batch_nums: Iterable[int] | None
    abort_after_batch_num: int | None


@dataclass(frozen=True)
class Options:
    """The keywords of :class:`~te_precision_callbacks.debug_utils.DebugActivationOverflow`, each under its name.

    Raises:
        OverflowOptionError: the value of a keyword is invalid.
    """

    max_frames: int
    mode: Mode
    gradients: bool
    parameters: bool
    abs_min: bool
    trace_batches: tuple[int, ...]
    abort_after_batch: int | None
    allow_neg_inf: tuple[str, ...]
    warn_above: float | None
    distributed: bool
    process_group: torch.distributed.ProcessGroup | None
    on_failure: OnFailure

    def __post_init__(self) -> None:
        _check_count("max_frames", self.max_frames, least=1)
        _check_choice("mode", self.mode, get_args(Mode))
        _check_choice("on_failure", self.on_failure, get_args(OnFailure))
        for batch in self.trace_batches:
            _check_count("trace_batches", batch)
        if self.abort_after_batch is not None:
            _check_count("abort_after_batch", self.abort_after_batch)
        for pattern in self.allow_neg_inf:
            if not isinstance(pattern, str):
                raise OverflowOptionError(f"allow_neg_inf= must hold patterns of module paths, not {pattern!r}.")
        share, group = self.warn_above, self.process_group
        if share is not None and not (isinstance(share, (int, float)) and 0 < share <= 1):
            raise OverflowOptionError(f"warn_above= must be a fraction between 0 and 1, or None, not {share!r}.")
        if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
            raise OverflowOptionError(f"process_group= must be a torch.distributed.ProcessGroup, not {group!r}.")


def from_transformers(
    given: Mapping[str, Any], trace_batches: Iterable[int], abort_after_batch: int | None
) -> tuple[Iterable[int], int | None]:
    """The values of ``trace_batches`` and ``abort_after_batch``, given under either name.

    Raises:
        OverflowOptionError: a keyword is unknown, or a value was given under both names.
    """
    ours = {"trace_batch_nums": "trace_batches", "abort_after_batch_num": "abort_after_batch"}
    for (theirs, name), own in zip(ours.items(), (trace_batches, abort_after_batch), strict=True):
        if theirs in given and own not in ((), None):
            raise OverflowOptionError(f"{theirs}= is another name for {name}=. Give one of the two.")
    for key in given:
        if key == "max_frames_to_save":
            raise OverflowOptionError(
                "max_frames_to_save= counts modules, but here a frame is a tensor. Give max_frames= about three times"
                " the number: for a module's inputs, its outputs, and their gradients."
            )
        if key not in ours:
            known = [field.name for field in fields(Options)]
            close = difflib.get_close_matches(key, [*known, *ours], n=1)
            raise OverflowOptionError(f"There is no option {key!r}.{f' Did you mean {close[0]!r}?' if close else ''}")
    traced = given.get("trace_batch_nums")
    last = given.get("abort_after_batch_num")
    return trace_batches if traced is None else traced, abort_after_batch if last is None else last


def listed(key: str, value: object) -> tuple[Any, ...]:
    """The values of a keyword that takes several.

    Raises:
        OverflowOptionError: ``value`` is not a list of values.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OverflowOptionError(f"{key}= must be a list, not {value!r}.")
    return tuple(value)


def _check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OverflowOptionError(f"{key}= must be one of {', '.join(map(repr, choices))}, not {value!r}.")


def _check_count(key: str, value: object, *, least: int = 0) -> None:
    if type(value) is not int or value < least:
        raise OverflowOptionError(f"{key}= takes whole numbers >= {least}, not {value!r}.")
