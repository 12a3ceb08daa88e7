"""Tracks whether the script enters regions of ``te.autocast``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class AutocastRegions:
    """The regions of a run.

    Attributes:
        has_entered: whether one was entered in this step.
        has_enabled: whether one with ``enabled=True`` was entered.
    """

    def __init__(self) -> None:
        self.has_entered = False
        self.has_enabled = False

    def wrap(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``FP8GlobalStateManager.autocast_enter`` of TE 2.20.2 (``pytorch/quantization.py``)."""

        @functools.wraps(upstream)
        def autocast_enter(enabled: bool = False, *arguments: Any, **keywords: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.has_entered = True
                self.has_enabled |= enabled
            return upstream(enabled, *arguments, **keywords)

        return autocast_enter
