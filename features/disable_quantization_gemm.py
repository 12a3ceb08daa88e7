"""DisableQuantizationGEMM and DisableFP8GEMM: chosen GEMMs run in high precision."""

from __future__ import annotations

from nvdlfw_inspect.registry import api_method

from te_precision_callbacks.features.base import Feature, Options
from te_precision_callbacks.features.registration import own_feature


@own_feature("DisableFP8GEMM", "DisableFp8Gemm")
class DisableQuantizationGEMM(Feature):
    """Runs chosen GEMMs in high precision, under any recipe. DisableFP8GEMM is its older name.

    Keys: ``gemms`` or ``gemms_struct``.
    """

    @api_method
    def fp8_gemm_enabled(self, config: Options, layer_name: str, gemm: str, iteration: int) -> tuple[bool, int | None]:
        """No, and so in the next iteration."""
        return False, iteration + 1
