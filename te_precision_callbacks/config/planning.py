"""Which features act on which layer, decided before the run.

nvidia-dlfw-inspect 0.2.2 decides this in each layer's first forward pass, where a selector that hits no layer is silent
and two sections that hit one layer end the run. Here the sections are merged per layer, and what is handed over are
exact layer names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from te_precision_callbacks.config.problems import ConfigError, KeyPath, meant_for, nearest, suggestion
from te_precision_callbacks.config.selection import LayerSelector, SelectableLayer

logger = logging.getLogger(__name__)

RegisteredFeatures = Mapping[str, Collection[str]]
"""The features that a session found: namespace -> feature names. ``base`` is nvidia-dlfw-inspect's own namespace."""

NAMESPACE = "transformer_engine"
"""The namespace whose features have schemas."""

FeatureOptions = Mapping[str, Any]
NamespacedFeatures = Mapping[str, Mapping[str, FeatureOptions]]


@dataclass(frozen=True)
class Section:
    """One top-level entry of a config: some layers, and what is done with them.

    Attributes:
        name: its key in the config.
        enabled: a section that is not enabled does nothing, and its features need not exist.
        selector: the layers that it means.
        features: the rest of the section, by namespace (``transformer_engine``) or, for the features of
            nvidia-dlfw-inspect itself, by feature name.
        places: where each feature and each key of its options stands, for messages.
        modifies: for each enabled feature of Transformer Engine, as written, the tensors that it replaces, each as the
            GEMM that gets it and its name.
    """

    name: str
    enabled: bool
    selector: LayerSelector
    features: Mapping[str, Mapping[str, Any]]
    places: Mapping[KeyPath, str]
    modifies: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)

    def place(self, *keys: str | int) -> str:
        """Where a key of this section, or the one above it, stands: ``config.yaml, line 7 (section 'stats')``."""
        above = (keys[:end] for end in range(len(keys), -1, -1))
        return next(self.places[path] for path in above if path in self.places)


@dataclass(frozen=True)
class LayerPlan:
    """What happens in one layer.

    Attributes:
        layer: the layer.
        sections: the names of the sections that hit it.
        features: namespace -> feature -> its options.
    """

    layer: SelectableLayer
    sections: tuple[str, ...]
    features: NamespacedFeatures


@dataclass(frozen=True)
class Plan:
    """What happens in which layer.

    Attributes:
        layers: the layers that some section hits, in the order of the model.
        unmatched: the names of the sections that hit none.
    """

    layers: tuple[LayerPlan, ...]
    unmatched: tuple[str, ...]

    def as_inspect_config(self) -> dict[str, Any]:
        """The plan as a config of nvidia-dlfw-inspect: one section for each set of layers with the same features.

        Its layers are given as one anchored pattern of exact names, so that no layer is in two sections and none is hit
        by chance. With no layer at all it holds one section that hits nothing, since an empty config is refused there.
        """
        groups: dict[tuple[str, ...], list[LayerPlan]] = {}
        for entry in self.layers:
            groups.setdefault(entry.sections, []).append(entry)
        config: dict[str, Any] = {}
        for sections, entries in groups.items():
            name = " + ".join(sections)
            while name in config:
                name += " "
            config[name] = {
                "enabled": True,
                "layers": {"layer_name_regex_pattern": exact_pattern(entry.layer.name for entry in entries)},
                **entries[0].features,
            }
        return config or {"no layer": {"enabled": True, "layers": {"layer_name_regex_pattern": exact_pattern(())}}}


def exact_pattern(names: Iterable[str]) -> str:
    """A regular expression that ``search`` finds in exactly these names; in none where there are none."""
    return rf"\A(?:{'|'.join(re.escape(name) for name in names) or '(?!)'})\Z"


def plan(
    sections: Sequence[Section],
    layers: Sequence[SelectableLayer],
    registered: RegisteredFeatures,
    *,
    allow_unmatched: bool = False,
) -> Plan:
    """Decide which features act on which layer.

    Args:
        sections: the enabled sections.
        layers: the layers of the model.
        registered: the features that exist.
        allow_unmatched: warn about a section that hits no layer, instead of raising.

    Raises:
        ConfigError: an unknown feature, a section that hits no layer, two sections with one feature for one layer, two
            features that modify one tensor.
    """
    resolved = {section.name: resolve_features(section, registered) for section in sections}
    planned = []
    matched: set[str] = set()
    names = {layer.name for layer in layers}
    for layer in layers:
        hit = [section for section in sections if section.selector.selects(layer, names)]
        if hit:
            matched.update(section.name for section in hit)
            merged = _merge(layer, hit, resolved)
            planned.append(LayerPlan(layer, tuple(section.name for section in hit), merged))
    unmatched = [section for section in sections if section.name not in matched] if layers else []
    messages = [_no_layer_message(section, layers) for section in unmatched]
    for section in sections if layers else ():
        if section.name in matched:
            messages += _missing_names(section, layers)
    for message in messages:
        if not allow_unmatched:
            raise ConfigError(f"{message} With allow_unmatched=True this is a warning.")
        logger.warning("%s", message)
    return Plan(tuple(planned), tuple(section.name for section in unmatched))


def resolve_features(section: Section, registered: RegisteredFeatures) -> NamespacedFeatures:
    """The enabled features of a section by namespace, under the names that they are registered with.

    Case does not matter: Transformer Engine's documentation writes ``DisableFp8Gemm`` where its code has
    ``DisableFP8GEMM``.

    Raises:
        ConfigError: a feature or namespace that does not exist, or a feature without ``enabled``.
    """
    resolved: dict[str, dict[str, FeatureOptions]] = {}
    for key, body in section.features.items():
        if key in registered:
            for name, options in body.items():
                feature = _registered_name(name, key, registered, section.place(key, name))
                _add(resolved, key, feature, feature_options(name, options, section.place(key, name)), section)
        else:
            feature = _registered_name(key, "base", registered, section.place(key))
            _add(resolved, "base", feature, feature_options(key, body, section.place(key)), section)
    return {
        namespace: {feature: options for feature, options in features.items() if options["enabled"]}
        for namespace, features in resolved.items()
    }


def _add(
    resolved: dict[str, dict[str, FeatureOptions]],
    namespace: str,
    feature: str,
    options: FeatureOptions,
    section: Section,
) -> None:
    if feature in resolved.setdefault(namespace, {}):
        raise ConfigError(
            f"{section.place(namespace)}: {feature!r} stands here twice, in two spellings. Keep one of them."
        )
    resolved[namespace][feature] = options


def _registered_name(name: str, namespace: str, registered: RegisteredFeatures, place: str) -> str:
    known = registered.get(namespace, ())
    for candidate in known:
        if candidate.casefold() == name.casefold():
            return candidate
    others = [space for space in registered if space != namespace]
    for other in others:
        if any(candidate.casefold() == name.casefold() for candidate in registered[other]):
            raise ConfigError(f"{place}: {name!r} is a feature of {other!r}; indent it below '{other}:'.")
    what = f"there is no feature {name!r} in {namespace!r}"
    if namespace == "base":
        what = f"{name!r} is neither a namespace ({', '.join(others)}) nor a feature of nvidia-dlfw-inspect itself"
        known = [*others, *known]
    raise ConfigError(f"{place}: {what}.{suggestion(name, known)}")


def feature_options(name: str, options: Any, place: str) -> FeatureOptions:
    """A feature's options, which say whether it is enabled.

    Raises:
        ConfigError: they are not a mapping, or do not say it.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"{place}: the options of {name!r} must be a mapping, not {options!r}.")
    if "enabled" not in options:
        raise ConfigError(
            f"{place}: {name!r} has no 'enabled'. Add 'enabled: True' below it.{meant_for('enabled', options)}"
        )
    if not isinstance(options["enabled"], bool):
        raise ConfigError(f"{place}: 'enabled' of {name!r} is True or False, not {options['enabled']!r}.")
    return dict(options)


def _merge(
    layer: SelectableLayer, hit: Sequence[Section], resolved: Mapping[str, NamespacedFeatures]
) -> NamespacedFeatures:
    merged: dict[str, dict[str, FeatureOptions]] = {}
    owner: dict[tuple[str, str], Section] = {}
    for section in hit:
        for namespace, features in resolved[section.name].items():
            for feature, options in features.items():
                first = owner.setdefault((namespace, feature), section)
                if first is not section:
                    raise ConfigError(
                        f"{section.place()}: gives {feature!r} to the layer {layer.name!r}, and so does"
                        f" {first.place()}. Put both into one section ('tensors_struct' takes several tensors), or make"
                        " their layers differ."
                    )
                merged.setdefault(namespace, {})[feature] = options
    refuse_shared_tensors(hit, f"the layer {layer.name!r}")
    return merged


def refuse_shared_tensors(sections: Iterable[Section], layers: str) -> None:
    """Refuse two features that modify one tensor of one GEMM: upstream calls only one of them.

    Args:
        sections: what meets in some layers.
        layers: these layers, for the message.

    Raises:
        ConfigError: two features modify one tensor.
    """
    first: dict[tuple[str, str], tuple[str, Section]] = {}
    for section in sections:
        for feature, pairs in section.modifies.items():
            for pair in pairs:
                other, owner = first.setdefault(pair, (feature, section))
                if owner is not section or other != feature:
                    gemm, tensor = pair
                    raise ConfigError(
                        f"{section.place(NAMESPACE, feature)}: {feature!r} modifies the tensor {tensor!r} of the GEMM"
                        f" {gemm!r} in {layers}, and so does {other!r} in {owner.place(NAMESPACE, other)}. Only one of"
                        " them can: take the tensor or the GEMM out of the other, or make their layers differ."
                    )


def _missing_names(section: Section, layers: Sequence[SelectableLayer]) -> list[str]:
    """A message for each of a section's exact names that no layer has."""
    known = {name for layer in layers for name in (layer.name, *layer.aliases)}
    return [
        f"{section.selector.place}: there is no layer {name!r}.{suggestion(name, [layer.name for layer in layers])}"
        for name in sorted((section.selector.exact_names or frozenset()) - known)
    ]


def _no_layer_message(section: Section, layers: Sequence[SelectableLayer]) -> str:
    names = [layer.name for layer in layers]
    parts = {part for name in names for part in name.split(".")} | {kind for layer in layers for kind in layer.types}
    words = section.selector.words()
    near = list(dict.fromkeys(match for word in words for match in [*nearest(word, names), *nearest(word, parts)]))
    if near:
        hint = f" Near what it asks for: {', '.join(repr(name) for name in near[:5])}."
    else:
        more = f", and {len(names) - 8} more" if len(names) > 8 else ""
        hint = f" The layers are: {', '.join(repr(name) for name in names[:8])}{more}."
    return f"{section.selector.place}: the section {section.name!r} matches none of the {len(names)} layers.{hint}"
