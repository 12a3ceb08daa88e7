"""The budget of a run's dumps: bytes, files, and the space that must stay free on the disk.

budget = Budget(folder)                     # counts the files in the folder
why = budget.refuses(nbytes, limits)        # None, or the reason
budget.count(nbytes)                        # after the file was written
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from te_precision_callbacks.base.counts import many

KEPT_FREE = 1 << 30
"""The bytes that stay free on the disk; a twentieth of a small disk."""


@dataclass(frozen=True)
class Limits:
    """The limits of a rank.

    Attributes:
        max_bytes, max_files: limits for all files in the rank's folder together.
        max_memory: the maximum bytes of host memory for the writer's queue; the same again for dumps that are held
            until the end of a step.
    """

    max_bytes: int
    max_files: int
    max_memory: int


class Budget:
    """Counts the files in a rank's folder, including files of earlier runs; the folder need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        sizes = list(_sizes(folder))
        self.files = len(sizes)
        self.bytes = sum(sizes)

    def refuses(self, nbytes: int, limits: Limits) -> str | None:
        if self.bytes + nbytes > limits.max_bytes:
            return (
                f"max_bytes={limits.max_bytes:,} is exceeded by the next file of up to {nbytes:,} bytes:"
                f" {self.bytes:,} bytes are in use"
            )
        if self.files + 1 > limits.max_files:
            return (
                f"max_files={limits.max_files:,} is reached: the rank's folder has {many(self.files, 'file')}, with"
                " those of earlier runs"
            )
        return why_full(self._folder, nbytes)

    def count(self, nbytes: int) -> None:
        self.files += 1
        self.bytes += nbytes


def why_full(folder: Path, nbytes: int = 0) -> str | None:
    existing = next((place for place in (folder, *folder.parents) if place.is_dir()), Path())
    disk = shutil.disk_usage(existing)
    if disk.free - nbytes < min(KEPT_FREE, disk.total // 20):
        return f"little space is left on the disk: {disk.free:,} of {disk.total:,} bytes are free"
    return None


def _sizes(folder: Path) -> Iterator[int]:
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.stat(os.path.join(place, name), follow_symlinks=False).st_size
            except FileNotFoundError:  # removed in the meantime
                continue
