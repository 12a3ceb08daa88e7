"""Sections of a config that mend a finding or follow an advice, in YAML."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable


def keep_high(*layers: str, others: Iterable[str] = ()) -> str:
    """Keep layers in high precision.

    Args:
        layers: their names.
        others: the names of layers that are not meant: without one among the numbered layers of a form, the pattern
            takes all numbers.
    """
    pattern = json.dumps(f"^{_pattern(layers, others)}$")  # JSON is YAML
    return f"""keep_in_high_precision:
  enabled: True
  layers:
    layer_name_regex_pattern: {pattern}
  transformer_engine:
    DisableFP8Layer:
      enabled: True
"""


def _pattern(layers: Iterable[str], others: Iterable[str]) -> str:
    """A pattern of these names, and none of the others."""
    forms: dict[str, list[str]] = defaultdict(list)
    for name in layers:
        forms[_form(name)].append(name)
    of_others = {_form(name) for name in others}
    found: list[str] = []
    for form, names in forms.items():
        is_whole = len(names) > 1 and form not in of_others
        found += [form] if is_whole else map(re.escape, names)
    return found[0] if len(found) == 1 else f"({'|'.join(found)})"


def _form(name: str) -> str:
    """The pattern of a name with any numbers."""
    return re.sub(r"\d+", lambda _: r"\d+", re.escape(name))
