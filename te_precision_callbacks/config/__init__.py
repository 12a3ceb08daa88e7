"""Debug configs: loading, validation, and planning of features on the layers of a model.

Usage::

    config = load_config("config.yaml")  # or a mapping, or None for the defaults
    plan = config.plan(layers, registered)  # the features of each layer
"""

from __future__ import annotations

from te_precision_callbacks.config.loading import Config, load_config
from te_precision_callbacks.config.planning import Plan
from te_precision_callbacks.config.problems import ConfigError

__all__ = ["Config", "ConfigError", "Plan", "load_config"]
