"""Fingerprints as files in the folder of a checkpoint: one a rank.

te_precision_fingerprint.json          of rank 0
te_precision_fingerprint_rank-3.json   of rank 3

    write(fingerprint, folder)
    saved = read(folder, rank)    # rank -> fingerprint
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from te_precision_callbacks.runs.fingerprints.fingerprint import Fingerprint, FingerprintError

FILE_NAME = "te_precision_fingerprint.json"


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return FILE_NAME if rank == 0 else f"te_precision_fingerprint_rank-{rank}.json"


def write(fingerprint: Fingerprint, folder: Path) -> None:
    """Write a fingerprint; its file appears when it is complete, and replaces an earlier one.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / file_name(fingerprint.rank)
    beside = folder / f".{uuid.uuid4().hex}.incomplete"
    try:
        beside.write_text(fingerprint.to_text(), encoding="utf-8")
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def read(folder: Path, rank: int) -> dict[int, Fingerprint]:
    """The fingerprints of a checkpoint that a rank is compared with: its own, or those of all ranks if it has none.

    Args:
        folder: the folder of the checkpoint.
        rank: the rank.

    Returns:
        Rank -> fingerprint; empty for a checkpoint without fingerprints.

    Raises:
        FingerprintError: a file cannot be read, is damaged, or of another version.
    """
    own = folder / file_name(rank)
    found = {}
    for path in [own] if own.exists() else sorted(folder.glob("te_precision_fingerprint*.json")):
        try:
            fingerprint = Fingerprint.from_text(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FingerprintError(f"{path}: {error}") from error
        found[fingerprint.rank] = fingerprint
    return found
