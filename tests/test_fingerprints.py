"""Fingerprints without a run: their hash, their files, and how a comparison speaks of layers."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.runs.fingerprints import (
    Fingerprint,
    FingerprintError,
    LayerFingerprint,
    RecipeFingerprint,
    ResumeFinding,
    ScalingState,
    Weights,
    compare,
    content_hash,
    file_name,
    read,
    recipe_fingerprint,
    write,
)


def layer(name: str, *, sharded: bool = False, rowwise: str = "a") -> LayerFingerprint:
    return LayerFingerprint("", name, Weights("quantized", "Float8Tensor", {"rowwise": rowwise}, sharded))


def fingerprint(*layers: LayerFingerprint, rank: int = 0, world_size: int = 2) -> Fingerprint:
    return Fingerprint(7, "run", rank, world_size, "config", {"torch": "2"}, layers=layers)


# ---------------------------------------------------------------------- the hash


@pytest.mark.parametrize("size", [1, 8, 13, 4096])
def test_the_hash_is_the_weighted_sum_of_the_words(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    words = np.frombuffer(data.numpy().tobytes().ljust(-(-size // 8) * 8, b"\0"), dtype="<u8")
    expected = sum((int(word) ^ int(word) >> 32) * (2 * index + 1) for index, word in enumerate(words)) + size
    assert content_hash(data) == f"{expected % 2**64:016x}"


def test_the_hash_depends_on_content_order_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not on the pieces of a large tensor."""
    data = torch.arange(64, dtype=torch.float32)
    other = torch.where(data == 17, -data, data)
    signs = torch.where((data == 17) | (data == 33), -data, data)  # two signs do not cancel
    different = [data, other, signs, data.flip(0), data[:-1], torch.cat([data, torch.zeros(1)])]
    hashes = [content_hash(tensor) for tensor in different]
    assert len(set(hashes)) == len(different)
    assert content_hash(data, other) != content_hash(other, data)
    assert content_hash(data.reshape(8, 8).t().contiguous().t()) == content_hash(data), "memory does not matter"
    monkeypatch.setattr("te_precision_callbacks.runs.fingerprints._CHUNK_BYTES", 64)
    assert [content_hash(tensor) for tensor in different] == hashes


# ---------------------------------------------------------------------- recipes


def test_a_recipe_has_all_of_its_values() -> None:
    def largest(history: torch.Tensor) -> torch.Tensor:
        return history.max()

    scaling = recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3)
    scaling.fp8_quant_fwd_inp = recipes.QParams(power_2_scale=True)
    result = recipe_fingerprint(scaling)
    assert result.name == "Float8CurrentScaling"
    assert result.fields["fp8_format"] == "E4M3"
    assert result.fields["fp8_quant_fwd_inp.power_2_scale"] is True
    assert result.fields["fp8_quant_fwd_weight.power_2_scale"] is False, "an attribute of the class"
    assert result.fields["fp8_gemm_fprop.use_split_accumulator"] is False
    assert result != recipe_fingerprint(recipes.Float8CurrentScaling())
    text = recipe_fingerprint(recipes.DelayedScaling(amax_compute_algo=largest)).fields["amax_compute_algo"]
    assert text == "function test_a_recipe_has_all_of_its_values.<locals>.largest", "it has no address"


# ---------------------------------------------------------------------- files and ranks


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank reads its own file, or that of rank 0."""
    before, after, of_other = fingerprint(), replace(fingerprint(), iteration=8), fingerprint(layer("b"), rank=1)
    for item in (before, after, of_other):
        write(item, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            write(before, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {file_name(0), file_name(1)}
    assert [read(tmp_path, rank) for rank in (0, 1, 5)] == [after, of_other, after]
    assert read(tmp_path / "nowhere", 0) is None
    (tmp_path / file_name(0)).write_bytes(b"\xff")
    with pytest.raises(FingerprintError, match=file_name(0)):
        read(tmp_path, 0)


def test_shards_are_compared_at_their_own_place_alone() -> None:
    for sharded, rank, world_size, finds in ((False, 0, 1, 1), (True, 0, 2, 1), (True, 1, 2, 0), (True, 0, 4, 0)):
        before = fingerprint(layer("a", sharded=sharded), rank=rank, world_size=world_size)
        findings = compare(before, fingerprint(layer("a", sharded=sharded, rowwise="b"))).findings
        of_weights = [finding for finding in findings if "rounded again" in finding.what]
        assert len(of_weights) == finds, (sharded, rank, world_size)


# ---------------------------------------------------------------------- layers in words


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (["head"], "head"),
        ([f"layers.{number}.fc1" for number in range(12)], "layers.{0-11}.fc1"),
        (["pp1.layers.0.fc1", "pp2.layers.3.fc1"], "pp1.layers.0.fc1, pp2.layers.3.fc1"),
        ([f"0.experts.gemm_{number}" for number in range(8)], "0.experts.gemm_{0-7}"),
        ([f"{letter}.fc1" for letter in "abcdef"], "a.fc1, b.fc1, c.fc1, d.fc1, 2 more"),
    ],
)
def test_many_layers_are_a_pattern(layers: list[str], words: str) -> None:
    assert str(ResumeFinding("Something differs", tuple(layers))) == f"Something differs: {words}."


def test_layers_that_one_side_lacks_are_not_compared() -> None:
    before, now = fingerprint(layer("a"), layer("b")), fingerprint(layer("b", rowwise="b"), layer("c"))
    (result,) = compare(before, now).findings
    assert result.layers == ("b",)


def test_scales_are_compared_where_ranks_have_the_same() -> None:
    """Without a reduction of amax another rank has its own; but scales of 1 are not restored ones."""

    def state(scale: float) -> ScalingState:
        return ScalingState(str(scale), "a", has_unit_scales=scale == 1, is_new=False, steps=16)

    before = fingerprint(replace(layer("a"), forward=state(8.0)))
    for rank, scale, item in ((0, 8.0, 0), (0, 4.0, 1), (1, 4.0, 0), (1, 1.0, 1)):
        now = fingerprint(replace(layer("a"), forward=state(scale)), rank=rank)
        assert len(compare(before, now).findings) == item, (rank, scale)
    reduced = {"recipes": (RecipeFingerprint("DelayedScaling", {"reduce_amax": True, "amax_history_len": 16}),)}
    before, now = (
        replace(fingerprint(replace(layer("a"), recipe=0, forward=state(scale)), rank=rank), **reduced)
        for rank, scale in ((0, 8.0), (1, 4.0))
    )
    assert [finding.what for finding in compare(before, now).findings] == [
        "The scales differ from the checkpoint (forward)"
    ]
