"""Schemas of the features in the namespace ``transformer_engine``: a pydantic model per feature.

    FEATURES["DisableFP8GEMM"].model_validate({"enabled": True, "gemms": ["fprop"]})
    schema_of("DisableFp8Gemm")                                    # case does not matter

Configs are validated with these models (:mod:`te_precision_callbacks.config.checking`). docs/features.md and
``te-precision features`` are generated (:mod:`te_precision_callbacks.cli.manual`) from the fields' types, limits,
defaults and descriptions, and from the models' docstrings and examples. Upstream's keys: Transformer Engine 2.20.2,
``debug/features/*.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import cast

from te_precision_callbacks.base.vocabulary import RESULT, GemmName, OperandName, TensorName
from te_precision_callbacks.config.effects import BASE, NAMESPACE, Effect
from te_precision_callbacks.config.keys import (
    Dumped,
    Fp8Statistics,
    GemmSampling,
    LoggedTensor,
    Margin,
    Nvfp4Statistics,
    Quantization,
    Scheduled,
    Spans,
    TensorStatistics,
)
from te_precision_callbacks.config.levels import (
    TAKES_PART,
    FeatureSchema,
    GemmChoice,
    Level,
    ModifyingFeatureSchema,
    ObservingFeatureSchema,
    OneGemm,
    OneTensor,
    Target,
    TensorChoice,
)
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request


class LogTensorStatsItem(TensorStatistics, LoggedTensor[TensorName]):
    """One tensor of LogTensorStats."""


class LogTensorStats(Scheduled, TensorStatistics, ObservingFeatureSchema[TensorName, LogTensorStatsItem]):
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
    def requests_for(self, *, is_quantized: bool) -> tuple[Request, ...]:
        """With ``only_quantized`` and no quantized tensor, return only statistics that name a recipe."""
        if is_quantized or not self.only_quantized:
            return self.requests
        return tuple(request for request in self.requests if request.recipe != OWN_RECIPE)


class LogFp8TensorStats(Scheduled, Fp8Statistics, ObservingFeatureSchema[OperandName, LogFp8TensorStatsItem]):
    """Logs the effect of quantization on the operands of the GEMMs: underflows, overflows, errors, scales.

    It can also simulate recipes that the layer does not run.
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


class LogNvfp4TensorStats(Scheduled, Nvfp4Statistics, ObservingFeatureSchema[OperandName, LogNvfp4TensorStatsItem]):
    """Logs the effect of quantization to NVFP4 on the operands of the GEMMs."""

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


class DisableQuantizationGemmItem(Spans, OneGemm):
    """One GEMM of DisableQuantizationGEMM."""


class DisableQuantizationGEMM(Spans, GemmChoice[DisableQuantizationGemmItem], FeatureSchema):
    """Runs the listed GEMMs in high precision under every recipe.

    It excludes PerTensorScaling on these GEMMs.

    One exception, as in Transformer Engine's own feature: under autocast, the float32 bias of a GroupedLinear, and of
    fc2 in a LayerNormMLP with fc1 in FP8, is still rounded to bfloat16.
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

    def effect(self) -> Effect:
        return Effect(high_precision=tuple(str(target.gemm) for target in self.targets), schedules=self.schedules())


class DisableFP8GEMM(DisableQuantizationGEMM):
    """The older name of DisableQuantizationGEMM."""

    example = """
forward_in_high_precision:
  enabled: True
  layers:
    layer_types: [fc1, fc2]
  transformer_engine:
    DisableFP8GEMM:
      enabled: True
      gemms: fprop
      start_step: 85_000  # the last 15 % of 100,000 steps
"""


class DisableQuantizationLayer(Spans, FeatureSchema):
    """Runs all GEMMs of the layer in high precision under every recipe.

    It excludes PerTensorScaling on the layer. The exception for the bias is the same as for DisableQuantizationGEMM.
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
        return Effect(high_precision=tuple(TAKES_PART), schedules=self.schedules())


class DisableFP8Layer(DisableQuantizationLayer):
    """The older name of DisableQuantizationLayer."""

    example = """
fc2_in_high_precision:
  enabled: True
  layers:
    layer_types: [fc2]
  transformer_engine:
    DisableFP8Layer:
      enabled: True
"""


class PerTensorScalingTensorItem(Spans, Margin, OneTensor[OperandName]):
    """One tensor of PerTensorScaling."""


class PerTensorScalingGemmItem(Spans, Margin, TensorChoice[OperandName, PerTensorScalingTensorItem], OneGemm):
    """One GEMM of PerTensorScaling."""


class PerTensorScaling(
    Spans, Margin, ModifyingFeatureSchema[OperandName, PerTensorScalingTensorItem, PerTensorScalingGemmItem]
):
    """Scales tensors by the amax of the current step instead of earlier amaxes, in layers with delayed scaling."""

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
        return Effect(self.modifies(), quantizes=True, needs_recipe="fp8_delayed_scaling", schedules=self.schedules())


class FakeQuantTensorItem(Spans, Quantization, OneTensor[TensorName]):
    """One tensor of FakeQuant."""


class FakeQuantGemmItem(Spans, Quantization, TensorChoice[TensorName, FakeQuantTensorItem], OneGemm):
    """One GEMM of FakeQuant."""


class FakeQuant(Spans, Quantization, ModifyingFeatureSchema[TensorName, FakeQuantTensorItem, FakeQuantGemmItem]):
    """Rounds tensors to a format and back, and runs the GEMM in high precision.

    This isolates the error from each tensor, and can try formats that the GPU does not have.

    MXFP8 results equal the recipe's bit for bit. FP8 results equal Transformer Engine's FakeQuant bit for bit, but can
    differ from current scaling: the scale is computed with the reciprocal of amax, so it is one unit in the last place
    off for a quarter of all amaxes, and single elements may round to the neighboring value.
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
        gemms = dict.fromkeys(str(target.gemm) for target in self.targets)
        return Effect(self.modifies(), high_precision=tuple(gemms), schedules=self.schedules())


class LogGemmErrorItem(GemmSampling, OneGemm):
    """One GEMM of LogGemmError."""


class LogGemmError(GemmSampling, GemmChoice[LogGemmErrorItem], FeatureSchema):
    """Logs the error of GEMMs in low precision: of their kernel, and of the format of their operands.

    Products are not computed a second time: the operands and the result are multiplied with a few random vectors.
    docs/gemm-error.md explains the statistics and their limits. The feature needs a session.
    """

    example = """
gemm_error:
  enabled: True
  layers:
    layer_types: [all]
  transformer_engine:
    LogGemmError:
      enabled: True
      gemms: [fprop, dgrad, wgrad]
      freq: 500
"""


class DumpTensorsItem(Scheduled, Dumped, OneTensor[TensorName]):
    """One tensor of DumpTensors."""


class DumpTensorsGemmItem(Scheduled, OneGemm):
    """One GEMM of DumpTensors."""


class DumpTensors(
    Scheduled, Dumped, GemmChoice[DumpTensorsGemmItem], ObservingFeatureSchema[TensorName, DumpTensorsItem]
):
    """Writes tensors or whole GEMMs to files, one per rank, step, layer, tensor or GEMM, and micro-batch.

    `gemms` writes whole GEMMs for `dumps.gemm_errors`: the codes and scales of both operands, the operands before
    quantization if available, and the result. `high_precision_tensor` and `quantized_tensor` apply to `tensors`.

    Files are written in the background to `tensor_dumps/rank_R/iter_N/` in the log folder. Dumping stops, with one
    message, before less than 1 GiB is free on the disk.
    """

    example = """
dump_some_steps:
  enabled: True
  layers:
    exact_layer_names: [model.layers.0.layernorm_mlp.fc2]
  transformer_engine:
    DumpTensors:
      enabled: True
      high_precision_tensor: True
      quantized_tensor: True
      tensors_struct:
        - tensor: activation
          freq: 100
        - tensor: gradient
          start_end_list: [[120, 125]]
"""

    @cached_property
    def targets(self) -> tuple[Target[DumpTensorsItem], ...]:
        if (self.gemms or self.gemms_struct) and not (self.tensors or self.tensors_struct):
            return ()
        return tuple(self.target(None, tensor, nested) for tensor, nested in self.choices("tensor", self.nested))

    @cached_property
    def gemm_targets(self) -> tuple[Target[DumpTensorsGemmItem], ...]:
        if not self.gemms and not self.gemms_struct:
            return ()
        targets = []
        for gemm, nested in self.choices("gemm", self.nested):
            targets.append(replace(self.target(gemm, None, nested), tensor=RESULT[cast(GemmName, gemm)]))
        return tuple(targets)

    @property
    def every_target(self) -> tuple[Target[Level], ...]:
        return (*self.targets, *self.gemm_targets)


_SCHEMAS: tuple[type[FeatureSchema], ...] = (
    LogTensorStats,
    LogFp8TensorStats,
    LogNvfp4TensorStats,
    DisableQuantizationGEMM,
    DisableQuantizationLayer,
    DisableFP8GEMM,
    DisableFP8Layer,
    PerTensorScaling,
    FakeQuant,
    LogGemmError,
    DumpTensors,
)

FEATURES = {schema.__name__: schema for schema in _SCHEMAS}


def registered_name(name: str, registered: Iterable[str]) -> str | None:
    return next((candidate for candidate in registered if candidate.casefold() == name.casefold()), None)


def schema_of(feature: str) -> type[FeatureSchema] | None:
    return FEATURES.get(registered_name(feature, FEATURES) or "")


UPSTREAM_FEATURE = "LogTensorStats"
"""nvidia-dlfw-inspect's own feature (0.2.2, ``debug_features/``). Layers of Transformer Engine do not call it."""


def known_features(user_features: Iterable[str] = ()) -> Mapping[str, tuple[str, ...]]:
    """Map namespaces to the features that a session will find; custom features are in ``transformer_engine``."""
    registered = {NAMESPACE: dict.fromkeys((*FEATURES, *user_features)), BASE: {UPSTREAM_FEATURE: None}}
    registry = sys.modules.get("nvdlfw_inspect.registry")  # includes features that the script has registered
    if registry is not None:
        for namespace, data in registry.Registry.data.items():
            names = (*data.features, *(waiting.__name__ for waiting in data.deferred_features))
            registered.setdefault(namespace, {}).update(dict.fromkeys(names))
    return {namespace: tuple(features) for namespace, features in registered.items()}


def is_upstream_test(name: str) -> bool:
    return name.startswith("Test")
