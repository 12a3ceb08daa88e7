"""Registers features in nvidia-dlfw-inspect's namespace ``transformer_engine``.

Read from nvidia-dlfw-inspect 0.2.2 (``registry.py``): the registry keeps the first feature of a name and the last
namespace API, so the order of ``feature_dirs`` matters. Here it does not: this project's features replace Transformer
Engine's features of the same name, and its namespace API stays even if Transformer Engine's is registered later.
"""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.registry import NamespaceData, Registry

from te_precision_callbacks.config import effects
from te_precision_callbacks.te.package import feature_folders

NAMESPACE = effects.NAMESPACE


class _Namespace(NamespaceData):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "api" and getattr(self.__dict__.get("api"), "is_own", False) and is_upstream(type(value)):
            return
        super().__setattr__(name, value)


def namespace() -> Any:
    entry = Registry.data.get(NAMESPACE)
    if not isinstance(entry, _Namespace):
        replacement = _Namespace(NAMESPACE, None)
        if entry is not None:
            replacement.__dict__.update(entry.__dict__)
        Registry.data[NAMESPACE] = replacement
    return Registry.data[NAMESPACE]


def register(feature: type) -> None:
    """Register a custom feature class; it takes precedence over every feature of the same name.

    Call this before nvidia-dlfw-inspect is initialized. The registry's decorator does not work then: once Transformer
    Engine's namespace API is imported, for example by the base class of a feature, it needs a logger that is created by
    the initialization.
    """
    _put(feature.__name__, feature())


def own_feature(*names: str) -> Any:
    """Class decorator that registers a feature of this project under its name and other spellings.

    A custom feature of the same name that is already registered stays.
    """

    def decorate(feature: type) -> type:
        data = namespace()
        for name in (feature.__name__, *names):
            # A class registered before any namespace API is deferred.
            present = [waiting for waiting in data.deferred_features if waiting.__name__ == name]
            if name in data.features:
                present.append(type(data.features[name]))
            if all(map(is_upstream, present)):
                _put(name, feature())
        return feature

    return decorate


def _put(name: str, instance: Any) -> None:
    data = namespace()
    data.features[name] = instance
    # Also remove a class that was deferred because no namespace API existed.
    data.deferred_features[:] = [waiting for waiting in data.deferred_features if waiting.__name__ != name]


def is_upstream(kind: type) -> bool:
    """Return whether a class comes from Transformer Engine's folder of features, imported or executed by path."""
    codes = [getattr(getattr(member, "__func__", member), "__code__", None) for member in vars(kind).values()]
    return any(code is not None and code.co_filename.startswith(feature_folders()) for code in codes)
