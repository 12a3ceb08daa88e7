"""Dump files: their content, that they appear whole or not at all, other refusals, and the writing process."""

import json
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

from te_precision_callbacks import dumps
from te_precision_callbacks.dumps import dump_files
from te_precision_callbacks.dumps import recording as module
from te_precision_callbacks.dumps.contents import SCHEMA, Dump, Header, create_dump
from te_precision_callbacks.dumps.recording import Recorder
from tests.dumps.storages import random_bytes, some_mxfp8, some_nvfp4
from tests.full_disk import files_up_to

X = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).bfloat16()


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        assert torch.equal(tensor.contiguous().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# --- content of a file ------------------------------------------------------------------------------------------------


def test_a_file_holds_both_tensors_and_where_they_are_from(tmp_path: Path) -> None:
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
    place = (header.layer, header.tensor, header.iteration, header.micro_batch, header.rank, header.recipe)
    assert place == ("decoder.fc1", "activation", 100, 2, 3, "MXFP8BlockScaling")
    assert header.versions["torch"] == torch.__version__
    assert header.versions.keys() == {"torch", "transformer_engine", "te_precision_callbacks"}
    assert (header.high_precision.shape, header.high_precision.dtype) == ((40, 96), "bfloat16")
    rowwise, columnwise = header.quantized.rowwise, header.quantized.columnwise
    assert (rowwise.block, rowwise.stored_scale_shape, columnwise) == ((1, 32), (128, 4), None)
    assert torch.equal(loaded.tensors["high_precision"], X)
    assert torch.equal(dumps.dequantize(loaded), quantized.dequantize())
    assert dumps.dequantize(loaded).dtype == torch.bfloat16
    assert sorted(os.listdir(path.parent)) == ["dump.safetensors"]


def test_a_plain_tensor_alone(tmp_path: Path) -> None:
    dumps.save(torch.nn.Parameter(X), tmp_path / "a", tensor_name="weight")
    loaded = dumps.load(tmp_path / "a")
    assert loaded.header.quantized is None
    assert loaded.tensors.keys() == {"high_precision"}
    with pytest.raises(dumps.DumpError, match="'weight' has no quantized tensor"):
        dumps.dequantize(loaded)


def test_a_fake_quantized_tensor_is_the_quantized_one(tmp_path: Path) -> None:
    rounded = X.to(torch.float8_e5m2).bfloat16()
    dumps.save(rounded, tmp_path / "a", high_precision=X)
    assert torch.equal(dumps.dequantize(dumps.load(tmp_path / "a")), rounded)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint64, torch.uint32, torch.uint16),
]


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    for dtype in DTYPES:
        for shape in [(), (3, 5, 2)]:
            tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).abs().to(dtype)
            dumps.save(tensor, tmp_path / "a")
            assert_same(dumps.load(tmp_path / "a").tensors, {"high_precision": tensor})
            assert_same(load_file(tmp_path / "a"), {"high_precision": tensor})


@pytest.mark.parametrize(
    "tensor",
    [X.t(), X[::2, 1:], X.expand(2, 40, 96), torch._neg_view(X), X[:, 0][:1], X.t()[:1, :1]],
    ids=["transpose", "slice", "expand", "negated", "one of a column", "one of a transpose"],
)
def test_a_view_is_read_back_with_its_values(tmp_path: Path, tensor: torch.Tensor) -> None:
    dumps.save(tensor, tmp_path / "a")
    assert torch.equal(dumps.load(tmp_path / "a").tensors["high_precision"], tensor)


def test_decoded_internals_multiply_to_the_tensor(tmp_path: Path) -> None:
    quantized = some_nvfp4()
    dumps.save(quantized, tmp_path / "without", internals=False)
    without = dumps.load(tmp_path / "without")
    assert without.tensors.keys() == {"rowwise_data", "rowwise_block_scale_inv", "amax_rowwise"}
    assert torch.equal(dumps.dequantize(without), quantized.dequantize())
    dumps.save(quantized, tmp_path / "a")
    tensors = dumps.load(tmp_path / "a").tensors
    assert len(tensors) == 6
    factors = tensors["rowwise_block_factors"].repeat_interleave(16, 1)
    product = tensors["rowwise_data_unpacked_values"] * factors
    assert torch.equal(product, quantized.dequantize(dtype=torch.float32))
    scales = tensors["rowwise_block_scale_inv"].float()
    assert torch.equal(tensors["rowwise_block_scale_inv_values"], scales)
    assert torch.equal(tensors["rowwise_block_factors"], scales * tensors["amax_rowwise"] * (1 / (6 * 448)))


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_a_dump_shares_memory_and_a_snapshot_does_not() -> None:
    x, codes = X.clone(), random_bytes(8, 64, seed=1)
    quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3)
    quantized = quantizer(torch.randn(8, 64, generator=torch.Generator().manual_seed(2)))
    dump = create_dump(Header(), x, quantized)
    assert dump.tensors["high_precision"].data_ptr() == x.data_ptr()
    assert dump.tensors["data"].data_ptr() == quantized._data.data_ptr()
    snapshot = dump.copied()
    before = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    x.zero_()
    quantized._data.copy_(codes)
    quantized._scale_inv.zero_()
    assert_same(snapshot.tensors, before)
    snapshot.wait()


def test_a_snapshot_of_a_tensor_with_a_format_for_each_direction(tmp_path: Path) -> None:
    quantizer = HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(tex.DType.kFloat8E4M3),
        columnwise_quantizer=te.NVFP4Quantizer(tex.DType.kFloat4E2M1),
    )
    quantized = quantizer(torch.randn(256, 256, generator=torch.Generator().manual_seed(5)).bfloat16())
    dump = create_dump(Header(), None, quantized)
    assert dump.nbytes == 256 * 256 * 3 // 2 + 256 * 8 + 256 * 16 + 4, "codes, scales and amax"
    expected, snapshot = quantized.dequantize().clone(), dump.copied()
    quantized._rowwise_storage._rowwise_data.zero_()
    quantized._columnwise_storage._columnwise_data.zero_()
    dump_files.write(snapshot, tmp_path / "a")
    loaded = dumps.load(tmp_path / "a")
    assert torch.equal(dumps.dequantize(loaded), expected)
    assert int(dumps.dequantize(loaded, columnwise=True).count_nonzero()) > 1000


# --- refusals ---------------------------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


NOT_DUMPED = [
    (X.to_sparse(), {}, "plain, dense tensor"),
    (X.to("meta"), {}, "plain, dense tensor"),
    ([1.0], {}, "plain, dense tensor"),
    (None, {}, "nothing to dump"),
    (X, {"high_precision": X[:, :64]}, r"high_precision has the shape \(40, 64\), and the tensor \(40, 96\)"),
    (X, {"layer": torch.nn.Identity()}, r"layer= must be a name, as text, not Identity"),
    (X, {"tensor_name": None}, "tensor_name= must be a name, as text, not None"),
    (X, {"iteration": 1.5}, "iteration= must be a whole number, not 1.5"),
    (X, {"rank": torch.ones(2)}, "rank= must be a whole number, not tensor"),
    (X, {"micro_batch": "0"}, "micro_batch= must be a whole number, not '0'"),
]


def test_what_cannot_be_dumped(tmp_path: Path) -> None:
    for tensor, where, message in NOT_DUMPED:
        with pytest.raises(dumps.DumpError, match=message):
            dumps.save(tensor, tmp_path / "a", **where)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["torch", "torch, old format", "pickle"])
def test_a_pickle_is_not_unpickled(tmp_path: Path, kind: str) -> None:
    sign, path = tmp_path / "the code ran", tmp_path / "a.safetensors"
    content = {"high_precision": X, "quantized": Malicious(sign)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(dumps.NotADumpError, match="not a dump"):
        dumps.load(path)
    assert [file.path for file in dumps.list(tmp_path).foreign] == [path]
    assert not sign.exists()


FOREIGN: dict[str, Callable[[bytes], bytes]] = {
    "text": lambda _: b"a text of some length",
    "png": lambda _: b"\x89PNG\r\n\x1a\n" + bytes(50),
    "json": lambda _: b"{}",
    "no header": lambda _: bytes(8) + b"{",
    "a header of 2^64 bytes": lambda _: b"\xff" * 8 + b"{" * 9,
    "an unknown dtype": lambda whole: whole.replace(b'"BF16"', b'"XF16"'),
    "one byte more": lambda whole: whole + b"x",
    "one byte less": lambda whole: whole[:-1],
    "its half": lambda whole: whole[: len(whole) // 2],
    **{f"its first {size} bytes": lambda whole, size=size: whole[:size] for size in (0, 1, 7, 8, 9, 30, 500)},  # type: ignore[misc]
}


def test_a_foreign_or_damaged_file(tmp_path: Path) -> None:
    for change in FOREIGN.values():
        dumps.save(some_mxfp8(), tmp_path / "a", high_precision=X)
        (tmp_path / "a").write_bytes(change((tmp_path / "a").read_bytes()))
        with pytest.raises(dumps.NotADumpError, match=r"/a: "):
            dumps.load(tmp_path / "a")


def rewritten(path: Path, change: Any) -> None:
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["te_precision_dump"])
    change(header)
    save_file(load_file(path), path, metadata={"te_precision_dump": json.dumps(header)})


def change_of(*place: str, **values: Any) -> Any:
    def change(header: Any) -> None:
        for key in place:
            header = header[key]
        header.update(values)

    return change


UNREADABLE = [
    (
        change_of(schema=SCHEMA + 1, layer={"another": "form"}),
        f"version {SCHEMA + 1}.* reads version {SCHEMA}: update",
    ),
    (lambda header: header.pop("schema"), "schema"),
    (change_of(iteration="soon"), "iteration"),
    (change_of("quantized", dtype="load"), "'load' is not a dtype of torch"),
    (change_of("quantized", "rowwise", shape=[40, -96]), "quantized.rowwise.shape.1"),
    (change_of("quantized", "rowwise", data="rowwise"), "'rowwise'"),
    (change_of("quantized", "rowwise", format="E3M4"), "quantized.rowwise.format"),
    (change_of("quantized", "rowwise", block=[1, 48]), "shape"),
]


def test_a_header_that_cannot_be_read(tmp_path: Path) -> None:
    for change, message in UNREADABLE:
        path = tmp_path / "a"
        dumps.save(some_mxfp8(), path, high_precision=X)
        rewritten(path, change)
        with pytest.raises(dumps.NotADumpError, match=rf"(?s)/a: .*{message}"):
            dumps.load(path)


def test_names_in_other_alphabets(tmp_path: Path) -> None:
    for name in ("größe/😀", "\\ud800"):
        dumps.save(X, tmp_path / "a.safetensors", layer=name)
        assert dumps.load(tmp_path / "a.safetensors").header.layer == name
        assert [entry.header.layer for entry in dumps.list(tmp_path)] == [name]


# --- whole or not at all ----------------------------------------------------------------------------------------------


def test_a_file_that_does_not_fit_on_the_disk(tmp_path: Path) -> None:
    """The system refuses to write on after 100 kB; the earlier dumps stay."""
    path = tmp_path / "a"
    dumps.save(X, path)
    before = path.read_bytes()
    with files_up_to(100_000):
        for name in ("a", "b"):
            with pytest.raises(dumps.DumpError, match=rf"/{name}: cannot be written: .*No part of the file is left"):
                dumps.save(torch.zeros(100_000), tmp_path / name)
    assert os.listdir(tmp_path) == ["a"]
    assert path.read_bytes() == before


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    """Who reads while it is written again and again sees one of the contents, whole."""
    path = tmp_path / "a"
    contents = [torch.full((100_000,), float(value)) for value in range(2)]
    dumps.save(contents[0], path)
    stop = threading.Event()

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
    finally:
        stop.set()
        writer.join()
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_new_file_never_replaces_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    """Eight threads with one name, as processes of one rank may be; a folder and a dangling link have names too."""

    def refuse(*_: Any) -> None:
        raise PermissionError("the file system has no hard links")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "fc1.a.safetensors").symlink_to("nowhere")
    (tmp_path / "fc1.a.1.safetensors").mkdir()
    (tmp_path / "fc1.a.2.safetensors").write_bytes(b"another program's")
    begin = threading.Barrier(8)

    def write(value: int) -> None:
        begin.wait()
        for number in range(4):
            dump = create_dump(Header("fc1", "a"), torch.full((1000,), 4.0 * value + number), None)
            dump_files.write_new(dump, tmp_path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    names = {f"fc1.a.{number}.safetensors" for number in range(3, 35)}
    others = {"fc1.a.safetensors", "fc1.a.1.safetensors", "fc1.a.2.safetensors"}
    assert set(os.listdir(tmp_path)) == names | others
    assert (tmp_path / "fc1.a.2.safetensors").read_bytes() == b"another program's"
    assert os.readlink(tmp_path / "fc1.a.safetensors") == "nowhere"
    assert {float(dumps.load(tmp_path / name).tensors["high_precision"][0]) for name in names} == set(range(32))


# --- the thread that writes, and who waits for it, when it ends


def empty(number: int, nbytes: int) -> Dump:
    return Dump(Header(iteration=number), {"high_precision": torch.zeros(nbytes, dtype=torch.uint8)})


def ends(doing: Callable[[], object]) -> bool:
    thread = threading.Thread(target=doing, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


@pytest.mark.extended
@pytest.mark.parametrize("error", [SystemExit("no more"), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_nobody_waits_for_a_thread_that_has_ended(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    written: list[int | None] = []

    def write(dump: Dump, folder: Path) -> int:
        written.append(dump.header.iteration)
        begun.set()
        go.wait(20)
        raise error

    monkeypatch.setattr(module, "write_new", write)
    monkeypatch.setattr(module, "MOST_QUEUED", 1000)
    writer = Recorder(tmp_path)
    writer.put(empty(0, 100))
    assert begun.wait(20)
    writer.put(empty(1, 100))
    waiting = threading.Thread(target=lambda: writer.put(empty(2, 950)), daemon=True)
    waiting.start()
    go.set()
    waiting.join(20)
    assert not waiting.is_alive(), "it has waited for room"
    assert ends(writer.drain)
    if not isinstance(error, Exception):
        assert ends(lambda: writer.put(empty(3, 2000)))
        assert ends(writer.drain)
        assert written == [0], "what waited is dropped, and nothing more is taken"
    assert writer.thread.queued == 0
    failure = writer.take_failure()
    assert error in (failure, failure.__cause__)
    assert writer.take_failure() is None
