"""The existing features, as far as they are known before any is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from te_precision_callbacks.config.effects import BASE, NAMESPACE


def known_features(own: Iterable[str] = ()) -> Mapping[str, tuple[str, ...]]:
    """Map namespaces to the features that a session will find; custom ones are in ``transformer_engine``."""
    # Not above: the schemas import pydantic and numpy.
    from te_precision_callbacks.config.schemas import FEATURES

    known: dict[str, dict[str, None]] = {NAMESPACE: dict.fromkeys((*FEATURES, *own)), BASE: {}}
    registry = sys.modules.get("nvdlfw_inspect.registry")  # with the features that the script has registered
    for namespace, data in registry.Registry.data.items() if registry is not None else ():
        names = (*data.features, *(waiting.__name__ for waiting in data.deferred_features))
        known.setdefault(namespace, {}).update(dict.fromkeys(names))
    # nvidia-dlfw-inspect's own LogTensorStats: no layer of Transformer Engine calls it.
    known[BASE] = {feature: None for feature in known[BASE] if feature not in known[NAMESPACE]}
    return {namespace: tuple(features) for namespace, features in known.items()}


def is_of_upstreams_tests(name: str) -> bool:
    return name.startswith("Test")
