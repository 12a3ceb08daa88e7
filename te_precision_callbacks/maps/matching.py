"""Precision files of other tools as ordered rules, and the module that each rule takes.

The first rule that matches a module decides, unless it is not enabled. Engines such as vLLM load projections of one
input as one layer, so their rules are applied to such layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.suggestions import shown
from te_precision_callbacks.layers.folding import form_of
from te_precision_callbacks.maps.precision_map import (
    FindingKind,
    MapError,
    MapFinding,
    ModuleFormats,
    PrecisionMap,
    join_names,
    nearest_names,
)

FUSED_OF = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
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
    """

    name: str
    high: str
    is_linear: bool
    classes: tuple[str, ...] = ()
    layer: int | None = None


KEPT = ModuleFormats(HIGH, HIGH)
"""The module's own dtype, in a file for inference, which has no gradients."""


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
    matches: Callable[[str, Module], bool]
    formats: ModuleFormats = KEPT
    enabled: bool = True
    overrides: tuple[bool, bool] = (True, True)

    def __str__(self) -> str:
        return f"{self.place} {shown(self.pattern)}"

    def acts(self, default: ModuleFormats) -> bool:
        return self.overrides[default.weight == HIGH] or self.formats[:3] == default[:3]


@dataclass(frozen=True)
class RuleFile:
    """A precision file of another tool.

    Attributes:
        tool: the tool or engine with its version, for its matching.
        default: the formats of a module without a rule.
    """

    tool: str
    rules: Sequence[Rule]
    default: Callable[[Module], ModuleFormats]


def apply_rules(path: str, file: RuleFile, modules: Sequence[Module]) -> PrecisionMap:
    """Return the map of a precision file on the modules of a model, with findings about its rules."""
    names = [module.name for module in modules]
    deciding: dict[str, Rule] = {}
    problems: list[tuple[tuple[FindingKind, str, str], tuple[Rule, list[str]]]] = []
    for rule in file.rules:
        try:
            matched = [module for module in modules if rule.matches(rule.pattern, module)]
        except (re.error, MapError) as error:
            raise MapError(f"{rule} cannot be matched by the rules of {file.tool}: {error}.") from None
        problem = _problem(file, rule, matched, deciding, names)
        if problem is not None:
            kind, reason, affected = problem
            problems.append(((kind, form_of(rule.pattern), reason), (rule, affected)))
        if rule.enabled:
            for module in matched:
                deciding.setdefault(module.name, rule)
    formats = {module.name: _formats(path, file, module, deciding.get(module.name)) for module in modules}
    findings = []
    for (kind, _, reason), alike in group_by_key(problems).items():
        places = join_names(rule.place for rule, _ in alike)
        affected = [name for _, modules_of_rule in alike for name in modules_of_rule]
        text = f"{path}: {places} {join_names(shown(rule.pattern) for rule, _ in alike)} {reason}"
        if affected:
            text += f": {join_names(affected)}."
        findings.append(MapFinding(kind, text, tuple(affected)))
    return PrecisionMap(path, formats, tuple(findings))


def _problem(
    file: RuleFile, rule: Rule, matched: Sequence[Module], deciding: Mapping[str, Rule], names: Iterable[str]
) -> tuple[FindingKind, str, list[str]] | None:
    """Return the kind of a rule's finding, its text, and the affected modules."""
    free = {module.name: module for module in matched if module.name not in deciding}
    if not rule.enabled:
        reason = "takes no module, because it is not enabled (enabled: true is missing)"
        return "disabled", reason, list(free)
    if not matched:
        return "unmatched", f"takes no module.{nearest_names(rule.pattern, names)}", []
    if not free:
        earlier = join_names(str(deciding[module.name]) for module in matched)
        reason = f"takes no module, because an earlier entry ({earlier}) takes all it matches"
        return "shadowed", reason, [module.name for module in matched]
    idle = [name for name, module in free.items() if not rule.acts(file.default(module))]
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


def _formats(path: str, file: RuleFile, module: Module, rule: Rule | None) -> ModuleFormats:
    formats = file.default(module)
    if rule is not None and rule.acts(formats):
        formats = rule.formats._replace(said=f"{rule} ({file.tool})")
    own = {HIGH: module.high or HIGH}
    weight, activation, gradient = (own.get(text, text) for text in formats[:3])
    return ModuleFormats(weight, activation, gradient, f"{path}: {formats.said}")


def fused_name(name: str) -> str:
    """Return the name of the engine's layer that has a module as a part; else the module's own name."""
    parent, dot, last = name.rpartition(".")
    return parent + dot + FUSED_OF.get(last, last)
