"""Names of models, checkpoints and precision files, as the tools write them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from te_precision_callbacks.maps.sources import block_of
from te_precision_callbacks.maps.tool_files import Module

BLOCKS = 4
VOCABULARY = 96


def dense(blocks: int = BLOCKS) -> list[str]:
    """Names of a dense model of Hugging Face, without norms."""
    parts = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    layers = [f"model.layers.{number}.{part}" for number in range(blocks) for part in parts]
    return ["model.embed_tokens", *layers, "lm_head"]


def sparse(blocks: int = BLOCKS, experts: int = 4) -> list[str]:
    """Names of a model with routed experts."""
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    routed = [f"mlp.experts.{number}.{name}_proj" for number in range(experts) for name in ("gate", "up", "down")]
    shared = [f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")]
    parts = [*attention, "mlp.gate", *routed, *shared]
    layers = [f"model.layers.{number}.{part}" for number in range(blocks) for part in parts]
    return ["model.embed_tokens", *layers, "lm_head"]


def megatron(experts: Iterable[str], blocks: int = BLOCKS) -> list[str]:
    """Names of a model of Megatron with experts of a layout, and dense MLPs in the first block."""
    attention = ["self_attention.linear_qkv", "self_attention.linear_proj"]
    names = [f"decoder.layers.0.{part}" for part in (*attention, "mlp.linear_fc1", "mlp.linear_fc2")]
    shared = ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    for number in range(1, blocks):
        names += [f"decoder.layers.{number}.{part}" for part in (*attention, *experts, *shared)]
    return names


GROUPED = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
SEQUENTIAL = tuple(f"mlp.experts.local_experts.{n}.linear_fc{part}" for n in range(8) for part in (1, 2))


def modules(names: Iterable[str]) -> list[Module]:
    return [Module(name, "BF16", is_linear=not name.endswith("embed_tokens"), layer=block_of(name)) for name in names]


def checkpoint(
    folder: Path, names: Iterable[str], *, quantized: Iterable[str] = (), config: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint of 32 x 32 weights; quantized ones as FP8 in blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    low = set(quantized)
    tensors = {}
    for name in names:
        rows = VOCABULARY if name in ("model.embed_tokens", "lm_head") else 32
        dtype = torch.float8_e4m3fn if name in low else torch.bfloat16
        tensors[f"{name}.weight"] = torch.zeros(rows, 32, dtype=dtype)
        if name in low:
            tensors[f"{name}.weight_scale_inv"] = torch.ones(2, 2)
    tensors["model.norm.weight"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors")
    text = {"vocab_size": VOCABULARY, "torch_dtype": "bfloat16", **({"quantization_config": config} if config else {})}
    (folder / "config.json").write_text(json.dumps(text))
    return folder


def fp8(*ignored: str, key: str = "modules_to_not_convert") -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], key: [*ignored]}


def matcher(pattern: str, config: str, **more: Any) -> dict[str, Any]:
    return {"type": "glob", "pattern": pattern, "config": config, "enabled": True, **more}


RECIPES = {
    "bf16": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}},
    "nvfp4": {
        "transformer_engine_config_type": "TEQuantizationParams",
        "training_recipe": {"fp4_quantization_recipe": "nvfp4", "override_nonquantized_autocast": True},
    },
    "mxfp8": {
        "transformer_engine_config_type": "TEQuantizationParams",
        "training_recipe": {"fp8_quantization_recipe": "mxfp8", "tp_only_amax_red": True},
    },
}


def precision_file(folder: Path, **matchers: Mapping[str, Any]) -> Path:
    """Write Megatron's precision file."""
    path = folder / "precision.yaml"
    path.write_text(yaml.safe_dump({"configs": RECIPES, "matchers": matchers}, sort_keys=False))
    return path


def written(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path
