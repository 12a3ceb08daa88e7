"""A plan, a run and a checkpoint of the byte language model, and the differences after a change of one layer."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from safetensors.torch import load_file, save_file

from examples.byte_lm import ByteLanguageModel
from te_precision_callbacks.check import check_model
from te_precision_callbacks.config import load_config
from te_precision_callbacks.coverage.contract_keeper import PrecisionContractError
from te_precision_callbacks.maps import MapError, PrecisionMap, compare_maps, open_map
from te_precision_callbacks.maps.precision_map import from_products, map_from_json
from te_precision_callbacks.session import InspectSession
from tests.conftest import feature

CHANGED = "layers.1.layernorm_mlp.fc2"
KEPT = {"kept": feature("DisableFP8Layer", layers=[CHANGED])}

HUGGING_FACE = {
    "self_attention.layernorm_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.proj": ("self_attn.o_proj",),
    "layernorm_mlp.fc1": ("mlp.up_proj",),
    "layernorm_mlp.fc2": ("mlp.down_proj",),
}


def model() -> ByteLanguageModel:
    made = ByteLanguageModel(layers=2, hidden=64, heads=4, window=16)
    made.configure_model()
    return made


def run(folder: Path, config: Any = None, steps: int = 1, **keywords: Any) -> PrecisionMap:
    trained = model()
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with InspectSession(config, model=trained, log_dir=folder, statistics_log="off", **keywords) as session:
        for _ in range(steps):
            trained(tokens).square().mean().backward()
            session.step()
    return open_map(folder)


def plan(config: Any = None) -> PrecisionMap:
    checked = check_model(model(), load_config(config or {}))
    return from_products(checked.coverage, "the plan")


def export(folder: Path, low: Iterator[str]) -> Path:
    """A checkpoint with the names of Hugging Face, with the FP8 layers of a run stored in FP8."""
    folder.mkdir()
    quantized = set(low)
    tensors = {"lm_head.weight": torch.zeros(256, 64), "model.embed_tokens.weight": torch.zeros(256, 64)}
    for number in range(2):
        for ours, theirs in HUGGING_FACE.items():
            for name in theirs:
                full = f"model.layers.{number}.{name}"
                is_low = f"layers.{number}.{ours}" in quantized
                tensors[f"{full}.weight"] = torch.zeros(64, 64, dtype=torch.float8_e4m3fn if is_low else torch.float32)
                if is_low:
                    tensors[f"{full}.weight_scale"] = torch.ones(())
    save_file(tensors, folder / "model.safetensors")
    return folder


def low(source: PrecisionMap) -> Iterator[str]:
    return (name for name, formats in source.modules.items() if formats.weight.startswith("FP8"))


@pytest.mark.slow
def test_a_plan_a_run_and_a_checkpoint_agree(tmp_path: Path) -> None:
    planned = plan()
    ran = run(tmp_path / "fp8")
    stored = open_map(export(tmp_path / "checkpoint", low(ran)))
    assert ran.modules["layers.0.layernorm_mlp.fc1"][:3] == ("FP8 E4M3", "FP8 E4M3", "FP8 E5M2")
    assert ran.modules["head"][:3] == ("FP32", "FP32", "FP32")
    assert "not a TE layer" in planned.modules["head"].said
    assert len(ran.modules) == 2 * 4 + 1
    for a, b in ((planned, ran), (ran, stored), (planned, stored)):
        result = compare_maps(a, b)
        assert (result.broken, result.compared >= 9) == ([], True)

    kept = run(tmp_path / "kept", KEPT)
    (difference,) = compare_maps(ran, kept).differences
    assert difference[:2] == (CHANGED, CHANGED)
    assert "section 'kept'" in difference.said_b
    assert {entry.a for entry in compare_maps(planned, kept).differences} == {CHANGED}
    assert {entry.a for entry in compare_maps(kept, stored).differences} == {CHANGED}
    assert {entry.a for entry in compare_maps(plan(KEPT), ran).differences} == {CHANGED}
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(64, 64)
    save_file(tensors, path)
    (difference,) = compare_maps(ran, open_map(tmp_path / "checkpoint")).differences
    assert difference[:5] == (
        "layers.0.self_attention.layernorm_qkv",
        "model.layers.0.self_attn.k_proj",
        "weight",
        "FP8 E4M3",
        "FP32",
    )


def test_llama_factory_9500_fp8_that_runs_in_bf16(tmp_path: Path) -> None:
    """Training with FP8 options, but a forward that never enters te.autocast."""

    def trained(folder: Path, *, in_fp8: bool) -> PrecisionMap:
        layer = torch.nn.ModuleDict({"fc1": te.Linear(32, 32), "fc2": te.Linear(32, 32)})
        with InspectSession(None, model=layer, log_dir=folder, statistics_log="off") as session:
            with te.autocast(enabled=True) if in_fp8 else nullcontext():
                result = layer["fc2"](layer["fc1"](torch.ones(16, 32)))
            result.sum().backward()
            session.step()
        return open_map(folder)

    model = torch.nn.ModuleDict({"fc1": te.Linear(32, 32), "fc2": te.Linear(32, 32)})
    planned = from_products(check_model(model, load_config({})).coverage, "the plan")
    wrong = compare_maps(planned, trained(tmp_path / "wrong", in_fp8=False))
    assert {difference.a for difference in wrong.differences} == {"fc1", "fc2"}
    assert "runs outside of te.autocast" in wrong.differences[0].said_b
    assert compare_maps(planned, trained(tmp_path / "healthy", in_fp8=True)).broken == []


def test_a_saved_map_is_the_map(tmp_path: Path) -> None:
    stored = open_map(export(tmp_path / "checkpoint", iter(["layers.0.self_attention.proj"])))
    assert map_from_json(json.loads(json.dumps(stored.as_json())), stored.source) == stored
    path = tmp_path / "rollout.json"
    path.write_text(json.dumps(stored.as_json()))
    assert open_map(path).modules == stored.modules


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"te_precision_map": 2}, "te_precision_map is 2, but this version reads only 1"),
        ({"te_precision_map": 1, "modules": []}, "modules: Input should be a valid dictionary"),
        (
            {"te_precision_map": 1, "modules": {"a": {"activation": "BF16"}}},
            r"modules.a.weight: Field required",
        ),
        (
            {"te_precision_map": 1, "modules": {"a": {"weight": 8}}},
            r"modules.a.weight: .* string, not 8",
        ),
    ],
)
def test_a_damaged_map(tmp_path: Path, data: object, message: str) -> None:
    path = tmp_path / "rollout.json"
    path.write_text(json.dumps(data))
    with pytest.raises(MapError, match=message):
        open_map(path)


# ---------------------------------------------------------------------- a contract over two sides


@pytest.mark.slow
def test_a_run_that_must_be_quantized_like_its_rollout(tmp_path: Path) -> None:
    low = [f"layers.{number}.{name}" for number in range(2) for name in HUGGING_FACE]
    rollout = export(tmp_path / "rollout", iter(low))
    run(tmp_path / "same", steps=4, require={"same_as": rollout})
    with pytest.raises(PrecisionContractError) as raised:
        run(tmp_path / "other", KEPT, steps=4, require={"same_as": str(rollout)})
    message = str(raised.value)
    assert "at step 2" in message, "after the third step, like a contract"
    assert "- same_as: A is this run, B is" in message
    assert f"{CHANGED} (model.layers.1.mlp.down_proj in B): weight in FP32 in A, in FP8 E4M3 in B" in message
    assert "section 'kept'" in message
    run(tmp_path / "warned", KEPT, steps=4, require={"same_as": rollout, "on_broken": "warn"})
    alignment = tmp_path / "alignment.yaml"
    alignment.write_text(f"allow: [{CHANGED}]")
    run(tmp_path / "allowed", KEPT, steps=4, require={"same_as": {"map": rollout, "alignment": alignment}})
    with pytest.raises(PrecisionContractError, match=r"fp8 is .*\n.*in FP8 E4M3 in B"):
        run(tmp_path / "both", KEPT, steps=4, require={"same_as": rollout, "share": "fp8 >= 99%"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"path": "x"}, "same_as of a contract must be a path, or a mapping with map and alignment"),
        ({"map": 3}, "same_as of a contract: map.*, not 3"),
        (3, "same_as of a contract: map.*, not 3"),
        ("none.json", "none.json: there is no such file or folder"),
    ],
)
def test_wrong_values_of_same_as(value: Any, message: str) -> None:
    with pytest.raises(MapError, match=message):
        InspectSession(None, require={"same_as": value})
