"""Precision files of other tools as ordered rules, and the module that each rule takes.

The first rule that matches a module decides, unless it is not enabled. Engines such as vLLM load projections of one
input as one layer, so their rules are applied to the parts of such a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.config.problems import shown
from te_precision_callbacks.layers.folding import fold_names, form_of
from te_precision_callbacks.maps.precision_map import FindingKind, MapError, MapFinding, ModuleFormats, PrecisionMap

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused layer of an engine -> its parts in a checkpoint (vLLM 0.24: ``packed_modules_mapping``; SGLang 0.5.12)."""

_FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}

_MOST_NAMES = 4
_MOST_NEAREST = 3


HIGH = "high precision"


class Module(NamedTuple):
    """A module with a weight.

    Attributes:
        high: the format without quantization; empty if unknown.
        is_linear: whether it is a linear layer, which tools quantize by default.
        classes: the names of its class and base classes; empty if unknown.
        layer: the number of its block; None outside of blocks.
    """

    name: str
    high: str
    is_linear: bool
    classes: tuple[str, ...] = ()
    layer: int | None = None


class Formats(NamedTuple):
    """The formats that a precision file gives: :data:`HIGH` for the module's own dtype, empty if it does not say."""

    weight: str
    activation: str = ""
    gradient: str = ""


@dataclass(frozen=True)
class Rule:
    """An entry of a precision file.

    Attributes:
        place: the key, such as ``ignored_layers[3]``.
        pattern: the entry's text.
        formats: the formats that it gives; None for high precision.
        matches: whether it matches a module.
        only_if: whether it acts on a module that the tool (quantizes, does not quantize) without it.
        is_default: whether the tool adds it to every file, so that it may match nothing.
    """

    place: str
    pattern: str
    formats: Formats | None
    matches: Callable[[Module], bool]
    enabled: bool = True
    only_if: tuple[bool, bool] = (True, True)
    is_default: bool = False


@dataclass(frozen=True)
class RuleFile:
    """A precision file of another tool.

    Attributes:
        tool: whose matching is applied, with the version.
        default: the formats of linear layers without a rule; None for high precision.
        default_place: where the default is said.
        kept: whether a block has no quantization around it, by its number.
        acts_on: whether the tool can quantize a module.
        trains: whether the formats also hold for the backward.
        fuses: whether the tool is an engine: the parts of its fused layers must have equal formats.
    """

    path: str
    tool: str
    rules: Sequence[Rule]
    default: Formats | None
    default_place: str
    kept: Callable[[int], bool] = lambda number: False
    acts_on: Callable[[Module], bool] = lambda module: module.is_linear
    trains: bool = False
    fuses: bool = False


@dataclass
class _Matches:
    """The modules that a rule matches: the ones that it decides, with or without effect, and those of earlier rules."""

    rule: Rule
    decided: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    earlier: dict[str, Rule] = field(default_factory=dict)


def apply_rules(file: RuleFile, modules: Iterable[Module]) -> PrecisionMap:
    """Return the map of a precision file on the modules of a model, with findings about its rules."""
    known = list(modules)
    matches = [_Matches(rule) for rule in file.rules]
    formats = {module.name: _decide(file, module, matches) for module in known}
    findings = _rule_findings(file, matches, fold_names(formats))
    if not file.fuses:
        return PrecisionMap(file.path, formats, tuple(findings))
    findings += _fused_findings(file, formats)
    note = f"A model of {file.tool} may keep layers in high precision that the file does not name, such as routers."
    return PrecisionMap(file.path, formats, tuple(findings), (note,))


def _decide(file: RuleFile, module: Module, matches: Iterable[_Matches]) -> ModuleFormats:
    is_kept = module.layer is not None and file.kept(module.layer)
    acts = file.acts_on(module)
    default = file.default if acts and not is_kept else None
    given = default
    said = file.default_place
    if not acts:
        said = f"{file.tool} does not quantize modules of this kind"
    elif is_kept and file.default is not None:
        said = f"block {module.layer} is kept in high precision"
    first: Rule | None = None
    for match in matches:
        rule = match.rule
        if not _is_match(file, rule, module):
            continue
        if first is not None:
            match.earlier[module.name] = first
        elif not rule.enabled:
            match.without_effect.append(module.name)
        elif rule.only_if[default is None] or rule.formats == default:
            first = rule
            match.decided.append(module.name)
            given = rule.formats
            said = f"{rule.place} {shown(rule.pattern)} ({file.tool})"
        else:
            first = rule
            match.without_effect.append(module.name)
    if given is None:
        given = Formats(HIGH, HIGH, HIGH if file.trains else "")
    weight, activation, gradient = (module.high if text == HIGH else text for text in given)
    return ModuleFormats(weight, activation, gradient, f"{file.path}: {said}")


def _is_match(file: RuleFile, rule: Rule, module: Module) -> bool:
    try:
        return rule.matches(module)
    except re.error as error:
        place = f"{file.path}: {rule.place} {shown(rule.pattern)}"
        raise MapError(f"{place} is not a regular expression, as {file.tool} reads it: {error}.") from None


def _rule_findings(file: RuleFile, matches: Iterable[_Matches], names: Sequence[str]) -> list[MapFinding]:
    grouped: dict[tuple[FindingKind, str, str], list[tuple[Rule, list[str]]]] = {}
    for match in matches:
        for kind, reason, modules in _problems(match, names):
            grouped.setdefault((kind, form_of(match.rule.pattern), reason), []).append((match.rule, modules))
    findings = []
    for (kind, _, reason), entries in grouped.items():
        places = ", ".join(fold_names((rule.place for rule, _ in entries), most=_MOST_NAMES))
        patterns = ", ".join(map(shown, fold_names((rule.pattern for rule, _ in entries), most=_MOST_NAMES)))
        affected = tuple(name for _, modules in entries for name in modules)
        listed = f": {join_names(affected)}" if affected else ""
        findings.append(MapFinding(kind, f"{file.path}: {places} {patterns} {reason}{listed}.", affected))
    return findings


def _problems(match: _Matches, names: Sequence[str]) -> Iterator[tuple[FindingKind, str, list[str]]]:
    rule = match.rule
    if rule.is_default:
        return
    if not rule.enabled:
        reason = "takes no module, because it is not enabled (enabled: true is missing)"
        yield "disabled", reason, match.without_effect
    elif match.without_effect:
        around = "a recipe" if rule.only_if[1] else "no recipe"
        key = "override_quantized_autocast" if rule.only_if[1] else "override_nonquantized_autocast"
        yield "no_effect", f"has no effect on modules with {around} around them ({key} is false)", match.without_effect
    elif not match.decided and match.earlier:
        earlier = dict.fromkeys(f"{other.place} {shown(other.pattern)}" for other in match.earlier.values())
        reason = f"takes no module, because an earlier entry ({', '.join(earlier)}) takes all it matches"
        yield "shadowed", reason, list(match.earlier)
    elif not match.decided:
        yield "unmatched", f"takes no module.{nearest_names(rule.pattern, names)}".rstrip("."), []
    inside = [name for name in match.decided if _is_part_of_a_word(rule.pattern, name)]
    if inside:
        yield "part_of_a_name", "matches only a part of a word in names", inside


def _is_part_of_a_word(pattern: str, name: str) -> bool:
    paths = [path for path in (name, fused_name(name)) if pattern in path]
    return bool(paths) and not any(f".{pattern}." in f".{path}." for path in paths)


def _fused_findings(file: RuleFile, formats: Mapping[str, ModuleFormats]) -> Iterator[MapFinding]:
    parts = group_by_key((fused_name(name), given[:2]) for name, given in formats.items())
    split = [fused for fused, given in parts.items() if len(set(given)) > 1]
    if split:
        text = f"{file.path}: {file.tool} refuses a layer whose parts have several formats: {join_names(split)}."
        yield MapFinding("fused", text, tuple(split))


def fused_name(name: str) -> str:
    """Return the name of the engine's layer that has a module as a part; else the module's own name."""
    parent, dot, last = name.rpartition(".")
    return parent + dot + _FUSED_OF.get(last, last)


def nearest_names(pattern: str, folded: Iterable[str]) -> str:
    """Return a sentence with the names nearest to a pattern, of names that are folded by block."""
    words = {word for word in re.split(r"[^\w]+", pattern) if len(word) > 1}
    shared = {name: len(words.intersection(name.split("."))) for name in folded}
    best = sorted(shared, key=lambda name: (-shared[name], len(name)))[:_MOST_NEAREST]
    if best:
        return f" Nearest names: {', '.join(best)}."
    return ""


def join_names(names: Iterable[str]) -> str:
    return ", ".join(fold_names(names, most=_MOST_NAMES))
