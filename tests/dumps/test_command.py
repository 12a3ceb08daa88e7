"""Dumps listed in Python, and ``te-precision dumps``."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from te_precision_callbacks import cli, dumps
from tests.dumps.storages import some_mxfp8
from tests.manual.test_command import one_line
from tests.reference.processes import te_precision

X = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for iteration in (10, 9):
        for layer in ("b", "a"):
            path = tmp_path / "rank_0" / f"iter_{iteration:06d}" / f"{layer}.safetensors"
            dumps.save(some_mxfp8(seed=iteration), path, high_precision=X, layer=layer, iteration=iteration)
    (tmp_path / "rank_0" / "notes.safetensors").write_text("not a tensor")
    (tmp_path / ".hidden.incomplete").write_bytes(b"PK\x03\x04")
    return tmp_path


def run(*arguments: Any, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, ["dumps", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code
    return done.output


def test_list(folder: Path) -> None:
    result = dumps.list(folder)
    assert [(entry.header.iteration, entry.header.layer) for entry in result] == [
        (9, "a"),
        (9, "b"),
        (10, "a"),
        (10, "b"),
    ]
    assert result[0].size == result[0].path.stat().st_size
    (foreign,) = result.foreign
    assert foreign.path.name == "notes.safetensors"
    assert foreign.why.startswith("not a dump, or damaged")
    assert len(dumps.list(result[0].path)) == 1
    with pytest.raises(dumps.DumpError, match="there is no such folder"):
        dumps.list(folder / "nowhere")


def test_list_command(folder: Path) -> None:
    output = run("list", folder)
    lines = output.splitlines()
    places = [
        next(i for i, line in enumerate(lines) if f"iter_{n:06d}/{layer}." in line) for n in (9, 10) for layer in "ab"
    ]
    assert places == sorted(places)
    assert "bfloat16, MXFP8TensorStorage" in lines[places[0]]
    assert re.search(r"not a dump: \S*notes.safetensors", one_line(output))
    answer = json.loads(run("list", folder, "--json"))
    assert [entry["header"]["iteration"] for entry in answer["dumps"]] == [9, 9, 10, 10]
    assert [Path(file["path"]).name for file in answer["foreign"]] == ["notes.safetensors"]
    for number in range(4):
        (folder / f"events{number}.safetensors").write_text("no dump")
    assert "and 2 more; --json lists them." in run("list", folder)


def test_show_command(tmp_path: Path) -> None:
    x = X.clone()
    x[0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    dumps.save(some_mxfp8(), tmp_path / "a", high_precision=x, layer="decoder.fc1", iteration=7)
    answer = json.loads(run("show", tmp_path / "a", "--json"))
    assert answer["header"]["layer"] == "decoder.fc1"
    numbers = {tensor["name"]: tensor for tensor in answer["tensors"]}
    finite = x[x.isfinite()].double()
    high = numbers["high_precision"]
    assert (high["minimum"], high["maximum"]) == (float(finite.min()), float(finite.max()))
    assert high["mean"] == pytest.approx(float(finite.mean()))
    assert (high["nan"], high["inf"], high["zeros"]) == (1, 1, int((x == 0).sum()))
    assert [error["what"] for error in answer["quantization_error"]] == ["high_precision / rowwise"]
    assert answer["quantization_error"][0]["nan"] == [1, 0]
    output = run("show", tmp_path / "a")
    for words in ("decoder.fc1", "rowwise_block_scale_inv", "high_precision / rowwise", "SQNR dB"):
        assert words in output


@pytest.mark.processes
def test_a_terminal_gets_no_control_characters(tmp_path: Path) -> None:
    """From a header, from the names of tensors, and in messages; also where they are no ASCII, or turn text around."""
    bad = "x\x1b]0;title\x07\x9b31m\u202e[red]\r\n"
    seen = r"x\x1b]0;title\x07\x9b31m\u202e[red]\r\n"
    path = tmp_path / "a.safetensors"
    dump = dumps.save(some_mxfp8(), path, high_precision=X, layer=bad, tensor_name=bad, recipe=bad)
    tensors = {name: tensor.contiguous() for name, tensor in dump.complete().items()} | {bad: X.clone()}
    save_file(tensors, path, metadata={"te_precision_dump": dump.header.to_json()})
    (tmp_path / f"foreign\x1b[31m{bad[-5]}.safetensors").write_text("text")
    damaged = tmp_path / "damaged.safetensors"
    header = dump.header.to_json().replace('"bfloat16"', json.dumps(bad))
    save_file(tensors, damaged, metadata={"te_precision_dump": header})
    outputs = [run(*arguments) for arguments in (("list", tmp_path), ("show", path), ("diff", path, path))]
    outputs += [run(*arguments, "--json") for arguments in (("list", tmp_path), ("show", path))]
    for output in outputs:
        assert all(character.isprintable() or character == "\n" for character in output)
    assert outputs[0].count(seen) >= 3, "layer and tensor, and what is damaged"
    assert outputs[1].count(seen) >= 4, "layer, tensor, recipe and the tensor of that name"
    done = te_precision("dumps", "show", str(damaged))
    assert done.returncode == 2
    assert seen in done.stderr
    assert all(character.isprintable() or character == "\n" for character in done.stderr)


def test_diff_command(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("same", 0), ("b", 1)):
        dumps.save(some_mxfp8(seed=seed), tmp_path / name, high_precision=X)
    assert "The dumps are equal." in run("diff", tmp_path / "a", tmp_path / "same")
    assert "The dumps differ." in run("diff", tmp_path / "a", tmp_path / "b", code=1)
    answer = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json", code=1))
    assert answer["equal"] is False
    high, rowwise = answer["differences"]
    assert (high["what"], high["differing"], high["sqnr_db"]) == ("high_precision", 0, "inf")
    assert rowwise["internals"]["codes_differing"] > 0
