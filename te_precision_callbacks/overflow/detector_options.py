"""The checked keywords of the detector."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import pydantic
import torch.distributed
from typing_extensions import TypedDict

from te_precision_callbacks.overflow.errors import OverflowOptionError

OnFailure = Literal["raise", "warn"]


class NamesOfTransformers(TypedDict, total=False):
    """Keywords that both detectors have, by their names in ``transformers.debug_utils.DebugUnderflowOverflow``."""

    trace_batch_nums: Iterable[int] | None
    abort_after_batch_num: int | None


_Number = Annotated[int, pydantic.Field(strict=True, ge=0)]


class DetectorOptions(pydantic.BaseModel):
    """The keywords of :class:`~te_precision_callbacks.debug_utils.DebugActivationOverflow`, each under its name."""

    model_config = pydantic.ConfigDict(frozen=True, arbitrary_types_allowed=True)

    max_frames: Annotated[int, pydantic.Field(strict=True, ge=1)]
    parameters: bool
    abs_min: bool
    trace_batches: tuple[_Number, ...]
    abort_after_batch: _Number | None
    allow_neg_inf: tuple[str, ...]
    distributed: bool
    process_group: torch.distributed.ProcessGroup | None
    on_failure: OnFailure

    @classmethod
    def checked(cls, **keywords: object) -> DetectorOptions:
        """The options with these values.

        Raises:
            OverflowOptionError: the value of a keyword is invalid.
        """
        try:
            return cls.model_validate(keywords)
        except pydantic.ValidationError as error:
            found = error.errors()[0]
            why = found["msg"].replace("Input should", "It must").replace("valid tuple", "list")
            raise OverflowOptionError(f"{found['loc'][0]}= has the value {found['input']!r}. {why}.") from error


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
            close = difflib.get_close_matches(key, [*DetectorOptions.model_fields, *ours], n=1)
            raise OverflowOptionError(f"There is no option {key!r}.{f' Did you mean {close[0]!r}?' if close else ''}")
    traced = given.get("trace_batch_nums")
    last = given.get("abort_after_batch_num")
    return trace_batches if traced is None else traced, abort_after_batch if last is None else last
