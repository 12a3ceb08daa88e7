"""DisableQuantizationLayer and DisableFP8Layer: all GEMMs of a layer run in high precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvdlfw_inspect.registry import api_method

from te_precision_callbacks.features.base import Feature, Options
from te_precision_callbacks.features.registration import own_feature


@own_feature("DisableFP8Layer", "DisableFp8Layer")
class DisableQuantizationLayer(Feature):
    """Runs all GEMMs of a layer in high precision, under any recipe. DisableFP8Layer is its older name. No keys."""

    def options_for(self, config: Mapping[str, Any], tensor: str | None, gemm: str | None) -> list[Options]:
        """Whatever the call is about."""
        return [{}]

    @api_method
    def fp8_gemm_enabled(self, config: Options, layer_name: str, gemm: str, iteration: int) -> tuple[bool, int | None]:
        """No, and so in the next iteration."""
        return False, iteration + 1
