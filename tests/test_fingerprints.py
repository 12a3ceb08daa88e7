"""Fingerprints without a run: their hash, their files, and how a comparison speaks of layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.runs.fingerprints import Finding, Fingerprint, FingerprintError, pooling, read
from te_precision_callbacks.runs.fingerprints.changes import compare
from te_precision_callbacks.runs.fingerprints.checkpoint_files import file_name, write
from te_precision_callbacks.runs.fingerprints.fingerprint import LayerFingerprint, Weights, merged
from te_precision_callbacks.runs.fingerprints.hashing import content_hash
from te_precision_callbacks.runs.fingerprints.pooling import Pool, Pooled, of_rank
from te_precision_callbacks.runs.fingerprints.taking import recipe_fingerprint


def layer(name: str, *, sharded: bool = False, rowwise: str = "a") -> LayerFingerprint:
    weights = Weights("quantized", "Float8Tensor", {"rowwise": rowwise}, sharded)
    return LayerFingerprint("", name, None, "", weights, None, None, ())


def fingerprint(*layers: LayerFingerprint, rank: int = 0, world_size: int = 2) -> Fingerprint:
    return Fingerprint(7, "run", rank, world_size, "config", {"torch": "2"}, layers=layers)


# ---------------------------------------------------------------------- the hash


@pytest.mark.parametrize("size", [1, 8, 13, 4096])
def test_the_hash_is_the_weighted_sum_of_the_words(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    words = np.frombuffer(data.numpy().tobytes().ljust(-(-size // 8) * 8, b"\0"), dtype="<u8")
    expected = sum((int(word) ^ int(word) >> 32) * (2 * index + 1) for index, word in enumerate(words)) + size
    assert content_hash(data) == f"{expected % 2**64:016x}"


def test_the_hash_of_a_large_tensor_does_not_depend_on_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(1000)
    whole = content_hash(data)
    monkeypatch.setattr("te_precision_callbacks.runs.fingerprints.hashing._PIECE", 64)
    assert content_hash(data) == whole


def test_the_hash_tells_content_order_and_length() -> None:
    data = torch.arange(64, dtype=torch.float32)
    other = data.clone()
    other[17] = -17.0
    alike = [data, other, data.flip(0), data[:-1], torch.cat([data, torch.zeros(1)])]
    assert len({content_hash(tensor) for tensor in alike}) == len(alike)
    signs = data.clone()
    signs[[17, 33]] *= -1
    assert content_hash(signs) != content_hash(data), "two signs do not cancel"
    assert content_hash(data, other) != content_hash(other, data)
    assert content_hash(data.reshape(8, 8).t().contiguous().t()) == content_hash(data), "memory does not matter"


# ---------------------------------------------------------------------- recipes


def test_a_recipe_has_all_of_its_values() -> None:
    scaling = recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3)
    scaling.fp8_quant_fwd_inp = recipes.QParams(power_2_scale=True)
    found = recipe_fingerprint(scaling)
    assert found.name == "Float8CurrentScaling"
    assert found.fields["fp8_format"] == "E4M3"
    assert found.fields["fp8_quant_fwd_inp.power_2_scale"] is True
    assert found.fields["fp8_quant_fwd_weight.power_2_scale"] is False, "an attribute of the class"
    assert found.fields["fp8_gemm_fprop.use_split_accumulator"] is False
    assert found != recipe_fingerprint(recipes.Float8CurrentScaling())


def test_a_function_in_a_recipe_has_no_address() -> None:
    def largest(history: torch.Tensor) -> torch.Tensor:
        return history.max()

    text = recipe_fingerprint(recipes.DelayedScaling(amax_compute_algo=largest)).fields["amax_compute_algo"]
    assert text == "function test_a_function_in_a_recipe_has_no_address.<locals>.largest"


# ---------------------------------------------------------------------- files and ranks


def test_each_rank_reads_its_own_file_or_all(tmp_path: Path) -> None:
    ranks = [fingerprint(layer("a"), rank=0), fingerprint(layer("b"), rank=1)]
    for each in ranks:
        write(each, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(file_name, range(2)))
    assert read(tmp_path, 1) == {1: ranks[1]}
    assert read(tmp_path, 5) == dict(enumerate(ranks))
    assert list(merged(read(tmp_path, 5).values())) == [("", "a"), ("", "b")]
    assert read(tmp_path / "nowhere", 0) == {}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = fingerprint(), replace(fingerprint(), iteration=8)
    write(before, tmp_path)
    write(after, tmp_path)
    assert read(tmp_path, 0) == {0: after}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            write(before, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file_name(0)]
    assert read(tmp_path, 0) == {0: after}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / file_name(0)).write_bytes(b"\xff")
    with pytest.raises(FingerprintError, match=file_name(0)):
        read(tmp_path, 0)


def test_shards_are_compared_at_their_own_place_alone() -> None:
    for sharded, saved, finds in (
        (False, {"rank": 0, "world_size": 1}, True),
        (True, {"rank": 0, "world_size": 2}, True),
        (True, {"rank": 1, "world_size": 2}, False),
        (True, {"rank": 0, "world_size": 4}, False),
    ):
        before = fingerprint(layer("a", sharded=sharded), **saved)
        report = compare({before.rank: before}, fingerprint(layer("a", sharded=sharded, rowwise="b")))
        assert any("rounded anew" in finding.what for finding in report.findings) == finds, (sharded, saved)


# ---------------------------------------------------------------------- layers in words


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (["head"], "head"),
        ([f"layers.{number}.fc1" for number in range(12)], "layers.*.fc1 (12 layers)"),
        (["pp1.layers.0.fc1", "pp2.layers.3.fc1"], "pp1.layers.0.fc1, pp2.layers.3.fc1"),
        ([f"0.experts.gemm_{number}" for number in range(8)], "*.experts.gemm_* (8 layers)"),
        ([f"{letter}.fc1" for letter in "abcdef"], "a.fc1, b.fc1, c.fc1, d.fc1, and 2 more layers"),
    ],
)
def test_many_layers_are_a_pattern(layers: list[str], words: str) -> None:
    assert str(Finding("Something differs", tuple(layers))) == f"Something differs: {words}."


def test_layers_that_one_side_lacks_are_not_compared() -> None:
    before, now = fingerprint(layer("a"), layer("b")), fingerprint(layer("b", rowwise="b"), layer("c"))
    (found,) = compare({0: before}, now).findings
    assert found.layers == ("b",)


def test_of_pooled_fingerprints_each_rank_has_its_own_or_all() -> None:
    alike, other = fingerprint(layer("fc"), rank=0), fingerprint(layer("fc", rowwise="b"), rank=2)
    pool = [{"ranks": [0, 1], "fingerprint": alike.to_text()}, {"ranks": [2], "fingerprint": other.to_text()}]
    assert of_rank(pool, 1) == {1: replace(alike, rank=1)}
    assert of_rank(pool, 2) == {2: other}
    assert sorted(of_rank(pool, 5)) == [0, 1, 2]
    with pytest.raises(FingerprintError, match="The fingerprints are damaged"):
        of_rank([{"rank": 0}], 0)


# ---------------------------------------------------------------------- of many ranks, in the store of torch


class CountingStore:
    """A real store that counts what passes; it answers as if no rank that is missing came any more."""

    def __init__(self) -> None:
        self.store = torch.distributed.HashStore()
        self.bytes = 0
        self.keys: set[str] = set()

    def set(self, key: str, value: str | bytes) -> None:
        self.bytes += len(value)
        self.keys.add(key)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        found = self.store.get(key)
        self.bytes += len(found)
        return found

    def delete_key(self, key: str) -> None:
        self.keys.discard(key)
        self.store.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        assert timeout.total_seconds() == pooling.WAITING
        if not self.store.check(keys):
            raise torch.distributed.DistStoreError("timeout")

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def has_extended_api(self) -> bool:
        return False


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    made = CountingStore()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: made)
    return made


def saved_by(pools: dict[int, Pool], *, size: int, hash_of: Callable[[int], str], iteration: int = 7) -> Pooled:
    """What rank 0 collects; it saves last, as if it had waited."""
    for rank, pool in sorted(pools.items(), reverse=True):
        layers = [layer(f"layers.{number}.fc", rowwise=hash_of(rank)) for number in range(100)]
        own = replace(fingerprint(*layers, rank=rank, world_size=size), run=f"run {rank}", iteration=iteration)
        found = pool.pooled(own)
    return found


def test_what_many_ranks_have_alike_travels_once(store: CountingStore) -> None:
    size, stage = 64, 16
    pools = {rank: Pool() for rank in range(size)}
    found = saved_by(pools, size=size, hash_of=lambda rank: f"stage {rank // stage}")
    assert [entry["ranks"] for entry in found] == [list(range(first, first + stage)) for first in range(0, size, stage)]
    assert {rank: of_rank(found, rank)[rank].layers[0].weights.hashes["rowwise"] for rank in (0, 19, 63)} == {
        0: "stage 0",
        19: "stage 1",
        63: "stage 3",
    }
    texts = sum(len(entry["fingerprint"]) for entry in found)
    assert store.bytes < 2 * (texts + 64 * size), "each text once there and once back, and a hash of each rank"
    assert not [key for key in store.keys if "/text/" in key]
    saved_by(pools, size=size, hash_of=lambda rank: "all", iteration=8)
    assert len(store.keys) == size, "the hashes of the last save, and up to which save rank 0 has collected"


def test_a_rank_that_saves_twice_before_rank_0_has_looked_loses_nothing(store: CountingStore) -> None:
    pools = {rank: Pool() for rank in range(2)}
    own = [replace(fingerprint(layer("fc", rowwise=str(rank)), rank=rank)) for rank in range(2)]
    for _ in range(2):
        pools[1].pooled(own[1])
    for _ in range(2):
        assert [entry["ranks"] for entry in pools[0].pooled(own[0])] == [[0], [1]]


def test_ranks_that_do_not_come_or_are_too_many_are_named(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pools = {rank: Pool() for rank in (0, 1, 2, 3, 5)}
    found = saved_by(pools, size=8, hash_of=lambda rank: f"rank {rank // 3}")
    assert [entry["ranks"] for entry in found] == [[0, 1, 2], [3, 5]]
    (warning,) = caplog.messages
    assert "ranks 4, 6-7 did not save within 10 s" in warning
    caplog.clear()
    monkeypatch.setattr(pooling, "MOST_BYTES", 30_000)
    found = saved_by({rank: Pool() for rank in range(4)}, size=4, hash_of=str, iteration=9)
    assert len(found) < 4
    (warning,) = caplog.messages
    assert "would have been more than" in warning
