"""Reads precision files of other tools: Megatron, ModelOpt, and the ``quantization_config`` of Hugging Face models.

The first rule that matches a module decides, unless it is not enabled. Engines such as vLLM load projections of one
input as one layer, so their rules are applied to such layers.

Files for transformers and compressed-tensors are matched by the installed library's own function. The other rules, and
these two without the library, were read from Megatron-Core 0.16.1 (``core/quantization/quant_config.py``,
``core/extensions/transformer_engine.py``), transformers 5.23 (``quantizers/quantizers_utils.py``), compressed-tensors
0.20.1 (``utils/match.py``), torchao's ``FqnToConfig`` (``quant_api.py``), vLLM 0.24
(``quantization/utils/quant_utils.py`` as of pull request 43981, ``quantization/modelopt.py`` and ``mxfp4.py``), and
SGLang 0.5.12 (``srt/layers/quantization/utils.py`` as of pull request 23467, ``mxfp4.py``). Megatron's reader is not
called, because it imports Transformer Engine.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from te_precision_callbacks.base.counts import ValueT, group_by_key
from te_precision_callbacks.base.suggestions import shown, suggestion
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.layers.folding import form_of
from te_precision_callbacks.maps.precision_map import (
    FindingKind,
    MapError,
    MapFinding,
    ModuleFormats,
    PrecisionMap,
    join_names,
    nearest_names,
    validated,
)

FUSED_OF = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Part in a checkpoint -> fused layer of an engine (vLLM 0.24: ``packed_modules_mapping``; SGLang 0.5.12)."""

HIGH = "high precision"


class Module(NamedTuple):
    """A module with a weight.

    Attributes:
        high: the format without quantization; empty if unknown.
        is_linear: whether it is a linear layer, which tools quantize by default.
        classes: the names of its class and base classes; empty if unknown.
        layer: the number of its block; None outside of blocks.
        has_matrix: false for a norm, or a parameter such as ``e_score_correction_bias``: it exists, and is in no map.
    """

    name: str
    high: str
    is_linear: bool
    classes: tuple[str, ...] = ()
    layer: int | None = None
    has_matrix: bool = True


KEPT = ModuleFormats(HIGH, HIGH)
"""The module's own dtype, in a file for inference, which has no gradients."""


Match = Callable[[str, Module], bool]
"""Whether an entry matches a module."""


@dataclass(frozen=True)
class Rule:
    """An entry of a precision file.

    Attributes:
        place: the key, such as ``ignored_layers[3]``.
        pattern: the entry's text.
        matches: whether a pattern matches a module.
        formats: the formats that it gives.
        overrides: whether it acts on a module that the tool (quantizes, does not quantize) without it.
    """

    place: str
    pattern: str
    matches: Match
    formats: ModuleFormats = KEPT
    enabled: bool = True
    overrides: tuple[bool, bool] = (True, True)

    def __str__(self) -> str:
        return f"{self.place} {shown(self.pattern)}"

    def names(self, module: Module) -> bool:
        return self.matches(self.pattern, module) or f".{module.name}".endswith(f".{self.pattern}")

    def acts(self, default: ModuleFormats) -> bool:
        return self.overrides[default.weight == HIGH] or self.formats[:3] == default[:3]


@dataclass(frozen=True)
class RuleFile:
    """A precision file of another tool.

    Attributes:
        tool: the tool or engine with its version, for its matching.
        default: the formats of a module without a rule.
        notes: facts that are in no map.
    """

    tool: str
    rules: Sequence[Rule]
    default: Callable[[Module], ModuleFormats]
    notes: tuple[str, ...] = ()


def apply_rules(path: str, file: RuleFile, modules: Sequence[Module]) -> PrecisionMap:
    """Return the map of a precision file on the modules of a model, with findings about its rules."""
    others = [module for module in modules if not module.has_matrix]
    modules = [module for module in modules if module.has_matrix]
    defaults = {module.name: file.default(module) for module in modules}
    deciding: dict[str, Rule] = {}
    problems: list[tuple[tuple[FindingKind, str, str], tuple[Rule, list[str]]]] = []
    for rule in file.rules:
        try:
            matched = [module for module in modules if rule.matches(rule.pattern, module)]
            if not matched and any(map(rule.names, others)):
                continue
        except (re.error, MapError) as error:
            raise MapError(f"{rule} cannot be matched by the rules of {file.tool}: {error}.") from None
        problem = _problem(rule, matched, deciding, defaults)
        if problem is not None:
            kind, reason, affected = problem
            problems.append(((kind, form_of(rule.pattern), reason), (rule, affected)))
        if rule.enabled:
            for module in matched:
                deciding.setdefault(module.name, rule)
    formats = {}
    for module in modules:
        chosen = defaults[module.name]
        decides = deciding.get(module.name)
        if decides is not None and decides.acts(chosen):
            chosen = decides.formats._replace(said=f"{decides} ({file.tool})")
        high_names = {HIGH: module.high or HIGH}
        weight, activation, gradient = (high_names.get(text, text) for text in chosen[:3])
        formats[module.name] = ModuleFormats(weight, activation, gradient, f"{path}: {chosen.said}")
    findings = []
    for (kind, _, reason), same_problems in group_by_key(problems).items():
        keys = join_names(rule.place for rule, _ in same_problems)
        affected = [name for _, modules_of_rule in same_problems for name in modules_of_rule]
        text = f"{path}: {keys} {join_names(shown(rule.pattern) for rule, _ in same_problems)} {reason}"
        if affected:
            text += f": {join_names(affected)}."
        findings.append(MapFinding(kind, text, tuple(affected)))
    return PrecisionMap(path, formats, tuple(findings), file.notes)


def _problem(
    rule: Rule, matched: Sequence[Module], deciding: Mapping[str, Rule], defaults: Mapping[str, ModuleFormats]
) -> tuple[FindingKind, str, list[str]] | None:
    """Return the kind of a rule's finding, its text, and the affected modules."""
    free = [module.name for module in matched if module.name not in deciding]
    if not rule.enabled:
        reason = "takes no module, because it is not enabled (enabled: true is missing)"
        return "disabled", reason, free
    if not matched:
        return "unmatched", f"takes no module.{nearest_names(rule.pattern, defaults)}", []
    if not free:
        earlier = join_names(str(deciding[module.name]) for module in matched)
        reason = f"takes no module, because an earlier entry ({earlier}) takes all it matches"
        return "shadowed", reason, [module.name for module in matched]
    idle = [name for name in free if not rule.acts(defaults[name])]
    if idle:
        keys = "override_quantized_autocast, override_nonquantized_autocast"
        return "no_effect", f"has no effect in the recipe around these modules ({keys})", idle
    inside = [name for name in free if _is_part_of_a_word(rule.pattern, name)]
    if inside:
        return "part_of_a_name", "matches only a part of a word in names", inside
    return None


def _is_part_of_a_word(pattern: str, name: str) -> bool:
    paths = [path for path in (name, fused_name(name)) if pattern in path]
    return bool(paths) and not any(f".{pattern}." in f".{path}." for path in paths)


def fused_name(name: str) -> str:
    """Return the name of the engine's layer that has a module as a part; else the module's own name."""
    parent, dot, last = name.rpartition(".")
    return parent + dot + FUSED_OF.get(last, last)


# ---------------------------------------------------------------------- files

Engine = Literal["vllm", "sglang"]

_Rules = tuple[list[Rule], ModuleFormats]
"""The rules of a file; the formats of other linear layers."""

_Reader = Callable[[Mapping[str, Any], Match], _Rules]

_E4M3 = "FP8 E4M3"
_BLOCK = "FP8 block E4M3"
_MXFP8 = "MXFP8 E4M3"
_MXFP4 = "MXFP4"
_NVFP4 = "NVFP4"

_KINDS = {
    "matchers": "Megatron's precision file",
    "configs": "Megatron's precision file",
    "quantization": "ModelOpt's hf_quant_config.json",
    "quantization_config": "a model's config.json",
    "quant_method": "a quantization_config",
}
"""Key of a precision file -> its kind."""

_MODELOPT = {
    "FP8": ModuleFormats(_E4M3, _E4M3),
    "FP8_PER_CHANNEL_PER_TOKEN": ModuleFormats(_E4M3, _E4M3),
    "FP8_PB_WO": ModuleFormats(_BLOCK, HIGH),
    "NVFP4": ModuleFormats(_NVFP4, _NVFP4),
    "W4A16_NVFP4": ModuleFormats(_NVFP4, HIGH),
    "MXFP8": ModuleFormats(_MXFP8, _MXFP8),
}
"""ModelOpt's ``quant_algo`` -> formats."""

_TORCHAO = {
    "Float8DynamicActivationFloat8WeightConfig": ModuleFormats(_E4M3, _E4M3),
    "Float8WeightOnlyConfig": ModuleFormats(_E4M3, HIGH),
    "Int8DynamicActivationInt8WeightConfig": ModuleFormats("INT8", "INT8"),
    "Int8WeightOnlyConfig": ModuleFormats("INT8", HIGH),
    "Int4WeightOnlyConfig": ModuleFormats("INT4", HIGH),
}

_FLOATS = {
    (8, None): _E4M3,
    (8, "block"): _BLOCK,
    (8, 128): _BLOCK,
    (8, 32): _MXFP8,
    (4, 32): _MXFP4,
    (4, 16): _NVFP4,
}
"""Bits and group of compressed-tensors -> format."""

_MEGATRON = {"tensorwise": "fp8_current_scaling", "blockwise": "fp8_block_scaling"}
"""Megatron's name of a recipe -> Transformer Engine's, if it is another."""

_LIBRARIES = {
    "transformers": ("transformers.quantizers.quantizers_utils", "should_convert_module", "5.23"),
    "compressed-tensors": ("compressed_tensors.utils.match", "match_name", "0.20"),
}
"""Library -> the module and the name of its matching function, and the version that was read."""


class Surroundings(NamedTuple):
    """Facts that a precision file lacks.

    Attributes:
        engine: the inference engine that reads the file; None for the tool that defines it.
        recipe: the recipe around the model, for Megatron's file; None if not given.
        bf16_layers: numbers of first and last blocks without the recipe, for Megatron's file.
    """

    engine: Engine | None = None
    recipe: str | None = None
    bf16_layers: tuple[int, int] = (0, 0)


def kind_of(data: Mapping[str, Any]) -> str:
    """Return the kind of a precision file; raises a MapError for none or several."""
    kinds = dict.fromkeys(kind for key, kind in _KINDS.items() if key in data)
    if len(kinds) == 1:
        return next(iter(kinds))
    kinds_found = " and ".join(kinds) or "no precision file"
    known_files = ", ".join(dict.fromkeys(_KINDS.values()))
    raise MapError(f"this is {kinds_found}: its keys are {shown(list(data))}. Known files: {known_files}.")


def read_rules(data: Mapping[str, Any], around: Surroundings, modules: Sequence[Module]) -> RuleFile:
    """Read the rules of a precision file; raises a MapError with the key and the value."""
    if kind_of(data) == _KINDS["matchers"]:
        return _megatron(validated(_MegatronFile, data, ""), around, modules)
    inner = data.get("quantization", data.get("quantization_config", data))
    config = validated(dict[str, Any], inner, "the quantization")
    method = str(config.get("quant_method"))
    if "quantization" in data or method in ("modelopt_fp4", "modelopt_mxfp8"):
        method = "modelopt"
    reader, tools = _known(_READERS, method, "quant_method")
    if around.engine not in tools:
        known_tools = ", ".join(tool for tool, _ in tools.values())
        raise MapError(f"the matching of {around.engine} is not known for {method}. Known: {known_tools}.")
    tool, match = tools[around.engine]
    if tool in _LIBRARIES:
        _, tool = _library(tool)
    rules, default = reader(config, match)
    if data.get("tie_word_embeddings") and not any(module.name.endswith("lm_head") for module in modules):
        rules = [rule for rule in rules if rule.pattern != "lm_head"]  # tools list it for all models
    lists = (config.get("modules_to_not_convert"), config.get("ignored_layers"))
    kept = {}  # patterns of names -> modules that the tool's code keeps, whatever a list says
    if method == "mxfp4":
        kept[r"^(?!.*\.experts\b)"] = "all but routed experts"
    elif reader is _fp8 and (around.engine is not None or lists == (None, None)):
        kept["lm_head$"] = "lm_head"
    elif (method, around.engine) == ("modelopt", "vllm"):
        kept["vision_tower|vision_model|visual"] = "vision towers"

    def of_linear(module: Module) -> ModuleFormats:
        if not module.is_linear:
            return KEPT._replace(said=f"{tool} quantizes only linear layers")
        for pattern, modules_kept in kept.items():
            if re.search(pattern, module.name):
                return KEPT._replace(said=f"{tool} keeps {modules_kept}")
        return default

    cache = config.get("kv_cache_scheme", config.get("kv_cache_quant_algo"))
    notes = (f"{tool} quantizes the KV cache too, which is in no map: {shown(cache)}.",) if cache else ()
    return RuleFile(tool, rules, of_linear, notes)


def _patterns(config: Mapping[str, Any], match: Match, *keys: str) -> list[Rule]:
    """Return the rules of the ignore list below one of some keys, which mean the same."""
    patterns_by_key = {key: config[key] for key in keys if config.get(key) is not None}
    if len(set(map(str, patterns_by_key.values()))) > 1:
        raise MapError(f"{' and '.join(patterns_by_key)} differ, and tools disagree on which one counts. Keep one.")
    for key, entries in patterns_by_key.items():
        names = enumerate(validated(list[str], entries, key))
        return [Rule(f"{key}[{number}]", entry, match) for number, entry in names]
    return []


def _known(table: Mapping[str, ValueT], name: Any, key: str) -> ValueT:
    if isinstance(name, str) and name in table:
        return table[name]
    raise MapError(f"{key}: {shown(name)} is not known.{suggestion(str(name), table)}")


# ---------------------------------------------------------------------- matching


@functools.cache
def _library(name: str) -> tuple[Callable[[str, Any], bool] | None, str]:
    """Return the matching function of a library, and the version; imports it, which takes seconds."""
    module, function, read = _LIBRARIES[name]
    try:
        called = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError):
        return None, f"{name} {read}"
    return called, f"installed {name} {importlib.metadata.version(name)}"


def _transformers(entry: str, module: Module) -> bool:
    should_convert, _ = _library("transformers")
    if should_convert is not None:
        return not should_convert(module.name, [entry])
    match = re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", module.name)
    return match is not None or module.name.endswith(entry)


def _transformers_weight(entry: str, module: Module) -> bool:
    return _transformers(entry, module._replace(name=f"{module.name}.weight"))


def _equal_or_regex(entry: str, module: Module) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module.name) is not None
    return entry == module.name


def _fused_or_equal(entry: str, module: Module) -> bool:
    return _equal_or_regex(entry, module) or entry == fused_name(module.name)


def _class_or_name(entry: str, module: Module) -> bool:
    match_name, _ = _library("compressed-tensors")
    has_name = _equal_or_regex(entry, module) if match_name is None else match_name(module.name, entry)
    if has_name or entry in module.classes:
        return True
    if module.classes or not entry[:1].isupper():
        return False
    if entry != "Linear":
        raise MapError("it is a class; give --modules package.module:function, which has the classes of modules")
    return module.is_linear


def _wildcard(entry: str, module: Module) -> bool:
    return fnmatchcase(module.name, entry)


def _full_match(entry: str, module: Module) -> bool:
    if entry.startswith("re:"):
        return re.fullmatch(entry.removeprefix("re:"), module.name) is not None
    return entry in (module.name, f"{module.name}.weight")


def _engine_name(name: str) -> str:
    """Return the engine's name of a layer: all routed experts are one."""
    experts = re.match(r"(.*\bexperts)\.", name)
    return experts[1] if experts and "shared" not in experts[1] else fused_name(name)


def _fused_or_inside(entry: str, module: Module) -> bool:
    return _fused_or_equal(entry, module) or module.name.startswith(f"{entry}.")


def _vllm(entry: str, module: Module) -> bool:
    name = _engine_name(module.name)
    if "experts" in name and name.rpartition(".")[2] not in FUSED_OF.values():
        return "experts" in entry and name in entry
    return entry in (name, module.name)


def _vllm_modelopt(entry: str, module: Module) -> bool:
    name = _engine_name(module.name)
    return _vllm(entry, module) or entry in name or fnmatchcase(name, entry)


def _sglang(entry: str, module: Module) -> bool:
    if entry.startswith("re:"):
        raise MapError("how 're:' is matched is not known")
    name = _engine_name(module.name)
    in_experts = name.endswith("experts")
    path = name if in_experts else module.name
    if f".{entry.rstrip('.')}." in f".{path}.":
        return True
    return in_experts and "experts" in entry and name in entry


# ---------------------------------------------------------------------- quantization_config


def _fp8(config: Mapping[str, Any], match: Match) -> _Rules:
    for key, default in (("modules_to_convert", None), ("dequantize", False), ("expert_dtype", "fp8")):
        if config.get(key) not in (None, default):
            raise MapError(f"{key} {shown(config[key])} is not read. Remove it, or map the checkpoint.")
    said = f"quant_method {config['quant_method']!r}"
    rules = _patterns(config, match, "modules_to_not_convert", "ignored_layers")
    text = _E4M3
    if config["quant_method"] == "mxfp4":
        if match is _transformers:
            return rules, ModuleFormats(_MXFP4, HIGH, said=said)
        return [], ModuleFormats(_MXFP4, said=said)  # engines ignore the list; their kernels choose the activation
    if config["quant_method"] == "mxfp8":
        text = _MXFP8
    elif config.get("weight_block_size") is not None:
        text = _BLOCK
    return rules, ModuleFormats(text, text, said=said)


class _Scheme(BaseModel):
    """A ``QuantizationArgs`` of compressed-tensors."""

    type: Literal["int", "float"]
    num_bits: int
    group_size: int | None = None
    strategy: str | None = None


class _Group(BaseModel):
    targets: list[str]
    weights: _Scheme | None = None
    input_activations: _Scheme | None = None


def _compressed_tensors(config: Mapping[str, Any], match: Match) -> _Rules:
    def takes(entry: str, module: Module) -> bool:
        return match(entry, module) or _class_or_name(entry, module)

    groups = validated(dict[str, _Group], config.get("config_groups"), "config_groups")
    targets = []
    for name, group in reversed(groups.items()):  # the last group with a target counts
        key = f"config_groups.{name}"
        weight = _scheme(group.weights, f"{key}.weights")
        formats = ModuleFormats(weight, _scheme(group.input_activations, f"{key}.input_activations"))
        targets += [Rule(f"{key}.targets", entry, takes, formats) for entry in group.targets]
    targets.sort(key=lambda rule: (rule.pattern[:1].isupper(), rule.pattern.startswith("re:"), rule.pattern))
    return [*_patterns(config, match, "ignore"), *targets], KEPT._replace(said="in no target")


def _scheme(scheme: _Scheme | None, key: str) -> str:
    if scheme is None:
        return HIGH
    if scheme.type == "int":
        return f"INT{scheme.num_bits}"
    group = "block" if scheme.strategy == "block" else scheme.group_size
    if (scheme.num_bits, group) not in _FLOATS:
        raise MapError(f"{key}: {scheme!r} is not a known format.")
    return _FLOATS[scheme.num_bits, group]


def _modelopt(config: Mapping[str, Any], match: Match) -> _Rules:
    rules = _patterns(config, match, "exclude_modules", "ignore")
    layers = validated(dict[str, dict[str, Any]], config.get("quantized_layers", {}), "quantized_layers")
    if match is _vllm_modelopt:  # the first part of an engine's layer counts
        layers = {_engine_name(name): layer for name, layer in reversed(layers.items())}
    for name, layer in layers.items():
        formats = _known(_MODELOPT, layer.get("quant_algo"), f"quantized_layers.{name}.quant_algo")
        rules.append(Rule("quantized_layers", name, _fused_or_inside, formats))
    algorithm = config.get("quant_algo")
    default = KEPT
    if algorithm != "MIXED_PRECISION" or not layers:
        default = _known(_MODELOPT, algorithm, "quant_algo")
    return rules, default._replace(said=f"quant_algo {algorithm!r}")


def _torchao(config: Mapping[str, Any], match: Match) -> _Rules:
    rules = _patterns(config, match, "modules_to_not_convert")
    source_key = "quant_type"
    chosen = validated(dict[str, dict[str, Any]], config.get("quant_type"), source_key).get("default", {})
    name = chosen.get("_type")
    if name != "FqnToConfig":
        default = _known(_TORCHAO, name, f"{source_key}.default._type")
        return rules, default._replace(said=f"quant_type {name}")
    data = validated(dict[str, dict[str, dict[str, Any] | None]], chosen.get("_data"), f"{source_key}.default._data")
    formats = {}
    for key, scheme in data.get("fqn_to_config", {}).items():
        formats[key] = KEPT if scheme is None else _known(_TORCHAO, scheme.get("_type"), key)
    default = formats.pop("_default", KEPT)
    for key in sorted(formats, key=lambda key: key.startswith("re:")):
        rules.append(Rule("fqn_to_config", key, _full_match, formats[key]))
    return rules, default._replace(said=f"{name}: _default")


_VLLM = "vLLM 0.24"
_FP8_TOOLS = {None: ("transformers", _transformers), "vllm": (_VLLM, _vllm), "sglang": ("SGLang 0.5.12", _sglang)}
_READERS: Mapping[str, tuple[_Reader, Mapping[str | None, tuple[str, Match]]]] = {
    "fp8": (_fp8, _FP8_TOOLS),
    "mxfp8": (_fp8, _FP8_TOOLS),
    "mxfp4": (_fp8, _FP8_TOOLS),
    "fbgemm_fp8": (_fp8, {engine: _FP8_TOOLS[engine] for engine in (None, "vllm")}),
    "compressed-tensors": (
        _compressed_tensors,
        {None: ("compressed-tensors", _class_or_name), "vllm": (_VLLM, _fused_or_equal)},
    ),
    "modelopt": (_modelopt, {None: ("ModelOpt's wildcards", _wildcard), "vllm": (_VLLM, _vllm_modelopt)}),
    "torchao": (_torchao, {None: ("transformers", _transformers_weight)}),
}
"""``quant_method`` -> its reader, and engine -> (tool, matching of its ignore list)."""


# ---------------------------------------------------------------------- Megatron


class _Recipe(BaseModel):
    model_config = ConfigDict(extra="forbid")

    fp8_quantization_recipe: Literal["tensorwise", "blockwise", "mxfp8", "custom"] | None = None
    fp4_quantization_recipe: Literal["nvfp4", "custom"] | None = None
    custom_recipe_factory: str | None = None
    fp8_format: Literal["e4m3", "hybrid"] = "e4m3"
    override_quantized_autocast: bool = True
    override_nonquantized_autocast: bool = False
    tp_only_amax_red: bool = False


class _Config(BaseModel):
    transformer_engine_config_type: Literal["TEQuantizationParams"]
    training_recipe: _Recipe


class _Matcher(BaseModel):
    type: Literal["glob"]
    pattern: str
    config: str
    enabled: bool = False


class _MegatronFile(BaseModel):
    configs: dict[str, _Config] = {}
    matchers: dict[str, _Matcher] = {}


def recipe_formats(name: str, elements: str = "") -> ModuleFormats:
    """Return the formats of a recipe of Transformer Engine, or of ``none``. ``elements``: ``e4m3`` or ``hybrid``."""
    if name == "none":
        return ModuleFormats(HIGH, HIGH, HIGH)
    row = _known(RECIPES, name, "--recipe")
    if name == "nvfp4":
        return ModuleFormats(row.format, row.format, row.format)
    is_hybrid = elements == "hybrid" or (not elements and "E5M2" in row.elements)
    gradient = "E5M2" if is_hybrid else "E4M3"
    return ModuleFormats(f"{row.format} E4M3", f"{row.format} E4M3", f"{row.format} {gradient}")


def _megatron(data: _MegatronFile, around: Surroundings, modules: Sequence[Module]) -> RuleFile:
    if around.recipe is None:
        raise MapError(
            "Megatron's file changes the recipe around the model, and leaves it to modules without a matcher."
            " Give this recipe with --recipe, such as --recipe mxfp8, or --recipe none."
        )
    formats = {}
    for name, config in data.configs.items():
        formats[name] = _training_formats(config.training_recipe, f"configs.{name}.training_recipe")
    rules = []
    for name, matcher in data.matchers.items():
        key = f"matchers.{name}"
        formats_of_rule = _known(formats, matcher.config, f"{key}.config")
        recipe = data.configs[matcher.config].training_recipe
        overrides = (recipe.override_quantized_autocast, recipe.override_nonquantized_autocast)
        rules.append(Rule(key, matcher.pattern, _te_wildcard, formats_of_rule, matcher.enabled, overrides))
    high = recipe_formats("none")
    default = recipe_formats(around.recipe)
    first, last = around.bf16_layers
    blocks = 1 + max((module.layer or 0 for module in modules), default=0)

    def around_module(module: Module) -> ModuleFormats:
        if not _is_te(module):
            return high._replace(said="no module of Transformer Engine")
        if module.layer is not None and not first <= module.layer < blocks - last:
            return high._replace(said=f"block {module.layer} is kept in high precision")
        return default._replace(said=f"no matcher: the recipe around the model, {around.recipe}")

    return RuleFile("Megatron-Core 0.16", rules, around_module)


def _is_te(module: Module) -> bool:
    if module.classes:
        return "TransformerEngineBaseModule" in module.classes
    return module.is_linear


def _te_wildcard(entry: str, module: Module) -> bool:
    return _is_te(module) and fnmatchcase(module.name, entry)


def _training_formats(recipe: _Recipe, key: str) -> ModuleFormats:
    if recipe.fp8_quantization_recipe and recipe.fp4_quantization_recipe:
        raise MapError(f"{key}: fp8_quantization_recipe and fp4_quantization_recipe exclude each other.")
    name = recipe.fp8_quantization_recipe or recipe.fp4_quantization_recipe
    if name is None:
        return recipe_formats("none")
    if name == "custom":
        raise MapError(
            f"{key}: 'custom' is code. Plan the model with te-precision map package.module:model --recipe"
            " package.module:factory."
        )
    return recipe_formats(_MEGATRON.get(name, name), recipe.fp8_format)
