"""docs/dumps.md: its code as it stands there, its table, and its words about the header."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from te_precision_callbacks import cli, dumps
from te_precision_callbacks.dumps.contents import dump_of
from te_precision_callbacks.dumps.header import Direction, Header, Quantized
from tests.docs.pages import blocks
from tests.dumps.storages import some_mxfp8, some_nvfp4
from tests.reference.processes import REPOSITORY

PAGE = (REPOSITORY / "docs" / "dumps.md").read_text()


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    saving, reading, by_hand = blocks("docs/dumps.md", "python")
    names: dict[str, object] = {}
    exec(saving, names)
    exec(reading, names)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[:2]] == [["100", "fc1"], ["101", "fc1"]]
    assert printed[2].startswith("high_precision / rowwise 0.")
    quantized = names["quantized"]
    assert torch.equal(names["numbers"], quantized.dequantize())  # type: ignore[attr-defined, arg-type]
    exec(by_hand, names)
    assert sorted(os.listdir("logs")) == ["fc1.safetensors", "plain.safetensors"]
    (commands,) = blocks("docs/dumps.md", "bash")
    codes = [CliRunner().invoke(cli.app, line.split()[1:]).exit_code for line in commands.splitlines()]
    assert codes == [0, 0, 1]


def test_the_table_has_every_name() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.* \|$", PAGE, re.MULTILINE)
    named = {row.replace("S_", "rowwise_") if row.startswith("S_") else row.replace("_S", "_rowwise") for row in rows}
    written = {"quantized", "transpose", "data", "scale_inv"}  # of Float8 and plain tensors
    for quantized in (some_mxfp8(), some_nvfp4()):
        written |= dump_of(torch.ones(1), quantized).complete().keys()
    assert written <= named


def test_the_table_has_every_key_of_the_header(tmp_path: Path) -> None:
    dumps.save(some_nvfp4(), tmp_path / "a")
    with safe_open(tmp_path / "a", "pt") as file:
        header = json.loads(file.metadata()["te_precision_dump"])
    assert header.keys() == {field.name for field in dataclasses.fields(Header)}
    table = PAGE[PAGE.index("**The header**") :]
    for kind in (Header, Quantized, Direction):
        for field in dataclasses.fields(kind):
            assert re.search(rf"`\S*\b{field.name}`", table), field.name
