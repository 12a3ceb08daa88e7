"""What low precision adds to the memory of a model's layers, and what it saves.

Usage::

    te-precision check config.yaml --model package.module:function --recipe mxfp8 --tokens 4096 --memory

    memory = plan_memory(model, named_te_modules(model), recipe, tokens=4096)
    show(memory)                      # bytes by kind beside BF16
    memory.added(lives="always")      # bytes that low precision adds to what is always there
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.speed.memory.planned import plan_memory
    from te_precision_callbacks.speed.memory.rows import Memory, MemoryRow, show

__all__ = ["Memory", "MemoryRow", "plan_memory", "show"]

__getattr__, __dir__ = lazy_names(__name__)
