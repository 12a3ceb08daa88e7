"""Writes, reads and lists dump files, in the safetensors format.

Files are written atomically. A killed process may leave a hidden file that ends with ``.incomplete``.

safetensors 0.8 and later write directly from the tensors' memory and release the GIL, so training continues.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from te_precision_callbacks.base.files import regular_file
from te_precision_callbacks.dumps.contents import Dump, DumpError, Header, NotADumpError, create_dump, operand_of

METADATA_KEY = "te_precision_dump"
"""The key of the header in the metadata of a file."""

SUFFIX = ".safetensors"

TEMPORARY_SUFFIX = ".incomplete"
"""The suffix of hidden, incomplete files."""

_LONGEST_LAYER = 160
"""The maximum length of a layer's name in a file name, which may have 255 bytes."""

_UNSAFE = re.compile(r"[^a-z0-9_.\-]", re.IGNORECASE)


def save(
    tensor: Any,
    path: str | os.PathLike[str],
    *,
    high_precision: torch.Tensor | None = None,
    layer: str = "",
    tensor_name: str = "",
    iteration: int | None = None,
    micro_batch: int = 0,
    rank: int = 0,
    recipe: Any = None,
    internals: bool = True,
) -> Dump:
    """Write a tensor to a file atomically.

    Args:
        tensor: a quantized tensor of Transformer Engine, or its storage class, with scales in any layout, even
            swizzled; or a plain tensor.
        path: the file. Its folder is created if missing; an existing file is replaced.
        high_precision: ``tensor`` before quantization, for the same file.
        layer: the layer's name, for the header.
        tensor_name: such as "activation", for the header.
        iteration: the debug iteration, for the header.
        rank: this rank, for the header.
        micro_batch: number of earlier dumps of this tensor in the iteration, for the header.
        recipe: the recipe, as an object or text.
        internals: add decoded tensors: unpacked FP4 values, scales as float32.

    Returns:
        The dump, which shares the tensor's memory.

    Raises:
        DumpError: an unknown kind of tensor, ``high_precision`` of another shape, a wrong type, or a file that fails.
        LayoutError: the tensor's buffers do not match each other.
    """
    for name, text in {"layer": layer, "tensor_name": tensor_name}.items():
        if not isinstance(text, str):
            raise DumpError(f"{name}= must be a name, as text, not {text!r}.")
    if iteration is not None:
        iteration = _require_int("iteration", iteration)
    if high_precision is None:
        high_precision = tensor
        tensor = None
    header = Header(
        layer=layer,
        tensor=tensor_name,
        iteration=iteration,
        micro_batch=_require_int("micro_batch", micro_batch),
        rank=_require_int("rank", rank),
        recipe=None if recipe is None else str(recipe),
    )
    dump = create_dump(header, high_precision, tensor, internals=internals)
    plain = dump.header.high_precision
    quantized = dump.header.quantized
    if plain is not None and quantized is not None and plain.shape != quantized.shape:
        raise DumpError(
            f"high_precision has the shape {plain.shape}, and the tensor {quantized.shape}: not the same tensor before"
            " and after quantization. Save them to two files."
        )
    write(dump, path)
    return dump


def _require_int(name: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError as error:
        raise DumpError(f"{name}= must be a whole number, not {number!r}.") from error


def write(dump: Dump, path: str | os.PathLike[str]) -> int:
    """Write a dump; replaces an existing file.

    Returns:
        The file's size in bytes.

    Raises:
        DumpError: the file cannot be written (disk full, no permission), or the format has no dtype for a tensor. An
            existing file is then unchanged.
    """
    path = Path(path)
    return _write(dump, path, lambda hidden: os.replace(hidden, path))


def write_new(dump: Dump, folder: Path) -> int:
    """Write a dump to a folder under a free name, even if other processes write there, and return the size in bytes.

    The name has the layer, the tensor, and the number of the micro-batch, except for the first one. ``.1``, ``.2``, ...
    is appended if the name exists. Raises DumpError.
    """
    header = dump.header
    parts = [_UNSAFE.sub("_", name).lstrip(".")[:_LONGEST_LAYER] for name in (header.layer, header.tensor)]
    if header.micro_batch:
        parts.append(f"mb{header.micro_batch}")
    stem = ".".join(parts)
    return _write(dump, folder / f"{stem}{SUFFIX}", lambda hidden: _rename_to_first_free(hidden, folder, stem))


def _write(dump: Dump, path: Path, appear: Callable[[Path], None]) -> int:
    hidden = path.parent / f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    tensors = {}
    for name, tensor in dump.complete().items():
        copy = tensor.detach().to("cpu", copy=True)  # safetensors refuses tensors that share memory
        tensors[name] = copy.resolve_conj().resolve_neg().contiguous()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, hidden, metadata={"format": "pt", METADATA_KEY: dump.header.to_json()})
            nbytes = hidden.stat().st_size
            appear(hidden)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
        return nbytes
    except (OSError, SafetensorError, KeyError) as error:
        raise DumpError(f"{path}: cannot be written: {error}. No part of the file is left.") from error


def _rename_to_first_free(source: Path, folder: Path, stem: str) -> None:
    for count in itertools.count():
        path = folder / (stem + (f".{count}" if count else "") + SUFFIX)
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            os.replace(source, path)
            return


def iteration_folder(folder: Path, rank: int, iteration: int) -> Path:
    return folder / "tensor_dumps" / f"rank_{rank}" / f"iter_{iteration:06d}"


def load(path: str | os.PathLike[str]) -> Dump:
    """Load a dump, to the CPU.

    Raises:
        NotADumpError: there is no such file, or the file is of another kind or version, truncated, or damaged.
    """
    with _open(Path(path)) as file:
        dump = Dump(_header_of(file), {name: file.get_tensor(name) for name in sorted(file.keys())})
        for columnwise in (False, True):
            dump.part(columnwise=columnwise)
        if dump.header.gemm is not None:
            for side, operand in dump.header.gemm.operands().items():
                operand_of(dump, side, operand)
        return dump


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a safetensors file; errors within the ``with`` block become NotADumpError."""
    try:
        with safe_open(regular_file(path), framework="pt") as file:
            yield file
    except NotADumpError as error:
        raise NotADumpError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise NotADumpError(f"{path}: there is no such file") from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError, MemoryError) as error:
        raise NotADumpError(f"{path}: not a dump, or damaged: {type(error).__name__}: {error}") from error


def _header_of(file: Any) -> Header:
    return Header.from_json(file.metadata()[METADATA_KEY])


@dataclass(frozen=True)
class Entry:
    path: Path
    size: int
    header: Header


@dataclass(frozen=True)
class Foreign:
    path: Path
    why: str


class Listing(tuple[Entry, ...]):
    """The dumps, sorted by iteration, layer, tensor, micro-batch and rank; ``foreign`` are the other files."""

    foreign: tuple[Foreign, ...]


def list_dumps(folder: str | os.PathLike[str]) -> Listing:
    """List the dumps in a folder and its subfolders, or in a file, by their headers; raises DumpError."""
    folder = Path(folder)
    if not folder.exists():
        raise NotADumpError(f"{folder}: there is no such folder.")
    entries: list[Entry] = []
    foreign: list[Foreign] = []
    paths = [folder]
    if folder.is_dir():
        unreadable: list[OSError] = []
        walk = os.walk(folder, onerror=unreadable.append)
        paths = sorted(Path(parent, name) for parent, _, names in walk for name in names if name.endswith(SUFFIX))
        foreign += (Foreign(Path(error.filename), f"cannot be read: {error.strerror}") for error in unreadable)
    for path in paths:
        try:
            with _open(path) as file:
                entries.append(Entry(path, path.stat().st_size, _header_of(file)))
        except NotADumpError as error:
            foreign.append(Foreign(path, str(error).removeprefix(f"{path}: ")))
    listing = Listing(sorted(entries, key=_order))
    listing.foreign = tuple(foreign)
    return listing


def _order(entry: Entry) -> tuple[int, str, str, int, int]:
    header = entry.header
    iteration = header.iteration
    if iteration is None:
        iteration = -1
    return iteration, header.layer, header.tensor, header.micro_batch, header.rank
