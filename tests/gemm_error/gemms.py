"""GEMMs of each recipe on the reference backend, with their operands before and after quantization."""

from typing import Any, NamedTuple

import torch
from transformer_engine.pytorch.cpp_extensions import general_gemm

from te_precision_callbacks.gemm_error.factors import Factor, factor_of
from tests import quantizers

BF16 = torch.bfloat16
RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4", "nvfp4 rht", "nvfp4 rht stochastic")
SIZES = {"n": 160, "m": 256, "k": 192}
COLUMNWISE = {"fprop": (False, False), "dgrad": (True, False), "wgrad": (True, True)}
"""Whether A and B are read columnwise."""
LAYOUTS = {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}


class Gemm(NamedTuple):
    """``out`` is B times A^T as a device gave it; the factors are [n, k] and [m, k]."""

    a: Any
    b: Any
    high_a: torch.Tensor
    high_b: torch.Tensor
    layout: str
    out: torch.Tensor

    @property
    def left(self) -> Factor:
        return factor_of(self.b, columnwise=self.layout[1] == "T")

    @property
    def right(self) -> Factor:
        return factor_of(self.a, columnwise=self.layout[0] == "N")

    def high(self, name: str) -> torch.Tensor:
        """float64, [rows, k]."""
        tensor = self.high_a if name == "a" else self.high_b
        is_transposed = self.layout[0] == "N" if name == "a" else self.layout[1] == "T"
        return (tensor.t() if is_transposed else tensor).double()


def quantizer(recipe: str, *, weight: bool = False, gradient: bool = False) -> Any:
    if recipe == "delayed":
        return quantizers.quantizer("fp8_delayed_scaling", e5m2=gradient, scale=40.0)
    if recipe == "current":
        return quantizers.quantizer("fp8_current_scaling", e5m2=gradient)
    if recipe in ("block", "mxfp8"):
        return quantizers.quantizer({"block": "fp8_block_scaling"}.get(recipe, recipe), weight=weight)
    rht = "rht" in recipe and not weight
    at_random = "stochastic" in recipe and gradient
    return quantizers.quantizer(
        "nvfp4", weight=weight, with_rht=rht, with_post_rht_amax=rht, stochastic_rounding=at_random
    )


def gemm_of(recipe: str, gemm: str, seed: int = 0, dtype: torch.dtype = BF16, **keywords: Any) -> Gemm:
    generator = torch.Generator().manual_seed(seed)
    n, m, k = SIZES["n"], SIZES["m"], SIZES["k"]
    of_a, of_b = COLUMNWISE[gemm]
    high_a = torch.randn((k, m) if of_a else (m, k), generator=generator).to(BF16)
    high_b = torch.randn((k, n) if of_b else (n, k), generator=generator).to(BF16)
    a = quantizer(recipe, weight=gemm != "wgrad")(high_a)
    b = quantizer(recipe, gradient=gemm != "fprop")(high_b)
    out = general_gemm(a, b, out_dtype=dtype, layout=LAYOUTS[gemm], use_split_accumulator=True, **keywords)[0]
    return Gemm(a, b, high_a, high_b, LAYOUTS[gemm], out)
