"""The replacement for ``torch.cuda`` in Transformer Engine's modules if there is a real GPU.

The compute capability and the CUDA version are emulated, since the backend's layouts depend on them. Everything else is
the real ``torch.cuda``.
"""

from __future__ import annotations

from typing import Any

import torch

from te_precision_callbacks.reference.cuda_on_cpu import cuda_version, no_attention, run_eagerly
from te_precision_callbacks.reference.target import capability

__all__ = ["cuda_version", "get_device_capability", "get_device_properties", "no_attention", "run_eagerly"]


class _Properties:
    def __init__(self, real: Any) -> None:
        self._real = real
        self.major, self.minor = capability()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return capability()


def get_device_properties(device: Any = None) -> _Properties:
    return _Properties(torch.cuda.get_device_properties(device))


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)
