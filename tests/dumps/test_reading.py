"""Dumps listed, shown and compared: in Python, with ``te-precision dumps``, and as in docs/gemm-error.md."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from te_precision_callbacks import cli, dumps
from te_precision_callbacks.dumps.contents import Direction, Header, Quantized, create_dump
from tests.docs.pages import blocks
from tests.drawn import normal
from tests.dumps.storages import some_mxfp8, some_nvfp4
from tests.manual.test_command import one_line
from tests.reference.processes import REPOSITORY, te_precision

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


def test_dumps_are_listed_by_iteration_and_layer(folder: Path) -> None:
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
    with pytest.raises(dumps.DumpError, match=r"nowhere: there is no such file$"):
        dumps.load(folder / "nowhere")


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
    dumps.save(torch.full((2, 3), float("inf")), tmp_path / "b")
    (nothing,) = json.loads(run("show", tmp_path / "b", "--json"))["tensors"]
    assert (nothing["minimum"], nothing["mean"], nothing["inf"]) == ("nan", "nan", 6)
    output = run("show", tmp_path / "a")
    for words in ("decoder.fc1", "rowwise_block_scale_inv", "high_precision"):
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
    outputs = [run(*arguments) for arguments in (("list", tmp_path), ("show", path))]
    outputs += [run(*arguments, "--json") for arguments in (("list", tmp_path), ("show", path))]
    for output in outputs:
        assert all(character.isprintable() or character == "\n" for character in output)
    assert outputs[0].count(seen) >= 3, "layer and tensor, and what is damaged"
    assert outputs[1].count(seen) >= 4, "layer, tensor, recipe and the tensor of that name"
    done = te_precision("dumps", "show", str(damaged))
    assert done.returncode == 2
    assert seen in done.stderr
    assert all(character.isprintable() or character == "\n" for character in done.stderr)


def test_a_matrix_of_nvfp4_has_all_dimensions_beside_the_tensor(tmp_path: Path) -> None:
    """A storage class with columnwise data only is read as a matrix."""
    x = normal(2, 32, 64).bfloat16()
    quantizer = te.NVFP4Quantizer(tex.DType.kFloat4E2M1)
    quantizer.internal = True
    quantizer.set_usage(rowwise=False, columnwise=True)
    columns = quantizer(x)
    for high_precision, shape in ((x, (2, 32, 64)), (None, (64, 64))):
        dumps.save(columns, tmp_path / "a", high_precision=high_precision)
        loaded = dumps.load(tmp_path / "a")
        assert loaded.header.quantized.shape == shape
        numbers = dumps.dequantize(loaded, columnwise=True, dtype=torch.float32)
        assert numbers.shape == shape
        assert 0 < (x.double() - numbers.double().reshape(x.shape)).abs().max() < 1


# ---------------------------------------------------------------------- the page


PAGE = (REPOSITORY / "docs" / "gemm-error.md").read_text()


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    saving, reading, difference, by_hand = blocks("docs/gemm-error.md", "python")[1:]
    names: dict[str, object] = {}
    exec(saving, names)
    exec(reading, names)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[:2]] == [["100", "fc1"], ["101", "fc1"]]
    assert torch.equal(names["numbers"], names["quantized"].dequantize())  # type: ignore[attr-defined, arg-type]
    exec(difference, names)
    error = (names["x"].double() - names["numbers"].double()).abs()  # type: ignore[attr-defined]
    result = re.fullmatch(r"largest error (\S+) at \((\d+), (\d+)\), SQNR 3\d\.\d dB\n", capsys.readouterr().out)
    assert result is not None
    assert error[int(result[2]), int(result[3])] == error.max() == pytest.approx(float(result[1]), rel=1e-2)
    exec(by_hand, names)
    assert sorted(os.listdir("logs")) == ["fc1.safetensors", "plain.safetensors"]
    (commands,) = blocks("docs/gemm-error.md", "bash")
    codes = [CliRunner().invoke(cli.app, line.split()[1:]).exit_code for line in commands.splitlines()]
    assert codes == [0, 0]


def test_the_table_has_every_name() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.* \|$", PAGE, re.MULTILINE)
    named = {row.replace("S_", "rowwise_") if row.startswith("S_") else row.replace("_S", "_rowwise") for row in rows}
    written = {"quantized", "transpose", "data", "scale_inv"}  # of Float8 and plain tensors
    for quantized in (some_mxfp8(), some_nvfp4()):
        written |= create_dump(Header(), torch.ones(1), quantized).complete().keys()
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
