"""Opens the sources of maps: recorded runs, checkpoints, precision files and saved maps.

The stored formats of a checkpoint are in the headers of its safetensors files. Scales are recognized by the names and
shapes that transformers, compressed-tensors and ModelOpt write.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.coverage.other_steps import recorded_products
from te_precision_callbacks.maps.alignment import is_projection
from te_precision_callbacks.maps.precision_map import (
    KEY,
    MapError,
    MapFinding,
    ModuleFormats,
    PrecisionMap,
    from_products,
    is_quantized,
    join_names,
    map_from_json,
    read_file,
    validated,
)
from te_precision_callbacks.maps.tool_files import Module, Surroundings, apply_rules, fused_name, kind_of, read_rules
from te_precision_callbacks.runs.reading import chosen_run, list_runs

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

_CLASSES_UNKNOWN = (
    "The classes of modules are not in a checkpoint: weights with two dimensions count as linear layers, unless their"
    " names are those of embeddings. Give --modules package.module:function for the classes."
)


def is_function(source: str) -> bool:
    return _FUNCTION.fullmatch(source) is not None and not Path(source).exists()


def open_map(
    source: str | os.PathLike[str], *, modules: Any = None, around: Surroundings | None = None
) -> PrecisionMap:
    """Read the map of a recorded run, a checkpoint, a precision file, or a saved map.

    Args:
        source: a log folder; a folder or file of safetensors; Megatron's YAML, ``hf_quant_config.json``,
            ``config.json`` or a ``quantization_config``; or the output of ``te-precision map --json``.
        modules: the modules for a precision file: a ``torch.nn.Module``, the path of a checkpoint, or a list
            of them. Default: the checkpoint in the file's folder.
        around: facts that a precision file lacks.

    Raises:
        MapError: the source is not known, damaged, or incomplete.
    """
    path = Path(source).expanduser()
    surroundings = around or Surroundings()
    if not path.exists():
        raise MapError(f"{path}: there is no such file or folder.")
    checkpoint = read_checkpoint(path)
    if checkpoint is not None:
        return _map_checkpoint(path, checkpoint, surroundings)
    if path.is_dir():
        return _map_run(path)
    data = read_file(path)
    if KEY in data:
        return map_from_json(data, str(path))
    return _apply(path, data, surroundings, modules)


def _apply(path: Path, data: Mapping[str, Any], around: Surroundings, model: Any) -> PrecisionMap:
    try:
        kind_of(data)
        modules = _modules(path, model)
        result = apply_rules(str(path), read_rules(data, around, modules), modules)
    except MapError as error:
        raise MapError(f"{path}: {error}") from None
    if around.engine is None:
        return result
    findings = tuple(_partly_quantized(path, result)) if around.engine == "vllm" else ()
    note = f"A model of {around.engine} may keep layers in high precision that the file does not name, such as routers."
    return replace(result, notes=(*result.notes, note), findings=(*result.findings, *findings))


def _partly_quantized(path: Path, result: PrecisionMap) -> Iterator[MapFinding]:
    """Find fused layers with parts in high precision, which vLLM 0.24 refuses (``is_layer_skipped``)."""
    fused = group_by_key((fused_name(name), name) for name in result.modules)
    names: list[str] = []
    for parts in fused.values():
        high = [name for name in parts if not is_quantized(result.modules[name].weight)]
        if len(high) < len(parts):
            names += high
    if names:
        text = f"{path}: vLLM does not load a fused layer with only some parts in high precision: {join_names(names)}."
        yield MapFinding("part_of_a_layer", text, tuple(names))


def _modules(path: Path, model: Any) -> Sequence[Module]:
    if isinstance(model, list):
        return model
    if hasattr(model, "named_modules"):
        return _modules_of(model)
    folder = path.parent if model is None else Path(model).expanduser()
    checkpoint = read_checkpoint(folder)
    if checkpoint is None:
        raise MapError(
            f"the file has patterns of names, and {folder} has no *.safetensors. Give the modules of the model with"
            " --modules: a checkpoint, or package.module:function."
        )
    return checkpoint.modules


def _modules_of(model: Any) -> list[Module]:
    from te_precision_callbacks.coverage.formats import dtype_name

    modules = []
    for name, module in model.named_modules():
        weights = [weight for weight in module.parameters(recurse=False) if weight.ndim > 1]
        if weights:
            classes = class_names(module)
            is_linear = any("Linear" in text or "MLP" in text for text in classes)
            modules.append(Module(name, dtype_name(weights[0].dtype), is_linear, classes, block_of(name)))
    return [*modules, *_without_matrix(dict(model.named_parameters()), modules)]


def _without_matrix(parameters: Iterable[str], modules: Sequence[Module]) -> list[Module]:
    """Return norms, and parameters that are neither a weight nor a bias, which a list may name."""
    names = dict.fromkeys(re.sub(r"\.(weight|bias)$", "", name) for name in parameters if not name.endswith(_SCALES))
    known = {module.name for module in modules}
    return [Module(name, "", False, ("Parameter",), has_matrix=False) for name in names if name not in known]


def _map_run(path: Path) -> PrecisionMap:
    if not list_runs(path):
        raise MapError(f"{path}: neither a checkpoint (no *.safetensors) nor a recorded run in this folder.")
    run, note = chosen_run(path)
    run.require_undamaged()
    rows = sorted(recorded_products(run.gemms, run.operands), key=lambda pair: pair[0]["since"] or 0)
    run_map = from_products((product for _, product in rows), f"{path}: run {run.run_id}")
    if not run_map.modules:
        raise MapError(f"{path}: the run recorded no precision of matrix products. {run.missing_contents}")
    notes = tuple(filter(None, [note, *run.notes]))
    return replace(run_map, source=str(path), notes=notes)


def _map_checkpoint(path: Path, checkpoint: Checkpoint, around: Surroundings) -> PrecisionMap:
    """Return the stored formats, with the activations and the rules of the ``quantization_config``."""
    folder = path if path.is_dir() else path.parent
    file = folder / "hf_quant_config.json"
    further_notes: tuple[str, ...] = ()
    if checkpoint.config.get("quantization_config"):
        if file.exists():
            further_notes = (f"{file} was not read: config.json has a quantization_config.",)
        file = folder / "config.json"
    if not file.exists():
        if around.engine is not None:
            raise MapError(f"{path}: --engine needs a quantization_config, and {folder / 'config.json'} has none.")
        return PrecisionMap(str(path), checkpoint.formats)
    stated_map = _apply(file, read_file(file), around, checkpoint.modules)
    stated_map = replace(stated_map, source=str(path), notes=(*stated_map.notes, *further_notes, _CLASSES_UNKNOWN))
    if not any(is_quantized(formats.weight) for formats in checkpoint.formats.values()):
        return stated_map  # an engine quantizes when it loads the checkpoint
    modules = {}
    contradictions = []
    unlisted = []
    for name, stored in checkpoint.formats.items():
        stated = stated_map.modules[name]
        if is_quantized(stored.weight) != is_quantized(stated.weight):
            if is_quantized(stored.weight) or is_projection(name):
                contradictions.append(((stored.weight, stated.weight), name))
            else:
                unlisted.append(name)
                stated = stated._replace(activation=stored.weight)
        modules[name] = stated._replace(weight=stored.weight, said=f"{stored.said}; {stated.said}")
    findings = list(stated_map.findings)
    for (stored_format, rule_format), affected in group_by_key(contradictions).items():
        text = f"{path}: stored in {stored_format}, but {file.name} says {rule_format}: {join_names(affected)}."
        findings.append(MapFinding("checkpoint", text, tuple(affected)))
    notes = stated_map.notes
    if unlisted:
        names = join_names(unlisted)
        notes = (*notes, f"Stored in high precision, though {file.name} does not name them: {names}.")
    return replace(stated_map, modules=modules, findings=tuple(findings), notes=notes)


# ---------------------------------------------------------------------- checkpoints

INDEX = "model.safetensors.index.json"

_HIGH = {"F64": "FP64", "F32": "FP32", "F16": "FP16", "BF16": "BF16"}
_DTYPES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}
_FP8 = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
_PARTS = (
    (re.compile(r"\.weight(?:_packed)?$"), ""),
    (re.compile(r"\.(fc[12])_weight$"), r".\1"),  # Transformer Engine's LayerNormMLP
    (re.compile(r"\.weight(\d+)$"), r".gemm_\1"),  # and GroupedLinear
    (re.compile(r"_blocks$"), ""),  # gpt-oss
)
"""End of a tensor's name -> end of the module's name."""

_FP4 = {16.0: "NVFP4", 32.0: "MXFP4"}
"""Elements with one scale -> format."""

_SCALES = (
    "weight_scale_inv",
    "weight_scale",
    "scale_inv",
    "scales",
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "weight_zero_point",
)
"""Ends of scales' names, the scales of blocks and channels first."""
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
_EMBEDDING = re.compile(
    r"((?<!patch_)embed(?!_out|.*proj|.*mapping)[^.]*|_emb|\b(wte|wpe|shared|relative_attention_bias))$"
)
"""End of an embedding's name in transformers 5.23. A projection can have as many rows."""


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
    dtype = _DTYPES.get(str(sizes.get("torch_dtype", sizes.get("dtype"))), "")
    modules: list[Module] = []
    formats: dict[str, ModuleFormats] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) < 2 or name.endswith((*_SCALES, "_bias")):
            continue
        ends = (end.sub(replacement, name) for end, replacement in _PARTS if end.search(name))
        module = next(ends, name)  # experts in one tensor have no such end
        formats[module] = _format(name, tensor, tensors)
        is_matrix = module != name and len(tensor.shape) == 2
        is_linear = (is_matrix and _EMBEDDING.search(module) is None) or ".experts." in module
        modules.append(Module(module, _HIGH.get(tensor.dtype, dtype), is_linear, layer=block_of(module)))
    if not modules:
        raise MapError(f"{path}: no weights in {', '.join(file.name for file in files)}.")
    return Checkpoint([*modules, *_without_matrix(tensors, modules)], formats, config)


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
    prefix = re.sub(r"(weight(_packed)?|blocks)$", "", name)
    if prefix == name:
        prefix = f"{name}_"
    scales = {key: tensors[prefix + key] for key in _SCALES if prefix + key in tensors}
    texts = [f"{key} {stored.dtype} {list(stored.shape)}" for key, stored in scales.items()]
    scale = next(iter(scales.values()), None)
    statement = f"{tensor.file}: {tensor.dtype} {list(tensor.shape)}, {', '.join(texts) or 'no scale'}"
    count = math.prod(scale.shape) if scale else 0
    shared = math.prod(tensor.shape) / count if count else 0.0
    if tensor.dtype == "U8" and 2 * shared in _FP4:  # two elements in a byte
        return ModuleFormats(_FP4[2 * shared], said=statement)
    if tensor.dtype not in _FP8:
        return ModuleFormats(f"unknown ({tensor.dtype})", said=statement)
    kind = "FP8"
    if scale and scale.dtype in ("U8", "F8_E8M0") and shared == 32:
        kind = "MXFP8"
    elif scale and len(scale.shape) > 1 and ("weight_scale_inv" in scales or scale.shape[-1] > 1):
        kind = "FP8 block"
    return ModuleFormats(f"{kind} {_FP8[tensor.dtype]}", said=statement)
