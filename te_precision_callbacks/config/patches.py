"""Sections of a config that mend a finding or follow an advice, in YAML."""

from __future__ import annotations

import json
import re


def keep_high(*layers: str) -> str:
    """Keep layers in high precision."""
    names = "|".join(map(re.escape, layers))
    pattern = json.dumps(f"^{names}$" if len(layers) == 1 else f"^({names})$")  # JSON is YAML
    return f"""keep_in_high_precision:
  enabled: True
  layers:
    layer_name_regex_pattern: {pattern}
  transformer_engine:
    DisableFP8Layer:
      enabled: True
"""
