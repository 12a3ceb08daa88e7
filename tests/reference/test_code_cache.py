"""Code of rewritten modules is kept for the next process, and what is kept never stands for something else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from te_precision_callbacks.reference.code_cache import CachedCode

SOURCE = b"cuda = 1\n"
CODE = compile(SOURCE, "linear.py", "exec")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path / "te-precision-callbacks" / "rewritten"


def test_what_was_kept_is_read() -> None:
    assert CachedCode(SOURCE, "linear.py", "how").read() is None
    CachedCode(SOURCE, "linear.py", "how").write(CODE)
    found = CachedCode(SOURCE, "linear.py", "how").read()
    assert found == CODE
    for other in (
        CachedCode(b"cuda = 2\n", "linear.py", "how"),
        CachedCode(SOURCE, "b.py", "how"),
        CachedCode(SOURCE, "linear.py", ""),
    ):
        assert other.read() is None


@pytest.mark.parametrize("damage", [b"", b"\x00", b"N", b"no code at all"])
def test_a_damaged_entry_is_none(folder: Path, damage: bytes) -> None:
    entry = CachedCode(SOURCE, "linear.py", "how")
    entry.write(CODE)
    (file,) = folder.iterdir()
    file.write_bytes(damage)
    assert entry.read() is None
    entry.write(CODE)
    assert entry.read() == CODE


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.write_text("a file")
    entry = CachedCode(SOURCE, "linear.py", "how")
    entry.write(CODE)
    assert entry.read() is None
    folder.parent.unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    entry.write(CODE)
    assert not folder.exists()
