"""DisableQuantizationGEMM and DisableFP8GEMM: chosen GEMMs run in high precision."""

from __future__ import annotations

from te_precision_callbacks.features.base import HighPrecisionFeature
from te_precision_callbacks.features.registration import own_feature


@own_feature("DisableFP8GEMM", "DisableFp8Gemm")
class DisableQuantizationGEMM(HighPrecisionFeature):
    """Runs chosen GEMMs in high precision, under any recipe. DisableFP8GEMM is its older name."""
