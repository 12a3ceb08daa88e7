"""The selectors and the features of docs/features.md, made from the schemas that check configs.

python -m tools.features_page    # prints them
"""

from __future__ import annotations

import re
import textwrap

from te_precision_callbacks.cli.manual.features import FeatureEntry, Key, features
from te_precision_callbacks.config.effects import NAMESPACE
from te_precision_callbacks.config.schemas import FEATURES
from te_precision_callbacks.config.selection import SELECTORS

_COMMON = (
    "tensors",
    "tensors_struct",
    "gemms",
    "gemms_struct",
    "start_step",
    "end_step",
    "start_end_list",
    "freq",
)
"""Keys that the page explains for all features, beside those of the items."""

_IN_ITEMS = ("tensor", "gemm")

_STATS = {
    "LogFp8TensorStats": (
        "names such as `underflows%`, `mxfp8_mse_columnwise`, `mxfp8_e5m2_sqnr_db`",
        "Statistics to compute, here or in each item. A name without a recipe is for the layer's own quantization; a"
        " name with a recipe shows how that recipe would quantize the tensor.",
    ),
    "LogNvfp4TensorStats": (
        "names such as `underflows%`, `mse_columnwise`",
        "Statistics to compute, here or in each item, for NVFP4.",
    ),
}
"""Feature -> the value and the meaning of ``stats``, whose names docs/statistics.md lists."""


def _section(feature: FeatureEntry) -> str:
    purpose = _filled(" ".join(feature.paragraphs))
    rows = "\n".join(_row(feature, key) for key in feature.keys if key.name not in (*_COMMON, *_IN_ITEMS, "enabled"))
    table = f"| key | takes | default | in items of | meaning |\n|---|---|---|---|---|\n{rows}\n\n" if rows else ""
    text = f"## {feature.name}\n\n{purpose}\n\n{_common(feature)}{table}```yaml\n{feature.example}\n```\n"
    return re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](\1)", text)


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_on_hyphens=False)


def _common(feature: FeatureEntry) -> str:
    """The common keys that the feature takes, with the tensors and GEMMs that it can act on."""
    names = {"tensors": ", ".join(feature.tensors), "gemms": ", ".join(feature.gemms)}
    results = []
    for key in feature.keys:
        if key.name in _COMMON:
            default = f"default {key.default}" if key.name == "freq" and key.default != 1 else ""
            more = names.get(key.name, default)
            results.append(f"`{key.name}`" + (f" ({more})" if more else ""))
    return _filled(f"Common keys: {', '.join(results)}.") + "\n\n"


def _row(feature: FeatureEntry, key: Key) -> str:
    items = ", ".join(dict.fromkeys(f"`{path[-1]}`" for path in key.where if path))
    takes, meaning = key.values, key.meaning
    if key.name == "stats" and feature.name in _STATS:
        takes, meaning = _STATS[feature.name]
        meaning += " [All names](statistics.md#statistics-of-quantized-tensors)."
    default = "" if key.default is None else key.default
    return f"| `{key.name}` | {takes} | {default} | {items} | {meaning} |"


def selectors() -> str:
    """The list of the keys of ``layers``."""
    return "\n".join(_filled(f"- `{key}`: {meaning}", "  ") for key, meaning in SELECTORS.items())


def sections() -> str:
    """The features."""
    own = (feature for feature in features() if feature.namespace == NAMESPACE and feature.name in FEATURES)
    return "\n".join(map(_section, own))


if __name__ == "__main__":
    print(f"{selectors()}\n\n{sections()}")
