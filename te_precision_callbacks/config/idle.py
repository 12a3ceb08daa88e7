"""What of a config does nothing in any layer, in words: a session and ``te-precision check`` warn of it."""

from __future__ import annotations

from collections.abc import Sequence

from te_precision_callbacks.config.known import known_features
from te_precision_callbacks.config.loading import Config
from te_precision_callbacks.config.planning import BASE, NamespacedFeatures, Section, resolve_features


def notes_of(config: Config) -> list[str]:
    """The warnings of a config without a session, whatever its model.

    Raises:
        ConfigError: a feature is unknown.
    """
    known = known_features()
    return idle_in_words(config, [resolve_features(section, known) for section in config.enabled_sections])


def idle_in_words(config: Config, features: Sequence[NamespacedFeatures]) -> list[str]:
    """The warnings.

    Args:
        config: the config.
        features: the features of each of its enabled sections, as they are registered.
    """
    sections = config.enabled_sections
    if not sections:
        return [f"The config ({config.name}) has no enabled section, so nothing is done."]
    found = (_idle(section, own) for section, own in zip(sections, features, strict=True))
    return [text for text in found if text]


def _idle(section: Section, features: NamespacedFeatures) -> str:
    """Why a section changes nothing in a layer of Transformer Engine; empty if it does."""
    if features.get(BASE):
        return (
            f"{section.place()}: {' and '.join(map(repr, features[BASE]))} belongs to nvidia-dlfw-inspect itself, and"
            " no layer of Transformer Engine calls it. Put it below 'transformer_engine:' to use the feature of the"
            " same name there."
        )
    return (
        "" if any(features.values()) else f"{section.place()}: the section has no enabled feature, so it does nothing."
    )
