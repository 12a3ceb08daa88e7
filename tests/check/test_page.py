"""docs/check.md: its code and its commands as they stand there."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.check.findings import FindingKind
from tests.docs.pages import ROOT, blocks

PAGE = "docs/check.md"

CONFIG = """
kept:
  enabled: True
  layers: {layer_types: [fc2, down_proj]}
  transformer_engine:
    DisableFP8GEMM: {enabled: True, gemms: [fprop]}
"""


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, of_transformers, use = blocks(PAGE, "python")
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "my_models.py").write_text(models)
    (tmp_path / "hf_models.py").write_text(of_transformers)
    monkeypatch.chdir(tmp_path)
    outputs = []
    for command in blocks(PAGE, "bash"):
        program, *arguments = shlex.split(command)
        assert program == "te-precision"
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code == 0, done.output
        outputs.append([line.split() for line in done.output.splitlines()])
    for drawn, output in zip(blocks(PAGE, "text"), outputs[1:], strict=True):
        for line in drawn.splitlines():
            assert line.split() in output, line
    del sys.modules["my_models"], sys.modules["hf_models"]

    names: dict[str, Any] = {}
    exec(compile(models, "my_models", "exec"), names)
    with torch.device("meta"):
        names["model"] = names["build"]()
    exec(compile(use, "use", "exec"), names)


def test_the_kinds_of_findings_are_on_the_page() -> None:
    text = (ROOT / PAGE).read_text()
    for kind in get_args(FindingKind):
        assert f"| `{kind}` |" in text
