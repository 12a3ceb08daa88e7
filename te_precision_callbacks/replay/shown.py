"""The body of the script of ``te-precision replay --repro``, which needs only torch and safetensors.

With Transformer Engine installed, it also runs the recorded GEMM. Read from Transformer Engine 2.20.2:
``general_gemm`` (``pytorch/cpp_extensions/gemm.py``) and the arguments of the classes in ``pytorch/tensor/storage``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BF16_ROUNDING = 2.0**-8
LARGEST = {"E4M3": 448.0, "E5M2": 57344.0, "E2M1": 6.0}
MANTISSA_BITS = {"E4M3": 3, "E5M2": 2, "E2M1": 1}
LOWEST_EXPONENT = {"E4M3": -6, "E5M2": -14, "E2M1": 0}


def read(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        gemm = json.loads(file.metadata()["te_precision_dump"])["gemm"]
        return gemm, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def codes_of(direction: Any, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decoded codes and the factor of each, in memory order: float64, [rows, columns]."""
    data = tensors[direction["data"]]
    if direction["format"] == "E2M1":
        nibbles = torch.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1).long()
        values = torch.tensor(E2M1 + [-x for x in E2M1])[nibbles]
    else:
        values = data.float()
    shape = direction["shape"]
    matrix = values.reshape(shape[-1], -1) if direction["transposed"] else values.reshape(-1, shape[-1])
    scale = tensors[direction["scale"]]
    if direction["scale_format"] == "E8M0":
        scale = torch.exp2(scale.view(torch.uint8).double() - 127)
    factors = scale.double()
    if direction["amax"] is not None:
        factors = factors * tensors[direction["amax"]].double().reshape(-1, 1) / (6.0 * direction["largest_scale"])
    if factors.numel() > 1:
        rows, columns = direction["block"]
        factors = factors.repeat_interleave(rows, 0)[: matrix.shape[0]]
        factors = factors.repeat_interleave(columns, 1)[:, : matrix.shape[1]]
    return matrix.double(), factors.reshape(1, 1).expand_as(matrix) if factors.numel() == 1 else factors


def operand(gemm: Any, side: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    described = gemm[side]
    if described["direction"] is None:
        values = tensors[f"{side}.values"].double()
        matrix = values.reshape(-1, values.shape[-1])
        return matrix.t() if described["columnwise"] else matrix
    codes, factors = codes_of(described["direction"], tensors)
    turned = described["columnwise"] != described["direction"]["transposed"]
    return (codes * factors).t() if turned else codes * factors


def quantized(described: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> Any:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    direction = described["direction"]
    mode, element = direction["scaling_mode"], direction["format"]
    data = tensors[direction["data"]].view(torch.uint8).to(device)
    scales = tensors[direction["scale"]]
    dtype = {"E4M3": tex.DType.kFloat8E4M3, "E5M2": tex.DType.kFloat8E5M2, "E2M1": tex.DType.kFloat4E2M1}[element]
    if mode == "per_tensor":
        whole: dict[str, Any] = {"data": None, "data_transpose": None}
        whole["data_transpose" if direction["transposed"] else "data"] = data
        return Float8TensorStorage(**whole, fp8_scale_inv=scales.to(device), fp8_dtype=dtype)
    if mode == "fp8_block_1d":
        scales = scales.t()
    if direction["scale_format"] != "float32":
        scales = scales.view(torch.uint8)
    padded = scales.new_zeros(direction["stored_scale_shape"])
    padded[: scales.shape[0], : scales.shape[1]] = scales
    columnwise = ".columnwise" in direction["data"]
    given = dict.fromkeys(("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"))
    way = "columnwise" if columnwise else "rowwise"
    given |= {f"{way}_data": data, f"{way}_scale_inv": padded.to(device), "quantizer": None}
    if mode == "mxfp8":
        return MXFP8TensorStorage(**given, fp8_dtype=dtype, with_gemm_swizzled_scales=False)
    if mode != "nvfp4":
        return Float8BlockwiseQTensorStorage(**given, fp8_dtype=dtype, is_2D_scaled=mode == "fp8_block_2d")
    given |= {"amax_rowwise": None, "amax_columnwise": None}
    given[f"amax_{way}"] = amax = tensors[direction["amax"]].to(device)
    return NVFP4TensorStorage(
        **given,
        fp4_dtype=dtype,
        with_gemm_swizzled_scales=False,
        row_scaled_nvfp4=amax.numel() > 1,
        nvfp4_use_4over6=direction["largest_scale"] != 448.0,
        nvfp4_e4m3_max=int(direction["largest_scale"]),
    )


def run_now(gemm: Any, tensors: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor | None]:
    """Run the recorded GEMM with Transformer Engine.

    Returns:
        The version and device, or the reason of a failure; and the result on the CPU, if any.
    """
    backend = None
    try:
        if importlib.util.find_spec("te_precision_callbacks") is not None:
            from te_precision_callbacks import reference

            backend = reference.install_where_needed()  # Transformer Engine without its extension, as on a CPU
        import transformer_engine
        from transformer_engine.pytorch.cpp_extensions import general_gemm
    except Exception as error:
        return f"Transformer Engine cannot be imported: {error}", None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    what = f"Transformer Engine {transformer_engine.__version__} on "
    what += torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    what += "" if backend is None else ", reference backend"
    bias, before = (tensors[name].to(device) if name in tensors else None for name in ("bias", "before"))
    try:
        a, b = (
            tensors[f"{side}.values"].to(device)
            if gemm[side]["direction"] is None
            else quantized(gemm[side], tensors, device)
            for side in "ab"
        )
        result, *_ = general_gemm(
            a,
            b,
            out_dtype=tensors["out"].dtype,
            alpha=gemm["alpha"],
            beta=None if before is None else gemm["beta"],
            accumulate=before is not None,
            layout=gemm["layout"],
            out=None if before is None else before.clone(),
            bias=bias,
            use_split_accumulator=gemm["split_accumulator"],
        )
        return what, result.cpu()
    except Exception as error:
        return f"{what} cannot run it: {error}", None


def kernel(gemm: Any, tensors: dict[str, torch.Tensor], result: torch.Tensor, made_by: str) -> bool:
    """Compare a result with the product of the recorded codes; return whether it is wrong."""
    left, right = operand(gemm, "b", tensors), operand(gemm, "a", tensors)
    product = expected = gemm["alpha"] * (left @ right.t())
    size = (abs(gemm["alpha"]) * (left.square() @ right.square().t()).sqrt()).clamp(min=1e-300)
    if "bias" in tensors:
        expected = expected + tensors["bias"].double()
    if "before" in tensors:
        before = gemm["beta"] * tensors["before"].double().reshape(expected.shape)
        expected, size = expected + before, torch.maximum(size, before.abs())
    result = result.double().reshape(expected.shape)
    error = (result - expected).abs().nan_to_num(float("inf"))
    # 2^-8 is the last bit of bfloat16; 2^-6 of the size of the terms leaves room for an accumulator of 14 bits.
    wrong = error > 2 * BF16_ROUNDING * expected.abs() + 2.0**-6 * size
    alone = result - expected + product
    gain = float((alone * product).sum() / product.square().sum().clamp(min=1e-300))
    off = abs(gain - 1) > BF16_ROUNDING
    if not wrong.any() and not off:
        print(f"{made_by}: no faults")
        return False
    rows, columns = int(wrong.any(1).sum()), int(wrong.any(0).sum())
    print(
        f"{made_by}: {int(wrong.sum())} elements are wrong, in {rows} rows and {columns} columns of {list(wrong.shape)}"
    )
    print(f"  the whole is {gain:.5g} of the product")
    for place in error.flatten().argsort(descending=True)[:5].tolist():
        row, column = divmod(place, wrong.shape[1])
        print(f"  [{row}, {column}]: {result[row, column]:.6g}, and in float64 {expected[row, column]:.6g}")
    return True


def quantizer(gemm: Any, side: str, tensors: dict[str, torch.Tensor]) -> bool:
    """Compare the codes of an operand with the tensor before quantization; return whether they are wrong."""
    described = gemm[side]
    direction, rounding = described["direction"], described["rounding"]
    high = tensors.get(f"{side}.high_precision")
    if direction is None or rounding is None or high is None or direction["hadamard"]:
        return False
    matrix = high.double().reshape(-1, high.shape[-1])
    exact = matrix.t() if direction["transposed"] else matrix
    codes, factors = codes_of(direction, tensors)
    number_format = direction["format"]
    y = (exact / factors).clamp(-LARGEST[number_format], LARGEST[number_format])
    exponent = torch.frexp(y).exponent.clamp(min=LOWEST_EXPONENT[number_format] + 1) - 1
    apart = torch.ldexp(torch.ones_like(y), exponent - MANTISSA_BITS[number_format])
    off = (codes - y).abs() / apart
    wrong = (factors > 0) & factors.isfinite() & (off > (1.0 if rounding["stochastic"] else 0.5) + 1e-3)
    largest = float(y.abs().amax())
    follows = rounding["scales_follow"] and direction["scaling_mode"] != "nvfp4"
    unused = follows and largest < LARGEST[number_format] / 4
    if not wrong.any() and not unused:
        print(f"{described['tensor']}: all {wrong.numel()} codes are the nearest numbers")
        return False
    print(f"{described['tensor']}: {int(wrong.sum())} of {wrong.numel()} codes are not the nearest number")
    for place in torch.where(wrong, off, 0.0).flatten().argsort(descending=True)[: min(3, int(wrong.sum()))].tolist():
        row, column = divmod(place, wrong.shape[1])
        print(f"  [{row}, {column}]: {y[row, column]:.6g} over its scale has the code of {codes[row, column]:.6g}")
    if unused:
        print(f"  the largest is {largest:.4g} over its scale, and {number_format} reaches {LARGEST[number_format]:g}")
    return True


def main() -> int:
    """Return the exit code: 1 if a code or the new result is wrong, or the recorded one if the GEMM cannot run; 2
    without the record."""
    record = Path(__file__).with_suffix(".safetensors")
    if not record.is_file():
        print(f"{record} is missing: it has the recorded GEMM. Put it in the folder of this script.", file=sys.stderr)
        return 2
    gemm, tensors = read(record)
    print(f"{gemm['gemm']}, {gemm['n']} x {gemm['m']}, sums of {gemm['k']}; compared with float64:")
    wrong_codes = [quantizer(gemm, side, tensors) for side in ("b", "a")]
    is_wrong = kernel(gemm, tensors, tensors["out"], f"recorded on {gemm['device']}")
    what, result = run_now(gemm, tensors)
    if result is None:
        print(f"not run now: {what}")
    else:
        is_wrong = kernel(gemm, tensors, result, f"run now by {what}")
    return int(is_wrong or any(wrong_codes))


if __name__ == "__main__":
    sys.exit(main())
