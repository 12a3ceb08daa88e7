"""Lists the dumps in a folder, from their headers alone.

Usage::

    found = list_dumps("logs/tensor_dumps")
    for entry in found:
        entry.path, entry.size, entry.header
    found.foreign  # files that are not dumps, and why
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from te_precision_callbacks.dumps.dump_files import file_format_of, read_header
from te_precision_callbacks.dumps.errors import DumpError, NotADumpError
from te_precision_callbacks.dumps.header import Header


@dataclass(frozen=True)
class Entry:
    """A dump in a folder.

    Attributes:
        path: the file.
        size: the size of the file in bytes.
        file_format: "safetensors" or "torch".
        header: None for a pickle that this package did not write, such as Transformer Engine's own dump. Such a dump is
            described by its path, rank_0/iter_000100/fc1_activation.pt, and by the pickle, which a list does not open.
    """

    path: Path
    size: int
    file_format: str
    header: Header | None


@dataclass(frozen=True)
class Foreign:
    """A file that is not a dump, and why."""

    path: Path
    why: str


class Listing(Sequence[Entry]):
    """The dumps, sorted by iteration, layer, tensor, micro-batch and rank; dumps without a header last, by path.

    Attributes:
        foreign: the other files, by path.
    """

    def __init__(self, entries: Sequence[Entry], foreign: Sequence[Foreign]) -> None:
        self._entries = tuple(sorted(entries, key=_order))
        self.foreign = tuple(sorted(foreign, key=lambda file: file.path))

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | Sequence[Entry]:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)


def list_dumps(folder: str | os.PathLike[str]) -> Listing:
    """List the dumps in a folder and its subfolders; reads no tensor, and unpickles nothing.

    Args:
        folder: the folder, or one file. Files whose names start with a dot are ignored.

    Raises:
        DumpError: there is no such folder, or it cannot be read.
    """
    entries: list[Entry] = []
    foreign: list[Foreign] = []

    def unreadable(error: OSError) -> None:
        """Report a folder that cannot be read."""
        path = Path(error.filename)
        if path == Path(folder):
            raise DumpError(f"{path}: cannot be read: {error.strerror}.") from error
        foreign.append(Foreign(path, f"cannot be read: {error.strerror}"))

    for path in _files(Path(folder), unreadable):
        try:
            size, file_format = path.stat().st_size, file_format_of(path)
            entries.append(Entry(path, size, file_format, read_header(path)))
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:  # a link to itself, a folder that may not be entered
            foreign.append(Foreign(path, f"cannot be read: {error.strerror or error}"))
        except DumpError as error:
            foreign.append(Foreign(path, str(error).removeprefix(f"{path}: ")))
    return Listing(entries, foreign)


def _files(folder: Path, unreadable: Callable[[OSError], None]) -> Iterator[Path]:
    if folder.is_file():
        yield folder
        return
    if not folder.is_dir():
        raise NotADumpError(f"{folder}: there is no such folder.")
    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield Path(parent, name)


def _order(entry: Entry) -> tuple[bool, int, str, str, int, int, str]:
    header = entry.header
    if header is None:
        return (True, 0, "", "", 0, 0, str(entry.path))
    iteration = -1 if header.iteration is None else header.iteration
    return (False, iteration, header.layer, header.tensor, header.micro_batch, header.rank, str(entry.path))
