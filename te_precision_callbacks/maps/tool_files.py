"""Reads precision files of other tools: Megatron, ModelOpt, and the ``quantization_config`` of Hugging Face models.

The matching was read from Megatron-Core 0.16.1 (``core/quantization/quant_config.py``,
``core/extensions/transformer_engine.py``), transformers 5.23 (``quantizers/quantizers_utils.py``, which is called where
it is installed), compressed-tensors 0.20.1 (``utils/match.py``), torchao's ``FqnToConfig`` (``quant_api.py``), vLLM
0.24 (``quantization/utils/quant_utils.py`` as of pull request 43981, ``quantization/modelopt.py``), and SGLang 0.5.12
(``srt/layers/quantization/utils.py`` as of pull request 23467). The functions of Megatron and compressed-tensors are
not called: importing them takes half a minute, and Megatron imports Transformer Engine. Tests compare with them.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.config.problems import shown, suggestion
from te_precision_callbacks.maps.matching import FUSED, HIGH, Formats, Module, Rule, RuleFile, fused_name
from te_precision_callbacks.maps.precision_map import MapError

Engine = Literal["vllm", "sglang"]

_VERSIONS = {"vllm": "vLLM 0.24", "sglang": "SGLang 0.5.12"}

Match = Callable[[str, Module], bool]
"""Whether an entry matches a module."""

_E4M3 = "FP8 E4M3"
_BLOCK = "FP8 block E4M3"
_MXFP8 = "MXFP8 E4M3"
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
    "FP8": Formats(_E4M3, _E4M3),
    "FP8_PER_CHANNEL_PER_TOKEN": Formats(_E4M3, _E4M3),
    "FP8_PB_WO": Formats(_BLOCK, HIGH),
    "NVFP4": Formats(_NVFP4, _NVFP4),
    "W4A16_NVFP4": Formats(_NVFP4, HIGH),
    "MXFP8": Formats(_MXFP8, _MXFP8),
}
"""ModelOpt's ``quant_algo`` -> formats."""

_TORCHAO = {
    "Float8DynamicActivationFloat8WeightConfig": Formats(_E4M3, _E4M3),
    "Float8WeightOnlyConfig": Formats(_E4M3, HIGH),
    "Int8DynamicActivationInt8WeightConfig": Formats("INT8", "INT8"),
    "Int8WeightOnlyConfig": Formats("INT8", HIGH),
    "Int4WeightOnlyConfig": Formats("INT4", HIGH),
}

_MEGATRON = {
    "tensorwise": "fp8_current_scaling",
    "blockwise": "fp8_block_scaling",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""Megatron's name of a recipe -> Transformer Engine's."""


@dataclass
class Surroundings:
    """What a precision file does not say.

    Attributes:
        engine: the inference engine whose matching is applied; None for the tool that defines the file.
        recipe: the recipe around the model, for Megatron's file; None if not given.
        bf16_layers: numbers of first and last blocks without the recipe, for Megatron's file.
        used: which of these a file has used.
    """

    engine: Engine | None = None
    recipe: str | None = None
    bf16_layers: tuple[int, int] = (0, 0)
    used: set[str] = field(default_factory=set)


def kind_of(data: Mapping[str, Any], path: str) -> str:
    """Return the key that tells the kind of a precision file; raises a MapError for none or several."""
    found = {kind: key for key, kind in _KINDS.items() if key in data}
    if len(found) == 1:
        return next(iter(found.values()))
    several = f"is {' and '.join(found)} at once" if found else "is no precision file"
    known = ", ".join(dict.fromkeys(_KINDS.values()))
    raise MapError(f"{path} {several}: its keys are {shown(list(data))}. Known files: {known}.")


def read_rules(data: Mapping[str, Any], path: str, around: Surroundings, modules: Sequence[Module]) -> RuleFile:
    """Read the rules of a precision file; raises a MapError with the key and the value."""
    kind = kind_of(data, path)
    if kind in ("matchers", "configs"):
        around.used |= {"recipe", "bf16_layers"}
        return _megatron(data, path, around, modules)
    around.used.add("engine")
    config = data if kind == "quant_method" else _mapping(data[kind], f"{path}: {kind}")
    method = "modelopt" if kind == "quantization" else str(config.get("quant_method"))
    readers = {
        "fp8": _fp8,
        "mxfp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "torchao": _torchao,
        "modelopt": _modelopt,
    }
    reader = readers.get(method.removesuffix("_fp4").removesuffix("_mxfp8"))
    if reader is None:
        raise MapError(f"{path}: quant_method {shown(method)} is not read.{suggestion(method, readers)}")
    return reader(config, path, around.engine)


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise MapError(f"{place} must be a mapping, not {shown(value)}.")


def _patterns(config: Mapping[str, Any], path: str, *keys: str) -> Iterator[tuple[str, str]]:
    """Yield (place, entry) of the lists below some keys, which mean the same."""
    given = [key for key in keys if config.get(key) is not None]
    if len({str(config[key]) for key in given}) > 1:
        raise MapError(f"{path}: {' and '.join(given)} differ, and tools disagree on which one counts. Keep one.")
    for key in given[:1]:
        entries = config[key]
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise MapError(f"{path}: {key} must be a list of names, not {shown(entries)}.")
        yield from ((f"{key}[{number}]", entry) for number, entry in enumerate(entries))


def _rule(place: str, entry: str, match: Match, formats: Formats | None = None) -> Rule:
    return Rule(place, entry, formats, functools.partial(match, entry))


# ---------------------------------------------------------------------- matching


@functools.cache
def _should_convert() -> Callable[[str, list[str]], bool] | None:
    """Return transformers' function, loaded from its file: importing the package takes seconds; None without it."""
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / "quantizers" / "quantizers_utils.py"
    spec = importlib.util.spec_from_file_location("_te_precision_quantizers_utils", file)
    if spec is None or spec.loader is None or not file.exists():
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[str, list[str]], bool] | None = getattr(module, "should_convert_module", None)
    return found


def _transformers(entry: str, module: Module, suffix: str = "") -> bool:
    name = module.name + suffix
    should_convert = _should_convert()
    if should_convert is not None:
        return not should_convert(name, [entry])
    return re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", name) is not None or name.endswith(entry)


def _equal_or_regex(entry: str, module: Module) -> bool:
    names = (module.name, fused_name(module.name))
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module.name) is not None
    return entry in names


def _class_or_name(entry: str, module: Module) -> bool:
    if _equal_or_regex(entry, module) or entry in module.classes:
        return True
    if module.classes or not entry[:1].isupper():
        return False
    if entry != "Linear":
        raise MapError(
            f"targets: {entry!r} is a class. Give --modules package.module:function, which has the classes of modules."
        )
    return module.is_linear


def _wildcard(entry: str, module: Module) -> bool:
    return fnmatchcase(module.name, entry)


def _engine_name(module: Module) -> str:
    """Return the engine's name of a layer: all routed experts are one."""
    experts = re.match(r"(.*\bexperts)\.", module.name)
    return experts[1] if experts and "shared" not in experts[1] else fused_name(module.name)


def _vllm(entry: str, module: Module) -> bool:
    name = _engine_name(module)
    if "experts" in name and name.rpartition(".")[2] not in FUSED:
        return "experts" in entry and name in entry
    return entry in (name, module.name)


def _vllm_modelopt(entry: str, module: Module) -> bool:
    name = _engine_name(module)
    return _vllm(entry, module) or entry in name or fnmatchcase(name, entry)


def _sglang(entry: str, module: Module) -> bool:
    name = _engine_name(module)
    in_experts = name.endswith("experts")
    path = name if in_experts else module.name
    if f".{entry.rstrip('.')}." in f".{path}.":
        return True
    return in_experts and "experts" in entry and name in entry


def _is_head(module: Module) -> bool:
    return module.name.rpartition(".")[2] == "lm_head"


# ---------------------------------------------------------------------- files


def _tool(own: str, engine: Engine | None, path: str, *engines: Engine) -> str:
    """Return the tool whose matching is applied; raises a MapError for an engine whose matching is not known."""
    if engine is None:
        return own
    if engine not in engines:
        known = ", ".join(_VERSIONS[name] for name in engines) or "none"
        raise MapError(f"{path}: the matching of {_VERSIONS[engine]} is not known for a file of {own}. Known: {known}.")
    return _VERSIONS[engine]


def _fp8(config: Mapping[str, Any], path: str, engine: Engine | None) -> RuleFile:
    for key in ("modules_to_convert", "dequantize"):
        if config.get(key):
            raise MapError(f"{path}: {key} {shown(config[key])} is not read. Remove it, or map the checkpoint.")
    tool = _tool("transformers", engine, path, "vllm", "sglang")
    match = {None: _transformers, "vllm": _vllm, "sglang": _sglang}[engine]
    listed = list(_patterns(config, path, "modules_to_not_convert", "ignored_layers"))
    rules = [_rule(place, entry, match) for place, entry in listed]
    if engine == "sglang" and any(entry.startswith("re:") for _, entry in listed):
        raise MapError(f"{path}: an entry begins with 're:', and how {tool} matches it is not known.")
    block = config.get("weight_block_size")
    text = _E4M3 if block is None else _BLOCK
    if config["quant_method"] == "mxfp8":
        text = _MXFP8
    place = f"quant_method {config['quant_method']!r}"
    has_list = any(config.get(key) is not None for key in ("modules_to_not_convert", "ignored_layers"))
    if engine is not None or not has_list:
        rules.append(Rule(f"{tool}'s default", "lm_head", None, _is_head, is_default=True))
    return RuleFile(path, tool, rules, Formats(text, text), place, fuses=engine is not None)


def _compressed_tensors(config: Mapping[str, Any], path: str, engine: Engine | None) -> RuleFile:
    tool = _tool("compressed-tensors 0.20", engine, path, "vllm")
    rules = [_rule(place, entry, _equal_or_regex) for place, entry in _patterns(config, path, "ignore")]
    targets = []
    for name, group in _mapping(config.get("config_groups"), f"{path}: config_groups").items():
        place = f"config_groups.{name}"
        given = _mapping(group, f"{path}: {place}")
        weight = _scheme(given.get("weights"), f"{path}: {place}.weights")
        formats = Formats(weight, _scheme(given.get("input_activations"), f"{path}: {place}.input_activations"))
        for key, entry in _patterns(given, path, "targets"):
            targets.append(_rule(f"{place}.{key}", entry, _class_or_name, formats))
    targets.sort(key=lambda rule: (rule.pattern[:1].isupper(), rule.pattern.startswith("re:"), rule.pattern))
    return RuleFile(path, tool, [*rules, *targets], None, "in no target", fuses=engine is not None)


def _scheme(scheme: Any, place: str) -> str:
    """Return the format of a ``QuantizationArgs`` of compressed-tensors."""
    if scheme is None:
        return HIGH
    fields = _mapping(scheme, place)
    kind = (fields.get("type"), fields.get("num_bits"))
    group = fields.get("group_size")
    if kind[0] == "int" and isinstance(kind[1], int):
        return f"INT{kind[1]}"
    if kind == ("float", 8):
        if group == 32:
            return _MXFP8
        return _BLOCK if fields.get("strategy") == "block" or group else _E4M3
    if kind == ("float", 4) and group in (16, 32):
        return _NVFP4 if group == 16 else "MXFP4"
    raise MapError(f"{place}: {shown(dict(fields))} is not a known format.")


def _modelopt(config: Mapping[str, Any], path: str, engine: Engine | None) -> RuleFile:
    tool = _tool("ModelOpt's wildcards", engine, path, "vllm")
    match = _wildcard if engine is None else _vllm_modelopt
    rules = [_rule(place, entry, match) for place, entry in _patterns(config, path, "exclude_modules", "ignore")]
    layers = _mapping(config.get("quantized_layers", {}), f"{path}: quantized_layers")
    for name, layer in layers.items():
        place = f"quantized_layers.{name}"
        formats = _known(
            _MODELOPT, _mapping(layer, f"{path}: {place}").get("quant_algo"), f"{path}: {place}.quant_algo"
        )
        rules.append(_rule("quantized_layers", name, _equal_or_regex, formats))
    algorithm = config.get("quant_algo")
    default = None
    if algorithm != "MIXED_PRECISION" or not layers:
        default = _known(_MODELOPT, algorithm, f"{path}: quant_algo")
    return RuleFile(path, tool, rules, default, f"quant_algo {algorithm!r}", fuses=engine is not None)


def _known(table: Mapping[str, Formats], name: Any, place: str) -> Formats:
    if isinstance(name, str) and name in table:
        return table[name]
    raise MapError(f"{place}: {shown(name)} is not known.{suggestion(str(name), table)}")


def _torchao(config: Mapping[str, Any], path: str, engine: Engine | None) -> RuleFile:
    tool = _tool("transformers, torchao", engine, path)
    match = functools.partial(_transformers, suffix=".weight")
    rules = [_rule(place, entry, match) for place, entry in _patterns(config, path, "modules_to_not_convert")]
    quant_type = _mapping(config.get("quant_type"), f"{path}: quant_type")
    chosen = _mapping(quant_type.get("default"), f"{path}: quant_type.default")
    name = chosen.get("_type")
    if name not in ("FqnToConfig", "ModuleFqnToConfig"):
        default = _known(_TORCHAO, name, f"{path}: quant_type.default._type")
        return RuleFile(path, tool, rules, default, f"quant_type {name}")
    data = _mapping(chosen.get("_data"), f"{path}: quant_type.default._data")
    named = dict(_mapping(data.get("fqn_to_config", data.get("module_fqn_to_config")), f"{path}: fqn_to_config"))
    given = {key: value and _known(_TORCHAO, value.get("_type"), f"{path}: {key}") for key, value in named.items()}
    default = given.pop("_default", None)
    ordered = sorted(given, key=lambda key: key.startswith("re:"))
    rules += [_rule("fqn_to_config", key, _full_match, given[key]) for key in ordered]
    return RuleFile(path, tool, rules, default, f"{name}: _default")


def _full_match(entry: str, module: Module) -> bool:
    if entry.startswith("re:"):
        return re.fullmatch(entry.removeprefix("re:"), module.name) is not None
    return entry in (module.name, f"{module.name}.weight")


# ---------------------------------------------------------------------- Megatron


def recipe_formats(name: str, elements: str = "") -> Formats | None:
    """Return the formats of a recipe of Transformer Engine; None for ``none``. ``elements``: ``e4m3`` or ``hybrid``."""
    if name == "none":
        return None
    if name not in RECIPES:
        raise MapError(f"There is no recipe {name!r}.{suggestion(name, ['none', *RECIPES])}")
    row = RECIPES[name]
    if name == "nvfp4":
        return Formats(row.format, row.format, row.format)
    is_hybrid = "E5M2" in row.elements if not elements else elements == "hybrid"
    gradient = "E5M2" if is_hybrid else "E4M3"
    return Formats(f"{row.format} E4M3", f"{row.format} E4M3", f"{row.format} {gradient}")


def _megatron(data: Mapping[str, Any], path: str, around: Surroundings, modules: Sequence[Module]) -> RuleFile:
    if around.recipe is None:
        raise MapError(
            f"{path}: Megatron's file changes the recipe around the model, and leaves it to modules without a matcher."
            " Give this recipe with --recipe, such as --recipe mxfp8, or --recipe none."
        )
    configs = _mapping(data.get("configs") or {}, f"{path}: configs")
    recipes = {name: _training_recipe(config, f"{path}: configs.{name}") for name, config in configs.items()}
    rules = []
    for name, entry in _mapping(data.get("matchers") or {}, f"{path}: matchers").items():
        place = f"matchers.{name}"
        matcher = _mapping(entry, f"{path}: {place}")
        for key in ("type", "pattern", "config"):
            if not isinstance(matcher.get(key), str):
                raise MapError(f"{path}: {place} must have {key}, a text, not {shown(matcher.get(key))}.")
        if matcher["type"] != "glob":
            raise MapError(f"{path}: {place}.type must be 'glob', not {shown(matcher['type'])}.")
        if matcher["config"] not in recipes:
            known = suggestion(matcher["config"], recipes)
            raise MapError(f"{path}: {place}.config {shown(matcher['config'])} is not in configs.{known}")
        formats, only_if = recipes[matcher["config"]]
        matches = functools.partial(_te_wildcard, matcher["pattern"])
        rules.append(Rule(place, matcher["pattern"], formats, matches, bool(matcher.get("enabled", False)), only_if))
    blocks = 1 + max((module.layer for module in modules if module.layer is not None), default=-1)
    first, last = around.bf16_layers

    def is_kept(number: int) -> bool:
        return number < first or number >= blocks - last

    default = recipe_formats(around.recipe)
    place = f"no matcher: the recipe around the model, {around.recipe}"
    tool = "Megatron-Core 0.16"
    return RuleFile(path, tool, rules, default, place, kept=is_kept, acts_on=_is_te, trains=True)


def _is_te(module: Module) -> bool:
    if module.classes:
        return "TransformerEngineBaseModule" in module.classes
    return module.is_linear


def _te_wildcard(entry: str, module: Module) -> bool:
    return _is_te(module) and fnmatchcase(module.name, entry)


def _training_recipe(config: Any, place: str) -> tuple[Formats | None, tuple[bool, bool]]:
    """Return the formats of an entry of ``configs``, and whether it acts (in a quantizing recipe, without one)."""
    fields = _mapping(config, place)
    if fields.get("transformer_engine_config_type") != "TEQuantizationParams":
        kind = shown(fields.get("transformer_engine_config_type"))
        raise MapError(f"{place}.transformer_engine_config_type must be 'TEQuantizationParams', not {kind}.")
    recipe = _mapping(fields.get("training_recipe"), f"{place}.training_recipe")
    given = {key: recipe[key] for key in ("fp8_quantization_recipe", "fp4_quantization_recipe") if recipe.get(key)}
    acts = recipe.get("override_quantized_autocast", True), recipe.get("override_nonquantized_autocast", False)
    if len(given) > 1:
        raise MapError(f"{place}.training_recipe: {' and '.join(given)} exclude each other.")
    for key, name in given.items():
        if name == "custom":
            raise MapError(
                f"{place}.training_recipe: {key} 'custom' is code ({shown(recipe.get('custom_recipe_factory'))}). Plan"
                " the model with te-precision map package.module:model --recipe package.module:factory."
            )
        if name not in _MEGATRON:
            raise MapError(
                f"{place}.training_recipe: {key} {shown(name)} is not known.{suggestion(str(name), _MEGATRON)}"
            )
        return recipe_formats(_MEGATRON[name], recipe.get("fp8_format", "e4m3")), acts
    return None, acts
