"""Config sections, in YAML, that fix a finding."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence


def keep_high(*layers: str, other_layers: Iterable[str] = (), gemms: Sequence[str] = ()) -> str:
    """Return a section that keeps layers in high precision.

    Args:
        gemms: the GEMMs to keep; by default, the whole layers.
        other_layers: names that the pattern must not match. If several layers differ only in their numbers, and no
            other name does, the pattern matches all numbers.
    """
    pattern = json.dumps(f"^{_pattern(layers, other_layers)}$")  # JSON is YAML
    name = "_".join(("keep", *gemms, "in_high_precision"))
    feature = "DisableFP8Layer:\n      enabled: True"
    if gemms:
        feature = f"DisableFP8GEMM:\n      enabled: True\n      gemms: [{', '.join(gemms)}]"
    return f"""{name}:
  enabled: True
  layers:
    layer_name_regex_pattern: {pattern}
  transformer_engine:
    {feature}
"""


def _pattern(layers: Iterable[str], other_layers: Iterable[str]) -> str:
    forms: dict[str, list[str]] = defaultdict(list)
    for name in layers:
        forms[_form(name)].append(name)
    other_forms = {_form(name) for name in other_layers}
    patterns: list[str] = []
    for form, names in forms.items():
        is_whole = len(names) > 1 and form not in other_forms
        patterns += [form] if is_whole else map(re.escape, names)
    if len(patterns) == 1:
        return patterns[0]
    return f"({'|'.join(patterns)})"


def _form(name: str) -> str:
    return re.sub(r"\d+", lambda _: r"\d+", re.escape(name))
