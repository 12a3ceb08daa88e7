"""Reading a config: from a YAML file, from a mapping, or the defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from te_precision_callbacks.config.planning import (
    NAMESPACE,
    Plan,
    RegisteredFeatures,
    Section,
    plan,
    refuse_shared_tensors,
)
from te_precision_callbacks.config.problems import ConfigError, KeyPath, meant_for, suggestion
from te_precision_callbacks.config.selection import LayerSelector, SelectableLayer

DEFAULT_CONFIG: dict[str, Any] = {
    "default_statistics": {
        "enabled": True,
        "layers": {"layer_types": ["all"]},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True,
                "tensors": ["activation", "weight", "gradient"],
                "stats": ["min", "max", "mean", "std", "cur_amax"],
                "freq": 10,
            }
        },
    }
}
"""What ``config=None`` means: five statistics of the GEMM operands of every TE layer, in every tenth step."""

_SECTION_KEYS = ("enabled", "layers")

Place = Callable[..., str]
"""Says where the key at a path stands; a key without a line of its own, by the nearest key above it."""


@dataclass(frozen=True)
class Config:
    """A loaded config.

    Attributes:
        sections: in the order of the file, those that are not enabled included.
        source: the file that it was read from; None for a mapping and for the defaults.
    """

    sections: tuple[Section, ...]
    source: Path | None

    @property
    def enabled_sections(self) -> tuple[Section, ...]:
        """The sections that do something."""
        return tuple(section for section in self.sections if section.enabled)

    def plan(
        self, layers: Sequence[SelectableLayer], registered: RegisteredFeatures, *, allow_unmatched: bool = False
    ) -> Plan:
        """Decide which features act on which of ``layers``; see :func:`te_precision_callbacks.config.planning.plan`."""
        return plan(self.enabled_sections, layers, registered, allow_unmatched=allow_unmatched)


ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config | None


def load_config(source: ConfigSource = None) -> Config:
    """Read and check a config.

    Args:
        source: the path of a YAML file, a mapping of the same content, a loaded config (returned as it is), or None for
            the defaults: :data:`DEFAULT_CONFIG`.

    Raises:
        ConfigError: the file is missing or unreadable, is not YAML, is not a mapping of sections, or a section is
            malformed; an enabled feature of Transformer Engine has a key or a value that its schema does not take; two
            features of a section modify one tensor. Whether a feature exists is checked when a session starts, against
            the features found there.
    """
    if isinstance(source, Config):
        return source
    if source is None:
        return _checked(DEFAULT_CONFIG, {}, "the default config", None)
    if isinstance(source, Mapping):
        return _checked(source, {}, "the config mapping", None)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"A config is a path, a mapping or None, not {type(source).__name__} {source!r}.")
    path = Path(source)
    data, lines = _read_yaml(path)
    return _checked(data, lines, str(path), path)


def _read_yaml(path: Path) -> tuple[Any, dict[KeyPath, int]]:
    """The content of a YAML file, and the line (1-based) of every key in it."""
    if path == Path():
        raise ConfigError("The config's path is empty. Give the path of a YAML file, a mapping, or None.")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"The config file {str(path)!r} does not exist (looked in {str(path.absolute().parent)!r})."
            + _similar_files(path)
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"The config file {str(path)!r} cannot be read: {error}.") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[KeyPath, int] = {}
        if node is not None:
            _index_lines(node, (), lines, path)
        return yaml.safe_load(text), lines
    except yaml.YAMLError as error:
        raise ConfigError(f"The config file {str(path)!r} is not valid YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"The config file {str(path)!r} has an anchor that contains itself.") from None


def _similar_files(path: Path) -> str:
    try:
        present = [entry.name for entry in path.absolute().parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return " That folder does not exist either."
    return suggestion(path.name, present, known_as="YAML files there")


def _index_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], file: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key_path = (*path, str(key_node.value))
            line = key_node.start_mark.line + 1
            if key_path in lines:
                raise ConfigError(
                    f"{file}, line {line}: {key_node.value!r} stands here a second time; the first is in line"
                    f" {lines[key_path]}. YAML would silently keep only one of them: give them different names."
                )
            lines[key_path] = line
            _index_lines(value_node, key_path, lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _index_lines(child, (*path, index), lines, file)


def _checked(data: Any, lines: dict[KeyPath, int], name: str, source: Path | None) -> Config:
    if not isinstance(data, Mapping):
        what = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise ConfigError(
            f"{name} {what}; a config is a mapping of section names to sections, each with 'enabled', 'layers' and"
            " features."
        )

    def place(*keys: str | int) -> str:
        line = next((lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in lines), None)
        where = f"{name}, line {line}" if line else name
        return f"{where} (section {keys[0]!r})"

    return Config(tuple(_section(str(key), value, place) for key, value in data.items()), source)


def _section(name: str, body: Any, place: Place) -> Section:
    here = place(name)
    if not isinstance(body, Mapping):
        raise ConfigError(f"{here}: a section is a mapping with 'enabled', 'layers' and features, not {body!r}.")
    for key in _SECTION_KEYS:
        if key not in body:
            raise ConfigError(f"{here}: the key {key!r} is missing.{meant_for(key, body)}")
    if not isinstance(body["enabled"], bool):
        raise ConfigError(f"{place(name, 'enabled')}: 'enabled' is True or False, not {body['enabled']!r}.")
    features: dict[str, dict[str, Any]] = {}
    places: dict[KeyPath, str] = {(): here}
    for key, value in body.items():
        if key in _SECTION_KEYS:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"{place(name, key)}: {key!r} must be a mapping of features, not {value!r}.")
        features[str(key)] = {str(feature): options for feature, options in value.items()}
        places[(str(key),)] = place(name, key)
        for path in _paths(value):
            places[(str(key), *path)] = place(name, key, *path)
    section = Section(
        name=name,
        enabled=body["enabled"],
        selector=LayerSelector.parse(body["layers"], place(name, "layers")),
        features=features,
        places=places,
    )
    return _with_checked_features(section, place) if section.enabled and NAMESPACE in features else section


def _paths(options: Any) -> Iterator[KeyPath]:
    """The path of each key and item in nested mappings and lists."""
    below: Iterable[tuple[str | int, Any]] = ()
    if isinstance(options, Mapping):
        below = ((str(key), value) for key, value in options.items())
    elif isinstance(options, (list, tuple)):
        below = enumerate(options)
    for key, value in below:
        yield (key,)
        yield from ((key, *path) for path in _paths(value))


def _with_checked_features(section: Section, place: Place) -> Section:
    # Not above: the schemas import pydantic and numpy, and `python -m` wants to run them as their only copy.
    from te_precision_callbacks.config.checking import check_features

    features = section.features[NAMESPACE]
    checked = check_features(features, lambda *keys: place(section.name, NAMESPACE, *keys))
    section = replace(
        section,
        features={**section.features, NAMESPACE: {**features, **checked.options}},
        modifies=checked.modifies,
    )
    refuse_shared_tensors([section], f"the layers of {section.name!r}")
    return section
