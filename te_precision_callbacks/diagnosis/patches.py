"""Sections of a config that mend a finding, in YAML."""

from __future__ import annotations

import json
import re


def keep_high(layer: str) -> str:
    """Keep a layer in high precision."""
    pattern = json.dumps(f"^{re.escape(layer)}$")  # JSON is YAML
    return f"""keep_in_high_precision:
  enabled: True
  layers:
    layer_name_regex_pattern: {pattern}
  transformer_engine:
    DisableFP8Layer:
      enabled: True
"""
