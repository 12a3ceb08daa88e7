"""Dump files: what is in them, that they appear whole or not at all, and what else is refused."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from te_precision_callbacks import dumps
from te_precision_callbacks.dumps import files
from te_precision_callbacks.dumps.contents import SCHEMA, dump_of
from tests.dumps.storages import random_bytes, some_mxfp8, some_nvfp4
from tests.reference.processes import REPOSITORY

X = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(params=["nameless", "hidden"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to let a file appear: without a name until then, and, where the system cannot, under another name."""
    if request.param == "hidden":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return str(request.param)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        assert torch.equal(tensor.contiguous().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# --- what is in a file ------------------------------------------------------------------------------------------------


def test_a_file_holds_both_tensors_and_where_they_are_from(tmp_path: Path, way: str) -> None:
    quantized = some_mxfp8()
    path = tmp_path / "deeper" / "dump.safetensors"
    dumps.save(
        quantized,
        path,
        high_precision=X,
        layer="decoder.fc1",
        tensor_name="activation",
        iteration=100,
        micro_batch=2,
        rank=3,
        recipe="MXFP8BlockScaling",
    )
    loaded = dumps.load(path)
    header = loaded.header
    assert (header.layer, header.tensor, header.iteration) == ("decoder.fc1", "activation", 100)
    assert (header.micro_batch, header.rank, header.recipe) == (2, 3, "MXFP8BlockScaling")
    assert header.versions["torch"] == torch.__version__
    assert header.versions.keys() == {"torch", "transformer_engine", "te_precision_callbacks"}
    assert header.high_precision is not None
    assert (header.high_precision.shape, header.high_precision.dtype) == ((40, 96), "bfloat16")
    assert header.quantized is not None
    assert header.quantized.rowwise is not None
    assert header.quantized.columnwise is None
    assert header.quantized.rowwise.block == (1, 32)
    assert header.quantized.rowwise.stored_scale_shape == (128, 4)
    assert torch.equal(loaded.tensors["high_precision"], X)
    assert torch.equal(dumps.dequantize(loaded), quantized.dequantize())
    assert dumps.dequantize(loaded).dtype == torch.bfloat16
    assert sorted(os.listdir(path.parent)) == ["dump.safetensors"]


def test_a_plain_tensor_alone(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(X)
    dumps.save(parameter, tmp_path / "a", tensor_name="weight")
    loaded = dumps.load(tmp_path / "a")
    assert loaded.header.quantized is None
    assert loaded.tensors.keys() == {"high_precision"}
    with pytest.raises(dumps.DumpError, match="'weight' has no quantized tensor"):
        dumps.dequantize(loaded)


def test_a_fake_quantized_tensor_is_the_quantized_one(tmp_path: Path) -> None:
    rounded = X.to(torch.float8_e5m2).bfloat16()
    dumps.save(rounded, tmp_path / "a", high_precision=X)
    assert torch.equal(dumps.dequantize(dumps.load(tmp_path / "a")), rounded)


def test_a_quantized_parameter_is_not_high_precision(tmp_path: Path) -> None:
    quantized = some_mxfp8()
    assert dump_of(quantized, None).tensors.keys() == dump_of(None, quantized).tensors.keys()
    assert "high_precision" not in dump_of(quantized, quantized).tensors


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2), (0, 4)], ids=str)
def test_every_dtype_and_shape(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).abs().to(dtype)
    dumps.save(tensor, tmp_path / "a")
    assert_same(dumps.load(tmp_path / "a").tensors, {"high_precision": tensor})
    assert_same(load_file(tmp_path / "a"), {"high_precision": tensor})


@pytest.mark.parametrize(
    "tensor",
    [X.t(), X[::2, 1:], X.expand(2, 40, 96), torch._neg_view(X)],
    ids=["transpose", "slice", "expand", "negated"],
)
def test_views(tmp_path: Path, tensor: torch.Tensor) -> None:
    dumps.save(tensor, tmp_path / "a")
    assert torch.equal(dumps.load(tmp_path / "a").tensors["high_precision"], tensor)


def test_the_library_writes_the_same_format(tmp_path: Path) -> None:
    """Its own file of the same tensors has them in the same places."""
    dump = dumps.save(some_nvfp4(), tmp_path / "ours", high_precision=X[:16, :32])
    tensors = {name: tensor.contiguous() for name, tensor in dump.complete().items()}
    save_file(tensors, tmp_path / "library", metadata={"te_precision_dump": dump.header.to_json(), "format": "pt"})
    layouts = []
    for name in ("ours", "library"):
        content = (tmp_path / name).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        layouts.append((json.loads(content[8:end]), content[end:]))
        assert end % 8 == 0
    assert layouts[0] == layouts[1]


def test_decoded_internals_are_optional(tmp_path: Path) -> None:
    decoded = {"rowwise_data_unpacked_values", "rowwise_block_scale_inv_values", "rowwise_block_factors"}
    raw = {"rowwise_data", "rowwise_block_scale_inv", "amax_rowwise"}
    quantized = some_nvfp4()
    for internals in (True, False):
        dumps.save(quantized, tmp_path / "a", internals=internals)
        loaded = dumps.load(tmp_path / "a")
        assert loaded.tensors.keys() == (raw | decoded if internals else raw)
        assert torch.equal(dumps.dequantize(loaded), quantized.dequantize())


def test_decoded_internals_multiply_to_the_tensor(tmp_path: Path) -> None:
    quantized = some_nvfp4()
    dumps.save(quantized, tmp_path / "a")
    tensors = dumps.load(tmp_path / "a").tensors
    factors = tensors["rowwise_block_factors"].repeat_interleave(16, 1)
    product = tensors["rowwise_data_unpacked_values"] * factors
    assert torch.equal(product, quantized.dequantize(dtype=torch.float32))
    scales = tensors["rowwise_block_scale_inv"].float()
    assert torch.equal(tensors["rowwise_block_scale_inv_values"], scales)
    assert torch.equal(tensors["rowwise_block_factors"], scales * tensors["amax_rowwise"] * (1 / (6 * 448)))


def test_the_size_is_known_before(tmp_path: Path) -> None:
    for number, quantized in enumerate((some_mxfp8(), some_nvfp4())):
        dump = dump_of(X, quantized)
        size = files.write(dump, tmp_path / str(number))
        assert size == (tmp_path / str(number)).stat().st_size
        assert 0 < size - dump.file_bytes < 6000
        assert dump.nbytes == sum(tensor.nbytes for tensor in dump.tensors.values())


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_a_dump_shares_memory_and_a_snapshot_does_not() -> None:
    x, codes = X.clone(), random_bytes(8, 64, seed=1)
    quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3)
    quantized = quantizer(torch.randn(8, 64, generator=torch.Generator().manual_seed(2)))
    dump = dump_of(x, quantized, keep_quantized=True)
    assert dump.tensors["high_precision"].data_ptr() == x.data_ptr()
    assert dump.tensors["data"].data_ptr() == quantized._data.data_ptr()
    snapshot = dump.copied()
    before = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    dequantized = snapshot.original.dequantize().clone()
    x.zero_()
    quantized._data.copy_(codes)
    quantized._scale_inv.zero_()
    assert_same(snapshot.tensors, before)
    assert torch.equal(snapshot.original.dequantize(), dequantized)
    snapshot.wait()


# --- files of torch.save ----------------------------------------------------------------------------------------------


def te_tensor() -> Any:
    quantizer = te.Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True)
    return quantizer(torch.randn(256, 128, generator=torch.Generator().manual_seed(3)).bfloat16())


@pytest.mark.parametrize("internals", [True, False])
def test_a_torch_file_is_as_transformer_engine_writes_it(tmp_path: Path, way: str, internals: bool) -> None:
    x, quantized = torch.randn(256, 128, generator=torch.Generator().manual_seed(3)).bfloat16(), te_tensor()
    path = tmp_path / "a.pt"
    dumps.save(quantized, path, high_precision=x, layer="fc1", internals=internals, file_format="torch")
    content = torch.load(path, weights_only=False)
    named = {f"{side}_{what}" for side in ("rowwise", "columnwise") for what in ("data", "block_scale_inv")}
    assert content.keys() == {"high_precision", "quantized", *(named if internals else ())}
    assert type(content["quantized"]) is type(quantized)
    assert torch.equal(content["quantized"].dequantize(), quantized.dequantize())
    if internals:
        assert content["rowwise_data"].dtype == torch.float8_e4m3fn
    loaded = dumps.load(path, allow_pickle=True)
    assert loaded.header.layer == "fc1"
    for columnwise in (False, True):
        assert torch.equal(dumps.dequantize(loaded, columnwise), quantized.dequantize())
    assert sorted(os.listdir(tmp_path)) == ["a.pt"]


def test_a_torch_file_holds_only_what_is_looked_at(tmp_path: Path) -> None:
    dumps.save(torch.zeros(1000, 1000)[:2], tmp_path / "a.pt", file_format="torch")
    assert (tmp_path / "a.pt").stat().st_size < 20_000


def test_transformer_engines_own_dump(tmp_path: Path) -> None:
    quantized = te_tensor()
    torch.save({"high_precision": X, "quantized": quantized}, tmp_path / "a.pt")
    loaded = dumps.load(tmp_path / "a.pt", allow_pickle=True)
    assert torch.equal(dumps.dequantize(loaded), quantized.dequantize())
    assert torch.equal(loaded.tensors["high_precision"], X)
    dumps.save(loaded.original, tmp_path / "b.safetensors", high_precision=X)
    assert dumps.compare(loaded, dumps.load(tmp_path / "b.safetensors")).equal


def test_a_dump_that_does_not_fit_its_format(tmp_path: Path) -> None:
    with pytest.raises(dumps.DumpError, match="keep_quantized=True"):
        files.write(dump_of(None, some_mxfp8()), tmp_path / "a.pt", "torch")
    with pytest.raises(dumps.DumpError, match="without internals"):
        files.write(dump_of(None, some_mxfp8(), internals=False, keep_quantized=True), tmp_path / "a")
    with pytest.raises(dumps.DumpError, match="file_format 'numpy'"):
        files.write(dump_of(X, None), tmp_path / "a", "numpy")
    with pytest.raises(dumps.DumpError, match=r"no dtype for torch\.complex64"):
        dumps.save(X.to(torch.complex64), tmp_path / "a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("tensor", [X.to_sparse(), X.to("meta"), [1.0], None], ids=["sparse", "meta", "list", "none"])
def test_what_cannot_be_dumped(tmp_path: Path, tensor: Any) -> None:
    with pytest.raises(dumps.DumpError, match=r"plain, dense tensor|nothing to dump"):
        dumps.save(tensor, tmp_path / "a")
    assert os.listdir(tmp_path) == []


# --- what is refused --------------------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["torch", "torch, old format", "pickle"])
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_pickle_is_not_unpickled(tmp_path: Path, kind: str, name: str) -> None:
    sign, path = tmp_path / "the code ran", tmp_path / name
    content = {"high_precision": X, "quantized": Malicious(sign)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(dumps.PickleRefusedError, match=r"a pickle.*load\(path, allow_pickle=True\), or --allow-pickle"):
        dumps.load(path)
    assert [entry.header for entry in dumps.list(tmp_path)] == [None]
    assert not sign.exists()
    if kind != "pickle":  # where it is told to, it does
        dumps.load(path, allow_pickle=True)
        assert sign.exists()


def test_a_truncated_file(tmp_path: Path) -> None:
    dumps.save(some_mxfp8(), tmp_path / "whole", high_precision=X)
    whole = (tmp_path / "whole").read_bytes()
    for size in [0, 1, 7, 8, 9, 30, 500, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "part").write_bytes(whole[:size])
        with pytest.raises(dumps.NotADumpError, match="part"):
            dumps.load(tmp_path / "part")
    (tmp_path / "more").write_bytes(whole + b"x")
    with pytest.raises(dumps.NotADumpError, match="more"):
        dumps.load(tmp_path / "more")


def test_a_truncated_torch_file(tmp_path: Path) -> None:
    dumps.save(X, tmp_path / "whole", file_format="torch")
    whole = (tmp_path / "whole").read_bytes()
    for size in [0, 4, 100, len(whole) // 2, len(whole) - 30]:
        (tmp_path / "part").write_bytes(whole[:size])
        with pytest.raises(dumps.NotADumpError, match="part"):
            dumps.load(tmp_path / "part", allow_pickle=True)


@pytest.mark.parametrize(
    "content",
    [b"a text of some length", b"\x89PNG\r\n\x1a\n" + bytes(50), b"{}", bytes(8) + b"{", b"\xff" * 8 + b"{" * 9],
    ids=["text", "png", "json", "no header", "a header of 2^64 bytes"],
)
def test_a_foreign_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(dumps.NotADumpError, match=r"/a: "):
        dumps.load(tmp_path / "a")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(dumps.NotADumpError, match="there is no such file"):
        dumps.load(tmp_path / "a")
    with pytest.raises(dumps.NotADumpError, match="a folder"):
        dumps.load(tmp_path)


def test_other_safetensors_files(tmp_path: Path) -> None:
    save_file({"weight": X}, tmp_path / "a")
    with pytest.raises(dumps.NotADumpError, match="a safetensors file, but no dump"):
        dumps.load(tmp_path / "a")


def rewritten(path: Path, change: Any) -> None:
    """The same file with another header."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["te_precision_dump"])
    change(header)
    save_file(load_file(path), path, metadata={"te_precision_dump": json.dumps(header)})


def test_a_later_version(tmp_path: Path) -> None:
    dumps.save(X, tmp_path / "a")
    rewritten(tmp_path / "a", lambda header: header.update(schema=SCHEMA + 1, layer={"another": "form"}))
    with pytest.raises(dumps.LaterVersionError, match=rf"/a: .*version {SCHEMA + 1}.* up to {SCHEMA}: update"):
        dumps.load(tmp_path / "a")


def test_what_a_later_version_only_adds_is_ignored(tmp_path: Path) -> None:
    dumps.save(X, tmp_path / "a")
    rewritten(tmp_path / "a", lambda header: header.update(weather="fine"))
    assert torch.equal(dumps.load(tmp_path / "a").tensors["high_precision"], X)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.pop("schema"), "no number under 'schema'"),
        (lambda header: header.update(iteration="soon"), "damaged at 'iteration'"),
        (lambda header: header["quantized"]["rowwise"].update(shape=[40, 128]), "as the header says"),
        (lambda header: header["quantized"]["rowwise"].update(data="rowwise"), "no 'rowwise'"),
        (lambda header: header["quantized"]["rowwise"].update(format="E3M4"), "no 'E3M4'"),
    ],
    ids=["schema", "type", "shape", "name", "format"],
)
def test_a_damaged_header(tmp_path: Path, change: Any, message: str) -> None:
    dumps.save(some_mxfp8(), tmp_path / "a")
    rewritten(tmp_path / "a", change)
    with pytest.raises(dumps.NotADumpError, match=message):
        dumps.dequantize(dumps.load(tmp_path / "a"))


def test_an_unknown_dtype(tmp_path: Path) -> None:
    dumps.save(X, tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(content.replace(b'"BF16"', b'"XF16"'))
    with pytest.raises(dumps.NotADumpError, match="XF16"):
        dumps.load(tmp_path / "a")


# --- whole or not at all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
def test_a_file_that_does_not_fit_on_the_disk(tmp_path: Path, way: str, file_format: str) -> None:
    """The system refuses to write on after 100 kB; what was there before stays."""
    path = tmp_path / "a"
    dumps.save(X, path, file_format=file_format)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        for name in ("a", "b"):
            with pytest.raises(dumps.DumpError, match=rf"/{name}: cannot be written: .*Nothing of it is left"):
                dumps.save(torch.zeros(100_000), tmp_path / name, file_format=file_format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["a"]
    assert path.read_bytes() == before


def test_a_place_where_no_file_can_be(tmp_path: Path, way: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    for path in (tmp_path / "file" / "a", tmp_path / "folder"):
        with pytest.raises(dumps.DumpError, match="cannot be written"):
            dumps.save(X, path)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_file_is_replaced_at_once(tmp_path: Path, way: str) -> None:
    """Who reads while it is written again and again sees one of the contents, whole."""
    path = tmp_path / "a"
    contents = [torch.full((100_000,), float(value)) for value in range(2)]
    dumps.save(contents[0], path)
    stop, seen = threading.Event(), set()

    def write() -> None:
        while not stop.is_set():
            for content in contents:
                dumps.save(content, path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            tensor = dumps.load(path).tensors["high_precision"].clone()
            assert torch.equal(tensor, tensor[:1].expand(100_000))
            seen.add(float(tensor[0]))
    finally:
        stop.set()
        writer.join()
    assert os.listdir(tmp_path) == ["a"]


WRITER = """
import sys, torch
from te_precision_callbacks.dumps.contents import dump_of
from te_precision_callbacks.dumps.files import write
torch.set_num_threads(1)
for number in range(100_000):
    tensor = torch.full((300_000,), float(number))
    write(dump_of(tensor, None, iteration=number), f"{sys.argv[1]}/{number:06d}", sys.argv[2])
    write(dump_of(tensor, None, iteration=number), f"{sys.argv[1]}/last", sys.argv[2])
"""


@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
def test_a_killed_process_leaves_whole_files(tmp_path: Path, file_format: str) -> None:
    """Killed twice, while one dump after another is written: new files, and one that is replaced each time."""
    kept = 0
    for number, after in enumerate((3, 8)):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), file_format],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": "."},
        )
        while process.poll() is None and len(os.listdir(folder)) < after:
            time.sleep(0.001 * number)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        listing = dumps.list(folder)
        assert listing.foreign == ()
        assert len(listing) >= after
        # Nothing else is there, under any name.
        beside = [name for name in os.listdir(folder) if name.startswith(".")]
        assert len(listing) + len(beside) == len(os.listdir(folder))
        assert not [name for name in beside if not name.endswith(".incomplete")]
        for entry in listing:
            loaded = dumps.load(entry.path, allow_pickle=True)
            expected = torch.full((300_000,), float(loaded.header.iteration or 0))
            assert torch.equal(loaded.tensors["high_precision"], expected)
            kept += 1
    assert kept >= 11
