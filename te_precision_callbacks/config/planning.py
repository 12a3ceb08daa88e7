"""Planning: the features that act on each layer.

nvidia-dlfw-inspect 0.2.2 decides this in each layer's first forward: it silently ignores a selector that matches no
layer, and two sections that select the same layer end the run. Here sections are merged per layer before the run, and
nvidia-dlfw-inspect receives exact layer names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from te_precision_callbacks.base.counts import first_of, group_by_key, some_of
from te_precision_callbacks.base.suggestions import meant_for, shown, suggestion
from te_precision_callbacks.base.vocabulary import LayerNames
from te_precision_callbacks.config.effects import BASE, Effect, conflicts
from te_precision_callbacks.config.problems import ConfigError, Problems
from te_precision_callbacks.config.schemas import is_upstream_test, registered_name
from te_precision_callbacks.config.selection import (
    EXACT,
    LayerIndex,
    LayerSelector,
    index_by_upstream_names,
)
from te_precision_callbacks.config.yaml_text import Places

if TYPE_CHECKING:
    from te_precision_callbacks.layers.naming import Layer

RegisteredFeatures = Mapping[str, Collection[str]]

_BY_UPSTREAM = "layer_names: upstream selects by the layer names of nvidia-dlfw-inspect's infer_and_assign_layer_names"

_AS_WARNING = " Fix the selector, or set allow_unmatched=True (te-precision check: --allow-unmatched)."

FeatureOptions = Mapping[str, Any]
NamespacedFeatures = Mapping[str, Mapping[str, FeatureOptions]]


@dataclass(frozen=True)
class Section:
    """A section of a config: layers, and the features that act on them.

    Attributes:
        enabled: whether it acts; other keys of a disabled section are not validated.
        features: the features by namespace (``transformer_engine``), or by name for nvidia-dlfw-inspect's features.
        effects: the effect of each enabled feature of Transformer Engine.
    """

    name: str
    enabled: bool
    selector: LayerSelector
    features: Mapping[str, Mapping[str, Any]]
    places: Places
    effects: Mapping[str, Effect] = field(default_factory=dict)

    def place(self, *keys: str | int) -> str:
        return self.places(self.name, *keys)


@dataclass(frozen=True)
class LayerPlan:
    """The features that act on a layer, by namespace, and the names of the sections that select it."""

    layer: Layer
    sections: tuple[str, ...]
    features: NamespacedFeatures


@dataclass(frozen=True)
class Plan:
    """The features that act on each layer, in the order of the model, and the sections that select no layer."""

    layers: tuple[LayerPlan, ...]
    unmatched: tuple[str, ...]

    def as_inspect_config(self) -> dict[str, Any]:
        """Convert to a config of nvidia-dlfw-inspect: one section for each set of layers with the same features.

        The layers are selected by one anchored pattern of exact names, so a layer is never in two sections.
        """
        config: dict[str, Any] = {}
        for sections, entries in group_by_key((entry.sections, entry) for entry in self.layers).items():
            name = " + ".join(sections)
            while name in config:
                name += " "
            names = "|".join(re.escape(entry.layer.name) for entry in entries)
            config[name] = {
                "enabled": True,
                "layers": {"layer_name_regex_pattern": rf"\A(?:{names})\Z"},
                **entries[0].features,
            }
        return config


@dataclass(frozen=True)
class Draft:
    """A plan with its problems.

    Attributes:
        plan: layers with conflicts have no features in it.
        wrong: conflicts, and invalid selectors.
        missing: sections that select no layer, and names that no layer has.
        idle: selector entries without effect, if other entries of the section select layers.
    """

    plan: Plan
    wrong: Problems
    missing: Problems
    idle: Problems


def draft(
    sections: Sequence[Section],
    layers: Sequence[Layer],
    registered: RegisteredFeatures,
    *,
    layer_names: LayerNames | None,
) -> Draft:
    resolved: list[NamespacedFeatures] = []
    wrong = Problems()
    missing = Problems()
    idle = Problems()
    for section in sections:
        with wrong.collecting():
            resolved.append(resolve_features(section, registered))
    wrong.raise_any()
    upstreams = [] if layer_names == "path" else index_by_upstream_names(layers)
    indexes = upstreams if layer_names == "upstream" else [LayerIndex(layers)]
    sections_of: list[list[int]] = [[] for _ in layers]
    unmatched: list[str] = []
    for number, section in enumerate(sections if layers else ()):
        selector = section.selector
        index = selector.choose(indexes)
        selected = selector.select(index)
        upstream = selector.choose(upstreams) if layer_names is None else None
        if not selected:
            unmatched.append(section.name)
            missing.append(_no_layer_message(section, index, upstream))
            continue
        for position in selected:
            sections_of[position].append(number)
        if upstream is not None and selector.differs(index, upstream):
            idle.append(_other_layers_message(section, layers, selected, selector.select(upstream)))
        for key, entry, problem in selector.idle_entries(index):
            text = f"{selector.place(key, entry)}: {problem}"
            if key != EXACT:
                idle.append(text)
                continue
            if upstream is not None and upstream.find(EXACT, selector.entries[EXACT][entry]):
                text += f" {_BY_UPSTREAM}, such as this name."
            missing.append(text + _AS_WARNING)
    merged: dict[tuple[int, ...], NamespacedFeatures] = {}
    planned: list[LayerPlan] = []
    for layer, numbers in zip(layers, map(tuple, sections_of), strict=True):
        if numbers:
            acting = [sections[number] for number in numbers]
            if numbers not in merged:
                merged[numbers] = _merge(layer, acting, [resolved[number] for number in numbers], wrong)
            planned.append(LayerPlan(layer, tuple(section.name for section in acting), merged[numbers]))
    return Draft(Plan(tuple(planned), tuple(unmatched)), wrong, missing, idle)


def _merge(
    layer: Layer, sections: Sequence[Section], resolved: Sequence[NamespacedFeatures], wrong: Problems
) -> NamespacedFeatures:
    """Merge the features of a layer's sections; with conflicts, which ``wrong`` gets, the layer has no features."""
    merged: dict[str, dict[str, FeatureOptions]] = {}
    owners: dict[tuple[str, str], Section] = {}
    problems = Problems()
    for section, features_of_section in zip(sections, resolved, strict=True):
        for namespace, features in features_of_section.items():
            for feature, options in features.items():
                owner = owners.setdefault((namespace, feature), section)
                if owner is not section:
                    problems.append(
                        f"{section.place()}: the layer {layer.name!r} already has {feature!r} from {owner.place()}."
                        " Merge the two ('tensors_struct' takes several tensors), or select different layers."
                    )
                merged.setdefault(namespace, {})[feature] = options
    if not problems and len(sections) > 1:
        wrong += conflicts(sections, f"the layer {layer.name!r}")
    wrong += problems
    if problems:
        return {}
    return merged


def resolve_features(
    section: Section, registered: RegisteredFeatures, *, allows_unknown: bool = False
) -> NamespacedFeatures:
    """Return the enabled features of a section by namespace, under their registered names.

    Names are case-insensitive: Transformer Engine's documentation writes ``DisableFp8Gemm`` for ``DisableFP8GEMM``.

    Args:
        allows_unknown: whether features may exist that are not registered yet; unknown features are then ignored.

    Raises:
        ConfigError: unknown feature or namespace, or a feature without ``enabled``.
    """
    resolved: dict[str, dict[str, FeatureOptions]] = {}
    problems = Problems()
    for key, body in section.features.items():
        namespace = BASE
        by_path: dict[tuple[str, ...], Any] = {(key,): body}
        if key in registered:
            namespace = key
            by_path = {(key, name): options for name, options in body.items()}
        for path, options in by_path.items():
            name = path[-1]
            feature = registered_name(name, registered.get(namespace, ()))
            if feature is None:
                if not allows_unknown:
                    problems.append(_unknown_feature(name, namespace, registered, section.place(*path)))
            elif feature in resolved.setdefault(namespace, {}):
                problems.append(f"{section.place(*path)}: {shown(feature)} is given twice, in two spellings. Keep one.")
            else:
                with problems.collecting():
                    resolved[namespace][feature] = _feature_options(section, path, options)
    problems.raise_any()
    for features in resolved.values():
        for feature, options in list(features.items()):
            if not options["enabled"]:
                del features[feature]
    return resolved


def _unknown_feature(name: str, namespace: str, registered: RegisteredFeatures, location: str) -> str:
    spaces = [space for space in registered if space != namespace]
    for other in spaces:
        if registered_name(name, registered[other]) is not None:
            return f"{location}: {shown(name)} is a feature of {other!r}; indent it below '{other}:'."
    what = f"there is no feature {shown(name)} in {namespace!r}"
    feature_names = [feature for feature in registered.get(namespace, ()) if not is_upstream_test(feature)]
    if namespace == BASE:
        what = f"{shown(name)} is neither a namespace ({', '.join(spaces)}) nor a feature of nvidia-dlfw-inspect itself"
        feature_names = [*spaces, *feature_names]
    return (
        f"{location}: {what}.{suggestion(name, feature_names)} Pass your own feature to the session with features= or"
        " feature_dirs=; te-precision check does not know it."
    )


def _feature_options(section: Section, path: tuple[str, ...], options: Any) -> FeatureOptions:
    name = shown(path[-1])
    here = section.place(*path)
    if not isinstance(options, Mapping):
        raise ConfigError(f"{here}: the options of {name} must be a mapping, not {shown(options)}.")
    if "enabled" not in options:
        raise ConfigError(
            f"{here}: {name} has no 'enabled'. Add 'enabled: True' below it.{meant_for('enabled', options)}"
        )
    if not isinstance(options["enabled"], bool):
        here = section.place(*path, "enabled")
        raise ConfigError(f"{here}: 'enabled' of {name} must be True or False, not {shown(options['enabled'])}.")
    return options if isinstance(options, dict) else dict(options)


def _other_layers_message(
    section: Section, layers: Sequence[Layer], selected: Sequence[int], by_upstream: Sequence[int]
) -> str:
    here = some_of([layers[index].name for index in selected])
    there = some_of([f"{layers[index].upstream[0]} (here {layers[index].name})" for index in by_upstream])
    return (
        f"{section.selector.place()}: the section {shown(section.name)} selects {here}; by nvidia-dlfw-inspect's"
        f" names it would select {there}. {_BY_UPSTREAM};"
        " layer_names: path in the config keeps selecting by path."
    )


def _no_layer_message(section: Section, index: LayerIndex, upstream: LayerIndex | None) -> str:
    hint = section.selector.instead(index)
    if not hint:
        hint = f" The layers are: {', '.join(first_of(map(repr, index.layer_names), 8))}."
    theirs = upstream and section.selector.select(upstream)
    if theirs:
        hint = f" {_BY_UPSTREAM}: here {some_of(index.layers[at].upstream[0] for at in theirs)}."
    count = len(index.layers)
    return f"{section.selector.place()}: the selector matches none of the {count} layers.{hint}{_AS_WARNING}"
