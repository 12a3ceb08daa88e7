"""Registers a user's own feature classes."""

from __future__ import annotations

from collections.abc import Iterable

from nvdlfw_inspect.registry import Registry

NAMESPACE = "transformer_engine"


def register(classes: Iterable[type]) -> None:
    """Register feature classes in the namespace ``transformer_engine``.

    Call it before nvidia-dlfw-inspect is initialized: the registration is completed when the namespace's API is loaded,
    ahead of the features of the folders, so that a class here wins over one of the same name there.
    """
    for feature in classes:
        Registry.register_feature(namespace=NAMESPACE)(feature)
