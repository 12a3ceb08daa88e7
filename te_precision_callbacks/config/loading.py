"""Loading of configs from YAML files and mappings, and the default config."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from te_precision_callbacks.base.suggestions import meant_for, nearest, shown
from te_precision_callbacks.base.vocabulary import LayerNames
from te_precision_callbacks.config.checking import read_features
from te_precision_callbacks.config.effects import BASE, NAMESPACE, conflicts
from te_precision_callbacks.config.planning import (
    NamespacedFeatures,
    Plan,
    RegisteredFeatures,
    Section,
    draft,
    resolve_features,
)
from te_precision_callbacks.config.problems import ConfigError, Problems
from te_precision_callbacks.config.schemas import UPSTREAM_FEATURE, known_features
from te_precision_callbacks.config.selection import EXACT, SELECTOR_KEYS, LayerSelector
from te_precision_callbacks.config.yaml_text import Places, read_yaml

if TYPE_CHECKING:
    from te_precision_callbacks.layers.naming import Layer

logger = logging.getLogger(__name__)

DEFAULT_CONFIG: dict[str, Any] = {
    "default_statistics": {
        "enabled": True,
        "layers": {"layer_types": ["all"]},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True,
                "tensors": ["activation", "weight", "gradient"],
                "stats": ["min", "max", "mean", "std", "cur_amax", "nonfinite_num"],
                "freq": 100,
            },
            "LogFp8TensorStats": {
                "enabled": True,
                "tensors": ["activation", "weight", "gradient"],
                "stats": ["underflows%", "underflow_norm%", "overflows%", "scale_inv_min", "scale_inv_max"],
                "only_quantized": True,
                "freq": 100,
            },
        },
    }
}
"""The default config: statistics of the GEMM operands of every TE layer, and of quantization losses. A session adds
early steps (``steps.py``)."""

LAYER_NAMES = "layer_names"

_SECTION_KEYS = ("enabled", "layers")


@dataclass(frozen=True)
class Config:
    """A loaded config.

    Attributes:
        sections: all sections in the order of the file, including disabled sections.
        source: the file, if any.
        layer_names: the names that selectors use, if configured.
        content: the original config.
    """

    sections: tuple[Section, ...]
    source: Path | None
    layer_names: LayerNames | None = None
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        if self.source:
            return str(self.source)
        return "a mapping"

    @property
    def is_default(self) -> bool:
        """Return whether this is the default config; sessions then also check optimizer steps."""
        return any(section.name in DEFAULT_CONFIG for section in self.enabled_sections)

    @property
    def enabled_sections(self) -> tuple[Section, ...]:
        return tuple(section for section in self.sections if section.enabled)

    def plan(
        self,
        layers: Sequence[Layer],
        registered: RegisteredFeatures,
        *,
        allow_unmatched: bool = False,
    ) -> Plan:
        """Plan which features act on each layer.

        Types or numbers in a list that match no layer only cause a warning, since a config may serve several models.

        Args:
            registered: the existing features.
            allow_unmatched: warn about sections and names that match no layer, instead of raising.

        Raises:
            ConfigError: lists all problems: unknown features, selectors without a match, conflicts between sections or
                features.
        """
        drafted = draft(self.enabled_sections, layers, registered, layer_names=self.layer_names)
        drafted.idle.warn(logger)
        if allow_unmatched:
            drafted.missing.warn(logger)
        else:
            with drafted.wrong.collecting():
                drafted.missing.raise_any()
        drafted.wrong.raise_any()
        return drafted.plan


ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config | None


def load_config(
    source: ConfigSource = None,
    *,
    features: Sequence[type] | None = None,
    feature_dirs: Sequence[str | os.PathLike[str]] = (),
) -> Config:
    """Read and check a config.

    Args:
        source: the path of a YAML file, a mapping, a loaded config (returned unchanged), or None for
            :data:`DEFAULT_CONFIG`.
        features: all custom features, as classes. By default, a session that gets the config checks unknown names.
        feature_dirs: folders of custom features; unknown names are then checked at the start of a session.

    Raises:
        ConfigError: the config cannot be read or is invalid; lists all problems of the sections.
    """
    registered = known_features(feature.__name__ for feature in features or ())
    allows_unknown = features is None or bool(feature_dirs)
    problems = Problems()
    if isinstance(source, Config):
        for section in source.enabled_sections:
            with problems.collecting():
                resolve_features(section, registered, allows_unknown=allows_unknown)
        problems.raise_any()
        return source
    path = None
    data: Any = source
    if source is None:
        data = DEFAULT_CONFIG
        locate = Places("the default config")
    elif isinstance(source, Mapping):
        locate = Places("the config mapping")
    elif not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"A config must be a path, a mapping or None, not {type(source).__name__} {shown(source)}.")
    elif source == "":  # Path("") would be the current folder
        raise ConfigError("The config's path is empty. Give the path of a YAML file, a mapping, or None.")
    else:
        path = Path(source).expanduser()
        data, locate = read_yaml(path, problems)
    if not isinstance(data, Mapping):
        what = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise ConfigError(
            f"{locate.name} {what}; a config is a mapping of section names to sections, each with 'enabled', 'layers'"
            " and features."
        )
    sections: list[Section] = []
    layer_names: LayerNames | None = None
    for key, body in data.items():
        with problems.collecting():
            if key == LAYER_NAMES and not isinstance(body, Mapping):
                if body not in get_args(LayerNames):
                    raise ConfigError(
                        f"{locate(LAYER_NAMES)}: {LAYER_NAMES!r} beside the sections must be"
                        f" {' or '.join(map(repr, get_args(LayerNames)))}, not {shown(body)}."
                    )
                layer_names = body
            else:
                sections.append(_section(str(key), body, locate, registered, allows_unknown=allows_unknown))
    problems.raise_any()
    return Config(tuple(sections), path, layer_names, data)


def _section(name: str, body: Any, locate: Places, registered: RegisteredFeatures, *, allows_unknown: bool) -> Section:
    if not isinstance(body, Mapping):
        raise ConfigError(
            f"{locate(name)}: a section must be a mapping with 'enabled', 'layers' and features, not {shown(body)}."
        )
    locate_layers = functools.partial(locate, name, "layers")
    selector = LayerSelector({EXACT: ()}, locate_layers)  # selects nothing
    if body.get("enabled") is False:
        return Section(name, False, selector, {}, locate)
    if "layers" not in body and any(name in features for features in registered.values()):
        raise ConfigError(
            f"{locate(name)}: {shown(name)} is a feature, not a section. Put it into a section: 'my_section:' with"
            " 'enabled: True', 'layers: {layer_types: [all]}' and, below 'transformer_engine:', the feature."
        )
    problems = Problems()
    if body.get("enabled", True) is not True:
        problems.append(f"{locate(name, 'enabled')}: 'enabled' must be True or False, not {shown(body['enabled'])}.")
    misplaced = [key for key in SELECTOR_KEYS if key in body]
    for key in misplaced:
        problems.append(
            f"{locate(name, key)}: {key!r} selects layers and belongs below 'layers:', not next to 'enabled'."
        )
    others_of_section = {*_SECTION_KEYS, *misplaced}
    for key in _SECTION_KEYS:
        if key not in body and not (key == "layers" and misplaced):
            problems.append(f"{locate(name)}: the key {key!r} is missing.{meant_for(key, body)}")
            others_of_section.update(nearest(key, map(str, body), most=1))
    if "layers" in body:
        with problems.collecting():
            selector = LayerSelector.parse(body["layers"], locate_layers)
    features: dict[str, dict[str, Any]] = {}
    for key, value in body.items():
        if key in others_of_section:
            continue
        if isinstance(value, Mapping):
            features[str(key)] = {str(feature): options for feature, options in value.items()}
        else:
            problems.append(
                f"{locate(name, str(key))}: {shown(key)} must be a mapping of features, not {shown(value)}."
            )
    section = Section(name, True, selector, features, locate)
    with problems.collecting():
        resolve_features(section, registered, allows_unknown=allows_unknown)
    if NAMESPACE in features:
        with problems.collecting():
            read = read_features(features[NAMESPACE], functools.partial(section.place, NAMESPACE))
            effects = {feature: options.schema.effect() for feature, options in read.items()}
            section = replace(
                section, features={**features, NAMESPACE: {**features[NAMESPACE], **read}}, effects=effects
            )
            problems += conflicts([section], f"the layers of {shown(name)}")
    problems.raise_any()
    return section


def notes_of(config: Config) -> list[str]:
    registered = known_features()
    return describe_idle_sections(
        config, [resolve_features(section, registered) for section in config.enabled_sections]
    )


def describe_idle_sections(config: Config, features: Sequence[NamespacedFeatures]) -> list[str]:
    sections = config.enabled_sections
    if not sections:
        return [f"The config ({config.name}) has no enabled section, so it has no effect."]
    notes: list[str] = []
    for section, resolved in zip(sections, features, strict=True):
        if not any(resolved.values()):
            notes.append(f"{section.place()}: the section has no enabled feature, so it has no effect.")
        if UPSTREAM_FEATURE in resolved.get(BASE, ()):
            notes.append(
                f"{section.place(UPSTREAM_FEATURE)}: here {UPSTREAM_FEATURE!r} is nvidia-dlfw-inspect's own feature,"
                " which no layer of Transformer Engine calls. For statistics of its layers, indent it below"
                f" '{NAMESPACE}:'."
            )
    return notes
