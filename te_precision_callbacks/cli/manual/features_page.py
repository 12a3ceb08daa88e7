"""docs/features.md, made from the schemas that check configs.

python -m te_precision_callbacks.cli.manual.features_page > docs/features.md
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
schemas that check configs: `python -m te_precision_callbacks.cli.manual.features_page > docs/features.md`.

## Sections and their layers

A config is a mapping of sections. Each section has `enabled`, `layers`, and features below `transformer_engine:`. In a
section that is not enabled, nothing else is read, and `layers` may be missing. A layer may be in several sections, if
each of them brings different features. The keys of `layers` select:

{_selectors()}

If a section has several of these keys, nvidia-dlfw-inspect's rule applies:

- `exact_layer_names` decides alone. Without it `layer_name_regex_pattern` decides alone. Other keys then have no
  effect, and cause a warning.
- `layer_numbers` and `layer_types` combine: a layer must meet both. Within each list, one matching entry is enough.

A section that selects no layer of the model, and an exact name that no layer has, are refused at the start;
`allow_unmatched=True` turns both into warnings. If other entries of a list match, a type or a number that no layer has
only causes a warning, since one config may be for several models. A regular expression whose search in the names takes
more than half a second is refused.

### Names

A layer's name is its path in the module tree. The parts that DDP, FSDP, torch.compile, checkpoint wrappers and PEFT add
are left out: `layers.3.q_proj`, and for the adapter `layers.3.q_proj.lora_A.default`. These names also select the
layer: the name that the script gave (`te.Linear(..., name="head")`, or nvidia-dlfw-inspect's
`infer_and_assign_layer_names` before `attach()`), the path with PEFT's parts
(`base_model.model.layers.3.q_proj.base_layer`), and the path without a LightningModule's own attribute. The statistics
log and `summary` use a name that the script gave to one layer only. Layers with the same name are distinguished by
their paths, with a message. If ranks have different layers at the same path, the names have Megatron's numbers
([statistics.md](statistics.md#what-a-value-is-of)).

If modules have an attribute `layer_number`, nvidia-dlfw-inspect calls the same layer `model.layers.4.q_proj`. A config
that was written for those names may select other layers here; one warning then names both sets. To use exactly
nvidia-dlfw-inspect's names and numbers, pass `layer_names="upstream"` to any front door. Where only a config can be
passed, as with a flag, write the key at the level of the sections:

```yaml
layer_names: upstream     # or path: the paths are meant, and no warning is wanted
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

- A layer's number is then the only number in its name, not counting that of `fc1` or `fc2`. A layer whose name has
  several numbers or none, for which nvidia-dlfw-inspect raises, has no number. `layer_types` match parts of the name
  only.
- The names are those of the model that the session gets. A selector that matches none of them is compared with the
  names of the model without DDP and other wrappers, since scripts name a model before or after wrapping it. If the
  script has called `infer_and_assign_layer_names` itself, the names that it gave count.
- Layers to which nvidia-dlfw-inspect gives the same name (`model.layers.None....`, where `layer_number` is not set) are
  distinguished by a count, and that name selects all of them.
- nvidia-dlfw-inspect itself does not read a file with this key.

### Errors

One error reports all problems of a config, each with its line. A feature that does not exist is refused when the config
is loaded. Your own features are known then if they are given as classes (`features=`). Folders (`feature_dirs=`) are
executed when a session starts; with folders, an unknown name is refused at that point.

## Keys

- `te-precision features NAME` prints the keys of one feature, `te-precision statistics` what `stats` can have, as in
  [statistics.md](statistics.md).
- The case of a feature's name does not matter: `DisableFp8Gemm` is `DisableFP8GEMM`.
- A key that is allowed at the feature and in its items may be given at both; the item's value takes precedence. The
  item of a tensor takes precedence over that of a GEMM.
- Tensors: `fprop` multiplies `activation` and `weight` to `output`; `dgrad` multiplies `gradient` and `weight` to
  `dgrad`; `wgrad` multiplies `activation` and `gradient` to `wgrad`.
- A feature that looks at tensors may have a tensor in several items of `tensors_struct`, and all of them act. If a
  feature has GEMMs, a GEMM may be in one item only, and a tensor in one item of that GEMM only.
- A GEMM multiplies two quantized tensors, or two in high precision. A feature that quantizes a tensor of a GEMM
  (PerTensorScaling) and a feature that runs the GEMM in high precision (the Disable features, FakeQuant) therefore
  exclude each other in steps that both act in, in one section or in two sections that select the same layer.
- `start_step`, `end_step` and `start_end_list` of a feature that changes precision are this project's own keys:
  Transformer Engine's features of these names act in every step.
- Your own features, registered by folder or class, may have any keys: these are not checked.
"""


def as_markdown() -> str:
    """docs/features.md."""
    return "\n".join([_INTRODUCTION, *(_section(FeatureEntry.of_schema(model)) for model in FEATURES.values())])


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown())
