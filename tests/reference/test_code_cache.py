"""Code of rewritten modules is kept for the next process, and what is kept never stands for something else."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import CodeType

import pytest

from te_precision_callbacks.reference import code_cache
from te_precision_callbacks.reference.code_cache import KEPT_DAYS, CachedCode
from te_precision_callbacks.reference.importer import RewritingLoader

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


def test_what_is_long_unused_is_removed_once_a_process(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, days in (("old", KEPT_DAYS + 1), ("recent", KEPT_DAYS - 1)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - days * 86_400,) * 2)
    for how in ("first", "second"):
        CachedCode(SOURCE, "linear.py", how).write(CODE)
    assert {path.name.partition("-")[0] for path in folder.iterdir()} == {"recent", "linear"}
    assert code_cache._remove_old.cache_info().hits >= 1


def test_a_loader_takes_what_was_kept(folder: Path, tmp_path: Path) -> None:
    """Where it lies, and not what is read, says that the second loader did not rewrite: both give the same code."""
    path = tmp_path / "module.py"
    path.write_text('import torch\nwhere = torch.device("cuda")\n')
    first = _loaded(path)
    (file,) = folder.iterdir()
    written = file.stat().st_mtime_ns
    assert _loaded(path) == first
    assert file.stat().st_mtime_ns == written
    path.write_text('import torch\nwhere = torch.device("cuda", 1)\n')
    assert _loaded(path) != first
    assert len(list(folder.iterdir())) == 2


def _loaded(path: Path) -> CodeType:
    from te_precision_callbacks.reference import importer

    importer._code_of.cache_clear()  # as in another process
    code = RewritingLoader("module", str(path), cuda_on_cpu=True).get_code("module")
    assert code is not None
    return code
