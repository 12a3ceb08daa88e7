"""Base classes of this folder's features: their options for a tensor and a GEMM, and their statistics.

No feature is registered here; nvidia-dlfw-inspect also executes this file, without effect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from nvdlfw_inspect.registry import api_method

from te_precision_callbacks.config.checking import read_options
from te_precision_callbacks.config.keys import LoggedTensor
from te_precision_callbacks.config.levels import FeatureSchema, Nested, options_for
from te_precision_callbacks.config.schemas import schema_of
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.schedule import EVERY_STEP, Schedule
from te_precision_callbacks.te.tensors import gemm_operand

if TYPE_CHECKING:
    from te_precision_callbacks.engine.engine import StatisticsEngine
    from te_precision_callbacks.observation import Observation

logger = logging.getLogger("te_precision_callbacks.features")

Options = dict[str, Any]

Decision = tuple[bool, int | None]
"""Whether to call a feature, and the next iteration in which to query it again; None: never."""


def matching_options(config: Mapping[str, Any], *, tensor: str | None, gemm: str | None) -> list[Options]:
    """The options of a custom feature for a tensor and a GEMM, one for each entry that names them.

    Without ``tensors`` and ``tensors_struct`` the options apply to every tensor; the same holds for GEMMs.
    """
    whole = Nested.of(config)
    left_out = {"enabled"}
    gemms: Iterable[tuple[str | None, Nested]] = [(None, whole)]
    if gemm is not None:
        left_out |= {"gemms", "gemms_struct"}
        gemms = whole.choose("gemm")
    if tensor is not None:
        left_out |= {"tensors", "tensors_struct"}
    matching = []
    for gemm_name, outer in gemms:
        for tensor_name, nested in outer.choose("tensor") if tensor is not None else [(None, outer)]:
            if gemm_name in (None, gemm) and tensor_name in (None, tensor):
                named = (("gemm", gemm_name), ("tensor", tensor_name))
                options = nested.merge() | {what: name for what, name in named if name is not None}
                matching.append({key: value for key, value in options.items() if key not in left_out})
    return matching


class Feature:
    """Base class of this folder's features. The namespace API sets ``observation`` when nvidia-dlfw-inspect starts."""

    observation: Observation

    def read(self, name: str, options: Mapping[str, Any]) -> FeatureSchema:
        """Read options that no session has read.

        Raises:
            ConfigError: the options are invalid in the schema of the feature, or of its base class.
        """
        schemas = map(schema_of, (name, *(base.__name__ for base in type(self).__mro__)))
        schema = next((schema for schema in schemas if schema is not None), FeatureSchema)
        return read_options(schema, name, options, lambda *keys: "The config")

    def options_for(self, options: FeatureSchema, tensor: str | None, gemm: str | None) -> Sequence[object]:
        """The options for a call, one per item that names its tensor; empty if the feature does not act."""
        return options_for(options.targets, tensor, gemm)


class HighPrecisionFeature(Feature):
    @api_method
    def fp8_gemm_enabled(self, config: Any, layer_name: str, gemm: str, iteration: int) -> Decision:
        acts, upcoming = _steps(config).at(iteration)
        return not acts, upcoming


class ModifyingFeature(Feature):
    @api_method
    def modify_tensor_enabled(
        self, config: Any, layer_name: str, tensor_name: str, gemm: str, iteration: int
    ) -> Decision:
        return _steps(config).at(iteration)


def _steps(options: Any) -> Schedule:
    schedule: Schedule = getattr(options, "schedule", EVERY_STEP)
    return schedule


class ScheduledFeature(Feature):
    """Base class of features that observe tensors on a schedule.

    If a layer runs its fused path, a session reads the schedule of the options, and calls :meth:`observe`. On the debug
    path, and without a session, Transformer Engine's calls lead to the same method.
    """

    def observe(self, options: Any, watched: Watched) -> None:
        """Queue the requested statistics of a tensor, which must not change before the engine measures it."""
        raise NotImplementedError

    @api_method
    def inspect_tensor_enabled(self, config: Any, layer_name: str, tensor_name: str, iteration: int) -> Decision:
        return _steps(config).at(iteration)

    @api_method
    def inspect_tensor(
        self,
        config: Any,
        layer_name: str,
        tensor_name: str,
        iteration: int,
        tensor: torch.Tensor | None,
        rowwise_quantized_tensor: Any = None,
        columnwise_quantized_tensor: Any = None,
        quantizer: Any = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        tp_size: int = 1,
    ) -> None:
        operands = rowwise_quantized_tensor, columnwise_quantized_tensor
        group = tp_group if tp_size > 1 else None
        self.observe(config, Watched(layer_name, tensor_name, iteration, tensor, *operands, quantizer, group))


def keep_operand(engine: StatisticsEngine, watched: Watched, without: str) -> None:
    """Keep an operand in high precision until its GEMM has run; ``without``: the effect of a missing session."""
    if engine.keep_operand is None:
        if engine.notices.first(without):
            logger.warning(
                "%s: it needs a session of te-precision-callbacks, which sees the GEMMs. Start one with a callback or"
                " InspectSession.",
                without,
            )
    elif watched.values is not None:
        engine.keep_operand(watched.layer, watched.tensor, watched.values)


class Watcher(NamedTuple):
    """A feature that observes a tensor, and its steps."""

    name: str
    feature: ScheduledFeature
    options: Any
    schedule: Schedule


class StatisticsFeature(ScheduledFeature):
    def observe(self, options: LoggedTensor[Any], watched: Watched) -> None:
        """Request statistics of a tensor from the engine, which measures it once for all features."""
        rowwise = gemm_operand(watched.rowwise, columnwise=False)
        columnwise = gemm_operand(watched.columnwise, columnwise=True)
        quantizer = getattr(watched.quantizer, "rowwise_quantizer", watched.quantizer)  # of a hybrid quantizer
        if not (rowwise is watched.rowwise and columnwise is watched.columnwise and quantizer is watched.quantizer):
            watched = watched._replace(rowwise=rowwise, columnwise=columnwise, quantizer=quantizer)
        requests = options.requests_for(is_quantized=watched.quantized() is not None)
        if requests:
            self.observation.engine.note(watched, requests)
