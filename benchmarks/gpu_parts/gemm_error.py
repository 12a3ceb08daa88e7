"""The tolerances of docs/gemm-error.md on real kernels, and the floors of the formats, for each recipe of the GPU.

A healthy kernel must be within its tolerance in every GEMM. The largest ratio is what confirms a tolerance.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from step import gemm_errors

from gpu_parts.rows import Rows, Settings, values_of
from te_precision_callbacks.session import InspectSession

FLOORS = {"current": 0.0375, "mxfp8": 0.0375}  # relative errors of products of Gaussian matrices in E4M3


def _measured(made: Any, settings: Settings, size: int, steps: int) -> list[dict[str, float]]:
    """Return the values of each step of a linear layer with Gaussian operands."""
    te = settings.transformer_engine()
    net = te.Linear(size, size, bias=False, params_dtype=torch.bfloat16, device=settings.device)
    torch.nn.init.normal_(net.weight)
    with (
        tempfile.TemporaryDirectory() as folder,
        InspectSession(gemm_errors(1), model=net, log_dir=Path(folder), observe="fused", strict=True) as session,
    ):
        values = []
        for _ in range(steps):
            x = torch.randn(size, size, dtype=torch.bfloat16, device=settings.device, requires_grad=True)
            with te.autocast(enabled=True, recipe=made):
                out = net(x)
            out.backward(torch.randn_like(out))
            values.append(values_of(session.step()))
    return values


def check(settings: Settings, rows: Rows) -> None:
    settings.transformer_engine()
    from transformer_engine.common import recipe
    from transformer_engine.pytorch import quantization

    recipes: Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "delayed": (recipe.DelayedScaling, quantization.check_fp8_support),
        "current": (recipe.Float8CurrentScaling, quantization.check_fp8_support),
        "block": (recipe.Float8BlockScaling, quantization.check_fp8_block_scaling_support),
        "mxfp8": (recipe.MXFP8BlockScaling, quantization.check_mxfp8_support),
        "nvfp4": (lambda: recipe.NVFP4BlockScaling(disable_rht=True), quantization.check_nvfp4_support),
        "nvfp4 with Hadamard": (recipe.NVFP4BlockScaling, quantization.check_nvfp4_support),
    }
    sizes, count = ((512, 4096), 20) if settings.on_gpu else ((128,), 2)
    for name, (make, supports) in recipes.items():
        if not supports()[0]:
            rows.left_out(name, "this GPU does not have it")
            continue
        for size in sizes:
            with rows.of(f"{name}, {size}"):
                steps = _measured(make(), settings, size, count)
                for tensor in ("output", "dgrad", "wgrad"):
                    ratio = max(step[f"{tensor} gemm_kernel_ratio"] for step in steps)
                    rows.at_most(f"{name}, {size}, {tensor}: error over its tolerance", ratio, 1.0)
                error = steps[-1]["output gemm_format_error"]
                if name in FLOORS:
                    floor = FLOORS[name]
                    check = f"{name}, {size}: distance from the floor of the format"
                    rows.at_most(check, abs(error / floor - 1), 0.1, note=f"{error:.4f}, and {floor}")
                else:
                    rows.measured(f"{name}, {size}: error of the format", error)
