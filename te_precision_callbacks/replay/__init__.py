"""Replays records of GEMMs on the CPU: says whether the format, the quantizer or the kernel made an error.

    replayed = replay_file("fc1.fprop_gemm.safetensors")
    replayed.faults                          # what is wrong, the kernel first
    replayed.lanes                           # each way to compute the product, with its distance to the next
    replay_folder("logs/tensor_dumps")       # all records, in the order in which the GEMMs ran

A record is made by DumpTensors with ``gemms``. Nothing here needs Transformer Engine or a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.replay.folder import ReplayedFolder, replay_file, replay_folder
    from te_precision_callbacks.replay.gemm import Fault, Lane, Replayed, replay

__all__ = ["Fault", "Lane", "Replayed", "ReplayedFolder", "replay", "replay_file", "replay_folder"]

__getattr__, __dir__ = lazy_names(__name__)
