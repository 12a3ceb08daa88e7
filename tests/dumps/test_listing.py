"""What a listing does with what is no file that can be read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_precision_callbacks import dumps


@contextlib.contextmanager
def somebody_with_few_rights() -> Iterator[None]:
    """Root may look into every folder: in this block it is somebody else."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_folders_that_may_not_be_read() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are not for others
        folder = Path(name)
        folder.chmod(0o755)
        dumps.save(torch.ones(2), folder / "one.safetensors")
        secret = folder / "secret"
        secret.mkdir(mode=0)
        with somebody_with_few_rights():
            found = dumps.list(folder)
            with pytest.raises(dumps.DumpError, match=r"secret: cannot be read: Permission denied\.$"):
                dumps.list(secret)
    assert len(found) == 1
    assert [(file.path, file.why) for file in found.foreign] == [(secret, "cannot be read: Permission denied")]
