"""Alignment of names, and differences between two maps."""

from pathlib import Path

import pytest
import yaml

from te_precision_callbacks.config import ConfigError
from te_precision_callbacks.maps import MapError, ModuleFormats, PrecisionMap, compare_maps
from te_precision_callbacks.maps.alignment import Alignment, align, read_alignment
from te_precision_callbacks.maps.comparing import SameAs

NONE = Alignment()


def of(**weights: str) -> PrecisionMap:
    return PrecisionMap("map", {name: ModuleFormats(weight) for name, weight in weights.items()})


SAME_NAMES = [
    ("model.layers.3.self_attn.qkv_proj", ["model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.k_proj"]),
    ("decoder.layers.3.self_attention.linear_qkv", ["model.layers.3.self_attn.v_proj"]),
    ("layers.3.self_attention.layernorm_qkv", ["model.layers.3.self_attn.k_proj"]),
    ("decoder.layers.3.self_attention.linear_proj", ["model.layers.3.self_attn.o_proj"]),
    ("decoder.layers.3.mlp.linear_fc1", ["model.layers.3.mlp.gate_proj", "model.layers.3.mlp.up_proj"]),
    ("layers.3.layernorm_mlp.fc1", ["model.layers.3.mlp.gate_up_proj"]),
    ("layers.3.layernorm_mlp.fc2", ["model.layers.3.mlp.down_proj"]),
    ("decoder.layers.3.mlp.experts.linear_fc1", [f"model.layers.3.mlp.experts.{n}.gate_proj" for n in range(4)]),
    ("decoder.layers.3.mlp.experts.linear_fc2.gemm_2", ["model.layers.3.mlp.experts.2.down_proj"]),
    ("decoder.layers.3.mlp.experts.local_experts.1.linear_fc2", ["model.layers.3.block_sparse_moe.experts.1.w2"]),
    ("decoder.layers.3.mlp.experts.local_experts.1.linear_fc1", ["model.layers.3.mlp.experts.gate_up_proj"]),
    ("decoder.layers.3.mlp.shared_experts.linear_fc2", ["model.layers.3.mlp.shared_expert.down_proj"]),
    ("decoder.layers.3.mlp.router", ["model.layers.3.mlp.gate"]),
    ("transformer.h.3.attn.c_attn", ["model.layers.3.self_attn.q_proj"]),
    ("transformer.h.3.mlp.c_proj", ["model.layers.3.mlp.down_proj"]),
    *[
        (f"decoder.layers.3.self_attention.linear_{ours}_proj", [f"model.layers.3.self_attn.{theirs}"])
        for ours, theirs in (
            ("q", "q_proj"),
            ("q_down", "q_a_proj"),
            ("q_up", "q_b_proj"),
            ("kv_down", "kv_a_proj_with_mqa"),
            ("kv_up", "kv_b_proj"),
        )
    ],
    (
        "layers.3.self_attn.fused_qkv_a_proj",
        [f"layers.3.self_attn.{n}_proj{end}" for n, end in (("q_a", ""), ("kv_a", "_with_mqa"))],
    ),
    ("base_model.model.model.layers.3.self_attn.q_proj.base_layer", ["model.layers.3.self_attn.q_proj"]),
    ("base_model.model.lm_head.base_layer", ["lm_head"]),
    ("base_model.model.projector.linear_1", ["projector.linear_1"]),
    ("base_model.model.model.layers.3.mixer.in_proj.base_layer", ["backbone.layers.3.mixer.in_proj"]),
    ("decoder.layers.3.self_attention.linear_qkv.to_wrap", ["model.layers.3.self_attn.v_proj"]),
    ("decoder.layers.3.mlp.experts.linear_fc2.to_wrap.gemm_2", ["model.layers.3.mlp.experts.2.down_proj"]),
    ("output_layer", ["lm_head"]),
    ("embedding.word_embeddings", ["model.embed_tokens"]),
    ("model.visual.blocks.3.attn.qkv", ["visual.blocks.3.attn.qkv"]),
    ("mtp.layers.3.mixer.in_proj", ["model.mtp.layers.3.mixer.in_proj"]),
]


def test_names_that_mean_the_same() -> None:
    for ours, theirs in SAME_NAMES:
        others = [
            "model.layers.2.self_attn.q_proj",
            "vision.layers.3.mlp.down_proj",
            "encoder.layers.3.self_attn.q_proj",
        ]
        assert align([ours], [*theirs, *others], NONE) == {ours: theirs}
        for name in theirs:
            assert align([name], [ours], NONE) == {name: [ours]}


def test_experts_are_not_those_of_another_number() -> None:
    ours = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2"
    theirs = "model.layers.0.mlp.experts.2.down_proj"
    assert align([ours], [theirs, "model.layers.0.mlp.down_proj"], NONE) == {ours: []}


def test_one_projection_twice() -> None:
    twice = ["model.layers.0.self_attn.q_proj", "decoder.layers.0.self_attention.linear_qkv"]
    for a, b in ((twice, twice[:1]), (twice[:1], twice)):
        with pytest.raises(MapError, match=r"both look like the same projection.*--alignment"):
            align(a, b, NONE)


def test_an_alignment_file(tmp_path: Path) -> None:
    path = tmp_path / "alignment.yaml"
    names = {"a.*.in": ["b.*.x", "b.*.z"], "a.top": ["b.head"]}
    path.write_text(yaml.safe_dump({"names": names, "allow": ["*.router"]}))
    given = read_alignment(path)
    pairs = align(["a.3.in", "a.top", "a.odd"], ["b.3.x", "b.3.z", "b.head", "b.4.x"], given)
    assert pairs == {"a.3.in": ["b.3.x", "b.3.z"], "a.top": ["b.head"], "a.odd": []}
    with pytest.raises(MapError, match=r"names.a.top of the alignment: a.top is no name of A. Nearest names: a.tip"):
        align(["a.3.in", "a.tip"], ["b.3.x", "b.3.z"], given)
    with pytest.raises(MapError, match=r"a.\*.in of the alignment: b.\*.z is no name of B. Nearest names: b.3.x"):
        align(["a.3.in", "a.top"], ["b.3.x", "b.3.y", "b.head"], given)
    for text, message in (
        ("[]", "valid dictionary"),
        ("rename: {}", "rename: Extra inputs are not permitted"),
        ("names: []", "names: .* valid dictionary"),
        ("names: {a: 3}", "names.a: .* valid list, not 3"),
    ):
        path.write_text(text)
        with pytest.raises((MapError, ConfigError), match=message):
            read_alignment(path)


def test_differences_and_what_was_not_compared() -> None:
    a = of(first="FP8 E4M3", second="BF16", third="FP32", fourth="MXFP8 E4M3", alone="FP8 E4M3", mixed="BF16 -> NVFP4")
    b = of(first="BF16", second="BF16", third="BF16", fourth="NVFP4", also="NVFP4", plain="BF16", mixed="NVFP4")
    result = compare_maps(a, b)
    assert [(difference.a, difference.format_a, difference.format_b) for difference in result.differences] == [
        ("first", "FP8 E4M3", "BF16"),
        ("fourth", "MXFP8 E4M3", "NVFP4"),
        ("mixed", "BF16 -> NVFP4", "NVFP4"),
    ]
    assert (result.compared, result.only_a, result.only_b) == (5, ("alone",), ("also", "plain"))
    assert result.quantized_alone == ("alone", "also")
    assert result.not_said == {"activation": 5}
    assert len(result.broken) == 4
    allowed = compare_maps(a, b, Alignment(allow=["*"]))
    assert (allowed.broken, allowed.allowed) == ([], ("first", "fourth", "mixed"))


def test_nothing_in_common_is_no_agreement() -> None:
    (text,) = compare_maps(of(a="BF16"), of(b="BF16")).broken
    assert "No module of map has a partner" in text


def test_names_that_cannot_be_aligned_break_the_contract() -> None:
    twice = of(**{"model.layers.0.mlp.fc1": "NVFP4", "decoder.layers.0.mlp.linear_fc1": "NVFP4"})
    (text,) = SameAs(twice, NONE).broken([], "this run")
    assert text.startswith("this run cannot be compared with map: model.layers.0.mlp.fc1 and")
