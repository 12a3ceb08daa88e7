"""The existing features, as far as they are known before any is imported.

Read from nvidia-dlfw-inspect 0.2.2 (``registry.py``, ``debug_features/``) and Transformer Engine 2.20.2
(``debug/features/``): files in these folders register their classes with a decorator when a session starts.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from te_precision_callbacks.config.effects import BASE, NAMESPACE

_FOLDERS = (("transformer_engine", "debug/features"), ("nvdlfw_inspect", "debug_features"))

_REGISTERED = re.compile(r"""@Registry\.register_feature\(namespace=["'](\w+)["']\)\s*\n(?:@.*\n)*class\s+(\w+)""")


def known_features(own: Iterable[str] = ()) -> Mapping[str, tuple[str, ...]]:
    """Map namespaces to the features that a session will find, except in custom folders.

    Args:
        own: names of custom features, which belong to the namespace ``transformer_engine``.
    """
    # Not above: the schemas import pydantic and numpy.
    from te_precision_callbacks.config.schemas import FEATURES

    found: dict[str, dict[str, None]] = {NAMESPACE: dict.fromkeys((*FEATURES, *own)), BASE: {}}
    for namespace, feature in (*_shipped_upstream(), *_registered_by_now()):
        found.setdefault(namespace, {})[feature] = None
    # nvidia-dlfw-inspect's own LogTensorStats: no layer of Transformer Engine calls it.
    found[BASE] = {feature: None for feature in found[BASE] if feature not in found[NAMESPACE]}
    return {namespace: tuple(features) for namespace, features in found.items()}


def is_for_upstreams_tests(namespace: str, name: str) -> bool:
    """Return whether a feature is in a private file of upstream, such as TestDummyFeature: valid but not listed."""
    return (namespace, name) in _shipped_upstream(private=True)


@functools.cache
def _shipped_upstream(*, private: bool = False) -> tuple[tuple[str, str], ...]:
    """Return namespace and name of the features in upstream's files, or in private files, without imports."""
    found: list[tuple[str, str]] = []
    for package, folder in _FOLDERS:
        spec = importlib.util.find_spec(package)
        for place in (spec and spec.submodule_search_locations) or ():
            for file in sorted(Path(place, folder).glob("_*.py" if private else "*.py")):
                found += _REGISTERED.findall(file.read_text(encoding="utf-8"))
    return tuple(found)


def _registered_by_now() -> Iterable[tuple[str, str]]:
    """Yield namespace and name of the features that the script has registered."""
    registry = sys.modules.get("nvdlfw_inspect.registry")
    for namespace, data in registry.Registry.data.items() if registry is not None else ():
        yield from ((namespace, name) for name in data.features)
        yield from ((namespace, waiting.__name__) for waiting in data.deferred_features)
