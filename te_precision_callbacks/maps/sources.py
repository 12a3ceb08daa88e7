"""Opens the sources of maps: recorded runs, checkpoints, precision files and saved maps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.config.problems import Problems, shown
from te_precision_callbacks.config.yaml_text import read_yaml
from te_precision_callbacks.maps.checkpoint import (
    Checkpoint,
    block_of,
    read_checkpoint,
    read_config,
    safetensors_files,
)
from te_precision_callbacks.maps.matching import Module, apply_rules, join_names
from te_precision_callbacks.maps.precision_map import (
    MapError,
    MapFinding,
    ModuleFormats,
    PrecisionMap,
    from_operands,
    is_map,
    map_from_json,
    use_of,
)
from te_precision_callbacks.maps.tool_files import Surroundings, kind_of, read_rules
from te_precision_callbacks.runs.reading import chosen_run, list_runs

_DTYPES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "float64": "FP64"}
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

_CLASSES_UNKNOWN = (
    "The classes of modules are not in a checkpoint: weights with two dimensions count as linear layers, unless their"
    " rows are the vocabulary or the positions of config.json. Give --modules package.module:function for the classes."
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
        modules: the modules on which a precision file acts: a ``torch.nn.Module``, the path of a checkpoint, or a list
            of them. Default: the checkpoint in the file's folder.
        around: what a precision file does not say.

    Raises:
        MapError: the source is not known, damaged, or incomplete.
    """
    path = Path(source).expanduser()
    given = around or Surroundings()
    if not path.exists():
        raise MapError(f"{path}: there is no such file or folder.{_neighbours(path)}")
    files = safetensors_files(path)
    if files:
        return _map_checkpoint(path, read_checkpoint(path, files), given)
    if path.is_dir():
        if not list_runs(path):
            raise MapError(f"{path}: neither a checkpoint (no *.safetensors) nor a recorded run in this folder.")
        return _map_run(path)
    data = _read_file(path)
    if is_map(data):
        return map_from_json(data, str(path))
    kind_of(data, str(path))
    known = _modules(path, modules)
    return apply_rules(read_rules(data, str(path), given, known), known)


def _neighbours(path: Path) -> str:
    names = sorted(entry.name for entry in path.absolute().parent.glob("*"))[:8]
    return f" Its folder has {', '.join(names)}." if names else ""


def _read_file(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".yaml", ".yml"):
        return read_config(path)
    twice = Problems()
    data, _ = read_yaml(path, twice, "precision")
    twice.raise_any()
    if not isinstance(data, Mapping):
        raise MapError(f"{path} must be a mapping, not {shown(data)}.")
    return data


def _modules(path: Path, given: Any) -> Sequence[Module]:
    if isinstance(given, Sequence) and not isinstance(given, str):
        return given
    if given is not None and not isinstance(given, (str, os.PathLike)):
        return list(_modules_of(given))
    folder = path.parent if given is None else Path(given).expanduser()
    files = safetensors_files(folder) if folder.exists() else []
    if files:
        return read_checkpoint(folder, files).modules
    raise MapError(
        f"{path} names modules by patterns, and {folder} has no *.safetensors. Give the modules of the model with"
        " --modules: a checkpoint, or package.module:function."
    )


def _modules_of(model: Any) -> Iterator[Module]:
    for name, module in model.named_modules():
        weights = [weight for weight in module.parameters(recurse=False) if weight.ndim > 1]
        if weights:
            classes = class_names(module)
            high = _DTYPES.get(str(weights[0].dtype).removeprefix("torch."), "")
            is_linear = any("Linear" in text or "MLP" in text for text in classes)
            yield Module(name, high, is_linear, classes, block_of(name))


# ---------------------------------------------------------------------- runs


def _map_run(path: Path) -> PrecisionMap:
    run, note = chosen_run(path)
    run.require_undamaged()
    operands: dict[str, dict[tuple[Any, str], str]] = {}
    for row in sorted(run.operands.to_pylist(), key=lambda row: row["since"]):
        formats = operands.setdefault(row["layer"], {})
        key = row["gemm"], row["tensor"]
        texts = [*formats.get(key, "").split(" -> "), row["format"]]
        formats[key] = " -> ".join(dict.fromkeys(filter(None, texts)))
    reasons: dict[str, dict[str, None]] = {}
    for row in run.gemms.to_pylist():
        if row["layer"] in operands and row["reason"] and row["until"] is None:
            reasons.setdefault(row["layer"], {})[row["reason_ref"] or row["reason"]] = None
    source = f"{path}: run {run.run_id}"
    modules = {
        layer: from_operands(formats, "; ".join([source, *reasons.get(layer, ())]))
        for layer, formats in operands.items()
    }
    weights = {name: formats for name, formats in modules.items() if formats.weight}
    if not weights:
        raise MapError(f"{path}: the run recorded no precision of matrix products. {run.missing_contents}")
    return PrecisionMap(str(path), weights, notes=tuple(filter(None, [note, *run.notes])))


# ---------------------------------------------------------------------- checkpoints


def _map_checkpoint(path: Path, checkpoint: Checkpoint, around: Surroundings) -> PrecisionMap:
    """Return the stored formats, with the activations and the rules of the ``quantization_config``."""
    folder = path if path.is_dir() else path.parent
    files = [folder / "config.json"] if checkpoint.config.get("quantization_config") else []
    files += [file for file in [folder / "hf_quant_config.json"] if file.exists()]
    if not files:
        if around.engine is not None:
            raise MapError(f"{path}: --engine needs a quantization_config, and {folder / 'config.json'} has none.")
        return PrecisionMap(str(path), checkpoint.formats)
    said = apply_rules(read_rules(read_config(files[0]), str(files[0]), around, checkpoint.modules), checkpoint.modules)
    stored_quantized = any(use_of(formats.weight) == "quantized" for formats in checkpoint.formats.values())
    if not stored_quantized:  # an engine quantizes when it loads the checkpoint
        return replace(said, source=str(path), notes=(*said.notes, _CLASSES_UNKNOWN))
    modules: dict[str, ModuleFormats] = {}
    contradicted: dict[tuple[str, str], list[str]] = {}
    for name, stored in checkpoint.formats.items():
        rule = said.modules[name]
        modules[name] = rule._replace(weight=stored.weight, said=f"{stored.said}; {rule.said}")
        if use_of(stored.weight) != use_of(rule.weight):
            contradicted.setdefault((stored.weight, rule.weight), []).append(name)
    findings = list(said.findings)
    for (stored_format, rule_format), names in contradicted.items():
        asked = rule_format or "high precision"
        text = f"{path}: stored in {stored_format}, but {files[0].name} says {asked}: {join_names(names)}."
        findings.append(MapFinding("checkpoint", text, tuple(names)))
    return PrecisionMap(str(path), modules, tuple(findings), (*said.notes, _CLASSES_UNKNOWN))
