"""Count the waits of the host for the device, by the code that waits.

    with host_waits(device) as waits:
        loss.backward()
    waits.total, waits.ours

On a GPU these are the operations that ``torch.cuda.set_sync_debug_mode`` warns of: copies to the host, reads of an
element, and operations with a result of data-dependent size. On a CPU, where nothing waits, reads of one
element are counted (``_local_scalar_dense``, which is what ``.item()`` and ``bool()`` do).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import te_precision_callbacks

_PACKAGE = Path(te_precision_callbacks.__file__).resolve().parent
_FEATURES = _PACKAGE.parent / "features"
_STANDS_FOR_OTHERS = ("reference", "numerics")
"""Parts that compute what Transformer Engine's compiled part would, or that it calls for that."""
_GOES_BETWEEN = ("session", "instrumentation", "coverage", "layers")
"""Parts that call Transformer Engine, so that its own waits have them on the stack."""
_SYNCHRONIZING = "called a synchronizing CUDA operation"


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls something for each read of one element."""

    def __init__(self, note: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self._note()
        return function(*args, **(kwargs or {}))


class HostWaits:
    """Counted waits.

    Attributes:
        total: all of them.
        ours: waits of this project's own code, without the reference backend.
        places: file and line of ours -> how often.
    """

    def __init__(self) -> None:
        self.total = 0
        self.places: Counter[str] = Counter()

    @property
    def ours(self) -> int:
        return self.places.total()

    @property
    def where(self) -> str:
        return ", ".join(f"{count} in {place}" for place, count in self.places.most_common(4))

    def note(self) -> None:
        """Count the wait that is on the stack."""
        self.total += 1
        place = _ours(sys._getframe(1))
        if place is not None:
            self.places[place] += 1

    def shown(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Called in place of ``warnings.showwarning``, in the thread of the operation and on top of its stack."""
        if _SYNCHRONIZING in str(message):
            self.note()


@contextlib.contextmanager
def host_waits(device: torch.device) -> Iterator[HostWaits]:
    """Count waits inside a ``with`` block."""
    waits = HostWaits()
    if device.type != "cuda":
        with _Reads(waits.note):
            yield waits
        return
    torch.cuda.synchronize(device)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = waits.shown
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _ours(frame: FrameType | None) -> str | None:
    """The innermost line of this project on a stack, if the project waits there; None if somebody else does.

    Transformer Engine, and the reference backend, may be called by this project, as for a GEMM that is watched: their
    waits are their own. But where a feature or the engine calls them, the project waits.
    """
    innermost: str | None = None
    place: str | None = None
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        part = _part(path)
        if part is None and "transformer_engine" in path.parts:
            part = _STANDS_FOR_OTHERS[0]
        if part is not None:
            innermost = innermost or (None if part == "numerics" else part)
            if part not in _STANDS_FOR_OTHERS and place is None:
                place = f"{part}/{path.name}:{frame.f_lineno}"
            if part not in (*_STANDS_FOR_OTHERS, *_GOES_BETWEEN):
                return place
        frame = frame.f_back
    return place if innermost in _GOES_BETWEEN else None


def _part(path: Path) -> str | None:
    """The package of this project that a source file is in; of ``base`` the package in it."""
    if path.is_relative_to(_FEATURES):
        return _FEATURES.name
    if path.is_relative_to(_PACKAGE):
        first, *rest = path.relative_to(_PACKAGE).parts
        return rest[0] if first == "base" else first
    return None
