"""Transformer Engine's quantizers by the names of recipes."""

from typing import Any

import torch
import transformer_engine.pytorch as te


def fp8_dtype(e5m2: bool) -> Any:
    return te.DType.kFloat8E5M2 if e5m2 else te.DType.kFloat8E4M3


def quantizer(
    recipe: str, *, weight: bool = False, e5m2: bool = False, optimize_for_gemm: bool = False, **options: Any
) -> Any:
    """As the recipe's default has it, without random rounding and without the random Hadamard transform."""
    made: Any
    if recipe == "fp8_delayed_scaling":
        made = te.Float8Quantizer(torch.tensor([options.pop("scale", 1.0)]), torch.zeros(1), fp8_dtype(e5m2), **options)
    elif recipe == "fp8_current_scaling":
        made = te.Float8CurrentScalingQuantizer(fp8_dtype(e5m2), device=torch.device("cpu"), **options)
    elif recipe == "fp8_block_scaling":
        usages = {"rowwise": True, "columnwise": True}
        made = te.Float8BlockQuantizer(fp8_dtype(e5m2), block_scaling_dim=1 + weight, **usages | options)
    elif recipe == "mxfp8":
        made = te.MXFP8Quantizer(fp8_dtype(e5m2), **options)
    else:
        made = te.NVFP4Quantizer(with_2d_quantization=weight, **options)
    made.optimize_for_gemm = optimize_for_gemm
    return made
