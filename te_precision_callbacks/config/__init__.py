"""Debug configs: loading, validation, and planning of features on the layers of a model.

Usage::

    config = load_config("config.yaml")  # or a mapping, or None for the defaults
    plan = config.plan(layers, registered)  # the features of each layer
"""

from __future__ import annotations

from te_precision_callbacks.config.loading import Config, ConfigSource, load_config
from te_precision_callbacks.config.planning import LayerPlan, Plan, Section
from te_precision_callbacks.config.problems import ConfigError
from te_precision_callbacks.config.selection import LayerSelector

__all__ = [
    "Config",
    "ConfigError",
    "ConfigSource",
    "LayerPlan",
    "LayerSelector",
    "Plan",
    "Section",
    "load_config",
]
