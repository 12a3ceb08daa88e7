"""Dumps listed, shown and compared: in Python, with ``te-precision dumps``, and as in docs/dumps.md."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from te_precision_callbacks import cli, dumps
from te_precision_callbacks.dumps import difference
from te_precision_callbacks.dumps.contents import Dump, create_dump
from te_precision_callbacks.dumps.header import Direction, Header, Quantized
from tests.docs.pages import blocks
from tests.drawn import normal
from tests.dumps.storages import mxfp8, random_bytes, some_mxfp8, some_nvfp4
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


# ---------------------------------------------------------------------- compared, against numpy


INF, NAN = math.inf, math.nan


def plain(tensor: torch.Tensor) -> Dump:
    return create_dump(tensor, None, tensor="activation")


@pytest.mark.parametrize("piece", [1 << 16, 100], ids=["one piece", "pieces"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_high_precision(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece: int) -> None:
    monkeypatch.setattr(difference, "_PIECE", piece)
    a = normal(3, 50, 7).to(dtype)
    b = a.clone()
    b[:, 10:30] += (0.01 * normal(3, 20, 7, seed=1)).to(dtype)
    b[2, 20, 5] = a[2, 20, 5] + 9
    result = dumps.compare(plain(a), plain(b))
    (actual,) = result.differences
    x, y = a.double().numpy(), b.double().numpy()
    error = np.abs(x - y)
    assert not result.equal
    assert actual.what == "high_precision"
    assert actual.differing == np.count_nonzero(x != y) > 300
    assert actual.share == actual.differing / 1050
    assert actual.max_abs_error == error.max()
    assert actual.max_at == (2, 20, 5)
    assert actual.mean_abs_error == pytest.approx(error.mean(), rel=1e-12)
    assert actual.sqnr_db == pytest.approx(10 * np.log10(np.sum(x**2) / np.sum(error**2)), rel=1e-12)
    assert (actual.nan, actual.inf, actual.internals) == ((0, 0), (0, 0), None)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    a = torch.tensor([1.0, NAN, INF, INF, -INF, 2.0, 0.0, NAN])
    b = torch.tensor([1.0, NAN, INF, -INF, 3.0, 2.5, -0.0, 4.0])
    (result,) = dumps.compare(plain(a), plain(b)).differences
    assert result.differing == 4  # not NaN and NaN, nor 0 and -0
    assert (result.nan, result.inf) == ((2, 1), (3, 2))
    assert (result.max_abs_error, result.max_at) == (0.5, (5,))
    assert result.mean_abs_error == 0.5 / 3
    assert result.sqnr_db == pytest.approx(10 * math.log10((1 + 4) / 0.25))


@pytest.mark.parametrize(
    ("a", "b", "sqnr"),
    [([NAN, INF], [NAN, INF], NAN), ([0.0], [1.0], -INF), ([0.0], [0.0], INF), ([], [], NAN)],
    ids=["nothing finite", "no signal", "zeros", "empty"],
)
def test_sqnr_at_its_ends(a: list[float], b: list[float], sqnr: float) -> None:
    (result,) = dumps.compare(plain(torch.tensor(a)), plain(torch.tensor(b))).differences
    assert result.sqnr_db == pytest.approx(sqnr, nan_ok=True)


def test_the_counts_of_codes_and_scales() -> None:
    codes, scales = random_bytes(40, 96, seed=0), torch.full((40, 3), 127, dtype=torch.uint8)
    other_codes, other_scales = codes.clone(), scales.clone()
    other_codes[7, 70:73] ^= 1
    other_codes[30, 0] ^= 1
    other_scales[9, 0] += 1
    other_scales[2, 1] -= 3
    result = dumps.compare(create_dump(None, mxfp8(codes, scales)), create_dump(None, mxfp8(other_codes, other_scales)))
    (actual,) = result.differences
    assert actual.what == "rowwise"
    assert (actual.internals.blocks, actual.internals.codes_differing, actual.internals.scales_differing) == (120, 4, 2)


def test_a_difference_that_the_numbers_do_not_show() -> None:
    """The same numbers from other codes with another scale."""
    codes, scales = torch.full((1, 32), 0x38, dtype=torch.uint8), torch.full((1, 1), 127, dtype=torch.uint8)
    result = dumps.compare(create_dump(None, mxfp8(codes, scales)), create_dump(None, mxfp8(codes + 8, scales - 1)))
    (actual,) = result.differences
    assert (actual.differing, actual.equal, result.equal) == (0, False, False)


def test_quantized_against_high_precision() -> None:
    x, quantized = normal(40, 96).bfloat16(), some_mxfp8()
    alone = dumps.compare(create_dump(x, quantized))
    apart = dumps.compare(create_dump(x, None), create_dump(None, quantized))
    for result in (alone, apart):
        (actual,) = result.differences
        assert actual.what == "high_precision / rowwise"
        error = (x.double() - quantized.dequantize(dtype=torch.float32).double()).abs()
        assert actual.max_abs_error == float(error.max())
        assert actual.mean_abs_error == pytest.approx(float(error.mean()))


def columnwise_nvfp4(x: torch.Tensor) -> Any:
    """A storage class with columnwise data only: it is read as a matrix."""
    quantizer = te.NVFP4Quantizer(tex.DType.kFloat4E2M1)
    quantizer.internal = True
    quantizer.set_usage(rowwise=False, columnwise=True)
    return quantizer(x)


def test_a_matrix_of_nvfp4_is_compared_with_all_dimensions(tmp_path: Path) -> None:
    x = normal(2, 32, 64).bfloat16()
    columns = columnwise_nvfp4(x)
    dumps.save(columns, tmp_path / "both", high_precision=x)
    both = dumps.load(tmp_path / "both")
    assert both.header.quantized.shape == (2, 32, 64)
    (result,) = dumps.compare(both).differences
    assert result.shape == (2, 32, 64)
    numbers = dumps.dequantize(both, columnwise=True, dtype=torch.float32)
    assert numbers.shape == (2, 32, 64)
    error = (x.double() - numbers.double()).abs()
    assert 0 < result.max_abs_error == float(error.max())
    # Alone it has no other dimensions than a matrix's.
    dumps.save(columns, tmp_path / "alone")
    alone = dumps.load(tmp_path / "alone")
    assert alone.header.quantized.shape == (64, 64)
    for pair in ((create_dump(x, None), alone), (alone, create_dump(x, None))):
        (again,) = dumps.compare(*pair).differences
        assert (again.max_abs_error, again.max_at, again.shape) == (result.max_abs_error, result.max_at, (2, 32, 64))
    (same,) = dumps.compare(create_dump(None, columnwise_nvfp4(x)), both).differences[:1]
    assert same.equal
    with pytest.raises(dumps.DifferentShapesError, match=r"\(2, 64, 32\)"):
        dumps.compare(create_dump(x.reshape(2, 64, 32), None), alone)


def test_two_formats_of_one_tensor() -> None:
    result = dumps.compare(create_dump(None, some_mxfp8(16, 32)), create_dump(None, some_nvfp4(16, 32)))
    (actual,) = result.differences
    assert actual.internals is None
    assert actual.differing > 0
    assert result.not_compared == (
        "rowwise: codes and scales, which are E4M3 in blocks of 1 x 32 in a and E2M1 in blocks of 1 x 16 in b",
    )


def test_different_shapes() -> None:
    with pytest.raises(dumps.DifferentShapesError, match=r"high_precision: a has the shape \(2, 3\) and b \(3, 2\)"):
        dumps.compare(plain(normal(2, 3)), plain(normal(3, 2)))
    with pytest.raises(dumps.DifferentShapesError, match="rowwise"):
        dumps.compare(create_dump(None, some_mxfp8(40, 96)), create_dump(None, some_mxfp8(96, 32)))


def test_nothing_to_compare() -> None:
    with pytest.raises(dumps.NothingToCompareError, match="quantized form in the dump"):
        dumps.compare(plain(normal(2, 3)))


# ---------------------------------------------------------------------- the page


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
    assert torch.equal(names["numbers"], names["quantized"].dequantize())  # type: ignore[attr-defined, arg-type]
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
        written |= create_dump(torch.ones(1), quantized).complete().keys()
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
