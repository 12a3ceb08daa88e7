"""DumpTensors: writes tensors and whole GEMMs to files in the background."""

from __future__ import annotations

from te_precision_callbacks.base.vocabulary import OPERANDS
from te_precision_callbacks.config import schemas
from te_precision_callbacks.config.levels import FeatureSchema, options_for
from te_precision_callbacks.config.schemas import DumpTensorsGemmItem, DumpTensorsItem
from te_precision_callbacks.features.base import ScheduledFeature, keep_operand
from te_precision_callbacks.features.registration import own_feature
from te_precision_callbacks.layers.gemm_events import Watched


@own_feature()
class DumpTensors(ScheduledFeature):
    """Writes activations, weights, outputs and all gradients to files: in high precision, quantized, and decoded.

    It accepts the keys of Transformer Engine's feature (2.20.2, ``debug/features/dump_tensors.py``) and of its pull
    request 2645 (``dump_quantized_internals``), and more (docs/features.md). Unlike Transformer Engine's, the files are
    in the safetensors format.
    """

    def options_for(
        self, options: FeatureSchema, tensor: str | None, gemm: str | None
    ) -> list[DumpTensorsItem | DumpTensorsGemmItem]:
        if not isinstance(options, schemas.DumpTensors):
            return []
        chosen: list[DumpTensorsItem | DumpTensorsGemmItem] = [*options_for(options.targets, tensor, gemm)]
        for target in options.gemm_targets:
            is_operand = tensor in (None, *OPERANDS[target.options.gemm])
            if is_operand and gemm in (None, target.gemm):
                chosen.append(target.options)
        return chosen

    def observe(self, options: DumpTensorsItem | DumpTensorsGemmItem, watched: Watched) -> None:
        if isinstance(options, DumpTensorsGemmItem):
            keep_operand(self.observation.engine, watched, "DumpTensors writes no GEMM")
        else:
            self.observation.recorder.note_tensor(watched, options)
