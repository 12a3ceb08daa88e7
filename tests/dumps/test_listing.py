"""What a listing does with what is no file that can be read."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

from te_precision_callbacks import dumps


def test_a_link_to_itself_is_reported_aside(tmp_path: Path) -> None:
    dumps.save(torch.ones(2), tmp_path / "one.safetensors", layer="fc1")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    found = dumps.list(tmp_path)
    assert [entry.header.layer for entry in found if entry.header is not None] == ["fc1"]
    assert [file.path.name for file in found.foreign] == ["loop"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into every folder")
def test_folders_that_may_not_be_read(tmp_path: Path) -> None:
    dumps.save(torch.ones(2), tmp_path / "one.safetensors")
    secret = tmp_path / "secret"
    secret.mkdir(mode=0)
    found = dumps.list(tmp_path)
    assert len(found) == 1
    assert [(file.path, file.why) for file in found.foreign] == [(secret, "cannot be read: Permission denied")]
    with pytest.raises(dumps.DumpError, match=r"secret: cannot be read: Permission denied\.$"):
        dumps.list(secret)


def test_an_archive_that_is_not_of_torch_save(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "notes.docx", "w") as archive:
        archive.writestr("word/document.xml", "notes")
    found = dumps.list(tmp_path)
    assert not len(found)
    assert [file.why for file in found.foreign] == ["a zip archive, but none of torch.save."]
