"""The replacement for ``ProcessGroupNCCL`` where gloo stands for NCCL. Read from torch 2.13."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from te_precision_callbacks.reference.errors import MissingFunctionError

VERSION = (2, 27, 3)
"""Stands for ``torch.cuda.nccl.version()``: new enough for what scripts ask a version for."""


class Options:
    """Options of a NCCL group: they can be set, and are left out when a group is made, for gloo has none of them."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


class ProcessGroupNCCL:
    """Stands for the class: no group is one of it, and none can be made of it."""

    Options = Options

    def __init__(self, *_arguments: Any, **_options: Any) -> NoReturn:
        raise MissingFunctionError(
            "ProcessGroupNCCL: NCCL is not in the reference backend. init_process_group('nccl') and new_group give a "
            "group of gloo."
        )
