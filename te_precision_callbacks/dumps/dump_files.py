"""Writes and reads dump files: safetensors, or Transformer Engine's own form of a pickled dictionary.

Usage::

    write(dump, "fc1_activation.safetensors")
    write(dump, "fc1_activation.pt", "torch")
    write_new(dump, numbered(folder, "fc1_activation", ".safetensors"))  # names.py; never replaces another file
    dump = load("fc1_activation.safetensors")

A file appears under its name only when it is complete, so a process that is killed leaves only complete files. It may
also leave a file whose name ends with ``.incomplete``, on Linux only while a file is replaced. Reading never unpickles
unless told to.

The safetensors format (huggingface/safetensors, "Format"): 8 bytes with the length of a JSON object, little-endian; the
object, name -> dtype, shape, and where the data lie; the data. The library's own ``save_file`` leaves a temporary file
behind when it is killed, and ``save`` copies all tensors with the interpreter locked, which would stop training. The
format is therefore written here, and read by the library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from te_precision_callbacks.base.opening import own_file
from te_precision_callbacks.dumps.contents import Dump, dump_of, unshared
from te_precision_callbacks.dumps.errors import DumpError, NotADumpError, PickleRefusedError
from te_precision_callbacks.dumps.header import HIGH_PRECISION, QUANTIZED, Header, check

SAFETENSORS, TORCH = "safetensors", "torch"
"""The file formats."""

SUFFIXES = {SAFETENSORS: ".safetensors", TORCH: ".pt"}
"""The end of a file's name in each format."""

METADATA_KEY = "te_precision_dump"
"""Where the header is in the metadata of a safetensors file."""

HEADER_RECORD = "te_precision_dump.json"
"""Where the header is in the zip archive that ``torch.save`` writes. ``torch.load`` does not look at it."""

TEMPORARY_SUFFIX = ".incomplete"
"""The suffix of incomplete files, whose names start with a dot, on systems without unnamed files."""

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
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_PIECE = 1 << 24
_MOST_HEADER = 1 << 24
"""The most bytes of a header; in an archive the size is known only after unpacking."""


def write(dump: Dump, path: str | os.PathLike[str], file_format: str = SAFETENSORS, *, fsync: bool = False) -> int:
    """Write a dump; replaces an existing file.

    Args:
        dump: the dump.
        path: the file. Its folder is created if missing.
        file_format: ``"safetensors"``, or ``"torch"``: a dictionary, pickled by ``torch.save``, with Transformer
            Engine's keys ``"high_precision"`` and ``"quantized"``, its tensor, and the internals.
        fsync: wait until the file is on the disk, so it survives a power failure.

    Returns:
        The file's size in bytes.

    Raises:
        DumpError: the file cannot be written (disk full, no permission), or the dump does not fit the format. No part
            of the file is then left, and an existing file is unchanged.
    """
    return _write(dump, iter((Path(path),)), file_format, replace=True, fsync=fsync)


def write_new(dump: Dump, paths: Iterator[Path], file_format: str = SAFETENSORS) -> int:
    """Write a dump to the first free one of several paths in one folder, even if other processes write there.

    Args:
        dump, file_format: as in :func:`write`.
        paths: an endless iterator, as from :func:`te_precision_callbacks.dumps.file_names.numbered`.

    Returns:
        The file's size in bytes.

    Raises:
        DumpError: as :func:`write`.
    """
    return _write(dump, paths, file_format, replace=False, fsync=False)


def _write(dump: Dump, paths: Iterator[Path], file_format: str, *, replace: bool, fsync: bool) -> int:
    path = next(paths)
    if file_format not in _WRITERS:
        raise DumpError(f"file_format must be {SAFETENSORS!r} or {TORCH!r}, not {file_format!r}.")
    dump.wait()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _appearing(itertools.chain((path,), paths), path.parent, replace=replace, fsync=fsync) as file:
            _WRITERS[file_format](dump, file)
            file.flush()
            return os.fstat(file.fileno()).st_size
    except (OSError, RuntimeError) as error:
        reason = _os_error(error)
        if reason is None:
            raise
        why = "the disk is full" if reason.errno in (errno.ENOSPC, errno.EDQUOT) else reason.strerror or str(reason)
        raise DumpError(f"{path}: cannot be written: {why}. No part of the file is left.") from reason


def _os_error(error: BaseException | None) -> OSError | None:
    """The system's error behind an exception; torch.save raises a RuntimeError while it handles that error."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def load(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> Dump:
    """Load a dump from a file of either format, to the CPU.

    Args:
        path: the file.
        allow_pickle: also read files of the format "torch" (and Transformer Engine's own dumps), by unpickling them.
            This runs any code in the file, and needs Transformer Engine if the file has its tensors.

    Raises:
        NotADumpError: there is no such file, or the file is of another kind, truncated, or damaged.
        LaterVersionError: a later version of this package has written the file.
        PickleRefusedError: the file is a pickle, and ``allow_pickle`` is not set.
    """
    path = Path(path)
    if file_format_of(path) == TORCH:
        if not allow_pickle:
            raise PickleRefusedError(
                f"{path}: a pickle, of torch.save, where a safetensors file is expected. Unpickling can run any code"
                " that is in the file. If you trust it: load(path, allow_pickle=True), or --allow-pickle."
            )
        return _read_torch(path)
    with _naming(path), _opened(path) as file:
        header = _safetensors_header(file)
        try:
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        except (SafetensorError, AttributeError, TypeError, ValueError) as error:
            raise NotADumpError(f"torch {torch.__version__} cannot read its tensors: {error}.") from error
        check(header, tensors)
        return Dump(header, tensors)


def read_header(path: str | os.PathLike[str]) -> Header | None:
    """Read only the header, not the tensors; None for a pickle that this package has not written.

    Raises:
        NotADumpError, LaterVersionError: as :func:`load`.
    """
    path = Path(path)
    if file_format_of(path) == TORCH:
        return _torch_header(path)
    with _naming(path), _opened(path) as file:
        return _safetensors_header(file)


def file_format_of(path: str | os.PathLike[str]) -> str:
    """Tells ``"safetensors"`` from ``"torch"`` by the first bytes of a file.

    Raises:
        NotADumpError: there is no such file, or its first bytes fit neither format.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise NotADumpError(f"{path}: {'a folder' if path.is_dir() else 'there is no such file'}.")
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise NotADumpError(f"{path}: cannot be read: {error.strerror or error}.") from error
    if start.startswith(_ZIP) or (start.startswith(_PICKLE) and not start.endswith(b"{")):
        return TORCH
    if len(start) == 9 and start.endswith(b"{"):
        return SAFETENSORS
    raise NotADumpError(f"{path}: neither a safetensors file nor a file of torch.save ({path.stat().st_size} bytes).")


def _write_safetensors(dump: Dump, file: IO[bytes]) -> None:
    tensors = dump.complete()
    if QUANTIZED not in tensors and dump.header.quantized is not None:
        for direction in (dump.header.quantized.rowwise, dump.header.quantized.columnwise):
            if direction is not None and direction.data not in tensors:
                raise DumpError(
                    f"The dump of {dump.header.tensor!r} holds a {dump.header.quantized.class_name} without internals,"
                    f" for a file of the format {TORCH!r}. Make it with internals=True, or keep_quantized=False."
                )
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
        # numpy's view of a copy: memory that numpy has seen cannot be resized any more, as FSDP2 does with parameters.
        for start in range(0, flat.numel(), _PIECE):
            array: Any = flat[start : start + _PIECE].clone().numpy()
            file.write(memoryview(array))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:  # removed meanwhile
        raise
    except (SafetensorError, OSError) as error:
        raise NotADumpError(f"truncated, damaged, or not a safetensors file: {error}.") from error


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name in front of error messages."""
    try:
        yield
    except DumpError as error:
        raise type(error)(f"{path}: {error}") from error.__cause__


def _safetensors_header(file: Any) -> Header:
    text = (file.metadata() or {}).get(METADATA_KEY)
    if text is None:
        raise NotADumpError(f"a safetensors file, but not a dump: its metadata have no {METADATA_KEY!r}.")
    return Header.from_json(text)


def _write_torch(dump: Dump, file: IO[bytes]) -> None:
    quantized = dump.header.quantized
    content = dump.complete()
    if quantized is not None and QUANTIZED not in content and dump.original is None:
        raise DumpError(
            f"The dump of {dump.header.tensor!r} does not hold the {quantized.class_name} itself, which a file of the"
            f" format {TORCH!r} has under {QUANTIZED!r}. Make it with keep_quantized=True."
        )
    # A view is pickled with all of its underlying memory.
    pickled: dict[str, Any] = {name: unshared(tensor) for name, tensor in content.items()}
    if dump.original is not None:
        pickled = {QUANTIZED: dump.picklable(), **pickled}
    torch.save(pickled, file)
    file.seek(0)
    with zipfile.ZipFile(file, "a") as archive:
        folder = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{folder}/{HEADER_RECORD}", dump.header.to_json())


_WRITERS = {SAFETENSORS: _write_safetensors, TORCH: _write_torch}


def _read_torch(path: Path) -> Dump:
    header = _torch_header(path)
    try:
        # From a file without a name: torch.load goes by the name if that ends in .safetensors.
        with path.open("rb") as file:
            content = torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever the code in a file raises
        raise NotADumpError(
            f"{path}: cannot be unpickled: {error}. The file is damaged, or of another kind, or holds tensors of a"
            f" Transformer Engine that is not installed here, which a dump in the format {SAFETENSORS!r} does not need."
        ) from error
    if not isinstance(content, Mapping) or not content.keys() & {HIGH_PRECISION, QUANTIZED}:
        raise NotADumpError(f"{path}: a pickle, but not a dump: it has neither {HIGH_PRECISION!r} nor {QUANTIZED!r}.")
    quantized = content.get(QUANTIZED)
    derived = dump_of(content.get(HIGH_PRECISION), quantized, keep_quantized=quantized is not None)
    tensors = {**derived.tensors, **{name: value for name, value in content.items() if type(value) is torch.Tensor}}
    if header is None:
        # Only the path shows where Transformer Engine's own dump is from, and nothing shows when it was made.
        header = dataclasses.replace(derived.header, versions={}, time="")
    with _naming(path):
        check(header, tensors)
    return Dump(header, tensors, original=derived.original)


def _torch_header(path: Path) -> Header | None:
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            if file.read(len(_ZIP)) == _ZIP:
                raise NotADumpError(f"{path}: truncated or damaged: a zip archive without its end.")
        return None
    with _naming(path):
        try:
            text = _header_record(path)
        except (FileNotFoundError, NotADumpError):  # removed meanwhile; not an archive of torch.save
            raise
        except Exception as error:  # whatever zipfile and its decompressors raise for damaged bytes
            raise NotADumpError(f"truncated or damaged: {type(error).__name__}: {error}.") from error
        if text is not None and len(text) > _MOST_HEADER:
            raise NotADumpError(f"its {HEADER_RECORD} has more than {_MOST_HEADER:,} bytes, too many for a header.")
        return None if text is None else Header.from_json(text)


def _header_record(path: Path) -> bytes | None:
    """The header in the archive, cut off after the largest allowed size; None if there is none."""
    with zipfile.ZipFile(path) as archive:
        if not any(name.endswith("/data.pkl") for name in archive.namelist()):
            raise NotADumpError("a zip archive, but none of torch.save.")
        names = [name for name in archive.namelist() if name.endswith(f"/{HEADER_RECORD}")]
        if not names:
            return None
        with archive.open(names[0]) as record:
            return record.read(_MOST_HEADER + 1)


@contextlib.contextmanager
def _appearing(paths: Iterator[Path], folder: Path, *, replace: bool, fsync: bool) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends without an exception.

    Args:
        paths: the file gets the first path; without ``replace`` the first path that is free.
        folder: the folder of the paths.
        replace: whether an existing file is replaced.
        fsync: wait until the file is on the disk.
    """
    file = _nameless(folder)
    if file is None:
        with _hidden(paths, folder, replace=replace, fsync=fsync) as file:
            yield file
        return
    with file:
        yield file
        _sync(file, fsync)
        source = f"/proc/self/fd/{file.fileno()}"
        for path in paths:
            try:
                _link(file, source, path)
                break
            except FileExistsError:
                if not replace:
                    continue
                # A link does not replace, a rename does.
                beside = _beside(folder)
                _link(file, source, beside)
                try:
                    os.replace(beside, path)
                except OSError:
                    beside.unlink()
                    raise
    _sync_folder(folder, fsync)


def _nameless(folder: Path) -> IO[bytes] | None:
    """A file without a name, which vanishes with the process; None if the system has no such files."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), "w+b")
    except OSError as error:
        # From a file system without such files, a network's for example; EISDIR: from such a kernel.
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return None
        raise


def _link(file: IO[bytes], source: str, path: Path) -> None:
    # With src_dir_fd Python calls linkat, which follows the symbolic link; without it, link, which does not.
    os.link(source, path, src_dir_fd=file.fileno(), follow_symlinks=True)


@contextlib.contextmanager
def _hidden(paths: Iterator[Path], folder: Path, *, replace: bool, fsync: bool) -> Iterator[IO[bytes]]:
    """Like :func:`_appearing`, but the file has a hidden name, which is never listed, until it is complete."""
    beside = _beside(folder)
    try:
        with open(beside, "w+b", opener=own_file) as file:
            yield file
            _sync(file, fsync)
        if replace:
            os.replace(beside, next(paths))
        else:
            _rename_to_first_free(beside, paths)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(folder, fsync)


def _rename_to_first_free(source: Path, paths: Iterator[Path]) -> None:
    # A rename replaces an existing file. So the name is first taken with an empty file, which nobody else then takes: a
    # link would do both at once, but some file systems have no links.
    for path in paths:
        try:
            path.open("xb").close()
        except FileExistsError:
            continue
        try:
            os.replace(source, path)
        except OSError:
            path.unlink()
            raise
        return


def _beside(folder: Path) -> Path:
    return folder / f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"


def _sync(file: IO[bytes], fsync: bool) -> None:
    file.flush()
    if fsync:
        os.fsync(file.fileno())


def _sync_folder(folder: Path, fsync: bool) -> None:
    if fsync:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
