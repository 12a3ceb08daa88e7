"""The stored formats of a checkpoint, from the headers of its safetensors files.

Scales are recognized by the names and shapes that transformers, compressed-tensors and ModelOpt write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from te_precision_callbacks.config.problems import shown
from te_precision_callbacks.maps.matching import Module
from te_precision_callbacks.maps.precision_map import MapError, ModuleFormats
from te_precision_callbacks.runs.run_files import read_json

INDEX = "model.safetensors.index.json"

_SUFFIX = ".safetensors"
_HIGH = {"F64": "FP64", "F32": "FP32", "F16": "FP16", "BF16": "BF16"}
_FP8 = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
_PARTS = (
    (re.compile(r"\.weight(?:_packed)?$"), ""),
    (re.compile(r"\.(fc[12])_weight$"), r".\1"),  # Transformer Engine's LayerNormMLP
    (re.compile(r"\.weight(\d+)$"), r".gemm_\1"),  # and GroupedLinear
)
"""End of a tensor's name -> end of the module's name."""

_FP4 = {16.0: "NVFP4", 32.0: "MXFP4"}
"""Elements with one scale -> format."""

_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "input_scale")
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


def safetensors_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint; empty if there are none.

    Raises:
        MapError: a file that the index names is missing.
    """
    if path.is_file():
        return [path] if path.suffix == _SUFFIX else []
    index = path / INDEX
    if not index.exists():
        return sorted(path.glob(f"*{_SUFFIX}"))
    names = read_config(index).get("weight_map")
    if not isinstance(names, Mapping) or not names:
        raise MapError(f"{index}: weight_map must map tensors to files, not be {shown(names)}.")
    files = [path / str(name) for name in dict.fromkeys(names.values())]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        lost = [tensor for tensor, name in names.items() if name in missing]
        raise MapError(
            f"{path}: {len(missing)} of {len(files)} files of {INDEX} are missing, first {missing[0]}, with"
            f" {len(lost)} tensors such as {lost[0]}. Download the whole checkpoint."
        )
    stored = {name for file in files for name in _header(file)}
    lacking = [name for name in names if name not in stored]
    if lacking:
        raise MapError(f"{index} names {len(lacking)} tensors that its files lack, first {lacking[0]}.")
    return files


def read_config(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise MapError(f"{path} cannot be read: {error}.") from error


def read_checkpoint(path: Path, files: list[Path]) -> Checkpoint:
    """Read the headers of a checkpoint's files, and its config.json."""
    tensors = {name: tensor for file in files for name, tensor in _header(file).items()}
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json"
    config = read_config(file) if file.exists() else {}
    texts = config.get("text_config")
    sizes = {**config, **(texts if isinstance(texts, Mapping) else {})}
    rows = {sizes[key] for key in _TABLES if isinstance(sizes.get(key), int)}
    modules: list[Module] = []
    formats: dict[str, ModuleFormats] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) < 2 or name.endswith(_SCALES):
            continue
        module = _module_of(name)
        stored, how = _format(name, tensor, tensors)
        formats[module] = ModuleFormats(stored, said=f"{tensor.file}: {how}")
        high = _HIGH.get(tensor.dtype, str(sizes.get("torch_dtype") or sizes.get("dtype") or ""))
        high = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}.get(high, high)
        is_convolution = module != name and len(tensor.shape) > 2
        is_linear = tensor.shape[0] not in rows and not is_convolution
        modules.append(Module(module, high, is_linear, layer=block_of(module)))
    if not modules:
        raise MapError(f"{path}: no weights in {', '.join(file.name for file in files)}.")
    return Checkpoint(modules, formats, config)


def _module_of(tensor: str) -> str:
    for end, replacement in _PARTS:
        if end.search(tensor):
            return end.sub(replacement, tensor)
    return tensor  # experts in one tensor


def _header(file: Path) -> dict[str, _Tensor]:
    from safetensors import SafetensorError, safe_open

    def read() -> Iterator[tuple[str, _Tensor]]:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                part = opened.get_slice(name)
                yield name, _Tensor(part.get_dtype(), tuple(part.get_shape()), file.name)

    try:
        return dict(read())
    except (SafetensorError, OSError) as error:
        raise MapError(f"{file} cannot be read as safetensors: {error}.") from error


def _format(name: str, tensor: _Tensor, tensors: Mapping[str, _Tensor]) -> tuple[str, str]:
    """Return the format of a weight, and the dtypes and shapes that say so."""
    if tensor.dtype in _HIGH:
        return _HIGH[tensor.dtype], tensor.dtype
    prefix = name.removesuffix("weight_packed").removesuffix("weight")
    prefix = prefix if prefix != name else f"{name}_"
    scales = {key: tensors[prefix + key] for key in _SCALES if prefix + key in tensors}
    weight_scale = scales.get("weight_scale_inv", scales.get("weight_scale"))
    listed = ", ".join(f"{key} {scale.dtype} {list(scale.shape)}" for key, scale in scales.items())
    how = f"{tensor.dtype} {list(tensor.shape)}, {listed or 'no scale'}"
    columns = weight_scale.shape[-1] if weight_scale is not None and weight_scale.shape else 0
    shared = tensor.shape[-1] / columns if columns else 0.0
    elements = _FP8.get(tensor.dtype)
    if elements is not None:
        kind = "FP8"
        if weight_scale is not None and len(weight_scale.shape) > 1 and ("weight_scale_inv" in scales or columns > 1):
            is_mx = weight_scale.dtype in ("U8", "F8_E8M0") and shared == 32
            kind = "MXFP8" if is_mx else "FP8 block"
        return f"{kind} {elements}", how
    if tensor.dtype == "U8" and 2 * shared in _FP4:  # two elements in a byte
        return _FP4[2 * shared], how
    return f"unknown ({tensor.dtype})", how
