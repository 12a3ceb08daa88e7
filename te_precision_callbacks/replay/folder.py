"""Replays the records of a folder, in the order in which their GEMMs ran.

found = replay_folder("logs/tensor_dumps")
found.first_bad                  # the first GEMM with a fault
found.unread                     # path -> why a record could not be read
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from te_precision_callbacks.dumps.dump_files import load
from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.dumps.listing import list_dumps
from te_precision_callbacks.replay.gemm import Replayed, replay


@dataclass(frozen=True)
class ReplayedFolder:
    """The records of a folder.

    Attributes:
        records: path -> what was found, in the order of execution.
        unread: path -> why it could not be read.
    """

    records: dict[Path, Replayed]
    unread: dict[Path, str]

    @property
    def first_bad(self) -> tuple[Path, Replayed] | None:
        """The first GEMM, in the order of execution, that has a fault."""
        return next(((path, found) for path, found in self.records.items() if found.faults), None)


def replay_file(path: str | os.PathLike[str]) -> Replayed:
    """Replay one record.

    Raises:
        DumpError: the file is not a record of a GEMM, is damaged, or of a later version.
    """
    try:
        return replay(load(path))
    except DumpError as error:
        text = str(error)
        raise type(error)(text if text.startswith(str(path)) else f"{path}: {text}") from error


def replay_folder(folder: str | os.PathLike[str]) -> ReplayedFolder:
    """Replay all records in a folder and its folders; dumps of tensors are left out.

    Raises:
        DumpError: there is no such folder, or it has no record.
    """
    listed = list_dumps(folder)
    gemms = [entry for entry in listed if entry.header is not None and entry.header.gemm is not None]
    records: dict[Path, Replayed] = {}
    unread = {file.path: file.why for file in listed.foreign if file.path.suffix == ".safetensors"}
    if not gemms and not unread:
        raise DumpError(f"{folder}: no records of GEMMs. DumpTensors writes them with 'gemms', below its log folder.")
    for entry in sorted(gemms, key=lambda entry: _order(entry.header)):
        try:
            records[entry.path] = replay_file(entry.path)
        except DumpError as error:
            unread[entry.path] = str(error)
    return ReplayedFolder(records, unread)


def _order(header: object) -> tuple[int, int, int]:
    found: tuple[int, int, int] = (header.iteration or 0, header.gemm.order, header.rank)  # type: ignore[attr-defined]
    return found
