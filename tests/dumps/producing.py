"""Dumps of quantized tensors in every format, and the numbers they must be read back as."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.module import linear

from te_precision_callbacks import dumps
from tests.capability import stand_for
from tests.dumps import independent
from tests.quantizers import quantizer

HOPPER, BLACKWELL = "9.0", "10.0"
QUANTIZERS: dict[str, dict[str, Callable[..., Any]]] = {
    HOPPER: {
        "float8_delayed": partial(quantizer, "fp8_delayed_scaling", scale=3.0),
        "float8_current": partial(quantizer, "fp8_current_scaling", e5m2=True),
        "block_1d": partial(quantizer, "fp8_block_scaling", force_pow_2_scales=False),
        "block_2d": partial(quantizer, "fp8_block_scaling", weight=True, force_pow_2_scales=False),
    },
    BLACKWELL: {
        "float8_current": partial(quantizer, "fp8_current_scaling", e5m2=True),
        "mxfp8": partial(quantizer, "mxfp8"),
        "mxfp8_e5m2": partial(quantizer, "mxfp8", e5m2=True),
        "nvfp4": partial(quantizer, "nvfp4"),
        "nvfp4_rht": partial(quantizer, "nvfp4", with_rht=True, with_post_rht_amax=True),
        "nvfp4_2d": partial(quantizer, "nvfp4", weight=True),
    },
}
RECIPES = {
    HOPPER: ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"],
    BLACKWELL: [
        "Float8CurrentScaling",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
        "NVFP4BlockScaling aligned",
        "NVFP4BlockScaling plain",
    ],
}
SHAPES = {  # rows, in_features, out_features
    "Float8BlockScaling": (128, 128, 256),  # its GEMM takes no others
    "NVFP4BlockScaling aligned": (64, 128, 256),  # the kernels write all its scales swizzled
}
OPERANDS = ["fprop_weight", "fprop_input", "dgrad_weight", "dgrad_gradient", "wgrad_input", "wgrad_gradient"]


def source(name: str) -> torch.Tensor:
    """Many magnitudes, zeros and a denormal, in a shape that needs padded scales."""
    torch.manual_seed(len(name))
    shape = (2, 45, 150) if name.startswith("block") else (2, 48, 96 if "mxfp8" in name else 80)
    x = torch.randn(shape) * torch.exp(torch.randn(shape))
    x[0, :3, :40], x[1, 2, 3] = 0.0, 1e-40
    return x.bfloat16()


def operands_of_training(name: str) -> Iterator[tuple[str, Any, bool]]:
    """Operands of a te.Linear's three GEMMs in an ordinary step: name, tensor, direction."""
    kind, *how = name.split()
    options = {"disable_rht": True, "disable_2d_quantization": True} if how == ["plain"] else {}
    rows, inputs, outputs = SHAPES.get(name, (96, 96, 160))
    torch.manual_seed(5)
    layer = te.Linear(inputs, outputs, params_dtype=torch.bfloat16)
    x = torch.randn(2, rows // 2, inputs, dtype=torch.bfloat16, requires_grad=True)
    seen: list[tuple[str, Any, bool]] = []
    real = linear.general_gemm

    def general_gemm(a: Any, b: Any, *arguments: Any, layout: str = "TN", **options: Any) -> Any:
        gemm, first, second = {
            "TN": ("fprop", "weight", "input"),
            "NN": ("dgrad", "weight", "gradient"),
            "NT": ("wgrad", "input", "gradient"),
        }[layout]
        for role, tensor, columnwise in ((first, a, layout[0] == "N"), (second, b, layout[1] == "T")):
            seen.append((f"{gemm}_{role}", storage(tensor), columnwise))
        return real(a, b, *arguments, layout=layout, **options)

    linear.general_gemm = general_gemm
    try:
        with te.autocast(enabled=True, recipe=getattr(recipe, kind)(**options)):
            y = layer(x)
        y.backward(torch.randn_like(y))
    finally:
        linear.general_gemm = real
    yield from seen


def storage(tensor: Any) -> Any:
    """A copy in an object of the storage class: training frees its own after use."""
    kind = next(kind for kind in type(tensor).__mro__ if kind.__name__.endswith("Storage"))
    buffers = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in tensor.get_metadata().items()
    }
    return kind(**buffers)


def has(tensor: Any, columnwise: bool) -> bool:
    if hasattr(tensor, "_transpose_invalid"):
        return not tensor._transpose_invalid if columnwise else tensor._data is not None
    return getattr(tensor, "_columnwise_data" if columnwise else "_rowwise_data") is not None


def produce(name: str, tensor: Any, folder: Path) -> dict[str, Any]:
    dumps.save(tensor, folder / f"{name}.safetensors", layer=name, tensor_name="activation", iteration=7)
    for columnwise, side in ((False, "rowwise"), (True, "columnwise")):
        if has(tensor, columnwise):
            np.save(folder / f"{name}.{side}.npy", independent.numbers(tensor, columnwise=columnwise))
    scales = [getattr(tensor, f"_{side}_scale_inv", None) for side in ("rowwise", "columnwise")]
    return {
        "swizzled": bool(getattr(tensor, "_with_gemm_swizzled_scales", False)),
        "stored_scales": [None if scale is None else list(scale.shape) for scale in scales],
    }


def produced(capability: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Write for each tensor NAME.safetensors, and for each direction NAME.rowwise.npy with its numbers, read by
    :mod:`tests.dumps.independent`; return the tensors' facts in memory."""
    stand_for((int(float(capability)), 0))
    facts = {}
    for name, make in QUANTIZERS[capability].items():
        facts[name] = produce(name, make(optimize_for_gemm=True)(source(name)), folder)
    for name in RECIPES[capability]:
        for operand, tensor, columnwise in operands_of_training(name):
            case = f"{name}.{operand}"
            facts[case] = produce(case, tensor, folder) | {"columnwise": columnwise}
    return facts
