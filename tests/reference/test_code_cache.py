"""Code of rewritten modules is kept for the next process, and what is kept never stands for something else."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks.reference import importer
from te_precision_callbacks.reference.importer import RewritingLoader

MOMENT = 1_700_000_000


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return written(tmp_path / "mine.py", 'DEVICE = "cuda"\n')


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    os.utime(file, (MOMENT, MOMENT))
    return file


def device(source: Path, *, cuda_on_cpu: bool = True) -> str:
    names: dict[str, Any] = {}
    exec(RewritingLoader("mine", str(source), cuda_on_cpu).get_code("mine"), names)
    return str(names["DEVICE"])


def kept(source: Path) -> list[Path]:
    folder = source.parent / "__pycache__"
    return sorted(folder.iterdir()) if folder.exists() else []


def test_what_was_kept_is_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device(source) == "cpu"
    (file,) = kept(source)
    with monkeypatch.context() as patch:
        patch.setattr(RewritingLoader, "source_to_code", None)
        assert device(source) == "cpu"
    assert device(source, cuda_on_cpu=False) == "cuda"
    assert device(source) == "cpu"
    monkeypatch.setattr(importer, "_rewriter", lambda: "another")
    assert device(source) == "cpu"
    assert len(kept(source)) == 3
    assert file in kept(source)


def test_a_changed_source_is_rewritten_again(source: Path) -> None:
    assert device(source) == "cpu"
    written(source, 'DEVICE = "meta" or "cuda"\n')
    assert device(source) == "meta"


@pytest.mark.parametrize("damage", [b"", b"\x00", b"N", b"no code at all"])
def test_a_damaged_entry_is_written_again(source: Path, damage: bytes) -> None:
    assert device(source) == "cpu"
    (file,) = kept(source)
    whole = file.read_bytes()
    file.write_bytes(damage)
    assert device(source) == "cpu"
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_no_error(source: Path) -> None:
    (source.parent / "__pycache__").write_text("a file")
    assert device(source) == "cpu"


def test_pythons_own_bytecode_stays(source: Path) -> None:
    importer.SourceFileLoader("mine", str(source)).get_code("mine")
    (own,) = kept(source)
    before = own.read_bytes()
    assert device(source) == "cpu"
    assert own.read_bytes() == before
    assert len(kept(source)) == 2
