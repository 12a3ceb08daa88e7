"""LogGemmError: the error of GEMMs: of their kernel, and of the format of their operands."""

from __future__ import annotations

from te_precision_callbacks.base.vocabulary import OPERANDS
from te_precision_callbacks.config import schemas
from te_precision_callbacks.config.levels import FeatureSchema
from te_precision_callbacks.features.base import ScheduledFeature, keep_operand
from te_precision_callbacks.features.registration import own_feature
from te_precision_callbacks.layers.gemm_events import Watched


@own_feature()
class LogGemmError(ScheduledFeature):
    """Keeps the operands of GEMMs in high precision; a session measures the GEMMs that read them."""

    def options_for(
        self, options: FeatureSchema, tensor: str | None, gemm: str | None
    ) -> list[schemas.LogGemmErrorItem]:
        if not isinstance(options, schemas.LogGemmError):
            return []
        items = (target.options for target in options.targets if target.gemm in (gemm, None) or gemm is None)
        return [item for item in items if tensor is None or tensor in OPERANDS[item.gemm]]

    def observe(self, options: schemas.LogGemmErrorItem, watched: Watched) -> None:
        keep_operand(self.observation.engine, watched, "LogGemmError measures nothing")
