"""The options of the detector."""

from __future__ import annotations

from typing import Annotated

import pydantic
import torch
import torch.distributed

from te_precision_callbacks.overflow.errors import OverflowOptionError

_Number = Annotated[int, pydantic.Field(strict=True, ge=0)]


class DetectorOptions(pydantic.BaseModel):
    """The keywords of :class:`~te_precision_callbacks.debug_utils.DebugActivationOverflow`."""

    model_config = pydantic.ConfigDict(frozen=True, arbitrary_types_allowed=True)

    max_frames: Annotated[int, pydantic.Field(strict=True, ge=1)]
    parameters: bool
    abs_min: bool
    trace_batches: tuple[_Number, ...]
    abort_after_batch: _Number | None
    allow_neg_inf: tuple[str, ...]
    distributed: bool
    process_group: torch.distributed.ProcessGroup | None

    @classmethod
    def from_keywords(cls, **keywords: object) -> DetectorOptions:
        try:
            return cls.model_validate(keywords)
        except pydantic.ValidationError as error:
            problem = error.errors()[0]
            why = problem["msg"].replace("Input should", "It must").replace("valid tuple", "list")
            raise OverflowOptionError(f"{problem['loc'][0]}= has the value {problem['input']!r}. {why}.") from error
