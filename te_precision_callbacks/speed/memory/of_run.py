"""The memory of the layers of a running model: planned for the recipes and rows that it runs with, and counted.

memory = memory_of_run(model, modules, session.coverage())
memory.bytes("weight_columnwise").low, sum(row.counted or 0 for row in memory.of(kind="weight_columnwise"))
device_memory(torch.device("cuda"))     # what the caching allocator counts; None on a CPU

Read from Transformer Engine 2.20.2: ``fp8`` and ``fp8_meta["recipe"]`` of a module, ``_fp8_metas`` of an operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.naming import Model, NamedModule, named_operations
from te_precision_callbacks.reference import is_installed
from te_precision_callbacks.speed.memory.counted import CountedRow, kept_rows
from te_precision_callbacks.speed.memory.planned import plan_memory
from te_precision_callbacks.speed.memory.rows import Memory, MemoryRow


@dataclass(frozen=True)
class DeviceMemory:
    """What torch's caching allocator counts on a device, in bytes.

    Attributes:
        allocated: of tensors now.
        peak_allocated: the most so far, or since the script has reset it.
        reserved: taken from the device now.
        peak_reserved: the most so far, or since the script has reset it.
        retries: how often it had to free what it had kept, to make room.
    """

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    retries: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The counters of a GPU's allocator; None where there is none: on a CPU, and before anything has used the GPU.

    Nothing is reset, since the peak is the script's own too. The host does not wait for the device.
    """
    if device.type != "cuda" or is_installed() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    found = torch.cuda.memory_stats(device)
    return DeviceMemory(
        found["allocated_bytes.all.current"],
        found["allocated_bytes.all.peak"],
        found["reserved_bytes.all.current"],
        found["reserved_bytes.all.peak"],
        found["num_alloc_retries"],
    )


def memory_of_run(model: Model, modules: Sequence[NamedModule], products: Iterable[Product]) -> Memory:
    """The memory of a model that trains.

    A layer that was called several times in a forward counts once, with the rows of one call. Workspaces of cuBLAS are
    there only on a GPU.

    Args:
        model: the model.
        modules: its modules of Transformer Engine.
        products: the matrix products of its step.
    """
    calls: dict[str, list[int]] = {}
    low: set[str] = set()
    for product in products:
        if product.gemm == "fprop" and product.n:
            calls[product.layer] = [max(product.n, *calls.get(product.layer, [0]))]
        if product.is_low:
            low.add(product.layer)
    recipes: dict[str, Any] = {}
    cached = False
    for named in modules:
        module: Any = named.module
        recipe = module.fp8_meta.get("recipe") if getattr(module, "fp8", False) else None
        cached |= bool(vars(module).get("_fp8_workspaces"))
        recipes |= {layer.name: recipe if layer.name in low else None for layer in named.layers}
    for found in named_operations(model):
        states: Any = (vars(found.module).get("_fp8_metas") or {}).get("forward") or {}
        recipes |= {layer: states.get("recipe") if layer in low else None for layer in found.layers}
    planned = plan_memory(model, modules, None, cached=cached, recipes=recipes, calls=calls)
    if not any(parameter.device.type == "cuda" for named in modules for parameter in named.module.parameters()):
        planned = replace(planned, rows=tuple(row for row in planned if row.kind != "workspace"))
    return with_counted(planned, kept_rows(model, modules))


def with_counted(memory: Memory, rows: Iterable[CountedRow]) -> Memory:
    """A plan with the bytes of real tensors beside it. What was counted and not planned comes last, with 0 planned."""
    counted: dict[tuple[str, str, str, str], int] = {}
    first: dict[tuple[str, str, str, str], CountedRow] = {}
    for row in rows:
        key = row.layer, row.kind, row.what, row.lives
        counted[key] = counted.get(key, 0) + row.bytes
        first.setdefault(key, row)
    planned: dict[tuple[str, str, str, str], MemoryRow] = {}
    for each in memory:  # a layer has several parameters of one kind
        key = each.layer, each.kind, each.what, each.lives
        kept = planned.get(key)
        planned[key] = each if kept is None else replace(kept, low=kept.low + each.low, high=kept.high + each.high)
    joined = [replace(row, counted=counted.get(key)) for key, row in planned.items()]
    more = [
        MemoryRow(row.layer, row.kind, row.what, 0, 0, row.lives, counted[key])
        for key, row in first.items()
        if key not in planned
    ]
    return replace(memory, rows=(*joined, *more))
