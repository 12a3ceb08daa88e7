"""The body of the script that ``te-precision replay --repro`` writes: it imports torch and safetensors alone."""

from __future__ import annotations

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
    """The description of the GEMM, and the tensors."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["te_precision_dump"])
        return header["gemm"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def codes_of(direction: Any, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The decoded codes, and the factor of each, as they lie in memory: float64, [rows, columns]."""
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
    """An operand as its codes and scales say it: float64, [rows, k]."""
    described = gemm[side]
    if described["direction"] is None:
        values = tensors[f"{side}.values"].double()
        matrix = values.reshape(-1, values.shape[-1])
        return matrix.t() if described["columnwise"] else matrix
    codes, factors = codes_of(described["direction"], tensors)
    turned = described["columnwise"] != described["direction"]["transposed"]
    return (codes * factors).t() if turned else codes * factors


def kernel(gemm: Any, tensors: dict[str, torch.Tensor]) -> bool:
    """Compare the recorded result with the product of the recorded codes; whether it is wrong."""
    left, right = operand(gemm, "b", tensors), operand(gemm, "a", tensors)
    expected = gemm["alpha"] * (left @ right.t())
    size = (abs(gemm["alpha"]) * (left.square() @ right.square().t()).sqrt()).clamp(min=1e-300)
    if "bias" in tensors:
        expected = expected + tensors["bias"].double()
    if "before" in tensors:
        before = gemm["beta"] * tensors["before"].double().reshape(expected.shape)
        expected, size = expected + before, torch.maximum(size, before.abs())
    result = tensors["out"].double().reshape(expected.shape)
    error = (result - expected).abs().nan_to_num(float("inf"))
    # 2^-8 is the last bit of bfloat16; 2^-6 of the size of the terms leaves room for an accumulator of 14 bits.
    wrong = error > 2 * BF16_ROUNDING * expected.abs() + 2.0**-6 * size
    print(f"{gemm['gemm']} of {gemm['n']} x {gemm['m']} x {gemm['k']}: {int(wrong.sum())} of {wrong.numel()} wrong")
    for place in error.flatten().argsort(descending=True)[:5].tolist():
        row, column = divmod(place, wrong.shape[1])
        print(f"  [{row}, {column}]: result {result[row, column]:.6g}, float64 {expected[row, column]:.6g}")
    product = gemm["alpha"] * (left @ right.t())
    gain = float(((result - expected + product) * product).sum() / product.square().sum().clamp(min=1e-300))
    off = abs(gain - 1) > BF16_ROUNDING
    if off:
        print(f"  as a whole the result is {gain:.5g} of the product")
    return bool(wrong.any()) or off


def quantizer(gemm: Any, side: str, tensors: dict[str, torch.Tensor]) -> bool:
    """Compare the codes of an operand with the tensor before quantization; whether they are wrong."""
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
    wrong = (factors > 0) & (off > (1.0 if rounding["stochastic"] else 0.5) + 1e-3)
    largest = float(y.abs().amax())
    follows = rounding["scales_follow"] and direction["scaling_mode"] != "nvfp4"
    unused = follows and largest < LARGEST[number_format] / 4
    print(f"{described['tensor']}: {int(wrong.sum())} of {wrong.numel()} codes are not the nearest number")
    for place in off.nan_to_num(0.0).flatten().argsort(descending=True)[:3].tolist():
        row, column = divmod(place, wrong.shape[1])
        print(f"  [{row}, {column}]: {y[row, column]:.6g} over its scale has the code of {codes[row, column]:.6g}")
    if unused:
        print(f"  the largest is {largest:.4g} over its scale, and {number_format} reaches {LARGEST[number_format]:g}")
    return bool(wrong.any()) or unused


def main() -> int:
    """The exit code."""
    gemm, tensors = read(Path(__file__).with_suffix(".safetensors"))
    found = [quantizer(gemm, side, tensors) for side in ("b", "a")]
    return int(kernel(gemm, tensors) or any(found))


if __name__ == "__main__":
    sys.exit(main())
