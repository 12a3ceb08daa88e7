"""Reports of precision files and ignore lists that did not have the promised effect, with healthy twins."""

from pathlib import Path

from te_precision_callbacks.maps import MapFinding, PrecisionMap, compare_maps, open_map
from te_precision_callbacks.maps.tool_files import Surroundings
from tests.maps.making import (
    GROUPED,
    SEQUENTIAL,
    checkpoint,
    dense,
    fp8,
    matcher,
    megatron,
    modules,
    precision_file,
    sparse,
    written,
)

MXFP8 = {"quant_method": "modelopt", "quant_algo": "MXFP8"}


def kinds(source: PrecisionMap) -> list[str]:
    return [finding.kind for finding in source.findings]


def of_kind(source: PrecisionMap, kind: str) -> MapFinding:
    (finding,) = [finding for finding in source.findings if finding.kind == kind]
    return finding


def quantized(source: PrecisionMap) -> set[str]:
    return {name for name, formats in source.modules.items() if formats.weight != "BF16"}


def trained(
    folder: Path, names: list[str], recipe: str, bf16: tuple[int, int] = (0, 0), **matchers: object
) -> PrecisionMap:
    """The map of Megatron's precision file on a model with these names."""
    file = precision_file(folder, **matchers)  # type: ignore[arg-type]
    return open_map(file, modules=modules(names), around=Surroundings(recipe=recipe, bf16_layers=bf16))


def test_nemo_rl_3654_a_matcher_without_enabled(tmp_path: Path) -> None:
    names = megatron(GROUPED)
    attention = matcher("*self_attention*", "bf16")
    del attention["enabled"]
    wrong = trained(tmp_path, names, "mxfp8", attention=attention)
    finding = of_kind(wrong, "disabled")
    assert kinds(wrong) == ["disabled"]
    assert finding.modules == tuple(name for name in names if "self_attention" in name)
    assert "matchers.attention '*self_attention*'" in finding.text
    assert "enabled: true is missing" in finding.text
    assert quantized(wrong) == set(names), "the matcher that is not enabled takes nothing"
    healthy = trained(tmp_path, names, "mxfp8", attention=matcher("*self_attention*", "bf16"))
    assert healthy.findings == ()
    assert quantized(healthy) == {name for name in names if "self_attention" not in name}


def test_nemo_rl_3566_a_guard_that_matches_nothing(tmp_path: Path) -> None:
    names = megatron(GROUPED)
    experts = matcher("*mlp.experts*", "nvfp4")
    wrong = trained(tmp_path, names, "mxfp8", experts=experts, dense=matcher("decoder.layers.*.dense_mlp.*", "bf16"))
    finding = of_kind(wrong, "unmatched")
    assert "matchers.dense 'decoder.layers.*.dense_mlp.*' takes no module" in finding.text
    assert "Nearest names: decoder.layers.0.mlp.linear_fc1" in finding.text
    fc1 = wrong.modules["decoder.layers.0.mlp.linear_fc1"]
    assert (fc1.weight, "no matcher" in fc1.said) == ("MXFP8 E4M3", True), "what no matcher takes has the recipe around"
    guard = matcher("decoder.layers.*.mlp.linear_fc*", "bf16")
    healthy = trained(tmp_path, names, "mxfp8", experts=experts, dense=guard)
    assert healthy.findings == ()
    assert healthy.modules["decoder.layers.0.mlp.linear_fc1"].weight == "BF16"


def test_nemo_rl_3908_first_and_last_layers_override_the_file(tmp_path: Path) -> None:
    names = megatron(GROUPED)
    every = matcher("*", "mxfp8")
    kept = matcher("*self_attention*", "bf16")
    assert trained(tmp_path, names, "mxfp8", (1, 1), kept=kept).findings == (), "BF16 in BF16 is no problem"
    wrong = trained(tmp_path, names, "mxfp8", (1, 1), every=every)
    finding = of_kind(wrong, "no_effect")
    assert set(finding.modules) == {name for name in names if ".0." in name or ".3." in name}
    assert "override_nonquantized_autocast" in finding.text
    assert quantized(wrong) == set(names) - set(finding.modules)
    healthy = trained(tmp_path, names, "mxfp8", every=every)
    assert healthy.findings == ()
    assert quantized(healthy) == set(names)


def test_verl_7519_a_substring(tmp_path: Path) -> None:
    """56 parameters of a dense model with 28 blocks are trained in MXFP8, and served in BF16."""
    names = dense(28)
    routers = [f"model.layers.{number}.mlp.gate" for number in range(28)]
    ignored = ["lm_head", "model.embed_tokens", *routers]
    served = checkpoint(tmp_path / "served", names, config={**MXFP8, "ignore": ignored})
    rollout = open_map(served, around=Surroundings(engine="vllm"))
    trainer_names = [
        f"decoder.layers.{n}.{part}"
        for n in range(28)
        for part in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    ]
    trainer = trained(tmp_path, trainer_names, "mxfp8", every=matcher("*", "mxfp8"))
    result = compare_maps(trainer, rollout)
    assert len({difference.b for difference in result.differences}) == 56
    assert {difference.a.rpartition(".")[2] for difference in result.differences} == {"linear_fc1"}
    assert result.differences[0][3:5] == ("MXFP8 E4M3", "BF16")
    assert "ignore[2] 'model.layers.0.mlp.gate' (vLLM 0.24)" in result.differences[0].said_b
    finding = of_kind(rollout, "part_of_a_name")
    assert len(finding.modules) == 56
    healthy = checkpoint(tmp_path / "healthy", names, config={**MXFP8, "ignore": ["lm_head", "model.embed_tokens"]})
    result = compare_maps(trainer, open_map(healthy, around=Surroundings(engine="vllm")))
    assert (result.broken, result.b.findings, result.compared) == ([], (), 28 * 7)


def test_model_optimizer_2411_another_layout_of_experts(tmp_path: Path) -> None:
    experts = {f"fc{n}": matcher(f"*mlp.experts.linear_fc{n}", "nvfp4") for n in (1, 2)}
    names = megatron(SEQUENTIAL, blocks=33)
    wrong = trained(tmp_path, names, "none", **experts)
    assert kinds(wrong) == ["unmatched"] * 2
    assert "mlp.experts.local_experts" in wrong.findings[0].text, "the nearest names"
    assert quantized(wrong) == set()
    acting = {
        name: {**entry, "pattern": entry["pattern"].replace("experts.", "experts.*")} for name, entry in experts.items()
    }
    healthy = trained(tmp_path, names, "none", **acting)
    assert healthy.findings == ()
    assert {name for name, f in healthy.modules.items() if f.weight == "NVFP4"} == {
        n for n in names if ".experts." in n
    }


def test_prime_rl_2910_dropped_default_patterns(tmp_path: Path) -> None:
    names = modules(sparse())
    kept = ("lm_head", r"model.layers.\d+.mlp.gate")
    rollout = open_map(written(tmp_path / "served.json", fp8(*kept)), modules=names)
    wrong = compare_maps(open_map(written(tmp_path / "trainer.json", fp8()), modules=names), rollout)
    routers = {f"model.layers.{number}.mlp.gate" for number in range(4)}
    assert {difference.a for difference in wrong.differences} == {"lm_head", *routers}
    healthy = open_map(written(tmp_path / "trainer.json", fp8(*kept)), modules=names)
    assert compare_maps(healthy, rollout).broken == []
