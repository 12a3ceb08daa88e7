"""The replacement for ``ProcessGroupNCCL`` where gloo replaces NCCL. Read from torch 2.13."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from te_precision_callbacks.reference.errors import MissingFunctionError

VERSION = (2, 27, 3)
"""Replaces ``torch.cuda.nccl.version()``: new enough for what scripts ask a version for."""


class Options:
    """Options of an NCCL group: they can be set, and are dropped for new groups, since gloo lacks them."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


class ProcessGroupNCCL:
    """No group is an instance of this class, and none can be made."""

    Options = Options

    def __init__(self, *_arguments: Any, **_options: Any) -> NoReturn:
        raise MissingFunctionError(
            "ProcessGroupNCCL: NCCL is not in the reference backend. init_process_group('nccl') and new_group give a "
            "group of gloo."
        )
