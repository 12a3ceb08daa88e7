"""The stored formats of a checkpoint, from the headers of its safetensors files.

Scales are recognized by the names and shapes that transformers, compressed-tensors and ModelOpt write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.maps.matching import Module
from te_precision_callbacks.maps.precision_map import MapError, ModuleFormats, read_file, validated

INDEX = "model.safetensors.index.json"

_HIGH = {"F64": "FP64", "F32": "FP32", "F16": "FP16", "BF16": "BF16"}
_DTYPES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}
_FP8 = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
_PARTS = (
    (re.compile(r"\.weight(?:_packed)?$"), ""),
    (re.compile(r"\.(fc[12])_weight$"), r".\1"),  # Transformer Engine's LayerNormMLP
    (re.compile(r"\.weight(\d+)$"), r".gemm_\1"),  # and GroupedLinear
)
"""End of a tensor's name -> end of the module's name."""

_FP4 = {16.0: "NVFP4", 32.0: "MXFP4"}
"""Elements with one scale -> format."""

_SCALES = (
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "weight_zero_point",
)
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
_TABLES = ("vocab_size", "max_position_embeddings", "n_positions", "type_vocab_size")
"""Keys of a model's config: a weight with so many rows is an embedding, or the output layer over it."""


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    file: str


class Checkpoint(NamedTuple):
    """The modules with weights of a checkpoint, and their stored formats."""

    modules: list[Module]
    formats: dict[str, ModuleFormats]
    config: Mapping[str, Any]


def block_of(name: str) -> int | None:
    """Return the number of the block in a module's name."""
    number = _BLOCK.search(f"{name}.")
    return None if number is None else int(number[1])


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Read the headers of a checkpoint's files, and its config.json; None if there are no files.

    Raises:
        MapError: a file that the index names is missing.
    """
    folder = path if path.is_dir() else path.parent
    index: dict[str, str] = {}
    files = sorted(path.glob("*.safetensors"))
    if path.is_file() and path.suffix == ".safetensors":
        files = [path]
    elif (path / INDEX).exists():
        index = validated(dict[str, str], read_file(path / INDEX).get("weight_map"), f"{path / INDEX}: weight_map")
        files = [path / name for name in dict.fromkeys(index.values())]
    if not files:
        return None
    tensors: dict[str, _Tensor] = {}
    for file in files:
        if not file.exists():
            lost = [tensor for tensor, name in index.items() if name == file.name]
            raise MapError(
                f"{path}: {file.name}, with {many(len(lost), 'tensor')} such as {lost[0]}, is missing. Download the"
                " whole checkpoint."
            )
        tensors.update(_header(file))
    config_file = folder / "config.json"
    config = read_file(config_file) if config_file.exists() else {}
    sizes = {**config, **validated(dict[str, Any], config.get("text_config", {}), f"{config_file}: text_config")}
    rows = list(map(sizes.get, _TABLES))
    dtype = _DTYPES.get(str(sizes.get("torch_dtype", sizes.get("dtype"))), "")
    modules: list[Module] = []
    formats: dict[str, ModuleFormats] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) < 2 or name.endswith(_SCALES):
            continue
        ends = (end.sub(replacement, name) for end, replacement in _PARTS if end.search(name))
        module = next(ends, name)  # experts in one tensor have no such end
        formats[module] = _format(name, tensor, tensors)
        is_convolution = module != name and len(tensor.shape) > 2
        is_linear = tensor.shape[0] not in rows and not is_convolution
        modules.append(Module(module, _HIGH.get(tensor.dtype, dtype), is_linear, layer=block_of(module)))
    if not modules:
        raise MapError(f"{path}: no weights in {', '.join(file.name for file in files)}.")
    return Checkpoint(modules, formats, config)


def _header(file: Path) -> dict[str, _Tensor]:
    from safetensors import SafetensorError, safe_open

    tensors = {}
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                part = opened.get_slice(name)
                tensors[name] = _Tensor(part.get_dtype(), tuple(part.get_shape()), file.name)
    except (SafetensorError, OSError) as error:
        raise MapError(f"{file} cannot be read as safetensors: {error}.") from error
    return tensors


def _format(name: str, tensor: _Tensor, tensors: Mapping[str, _Tensor]) -> ModuleFormats:
    """Return the format of a weight, with the dtypes and shapes as its source."""
    if tensor.dtype in _HIGH:
        return ModuleFormats(_HIGH[tensor.dtype], said=f"{tensor.file}: {tensor.dtype}")
    prefix = re.sub(r"weight(_packed)?$", "", name)
    if prefix == name:
        prefix = f"{name}_"
    scales: dict[str, _Tensor] = {}
    texts = []
    for key in _SCALES:
        if prefix + key in tensors:
            found = tensors[prefix + key]
            scales[key] = found
            texts.append(f"{key} {found.dtype} {list(found.shape)}")
    scale = scales.get("weight_scale_inv", scales.get("weight_scale"))
    said = f"{tensor.file}: {tensor.dtype} {list(tensor.shape)}, {', '.join(texts) or 'no scale'}"
    columns = scale.shape[-1] if scale and scale.shape else 0
    shared = tensor.shape[-1] / columns if columns else 0.0
    if tensor.dtype == "U8" and 2 * shared in _FP4:  # two elements in a byte
        return ModuleFormats(_FP4[2 * shared], said=said)
    if tensor.dtype not in _FP8:
        return ModuleFormats(f"unknown ({tensor.dtype})", said=said)
    kind = "FP8"
    if scale and scale.dtype in ("U8", "F8_E8M0") and shared == 32:
        kind = "MXFP8"
    elif scale and len(scale.shape) > 1 and ("weight_scale_inv" in scales or columns > 1):
        kind = "FP8 block"
    return ModuleFormats(f"{kind} {_FP8[tensor.dtype]}", said=said)
