"""Replays the records of a folder in execution order."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from te_precision_callbacks.dumps.contents import Dump, a_dump
from te_precision_callbacks.dumps.dump_files import list_dumps, load
from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.replay.gemm import Replayed, replay_gemm


@dataclass(frozen=True)
class ReplayedFolder:
    """The records of a folder.

    Attributes:
        records: path -> result, in execution order.
        unread: path -> why it could not be read.
    """

    records: dict[Path, Replayed]
    unread: dict[Path, str]

    @property
    def first_bad(self) -> tuple[Path, Replayed] | None:
        return next(((path, replayed) for path, replayed in self.records.items() if replayed.faults), None)


@torch.no_grad()
def replay(dump: Dump) -> Replayed:
    """Replay a record of a GEMM.

    Raises:
        DumpError: the dump is not a record of a GEMM.
    """
    gemm = a_dump(dump).header.gemm
    if gemm is None:
        raise DumpError("The dump is one of a tensor, not of a whole GEMM, which DumpTensors writes with 'gemms'.")
    return replay_gemm(dump, gemm)


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
    """Replay all records in a folder and its subfolders in the order of their time; skip dumps of tensors.

    Raises:
        DumpError: the folder does not exist, or has no record.
    """
    listed = list_dumps(folder)
    unread = {file.path: file.why for file in listed.foreign if file.path.suffix == ".safetensors"}
    recorded = [
        ((header.time, header.iteration or 0, header.gemm.order, header.rank), entry.path)
        for entry in listed
        if (header := entry.header) is not None and header.gemm is not None
    ]
    if not recorded and not unread:
        raise DumpError(f"{folder}: no records of GEMMs. DumpTensors writes them with 'gemms', below its log folder.")
    records: dict[Path, Replayed] = {}
    for _, path in sorted(recorded):
        try:
            records[path] = replay_file(path)
        except DumpError as error:
            unread[path] = str(error)
    return ReplayedFolder(records, unread)
