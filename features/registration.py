"""Registers a user's own feature class."""

from __future__ import annotations

from nvdlfw_inspect.registry import NamespaceData, Registry

NAMESPACE = "transformer_engine"


def register(feature: type) -> None:
    """Register a feature class in the namespace ``transformer_engine``.

    Call it before nvidia-dlfw-inspect is initialized. The class wins over one of the same name in a feature folder. The
    registry's own decorator cannot do it: once Transformer Engine's namespace API was imported, as the base class of a
    feature does, it wants a logger that exists only after the initialization.
    """
    data = Registry.data.setdefault(NAMESPACE, NamespaceData(NAMESPACE, None))
    data.features[feature.__name__] = feature()
    if not any(feature.__name__ in names for names in data.feat_api_to_features.values()):
        Registry._register_feature_api(NAMESPACE, feature.__name__)
