"""Writes, reads and lists dump files, in the safetensors format.

Files are written atomically. A killed process may leave a hidden file that ends with ``.incomplete``.

The safetensors format (huggingface/safetensors, "Format"): 8 bytes with the length of a JSON object, little-endian; the
object, name -> dtype, shape and data offsets; the data. The library's ``save`` copies all tensors with the GIL held,
which would stop training. The format is therefore written here, and read by the library.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import operator
import os
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from te_precision_callbacks.base.opening import own_file
from te_precision_callbacks.dumps.contents import Dump, dump_of
from te_precision_callbacks.dumps.errors import DumpError, NotADumpError
from te_precision_callbacks.dumps.header import Header, check

METADATA_KEY = "te_precision_dump"
"""The key of the header in the metadata of a file."""

SUFFIX = ".safetensors"

TEMPORARY_SUFFIX = ".incomplete"
"""The suffix of hidden, incomplete files."""

# The names of the safetensors format.
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    **({torch.float8_e8m0fnu: "F8_E8M0"} if hasattr(torch, "float8_e8m0fnu") else {}),
}
_PIECE = 1 << 24
_LONGEST_LAYER = 160
"""The maximum length of a layer's name in a file name, which may have 255 bytes."""

_UNSAFE = re.compile(r"[^a-z0-9_.\-]", re.IGNORECASE)
_SAFE = re.compile(r"[a-z0-9_\-]+(\.[a-z0-9_\-]+)*")


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
        tensor: a quantized tensor of Transformer Engine, or its storage class, with scales in any layout, swizzled too;
            or a plain tensor.
        path: the file. Its folder is created if missing; an existing file is replaced.
        high_precision: ``tensor`` before quantization, for the same file.
        layer, tensor_name, iteration, micro_batch, rank: for the header.
        recipe: the recipe, as an object or text.
        internals: add decoded tensors: unpacked FP4 values, scales as float32.

    Returns:
        The dump, which shares the tensor's memory.

    Raises:
        DumpError: the kind of the tensor is unknown, ``high_precision`` has another shape, an argument has the wrong
            type, or the file cannot be written.
        LayoutError: the tensor's buffers do not match each other.
    """
    for name, text in {"layer": layer, "tensor_name": tensor_name}.items():
        if not isinstance(text, str):
            raise DumpError(f"{name}= must be a name, as text, not {text!r}.")
    dump = dump_of(
        tensor if high_precision is None else high_precision,
        None if high_precision is None else tensor,
        internals=internals,
        layer=layer,
        tensor=tensor_name,
        iteration=None if iteration is None else _whole("iteration", iteration),
        micro_batch=_whole("micro_batch", micro_batch),
        rank=_whole("rank", rank),
        recipe=recipe,
    )
    before, after = dump.header.high_precision, dump.header.quantized
    if before is not None and after is not None and before.shape != after.shape:
        raise DumpError(
            f"high_precision has the shape {before.shape}, and the tensor {after.shape}: they are not one tensor before"
            " and after quantization. Save them to two files."
        )
    write(dump, path)
    return dump


def _whole(name: str, number: Any) -> int:
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

    The name has the layer, the tensor, and from the second micro-batch on its number; ``.1``, ``.2`` and so on are
    appended if the name exists. Raises DumpError.
    """
    header = dump.header
    parts = [_distinct(header.layer), _distinct(header.tensor)]
    stem = ".".join(parts if header.micro_batch == 0 else [*parts, f"mb{header.micro_batch}"])
    return _write(dump, folder / f"{stem}{SUFFIX}", lambda hidden: _rename_to_first_free(hidden, folder, stem))


def _write(dump: Dump, path: Path, appear: Callable[[Path], None]) -> int:
    dump.wait()
    hidden = path.parent / f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(hidden, "wb", opener=own_file) as file:
                _write_tensors(dump, file)
                nbytes = file.tell()
            appear(hidden)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
        return nbytes
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise DumpError(f"{path}: cannot be written: {why}. No part of the file is left.") from error


def _rename_to_first_free(source: Path, folder: Path, stem: str) -> None:
    for count in itertools.count():
        path = folder / f"{stem}{f'.{count}' if count else ''}{SUFFIX}"
        try:
            os.link(source, path)  # a rename would replace an existing file
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            if os.path.lexists(path):
                continue
            os.replace(source, path)
        else:
            source.unlink()
        return


def iteration_folder(folder: Path, rank: int, iteration: int) -> Path:
    return rank_folder(folder, rank) / f"iter_{iteration:06d}"


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / "tensor_dumps" / f"rank_{rank}"


def _distinct(name: str) -> str:
    """Return a part of a file name that is unique to a layer, even on case-insensitive file systems."""
    if len(name) <= _LONGEST_LAYER and _SAFE.fullmatch(name):
        return name
    # A name on disk may have a lone surrogate.
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{_UNSAFE.sub('_', name).lstrip('.')[:_LONGEST_LAYER]}-{digest}"


def _write_tensors(dump: Dump, file: IO[bytes]) -> None:
    tensors = dump.complete()
    layout: dict[str, Any] = {"__metadata__": {"format": "pt", METADATA_KEY: dump.header.to_json()}}
    # Aligned, in the library's order: tensors with the largest elements come first.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPE_NAMES:
            raise DumpError(f"{name}: the safetensors format has no dtype for {tensor.dtype}.")
        start, end = end, end + tensor.nbytes
        layout[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(layout, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    for name in names:
        plain = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        # One element counts as contiguous with any stride, but most strides prevent a view as bytes.
        flat = plain.reshape(-1).as_strided((plain.numel(),), (1,)).view(torch.uint8)
        # A copy, since memory with a numpy view cannot be resized, as FSDP2 does with parameters.
        for start in range(0, flat.numel(), _PIECE):
            array: Any = flat[start : start + _PIECE].clone().numpy()
            file.write(memoryview(array))


def load(path: str | os.PathLike[str]) -> Dump:
    """Load a dump, to the CPU.

    Raises:
        NotADumpError: there is no such file, or the file is of another kind, truncated, or damaged.
        LaterVersionError: a later version of this package wrote the file.
    """
    with _opened(Path(path)) as file:
        header = _header_of(file)
        try:
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        except (SafetensorError, AttributeError, TypeError, ValueError) as error:
            raise NotADumpError(f"torch {torch.__version__} cannot read its tensors: {error}.") from error
        check(header, tensors)
        return Dump(header, tensors)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file, and prefix errors in the block with the file's name."""
    try:
        _check_kind(path)
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except FileNotFoundError:  # removed meanwhile
            raise
        except (SafetensorError, OSError) as error:
            raise NotADumpError(f"truncated, damaged, or not a safetensors file: {error}.") from error
    except DumpError as error:
        raise type(error)(f"{path}: {error}") from error.__cause__


def _check_kind(path: Path) -> None:
    try:
        if not path.is_file():
            raise NotADumpError("a folder." if path.is_dir() else "there is no such file.")
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise NotADumpError(f"cannot be read: {error.strerror or error}.") from error
    if start.startswith(b"PK\x03\x04"):
        raise NotADumpError("not a safetensors file, but an archive, perhaps of torch.save: read that with torch.load.")
    if len(start) < 9 or not start.endswith(b"{"):
        raise NotADumpError(f"not a safetensors file ({path.stat().st_size} bytes).")


def _header_of(file: Any) -> Header:
    text = (file.metadata() or {}).get(METADATA_KEY)
    if text is None:
        raise NotADumpError(f"a safetensors file, but not a dump: its metadata have no {METADATA_KEY!r}.")
    return Header.from_json(text)


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
    """The dumps, sorted by iteration, layer, tensor, micro-batch and rank; ``foreign`` are the other files, by path."""

    foreign: tuple[Foreign, ...]


def list_dumps(folder: str | os.PathLike[str]) -> Listing:
    """List the dumps in a folder and its subfolders, or in a file, by their headers; raises DumpError."""
    entries: list[Entry] = []
    foreign: list[Foreign] = []

    unreadable: list[OSError] = []
    for path in _files(Path(folder), unreadable.append):
        try:
            size = path.stat().st_size
            with _opened(path) as file:
                entries.append(Entry(path, size, _header_of(file)))
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:  # a link to itself, a folder that may not be entered
            foreign.append(Foreign(path, f"cannot be read: {error.strerror or error}"))
        except DumpError as error:
            foreign.append(Foreign(path, str(error).removeprefix(f"{path}: ")))
    foreign += [Foreign(Path(error.filename), f"cannot be read: {error.strerror}") for error in unreadable]
    listing = Listing(sorted(entries, key=_order))
    listing.foreign = tuple(sorted(foreign, key=lambda file: file.path))
    return listing


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


def _order(entry: Entry) -> tuple[int, str, str, int, int, str]:
    header = entry.header
    iteration = -1 if header.iteration is None else header.iteration
    return (iteration, header.layer, header.tensor, header.micro_batch, header.rank, str(entry.path))
