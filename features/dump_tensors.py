"""DumpTensors: writes tensors to files in the background, within a budget, and only where a condition holds."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from te_precision_callbacks.base.ranks import is_distributed
from te_precision_callbacks.base.vocabulary import OPERANDS
from te_precision_callbacks.config import schemas
from te_precision_callbacks.config.dumping import Collected
from te_precision_callbacks.config.levels import FeatureSchema, options_for
from te_precision_callbacks.config.problems import ConfigError
from te_precision_callbacks.dumps.recording import DumpOptions
from te_precision_callbacks.features.base import ScheduledFeature, keep_operand
from te_precision_callbacks.features.registration import namespace, own_feature
from te_precision_callbacks.layers.gemm_events import Watched

logger = logging.getLogger("te_precision_callbacks.features")


@own_feature()
class DumpTensors(ScheduledFeature):
    """Writes activations, weights, outputs and all gradients to files: in high precision, quantized, and decoded.

    It accepts the keys of Transformer Engine's feature (2.20.2, ``debug/features/dump_tensors.py``) and of its pull
    request 2645 (``dump_quantized_internals``), and more (docs/features.md). Unlike Transformer Engine's, the files are
    in the safetensors format.
    """

    def read(self, name: str, options: Mapping[str, Any]) -> FeatureSchema | None:
        """Read the options; invalid options are reported and disable the feature, and training continues."""
        try:
            schema: FeatureSchema | None = super().read(name, options)
            return schema
        except ConfigError as error:
            logger.error("%s Nothing is dumped with these options. Training continues.", error)
            return None

    def options_for(self, options: FeatureSchema, tensor: str | None, gemm: str | None) -> list[DumpOptions]:
        if not isinstance(options, schemas.DumpTensors):
            return []
        chosen = [DumpOptions.of(item, options) for item in options_for(options.targets, tensor, gemm)]
        for target in options.gemm_targets:
            is_operand = tensor in (None, *OPERANDS[target.options.gemm])
            if is_operand and gemm in (None, target.gemm):
                chosen.append(DumpOptions.of_gemm(target.options, options))
        return chosen

    def due(self, options: DumpOptions, iteration: int) -> tuple[bool, int | None]:
        """Return whether a dump is due, and the next due iteration; never due after the budget is exhausted.

        With several ranks only the schedule decides: observed and unobserved layers run different collectives, so an
        exhausted budget on one rank must not change the result there.
        """
        if self.observation.recorder.stopped(options.limits) and not is_distributed(None):
            return False, None
        due: tuple[bool, int | None] = super().due(options, iteration)
        return due

    def observe(self, options: DumpOptions, watched: Watched) -> None:
        if options.gemm:
            keep_operand(self.observation.engine, watched, "DumpTensors writes no GEMM")
            return
        collects = functools.partial(_collected, watched.layer, watched.tensor)
        self.observation.recorder.note(watched, options, collects)


def _collected(layer: str, tensor: str) -> dict[str, Collected]:
    statistics: dict[str, Collected] = namespace().api.collected(layer, tensor)
    return statistics
