"""Replays records of GEMMs on the CPU, to find faults of the quantizer or the kernel.

    replayed = replay_file("fc1.fprop_gemm.safetensors")
    replayed.faults, replayed.lanes
    replay_folder("logs/tensor_dumps")       # all records, in execution order

DumpTensors writes records with ``gemms``. The replay needs neither Transformer Engine nor a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.replay.gemm import (
        Replayed,
        ReplayedFolder,
        replay,
        replay_file,
        replay_folder,
    )

__all__ = ["Replayed", "ReplayedFolder", "replay", "replay_file", "replay_folder"]

__getattr__, __dir__ = lazy_names(__name__)
