"""docs/features.md, made from the schemas that check configs.

python -m tools.features_page > docs/features.md
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
"""Keys that the introduction explains for all features, beside those of the items."""

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


def _selectors() -> str:
    """The list of the keys of ``layers``."""
    return "\n".join(_filled(f"- `{key}`: {meaning}", "  ") for key, meaning in SELECTORS.items())


_INTRODUCTION = f"""\
# Features

The keys of a config and of each feature. Generated from the schemas that check configs:
`python -m tools.features_page > docs/features.md`.

```yaml
statistics:                      # a section: any name
  enabled: True
  layers:                        # the layers it selects
    layer_types: [layernorm_mlp]
  transformer_engine:            # the features that act on them
    LogTensorStats:
      enabled: True
      tensors: [activation]
      stats: [max]
```

A layer may be in several sections with different features. A section or feature with `enabled: False` is not checked.
Feature names are case-insensitive.

## Select layers

{_selectors()}

If a section has several of these keys, `exact_layer_names` takes precedence, then `layer_name_regex_pattern`; a warning
names the keys without effect. With `layer_numbers` and `layer_types`, a layer must match both; within each list, one
match is enough.

A section that selects no layer, or an exact name without a layer, is an error at start. With `allow_unmatched=True`, it
is a warning.

### Names

A layer's name is its path in the module tree, without the parts that DDP, FSDP, torch.compile, checkpoint wrappers and
PEFT add: `layers.3.q_proj`, or `layers.3.q_proj.lora_A.default` for an adapter. Selectors also match

- the name that the script gave, as in `te.Linear(..., name="head")`;
- the path with PEFT's parts, such as `base_model.model.layers.3.q_proj.base_layer`;
- the path without a LightningModule's own attribute.

If ranks have different layers at the same path, the names get [a prefix or Megatron's
numbers](statistics.md#aggregation).

nvidia-dlfw-inspect names some layers differently: with an attribute `layer_number`, `model.layers.3.q_proj` is
`model.layers.4.q_proj`. For a config with its names, write `layer_names: upstream` above the sections. A warning names
the sections that would select other layers by those names; `layer_names: path` suppresses it.

## Keys of all features

`te-precision features NAME` prints the keys of one feature.

| key | takes | meaning |
|---|---|---|
| `enabled` | True or False | Required in each feature. |
| `tensors` | a name or a list | Tensors that the feature acts on. |
| `gemms` | a name or a list | GEMMs that the feature acts on. |
| `tensors_struct`, `gemms_struct` | a list of mappings | Instead of `tensors` and `gemms`: a list of items, each with a `tensor` or a `gemm`, and keys that apply only to it. The keys of an item override those of the feature; the keys of a tensor override those of its GEMM. |
| `freq` | an integer >= 1 | The feature acts in steps that are multiples of this number, by default in every step: with `freq: 10` and `start_step: 5` in steps 10, 20, ... Not for features that change precision. |
| `start_step` | an integer >= 0 | The first step, counted from 0. |
| `end_step` | an integer >= -1 | The last step, inclusive. -1, the default: no end. |
| `start_end_list` | a list of [start, end] pairs | Several ranges of steps instead, ends included: `[[0, 20], [80, -1]]`. |

- Steps are *debug iterations*: optimizer steps with all of their micro-batches.
- The three GEMMs of a linear layer: `fprop` multiplies `activation` and `weight` to `output`; `dgrad` multiplies
  `gradient` and `weight` to `dgrad`; `wgrad` multiplies `activation` and `gradient` to `wgrad`.
- Both operands of a GEMM are quantized, or both are in high precision. PerTensorScaling quantizes; FakeQuant and the
  Disable features use high precision. They cannot act on the same GEMM in the same step, and only one feature can
  change a tensor of a GEMM.
- In plain Transformer Engine, features that change precision act in every step, without keys for ranges of steps.

"""  # noqa: E501


def as_markdown() -> str:
    """docs/features.md."""
    own = (feature for feature in features() if feature.namespace == NAMESPACE and feature.name in FEATURES)
    return "\n".join([_INTRODUCTION, *map(_section, own)])


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown())
