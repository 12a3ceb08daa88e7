"""The names of dump files: safe, and different for different tensors.

    file_stem("model.fc1", "activation", 0, file_format="safetensors")  # model.fc1.activation
    file_stem("model.fc1", "activation", 2, file_format="safetensors")  # model.fc1.activation.mb2
    file_stem("model.fc1", "activation", 0, file_format="torch")        # model_fc1_activation, as Transformer Engine
    numbered(folder, stem, ".safetensors")           # stem.safetensors, stem.1.safetensors, ...: the first free one

In names of safetensors files, a part of its SHA-256 is appended to a layer name that has characters other than
lower-case letters, digits, ``_``, ``-`` and single dots. No two layers then share a file name, even on file systems
that ignore case. Transformer Engine's names (2.20.2, ``debug/features/dump_tensors.py``) are equal for ``a.b`` and
``a_b``, and for all micro-batches; the first file gets the name, and a number is appended for the others.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from te_precision_callbacks.dumps.dump_files import TORCH

_MOST = 160
"""The most characters of a layer's name in a file name, which may have 255 bytes."""

_UNSAFE = re.compile(r"[^a-z0-9_.\-]", re.IGNORECASE)
_PLAIN = re.compile(r"[a-z0-9_\-]+(\.[a-z0-9_\-]+)*")
_UPSTREAM_REPLACES = re.compile(r'[/\\:*?"<>|. ]')
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def iteration_folder(folder: Path, rank: int, iteration: int) -> Path:
    """``tensor_dumps/rank_R/iter_XXXXXX`` in a log folder, as Transformer Engine has it."""
    return rank_folder(folder, rank) / f"iter_{iteration:06d}"


def rank_folder(folder: Path, rank: int) -> Path:
    """``tensor_dumps/rank_R`` in a log folder."""
    return folder / "tensor_dumps" / f"rank_{rank}"


def file_stem(layer: str, tensor: str, micro_batch: int, *, file_format: str) -> str:
    """The name of a dump's file, without its ending."""
    if file_format == TORCH:
        return _short("_".join(_CONTROL.sub("_", _UPSTREAM_REPLACES.sub("_", part)) for part in (layer, tensor)))
    parts = [_distinct(layer), _distinct(tensor)]
    return ".".join(parts if micro_batch == 0 else [*parts, f"mb{micro_batch}"])


def numbered(folder: Path, stem: str, suffix: str) -> Iterator[Path]:
    """The possible paths of a dump in a folder: the plain name, then with ``.1``, ``.2`` and so on appended."""
    yield folder / f"{stem}{suffix}"
    for count in itertools.count(1):
        yield folder / f"{stem}.{count}{suffix}"


def _distinct(name: str) -> str:
    if len(name) <= _MOST and _PLAIN.fullmatch(name):
        return name
    # A lone surrogate, which a name on disk may have, has no UTF-8.
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{_UNSAFE.sub('_', name).lstrip('.')[:_MOST]}-{digest}"


def _short(name: str) -> str:
    encoded = name.encode("utf-8", "surrogateescape") if name.isprintable() else name.encode("utf-8", "replace")
    if len(encoded) <= _MOST:
        return encoded.decode("utf-8", "surrogateescape")
    digest = hashlib.sha256(encoded).hexdigest()[:12]
    return f"{encoded[:_MOST].decode('utf-8', 'ignore')}-{digest}"
