"""Replays the records of a folder, in the order in which their GEMMs ran.

found = replay_folder("logs/tensor_dumps")
found.first_bad                  # the first GEMM with a fault
found.unread                     # path -> why a record could not be read
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from te_precision_callbacks.dumps.contents import Dump, a_dump
from te_precision_callbacks.dumps.dump_files import list_dumps, load
from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.dumps.header import Gemm, Header
from te_precision_callbacks.replay.attention import replay_attention
from te_precision_callbacks.replay.gemm import replay_gemm
from te_precision_callbacks.replay.verdict import Replayed


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
    def runs(self) -> dict[str, list[Path]]:
        """The records of each run, by its folder, and by the time of its first record where a folder has several runs;
        empty if the records are of one run. Each run has an order of its own."""
        headers = {path: found.header for path, found in self.records.items()}
        of_run: dict[_Start, list[Path]] = {}
        for path, start in _runs(headers).items():
            of_run.setdefault(start, []).append(path)
        folders = [start.folder for start in of_run]
        found = {}
        for start, paths in of_run.items():
            begun = min(headers[path].time for path in paths)
            alone = folders.count(start.folder) == 1
            found[str(start.folder) if alone else f"{start.folder} from {begun} on"] = paths
        return found

    @property
    def first_bad(self) -> tuple[Path, Replayed] | None:
        """The first GEMM, in the order of execution, that has a fault."""
        return next(((path, found) for path, found in self.records.items() if found.faults), None)


@torch.no_grad()
def replay(dump: Dump) -> Replayed:
    """Replay a record of a GEMM or of attention.

    Args:
        dump: the record.

    Raises:
        DumpError: the dump is not such a record.
    """
    call = a_dump(dump).header.call
    if call is None:
        raise DumpError("The dump is one of a tensor, not of a whole GEMM, which DumpTensors writes with 'gemms'.")
    return replay_gemm(dump, call) if isinstance(call, Gemm) else replay_attention(dump, call)


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
    """Replay all records in a folder and its folders, one run after the other; dumps of tensors are left out.

    Raises:
        DumpError: there is no such folder, or it has no record.
    """
    listed = list_dumps(folder)
    headers = {
        entry.path: entry.header for entry in listed if entry.header is not None and entry.header.call is not None
    }
    records: dict[Path, Replayed] = {}
    unread = {file.path: file.why for file in listed.foreign if file.path.suffix == ".safetensors"}
    if not headers and not unread:
        raise DumpError(f"{folder}: no records of GEMMs. DumpTensors writes them with 'gemms', below its log folder.")
    runs = _runs(headers)
    for path in sorted(headers, key=lambda path: (runs.get(path, ()), *_order(headers[path]))):
        try:
            records[path] = replay_file(path)
        except DumpError as error:
            unread[path] = str(error)
    return ReplayedFolder(records, unread)


class _Start(NamedTuple):
    """A start of a session: the folder of its dumps, and the first ``run`` of their headers."""

    folder: Path
    run: str


def _runs(headers: Mapping[Path, Header]) -> dict[Path, _Start]:
    """Record -> its run, if they are of several; empty if they can be of one, whose ranks may have a folder each.

    Each rank has its own name for a start. The next start in a folder is that of a rank which has had one before.
    """
    of_folder: dict[Path, dict[tuple[str, int], list[Path]]] = {}
    for path, header in headers.items():
        of_folder.setdefault(_run_of(path), {}).setdefault((header.run, header.rank), []).append(path)
    found: dict[Path, _Start] = {}
    ranks: dict[_Start, set[int]] = {}
    for folder, starts in of_folder.items():
        start = _Start(folder, "")
        for (run, rank), paths in sorted(starts.items()):
            if rank in ranks.get(start, ()) or start not in ranks:
                start = _Start(folder, run)
            ranks.setdefault(start, set()).add(rank)
            found |= dict.fromkeys(paths, start)
    are_of_one = sum(map(len, ranks.values())) == len(set[int]().union(*ranks.values()))
    return {} if are_of_one else found


def _run_of(record: Path) -> Path:
    """The folder of a run's dumps, which has one for each rank; of a record that lies elsewhere its own folder."""
    folders = record.absolute().parents
    return next((folder.parent for folder in folders if re.fullmatch(r"rank_\d+", folder.name)), folders[0])


def _order(header: Header) -> tuple[int, int, int]:
    return header.iteration or 0, 0 if header.call is None else header.call.order, header.rank
