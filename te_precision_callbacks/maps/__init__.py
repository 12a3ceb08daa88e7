"""Precision maps: the format of each module in a plan, a run, a checkpoint or a precision file, and their differences.

Usage::

    te-precision map logs                                        # what a recorded run had
    te-precision map checkpoint --engine vllm                    # what vLLM makes of a checkpoint
    te-precision map logs checkpoint --engine vllm               # quantized on one side only

    from te_precision_callbacks.maps import compare_maps, open_map
    for difference in compare_maps(open_map("logs"), open_map("checkpoint")).differences:
        print(difference)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.maps.alignment import Alignment, read_alignment
    from te_precision_callbacks.maps.comparing import Difference, MapComparison, compare_maps
    from te_precision_callbacks.maps.precision_map import MapError, MapFinding, ModuleFormats, PrecisionMap
    from te_precision_callbacks.maps.sources import open_map
    from te_precision_callbacks.maps.tool_files import Surroundings

__all__ = [
    "Alignment",
    "Difference",
    "MapComparison",
    "MapError",
    "MapFinding",
    "ModuleFormats",
    "PrecisionMap",
    "Surroundings",
    "compare_maps",
    "open_map",
    "read_alignment",
]

__getattr__, __dir__ = lazy_names(__name__)
