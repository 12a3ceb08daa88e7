"""docs/features.md, made from the schemas that check configs.

python -m tools.features_page > docs/features.md
"""

from __future__ import annotations

import textwrap

from te_precision_callbacks.cli.manual.features import FeatureEntry, Key
from te_precision_callbacks.config.schemas import FEATURES
from te_precision_callbacks.config.selection import SELECTORS


def _default(key: Key) -> str:
    return "must be given" if key.required else "" if key.default is None else str(key.default)


def _section(feature: FeatureEntry) -> str:
    rows = "\n".join(
        f"| `{key.name}` | {key.places} | {key.values} | {_default(key)} | {key.meaning} |" for key in feature.keys
    )
    head = "| key | where | takes | default | meaning |\n|---|---|---|---|---|"
    purpose = " ".join(feature.paragraphs)
    return f"## {feature.name}\n\n{purpose}\n\n{head}\n{rows}\n\n```yaml\n{feature.example}\n```\n"


def _selectors() -> str:
    """The list of the keys of ``layers``."""
    return "\n".join(
        textwrap.fill(f"- `{key}`: {meaning}", 120, subsequent_indent="  ", break_on_hyphens=False)
        for key, meaning in SELECTORS.items()
    )


_INTRODUCTION = f"""\
# Features

The keys of a config section, and of the features below its `transformer_engine:`. This page is generated from the
schemas that check configs: `python -m tools.features_page > docs/features.md`.

## Sections and their layers

A config is a mapping of sections. Each section has `enabled`, `layers`, and features below `transformer_engine:`. If a
section is not enabled, nothing else in it is read. A layer may be in several sections with different features. The keys
of `layers` select:

{_selectors()}

If a section has several of these keys, nvidia-dlfw-inspect's rule applies:

- `exact_layer_names` takes precedence, then `layer_name_regex_pattern`. Other keys have no effect then, and cause a
  warning.
- `layer_numbers` and `layer_types` combine: a layer must match both. Within each list, one match is enough.

A section that selects no layer of the model, and an exact name without a layer, are errors at start;
`allow_unmatched=True` turns both into warnings. A type or a number without a layer only causes a warning if other
entries of the list match.

### Names

A layer's name is its path in the module tree, without the parts that DDP, FSDP, torch.compile, checkpoint wrappers and
PEFT add: `layers.3.q_proj`, and `layers.3.q_proj.lora_A.default` for the adapter. Selectors also match the name that
the script gave (`te.Linear(..., name="head")`, or nvidia-dlfw-inspect's `infer_and_assign_layer_names` before
`attach()`), the path with PEFT's parts (`base_model.model.layers.3.q_proj.base_layer`), and the path without a
LightningModule's own attribute. If ranks have different layers at the same path, the names have Megatron's numbers
([statistics.md](statistics.md#aggregation)).

If modules have an attribute `layer_number`, nvidia-dlfw-inspect calls the same layer `model.layers.4.q_proj`. A config
for those names may select other layers here; one warning then lists both sets. For nvidia-dlfw-inspect's names and
numbers, pass `layer_names="upstream"` to any integration, or write the key at the level of the sections:

```yaml
layer_names: upstream     # or path, to use paths without a warning
statistics:
  enabled: True
  layers:
    layer_types: [layernorm_mlp]
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors: [activation]
      stats: [max]
```

- A layer's number is then the only number in its name, except in `fc1` and `fc2`. A layer with several numbers or none,
  for which nvidia-dlfw-inspect raises, has no number. `layer_types` match only parts of the name.
- Selectors match the names of the model passed to the session, or of the model without DDP and other wrappers.
  Names from the script's own `infer_and_assign_layer_names` take precedence.
- Layers with equal names (`model.layers.None....`, if `layer_number` is not set) are distinguished by a count, and the
  name selects all of them.
- nvidia-dlfw-inspect itself does not read a file with this key.

### Errors

One error reports all problems of a config with their lines. Unknown features are errors when the config is loaded, or
when a session starts if there are feature folders (`feature_dirs=`), which are executed then.

## Keys

- `te-precision features NAME` prints the keys of one feature, `te-precision statistics` the values of `stats`
  ([statistics.md](statistics.md)).
- Feature names ignore case: `DisableFp8Gemm` is `DisableFP8GEMM`.
- An item's key takes precedence over the feature's. The item of a tensor takes precedence over a GEMM's.
- Tensors: `fprop` multiplies `activation` and `weight` to `output`; `dgrad` multiplies `gradient` and `weight` to
  `dgrad`; `wgrad` multiplies `activation` and `gradient` to `wgrad`.
- A tensor may be in several items of `tensors_struct`, which all apply. If a feature has GEMMs, a GEMM may be in one
  item only, and a tensor in one item of that GEMM only.
- A GEMM multiplies two quantized tensors, or two in high precision. A feature that quantizes a tensor of a GEMM
  (PerTensorScaling) and a feature that runs the GEMM in high precision (the Disable features, FakeQuant) therefore
  exclude each other in steps in which both act.
- `start_step`, `end_step` and `start_end_list` of features that change precision are this project's own keys:
  Transformer Engine's features of these names act in every step.
- The keys of your own features are not checked.
"""


def as_markdown() -> str:
    """docs/features.md."""
    return "\n".join([_INTRODUCTION, *(_section(FeatureEntry.of_schema(model)) for model in FEATURES.values())])


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown())
