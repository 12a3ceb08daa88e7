"""The schemas of the features in the namespace ``transformer_engine``: one pydantic model per feature.

    FEATURES["DisableFP8GEMM"].model_validate({"enabled": True, "gemms": ["fprop"]})
    schema_of("DisableFp8Gemm")                                    # case does not matter
    keys_of(FEATURES["FakeQuant"])                                 # name, levels, values, default, meaning
    python -m te_precision_callbacks.config.schemas > docs/features.md

A config is checked with these models (:mod:`te_precision_callbacks.config.checking`), and docs/features.md is made from
them: from the fields' types, limits, defaults and descriptions, and from the models' docstrings and examples.
Upstream's keys: Transformer Engine 2.20.2, ``debug/features/*.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic.fields import FieldInfo

from te_precision_callbacks.config.effects import Effect
from te_precision_callbacks.config.fields import words
from te_precision_callbacks.config.keys import (
    Dumped,
    DumpLimits,
    Fp8Statistics,
    LoggedTensor,
    Margin,
    Nvfp4Statistics,
    Quantization,
    Scheduled,
    TensorStatistics,
)
from te_precision_callbacks.config.levels import (
    TAKES_PART,
    FeatureSchema,
    GemmChoice,
    Level,
    ModifyingFeature,
    ObservingFeature,
    OneGemm,
    OneTensor,
    Target,
    TensorChoice,
    levels,
)
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request
from te_precision_callbacks.vocabulary import OperandName, TensorName


class LogTensorStatsItem(TensorStatistics, LoggedTensor[TensorName]):
    """One tensor of LogTensorStats."""


class LogTensorStats(Scheduled, TensorStatistics, ObservingFeature[TensorName, LogTensorStatsItem]):
    """Logs statistics of tensors as they are before quantization, over all micro-batches and ranks of a step."""

    example = """
tensor_statistics:
  enabled: True
  layers:
    layer_types: [layernorm_mlp]
  transformer_engine:
    LogTensorStats:
      enabled: True
      stats: [min, max, std]
      freq: 10
      tensors_struct:
        - tensor: activation
        - tensor: gradient
          stats: [cur_amax, dynamic_range, max_blockwise_dynamic_range: {block_size: 32, dims: 2}]
          start_end_list: [[0, 200], [1000, -1]]
"""


class LogFp8TensorStatsItem(Fp8Statistics, LoggedTensor[OperandName]):
    """One tensor of LogFp8TensorStats."""

    def requests_for(self, *, is_quantized: bool) -> tuple[Request, ...]:
        """The statistics; with ``only_quantized`` and no quantized tensor, only those that need none."""
        if is_quantized or not self.only_quantized:
            return self.requests
        return tuple(request for request in self.requests if request.recipe != OWN_RECIPE)


class LogFp8TensorStats(Scheduled, Fp8Statistics, ObservingFeature[OperandName, LogFp8TensorStatsItem]):
    """Logs what quantization does to the operands of the GEMMs: underflows, overflows, the error, the scales.

    It can also show what a recipe other than the layer's own would do to the same tensors.
    """

    example = """
quantization_statistics:
  enabled: True
  layers:
    layer_name_regex_pattern: .*self_attention.*
  transformer_engine:
    LogFp8TensorStats:
      enabled: True
      tensors: [activation, gradient]
      stats: [underflows%, scale_inv_max, mxfp8_mse, mxfp8_mse_columnwise]
      freq: 100
"""


class LogNvfp4TensorStatsItem(Nvfp4Statistics, LoggedTensor[OperandName]):
    """One tensor of LogNvfp4TensorStats."""


class LogNvfp4TensorStats(Scheduled, Nvfp4Statistics, ObservingFeature[OperandName, LogNvfp4TensorStatsItem]):
    """Logs what quantization to NVFP4 does to the operands of the GEMMs."""

    example = """
nvfp4_statistics:
  enabled: True
  layers:
    layer_types: [all]
  transformer_engine:
    LogNvfp4TensorStats:
      enabled: True
      tensors: [activation, weight]
      stats: [underflows%, mse]
      freq: 50
      end_step: 1000
"""


class DisableQuantizationGemmItem(OneGemm):
    """One GEMM of DisableQuantizationGEMM."""


class DisableQuantizationGEMM(GemmChoice[DisableQuantizationGemmItem], FeatureSchema):
    """Runs the listed GEMMs in high precision, whatever the recipe says. It acts in every step.

    It excludes a feature that quantizes tensors of such a GEMM (PerTensorScaling).

    The bias is not always spared: in a float32 layer under autocast it stays rounded to bfloat16, as for an FP8 GEMM,
    in a GroupedLinear, and in fc2 of a LayerNormMLP whose fc1 runs in FP8. This is Transformer Engine's behaviour.
    """

    example = """
backward_in_high_precision:
  enabled: True
  layers:
    layer_types: [fc1]
  transformer_engine:
    DisableQuantizationGEMM:
      enabled: True
      gemms: [dgrad, wgrad]
"""

    @property
    def targets(self) -> tuple[Target[Level], ...]:
        """The listed GEMMs."""
        return tuple(Target(None, gemm, self, nested) for gemm, nested in self.chosen_gemms.items())

    def effect(self) -> Effect:
        """The listed GEMMs run in high precision."""
        return Effect(high_precision=tuple(self.chosen_gemms))


class DisableFP8GEMM(DisableQuantizationGEMM):
    """The older name of DisableQuantizationGEMM; it does the same, for every recipe."""

    example = """
forward_in_high_precision:
  enabled: True
  layers:
    layer_types: [fc1, fc2]
  transformer_engine:
    DisableFP8GEMM:
      enabled: True
      gemms: fprop
"""


class DisableQuantizationLayer(FeatureSchema):
    """Runs all GEMMs of the layer in high precision, whatever the recipe says. It acts in every step.

    It excludes a feature that quantizes tensors of the layer (PerTensorScaling).

    The bias is not always spared: in a float32 layer under autocast it stays rounded to bfloat16, as for an FP8 GEMM,
    in a GroupedLinear, and in fc2 of a LayerNormMLP whose fc1 runs in FP8. This is Transformer Engine's behaviour.
    """

    example = """
last_layer_in_high_precision:
  enabled: True
  layers:
    layer_numbers: [31]
  transformer_engine:
    DisableQuantizationLayer:
      enabled: True
"""

    def effect(self) -> Effect:
        """All GEMMs run in high precision."""
        return Effect(high_precision=tuple(TAKES_PART))


class DisableFP8Layer(DisableQuantizationLayer):
    """The older name of DisableQuantizationLayer; it does the same, for every recipe."""

    example = """
fc2_in_high_precision:
  enabled: True
  layers:
    layer_types: [fc2]
  transformer_engine:
    DisableFP8Layer:
      enabled: True
"""


class PerTensorScalingTensorItem(Margin, OneTensor[OperandName]):
    """One tensor of PerTensorScaling."""


class PerTensorScalingGemmItem(Margin, TensorChoice[OperandName, PerTensorScalingTensorItem], OneGemm):
    """One GEMM of PerTensorScaling."""


class PerTensorScaling(Margin, ModifyingFeature[OperandName, PerTensorScalingTensorItem, PerTensorScalingGemmItem]):
    """Scales tensors by their amax of this step, in layers whose recipe is delayed scaling, which takes earlier amaxes.

    It needs that recipe, and acts in every step. Only one feature can change a tensor of a GEMM, and none beside it can
    run the GEMM in high precision.
    """

    example = """
scale_by_current_amax:
  enabled: True
  layers:
    layer_types: [layernorm_qkv]
  transformer_engine:
    PerTensorScaling:
      enabled: True
      gemms: [fprop, dgrad]
      tensors: [activation, weight, gradient]
      margin: 1
"""

    def effect(self) -> Effect:
        """Tensors are quantized."""
        return Effect(self.modifies(), quantizes=True)


class FakeQuantTensorItem(Quantization, OneTensor[TensorName]):
    """One tensor of FakeQuant."""


class FakeQuantGemmItem(Quantization, TensorChoice[TensorName, FakeQuantTensorItem], OneGemm):
    """One GEMM of FakeQuant."""


class FakeQuant(Quantization, ModifyingFeature[TensorName, FakeQuantTensorItem, FakeQuantGemmItem]):
    """Rounds tensors to a format and back, and runs the GEMM in high precision.

    This isolates each tensor's part in the loss of precision, and allows trying formats that the GPU does not have. It
    acts in every step. Only one feature can change a tensor of a GEMM, and no other feature can quantize another tensor
    of that GEMM.

    FP8 results equal those of Transformer Engine's FakeQuant, bit for bit. Its scale is a product with the reciprocal
    of the amax, where current scaling divides: for a quarter of all amaxes the scale is one unit in the last place off,
    and single elements may round to the neighbouring number. MXFP8 results equal those of the recipe, bit for bit.
    """

    example = """
what_if_gradients_were_e5m2:
  enabled: True
  layers:
    layer_types: [fc1]
  transformer_engine:
    FakeQuant:
      enabled: True
      quant_format: MXFP8E4M3
      gemms_struct:
        - gemm: fprop
          tensors: [activation, weight]
        - gemm: dgrad
          tensors_struct:
            - tensor: gradient
              quant_format: FP8E5M2
              margin: 1
            - tensor: weight
"""

    def effect(self) -> Effect:
        """Tensors are replaced, and the listed GEMMs run in high precision."""
        return Effect(self.modifies(), high_precision=tuple(self.chosen_gemms))


class DumpTensorsItem(Scheduled, Dumped, OneTensor[TensorName]):
    """One tensor of DumpTensors."""


class DumpTensors(DumpLimits, Scheduled, Dumped, ObservingFeature[TensorName, DumpTensorsItem]):
    """Writes tensors to files, a file for each rank, step, layer, tensor and micro-batch.

    Files are written in the background, completely or not at all, to `tensor_dumps/rank_R/iter_N/` in the log folder.
    With `when` only tensors of steps in which a condition holds are written.
    """

    example = """
dump_what_is_not_finite:
  enabled: True
  layers:
    exact_layer_names: [model.layers.0.layernorm_mlp.fc2]
  transformer_engine:
    DumpTensors:
      enabled: True
      high_precision_tensor: True
      quantized_tensor: True
      max_bytes: 2GiB
      tensors_struct:
        - tensor: activation
          when: nonfinite  # or [nonfinite, underflows% > 5]; the latter beside LogFp8TensorStats with this statistic
        - tensor: gradient
          start_end_list: [[120, 125]]
"""


FEATURES: Mapping[str, type[FeatureSchema]] = {
    model.__name__: model
    for model in (
        LogTensorStats,
        LogFp8TensorStats,
        LogNvfp4TensorStats,
        DisableQuantizationGEMM,
        DisableQuantizationLayer,
        DisableFP8GEMM,
        DisableFP8Layer,
        PerTensorScaling,
        FakeQuant,
        DumpTensors,
    )
}


def schema_of(feature: str) -> type[FeatureSchema] | None:
    """The schema of a feature, whatever the case of its name; None for an unknown feature."""
    found = (model for name, model in FEATURES.items() if name.casefold() == feature.casefold())
    return next(found, None)


@dataclass(frozen=True)
class Key:
    """A key of a feature.

    Attributes:
        name: as in a config.
        where: the levels at which the key may be given, outermost first.
        values: the values that the key takes, in words.
        default: the value without the key; empty if there is none.
        meaning: what the key does.
    """

    name: str
    where: tuple[tuple[str, ...], ...]
    values: str
    default: str
    meaning: str


def keys_of(model: type[FeatureSchema]) -> tuple[Key, ...]:
    """The keys of a feature, those of its items included."""
    found: dict[str, Key] = {}
    for path, level in levels(model).items():
        for name, field in level.model_fields.items():
            known = found.get(name) or Key(name, (), words(field), _default(field), field.description or "")
            found[name] = replace(known, where=(*known.where, path))
    return tuple(found.values())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    default = field.get_default(call_default_factory=True)
    return "" if default in (None, []) else str(default)


def purpose(model: type[FeatureSchema]) -> str:
    """The purpose of a feature, in one paragraph."""
    return " ".join((inspect.getdoc(model) or "").split())


def _where(key: Key) -> str:
    places = dict.fromkeys(f"items of `{path[-1]}`" if path else "feature" for path in key.where)
    return ", ".join(places)


def _section(name: str, model: type[FeatureSchema]) -> str:
    rows = "\n".join(
        f"| `{key.name}` | {_where(key)} | {key.values} | {key.default} | {key.meaning} |" for key in keys_of(model)
    )
    head = "| key | where | takes | default | meaning |\n|---|---|---|---|---|"
    return f"## {name}\n\n{purpose(model)}\n\n{head}\n{rows}\n\n```yaml\n{model.example.strip()}\n```\n"


_INTRODUCTION = """\
# Features

The keys of a config section, and of the features below its `transformer_engine:`. This page is generated from the
schemas that check configs: `python -m te_precision_callbacks.config.schemas > docs/features.md`.

## Sections and their layers

A config is a mapping of sections. Each section has `enabled`, `layers`, and features below `transformer_engine:`. In a
section that is not enabled, nothing else is read, and `layers` may be missing. A layer may be in several sections, if
each of them brings different features. The keys of `layers` select:

- `exact_layer_names`: layers with one of these names.
- `layer_name_regex_pattern`: layers whose name contains a match of this regular expression.
- `layer_numbers`: layers with one of these numbers: `[0, '4-7']`, both ends included, or `all`. The number of a layer
  is the first part of its name that is a number: 12 in `model.layers.12.layernorm_mlp.fc1`.
- `layer_types`: layers with one of these words in their name, or of one of these classes (`LayerNormLinear`,
  `layernorm_linear`); `all`: every layer.

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
are left out: `layers.3.q_proj`, and beside it `layers.3.q_proj.lora_A.default`. These names also select the layer: the
name that the script gave (`te.Linear(..., name="head")`, or nvidia-dlfw-inspect's `infer_and_assign_layer_names` before
`attach()`), the path with PEFT's parts (`base_model.model.layers.3.q_proj.base_layer`), and the path without a
LightningModule's own attribute. The statistics log and `summary` use a name that the script gave to one layer only.
Layers with the same name are distinguished by their paths, and a message says so. If ranks have different layers at the
same path, the names have Megatron's numbers ([statistics.md](statistics.md#what-a-value-is-of)).

If modules have an attribute `layer_number`, nvidia-dlfw-inspect calls the same layer `model.layers.4.q_proj`. A config
that was written for those names may select other layers here; one warning then names both sets. To use exactly
nvidia-dlfw-inspect's names and numbers, pass `layer_names="upstream"` to any front door. Where only a config can be
passed, as with a flag, write the key beside the sections:

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

- The case of a feature's name does not matter: `DisableFp8Gemm` is `DisableFP8GEMM`.
- A key that is allowed at the feature and in its items may be given at both; the item's value takes precedence. The
  item of a tensor takes precedence over that of a GEMM.
- Tensors: `fprop` multiplies `activation` and `weight` to `output`; `dgrad` multiplies `gradient` and `weight` to
  `dgrad`; `wgrad` multiplies `activation` and `gradient` to `wgrad`.
- If a feature has schedules, a tensor may be in several items of `tensors_struct`, and all of them act. If a feature
  has GEMMs, a GEMM may be in one item only, and a tensor in one item of that GEMM only.
- A GEMM multiplies two quantized tensors, or two in high precision. A feature that quantizes a tensor of a GEMM
  (PerTensorScaling) and a feature that runs the GEMM in high precision (the Disable features, FakeQuant) therefore
  exclude each other, in one section or in two sections that select the same layer.
- Your own features, registered by folder or class, may have any keys: these are not checked.
"""


def as_markdown() -> str:
    """docs/features.md."""
    return "\n".join([_INTRODUCTION, *(_section(name, model) for name, model in FEATURES.items())])


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown())
