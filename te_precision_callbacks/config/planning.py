"""Decides before the run which features act on which layer.

nvidia-dlfw-inspect 0.2.2 decides this in each layer's first forward pass: a selector that matches no layer is not
reported, and two sections that select one layer end the run. Here the sections are merged per layer, and
nvidia-dlfw-inspect gets exact layer names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from te_precision_callbacks.base.vocabulary import LayerNames
from te_precision_callbacks.config.effects import BASE, NAMESPACE, Effect, conflicts
from te_precision_callbacks.config.known import is_for_upstreams_tests
from te_precision_callbacks.config.problems import MOST_TOLD, ConfigError, Problems, meant_for, shown, suggestion
from te_precision_callbacks.config.selection import (
    EXACT,
    LayerIndex,
    LayerSelector,
    by_upstreams_names,
)
from te_precision_callbacks.config.yaml_text import Places

if TYPE_CHECKING:
    from te_precision_callbacks.layers.naming import Layer

logger = logging.getLogger(__name__)

RegisteredFeatures = Mapping[str, Collection[str]]
"""The existing features: namespace -> feature names."""

_MOST_LAYERS_SHOWN = 3

_BY_UPSTREAM = (
    "layer_names='upstream' selects by the names that nvidia-dlfw-inspect's infer_and_assign_layer_names gives"
)

_AS_WARNING = " With allow_unmatched=True this is a warning."

FeatureOptions = Mapping[str, Any]
NamespacedFeatures = Mapping[str, Mapping[str, FeatureOptions]]


@dataclass(frozen=True)
class Section:
    """One top-level entry of a config: layers, and the features that act on them.

    Attributes:
        name: its key in the config.
        enabled: a section that is not enabled does nothing, and nothing else in it is read.
        selector: selects the layers.
        features: the rest of the section, by namespace (``transformer_engine``) or, for the features of
            nvidia-dlfw-inspect itself, by feature name.
        places: the places of the config's keys, for messages.
        effects: for each enabled feature of Transformer Engine, as written, its effect on the GEMMs of a layer.
    """

    name: str
    enabled: bool
    selector: LayerSelector
    features: Mapping[str, Mapping[str, Any]]
    places: Places
    effects: Mapping[str, Effect] = field(default_factory=dict)

    def place(self, *keys: str | int) -> str:
        """The place of a key of this section, or of the key above it: ``config.yaml, line 7 (section 'stats')``."""
        return self.places(self.name, *keys)


@dataclass(frozen=True)
class LayerPlan:
    """The features that act on one layer.

    Attributes:
        layer: the layer.
        sections: the names of the sections that select it.
        features: namespace -> feature -> its options.
    """

    layer: Layer
    sections: tuple[str, ...]
    features: NamespacedFeatures


@dataclass(frozen=True)
class Plan:
    """The features that act on each layer.

    Attributes:
        layers: the layers that at least one section selects, in the order of the model.
        unmatched: the names of the sections that select no layer.
        otherwise_upstream: the warning about sections that would select other layers by nvidia-dlfw-inspect's names;
            empty if there are none, or if ``layer_names`` says which names are meant.
    """

    layers: tuple[LayerPlan, ...]
    unmatched: tuple[str, ...]
    otherwise_upstream: str = ""

    def as_inspect_config(self) -> dict[str, Any]:
        """The plan as a config of nvidia-dlfw-inspect: one section for each set of layers with the same features.

        The layers are given as one anchored pattern of exact names, so no layer is in two sections, and none matches by
        chance.
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
        return config


@dataclass(frozen=True)
class Draft:
    """A plan with its problems, before it is decided what becomes of them.

    Attributes:
        plan: the plan; a layer whose sections exclude each other has no features.
        wrong: the sections that exclude each other in a layer, and the selectors that cannot be searched.
        missing: the sections that select no layer, and the names that no layer has.
        idle: the entries of selectors that select nothing while the others do.
    """

    plan: Plan
    wrong: Problems
    missing: Problems
    idle: Problems


def exact_pattern(names: Iterable[str]) -> str:
    """A regular expression that ``search`` finds in exactly these names; in no name if there are none."""
    return rf"\A(?:{'|'.join(re.escape(name) for name in names) or '(?!)'})\Z"


def plan(
    sections: Sequence[Section],
    layers: Sequence[Layer],
    registered: RegisteredFeatures,
    *,
    allow_unmatched: bool = False,
    layer_names: LayerNames | None = None,
) -> Plan:
    """Decide which features act on which layer.

    An entry of a list of types or numbers that matches no layer causes a warning only: one config may be for several
    models.

    Args:
        sections: the enabled sections.
        layers: the layers of the model.
        registered: the features that exist.
        allow_unmatched: warn about a section that selects no layer and a name that no layer has, instead of raising.
        layer_names: the names by which layers are selected. None: their paths, with a warning where
            nvidia-dlfw-inspect's names would select other layers.

    Raises:
        ConfigError: a feature is unknown, a section selects no layer, no layer has a given name, two sections have one
            feature for one layer, or two features exclude each other. One error reports all problems.
    """
    found = draft(sections, layers, registered, layer_names=layer_names)
    found.idle.warn(logger)
    if allow_unmatched:
        found.missing.warn(logger)
    else:
        with found.wrong.noted():
            found.missing.raise_any()
    found.wrong.raise_any()
    return found.plan


def draft(
    sections: Sequence[Section],
    layers: Sequence[Layer],
    registered: RegisteredFeatures,
    *,
    layer_names: LayerNames | None = None,
) -> Draft:
    """Decide which features act on which layer, and list what does not fit. Arguments are those of :func:`plan`.

    Raises:
        ConfigError: a feature is unknown.
    """
    problems = Problems()
    resolved: list[NamespacedFeatures] = []
    for section in sections:
        with problems.noted():
            resolved.append(resolve_features(section, registered))
    problems.raise_any()
    indexes = by_upstreams_names(layers) if layer_names == "upstream" else [LayerIndex(layers)]
    upstreams = by_upstreams_names(layers) if layer_names is None else []
    otherwise: list[tuple[Section, Sequence[int], Sequence[int]]] = []
    hit: list[list[int]] = [[] for _ in layers]
    unmatched: list[Section] = []
    missing, idle = Problems(), Problems()
    for number, section in enumerate(sections if layers else ()):
        selected: Sequence[int] = ()
        with problems.noted():
            index = section.selector.choose(indexes)
            selected = section.selector.select(index)
            upstream = section.selector.choose(upstreams) if upstreams else None
            if not selected:
                unmatched.append(section)
                missing.add(_no_layer_message(section, index, upstream))
            elif upstream is not None and section.selector.differs(index, upstream):
                otherwise.append((section, selected, section.selector.select(upstream)))
            for key, entry, describe in section.selector.idle_entries(index) if selected else ():
                what = _idle_message(section, key, entry, describe, upstream)
                (missing if key == EXACT else idle).add(what)
        for position in selected:
            hit[position].append(number)
    merged: dict[tuple[int, ...], NamespacedFeatures] = {}
    planned: list[LayerPlan] = []
    for layer, numbers in zip(layers, map(tuple, hit), strict=True):
        if not numbers:
            continue
        meeting = [sections[number] for number in numbers]
        if numbers not in merged:
            merged[numbers] = {}
            with problems.noted():
                merged[numbers] = _merge(layer, meeting, [resolved[number] for number in numbers])
                _refuse_conflicts(layer, meeting)
        planned.append(LayerPlan(layer, tuple(section.name for section in meeting), merged[numbers]))
    names = tuple(section.name for section in unmatched)
    drafted = Plan(tuple(planned), names, _otherwise_message(otherwise, layers))
    return Draft(drafted, problems, missing, idle)


def resolve_features(section: Section, registered: RegisteredFeatures, *, others: bool = False) -> NamespacedFeatures:
    """The enabled features of a section by namespace, under the names that they are registered with.

    Case does not matter: Transformer Engine's documentation writes ``DisableFp8Gemm`` where its code has
    ``DisableFP8GEMM``.

    Args:
        section: the section.
        registered: the features that exist.
        others: whether there may be more features, which are left out.

    Raises:
        ConfigError: a feature or namespace that does not exist, or a feature without ``enabled``.
    """
    resolved: dict[str, dict[str, FeatureOptions]] = {}
    problems = Problems()
    for key, body in section.features.items():
        named = {key: body} if key not in registered else body
        namespace = BASE if key not in registered else key
        for name, options in named.items():
            path = (key,) if key not in registered else (key, name)
            feature = _registered_name(name, registered.get(namespace, ()))
            if namespace == BASE and _registered_name(name, registered.get(NAMESPACE, ())) is not None:
                feature = None  # nvidia-dlfw-inspect's own LogTensorStats, which no layer of Transformer Engine calls
            if feature is None:
                if not others:
                    problems.add(_unknown_feature(name, namespace, registered, section.place(*path)))
            elif feature in resolved.setdefault(namespace, {}):
                problems.add(
                    f"{section.place(*path)}: {shown(feature)} is given here twice, in two spellings. Keep one of them."
                )
            else:
                with problems.noted():
                    resolved[namespace][feature] = _feature_options(section, path, options)
    problems.raise_any()
    return {
        namespace: {feature: options for feature, options in features.items() if options["enabled"]}
        for namespace, features in resolved.items()
    }


def _registered_name(name: str, known: Iterable[str]) -> str | None:
    return next((candidate for candidate in known if candidate.casefold() == name.casefold()), None)


def _unknown_feature(name: str, namespace: str, registered: RegisteredFeatures, place: str) -> str:
    others = [space for space in registered if space != namespace]
    for other in others:
        if _registered_name(name, registered[other]) is not None:
            return f"{place}: {shown(name)} is a feature of {other!r}; indent it below '{other}:'."
    what = f"there is no feature {shown(name)} in {namespace!r}"
    known = [each for each in registered.get(namespace, ()) if not is_for_upstreams_tests(namespace, each)]
    if namespace == BASE:
        what = f"{shown(name)} is neither a namespace ({', '.join(others)}) nor a feature of nvidia-dlfw-inspect itself"
        known = [*others, *known]
    return (
        f"{place}: {what}.{suggestion(name, known)} Give a session your own feature as a class in features=, or its"
        " folder in feature_dirs=. te-precision check does not know your own features."
    )


def _feature_options(section: Section, path: tuple[str, ...], options: Any) -> FeatureOptions:
    """A feature's options, checked to be a mapping with a valid ``enabled``."""
    name, here = shown(path[-1]), section.place(*path)
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


def _merge(layer: Layer, hit: Sequence[Section], resolved: Sequence[NamespacedFeatures]) -> NamespacedFeatures:
    merged: dict[str, dict[str, FeatureOptions]] = {}
    owner: dict[tuple[str, str], Section] = {}
    problems = Problems()
    for section, of_section in zip(hit, resolved, strict=True):
        for namespace, features in of_section.items():
            for feature, options in features.items():
                first = owner.setdefault((namespace, feature), section)
                if first is not section:
                    problems.add(
                        f"{section.place()}: gives {feature!r} to the layer {layer.name!r}, and so does"
                        f" {first.place()}. Put both into one section ('tensors_struct' takes several tensors), or make"
                        " their layers differ."
                    )
                merged.setdefault(namespace, {})[feature] = options
    problems.raise_any()
    return merged


def _refuse_conflicts(layer: Layer, hit: Sequence[Section]) -> None:
    problems = Problems()
    for conflict in conflicts(hit, f"the layer {layer.name!r}") if len(hit) > 1 else ():
        problems.add(conflict)
    problems.raise_any()


def _idle_message(
    section: Section, key: str, entry: int, describe: Callable[[], str], upstream: LayerIndex | None
) -> str:
    text = f"{section.selector.place(key, entry)}: {describe()}"
    if key != EXACT:
        return text
    if upstream is not None and upstream.named((section.selector.exact_names or ())[entry]):
        text += f" {_BY_UPSTREAM}, and this is one of them."
    return text + _AS_WARNING


def _otherwise_message(
    otherwise: Sequence[tuple[Section, Sequence[int], Sequence[int]]], layers: Sequence[Layer]
) -> str:
    told = [
        f"{section.selector.place()}: {_some([layers[at].name for at in ours])}; by nvidia-dlfw-inspect's names"
        f" {_some([f'{layers[at].upstream[0]} (here {layers[at].name})' for at in theirs])}"
        for section, ours, theirs in otherwise[:MOST_TOLD]
    ]
    if len(otherwise) > MOST_TOLD:
        told.append(f"and {len(otherwise) - MOST_TOLD} more sections")
    if not told:
        return ""
    lines = "\n- ".join(["The layers' paths select other layers than nvidia-dlfw-inspect would:", *told])
    return f"{lines}\n{_BY_UPSTREAM}; layer_names='path' confirms that the paths are meant."


def _some(names: Sequence[str]) -> str:
    shown_names = ", ".join(names[:_MOST_LAYERS_SHOWN]) or "no layer"
    more = len(names) - _MOST_LAYERS_SHOWN
    return f"{shown_names} and {more} more" if more > 0 else shown_names


def _no_layer_message(section: Section, index: LayerIndex, upstream: LayerIndex | None) -> str:
    names = [layer.name for layer in index.layers]
    hint = section.selector.instead(index)
    if not hint:
        more = f", and {len(names) - 8} more" if len(names) > 8 else ""
        hint = f" The layers are: {', '.join(repr(name) for name in names[:8])}{more}."
    theirs = section.selector.select(upstream) if upstream is not None else ()
    if theirs:
        hint = f" {_BY_UPSTREAM}: here {_some([index.layers[at].upstream[0] for at in theirs])}."
    return (
        f"{section.selector.place()}: the section {shown(section.name)} matches none of the {len(names)} layers.{hint}"
        f"{_AS_WARNING}"
    )
