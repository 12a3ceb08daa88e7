"""DisableQuantizationLayer and DisableQuantizationGEMM: all or chosen GEMMs of a layer run in high precision."""

from __future__ import annotations

from te_precision_callbacks.features.base import HighPrecisionFeature
from te_precision_callbacks.features.registration import own_feature


@own_feature("DisableFP8Layer", "DisableFp8Layer")
class DisableQuantizationLayer(HighPrecisionFeature):
    """Runs all GEMMs of a layer in high precision, under any recipe. DisableFP8Layer is its older name."""


@own_feature("DisableFP8GEMM", "DisableFp8Gemm")
class DisableQuantizationGEMM(HighPrecisionFeature):
    """Runs chosen GEMMs in high precision, under any recipe. DisableFP8GEMM is its older name."""
