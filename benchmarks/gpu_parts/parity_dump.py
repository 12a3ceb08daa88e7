"""Quantize the same tensors with all recipes of a GPU, multiply them, and save the bytes for parity.py.

    python -m gpu_parts.parity_dump FILE --device cuda --backend reference --capability 9.0

A process has one backend and one compute capability, so each combination needs its own process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gpu_parts.rows import in_one_line
from te_precision_callbacks import reference
from te_precision_callbacks.base.numerics.layouts import stored

ROWS, COLUMNS, OUTPUTS = 256, 384, 128
"""Multiples of 128, which all recipes take; the number of outputs is that of a weight's rows."""

SCALE = 3.7
"""Of delayed scaling: no power of two."""


def tensors() -> dict[str, torch.Tensor]:
    """Return the tensors to quantize, on the CPU, with the same values in every process."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(ROWS, COLUMNS, generator=generator)
    magnitudes = torch.exp(4 * torch.randn(ROWS, COLUMNS, generator=generator))
    rows = torch.arange(ROWS).view(-1, 1)
    return {
        "normal, bfloat16": normal.bfloat16(),
        "normal, float32": normal,
        "normal, float16": normal.half(),
        "of many magnitudes, bfloat16": (normal * magnitudes).bfloat16(),
        "of many magnitudes, float32": normal * magnitudes,
        "small, float32": normal * magnitudes * 1e-33,
        "huge, bfloat16": (normal.clamp(-3, 3) * 1e38).bfloat16(),
        "with zero blocks, bfloat16": normal.where(rows % 64 > 31, 0.0).bfloat16(),
        "weight": torch.randn(OUTPUTS, COLUMNS, generator=generator).bfloat16(),
    }


WEIGHT, ACTIVATION = "weight", "normal, bfloat16"
"""What is multiplied."""


def quantizers(capability: str, device: torch.device) -> dict[str, tuple[str, Callable[[bool], Any]]]:
    """Name -> the recipe, as Transformer Engine's checks name it, and a function that makes a quantizer, of a weight or
    not. Nothing is drawn at random."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import DType

    def dtype(e5m2: bool, weight: bool) -> Any:
        """There is no GEMM of E5M2 with E5M2."""
        return DType.kFloat8E5M2 if e5m2 and not weight else DType.kFloat8E4M3

    def delayed(e5m2: bool) -> Callable[[bool], Any]:
        def make(weight: bool) -> Any:
            scale = torch.tensor([SCALE], device=device)
            return te.Float8Quantizer(scale, torch.zeros(1, device=device), dtype(e5m2, weight))

        return make

    def current(e5m2: bool, **options: Any) -> Callable[[bool], Any]:
        return lambda weight: te.Float8CurrentScalingQuantizer(dtype(e5m2, weight), device, **options)

    def blocks(e5m2: bool, **options: Any) -> Callable[[bool], Any]:
        return lambda weight: te.Float8BlockQuantizer(
            dtype(e5m2, weight), rowwise=True, columnwise=True, block_scaling_dim=2 if weight else 1, **options
        )

    def mxfp8(e5m2: bool) -> Callable[[bool], Any]:
        return lambda weight: te.MXFP8Quantizer(dtype(e5m2, weight))

    def nvfp4(**options: Any) -> Callable[[bool], Any]:
        return lambda weight: te.NVFP4Quantizer(with_2d_quantization=weight, **options)

    results: dict[str, tuple[str, Callable[[bool], Any]]] = {
        "delayed scaling, E4M3": ("fp8", delayed(False)),
        "delayed scaling, E5M2": ("fp8", delayed(True)),
        "current scaling, E4M3": ("fp8", current(False)),
        "current scaling, E5M2": ("fp8", current(True)),
        "current scaling, powers of two": ("fp8", current(False, force_pow_2_scales=True)),
    }
    if capability == "9.0":
        return results | {
            "FP8 blocks, E4M3": ("fp8_block_scaling", blocks(False)),
            "FP8 blocks, E5M2": ("fp8_block_scaling", blocks(True)),
            "FP8 blocks, float32 scales": ("fp8_block_scaling", blocks(False, force_pow_2_scales=False)),
        }
    return results | {
        "MXFP8, E4M3": ("mxfp8", mxfp8(False)),
        "MXFP8, E5M2": ("mxfp8", mxfp8(True)),
        "NVFP4": ("nvfp4", nvfp4()),
        "NVFP4, Hadamard transform": ("nvfp4", nvfp4(with_rht=True, with_post_rht_amax=True)),
    }


def _refusals() -> dict[str, str]:
    """Recipe -> why it does not run on this GPU, by Transformer Engine's own checks."""
    from transformer_engine.pytorch import quantization

    results = {}
    for recipe in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling"):
        runs, why = getattr(quantization, f"check_{recipe}_support")()
        if not runs:
            results[recipe] = str(why)
    return results


def made(capability: str, device: torch.device) -> dict[str, Any]:
    """For each quantizer: ``refused``, or the parts of each quantized tensor, what failed, and the result of a GEMM."""
    refusals = _refusals()
    results: dict[str, Any] = {}
    for name, (recipe, make) in quantizers(capability, device).items():
        if recipe in refusals:
            results[name] = {"refused": refusals[recipe]}
            continue
        parts, operands, failures = {}, {}, {}
        for key, tensor in tensors().items():
            if "Hadamard" in name and (tensor.dtype != torch.bfloat16 or key == WEIGHT):
                continue  # it takes bfloat16 alone, and no weights
            its = make(key == WEIGHT)
            try:
                quantized = its(tensor.to(device))
                parts.update({f"{key}, {part}": value.cpu() for part, value in _parts(quantized, its)})
            except Exception as error:  # the others may be fine
                failures[key] = in_one_line(error)
                continue
            operands[key] = quantized
        results[name] = {"parts": parts, "failures": failures}
        if {WEIGHT, ACTIVATION} <= operands.keys():
            try:
                results[name]["product"] = _product(operands[WEIGHT], operands[ACTIVATION]).cpu()
            except Exception as error:
                failures["GEMM"] = in_one_line(error)
            for key in (WEIGHT, ACTIVATION):
                results[name][key] = _dequantized(operands[key]).cpu()
    return results


def _parts(quantized: Any, quantizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Data, scales and amaxes, without what pads them."""
    for columnwise in (False, True):
        part = stored(quantized, columnwise=columnwise)
        if part is None:
            continue
        direction = "columnwise" if columnwise else "rowwise"
        yield f"{direction} data", part.codes
        yield f"{direction} scales", part.scales
        if part.amax is not None:
            yield f"{direction} amax", part.amax
    amax = getattr(quantizer, "amax", None)
    if isinstance(amax, torch.Tensor):
        yield "amax", amax


def _dequantized(quantized: Any) -> torch.Tensor:
    part = stored(quantized, columnwise=False)
    if part is None:
        raise RuntimeError(f"a {type(quantized).__name__} without rowwise data")
    return part.dequantized()


def _product(weight: Any, activation: Any) -> torch.Tensor:
    """The forward of a linear layer, in float32."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    out, *_ = general_gemm(weight, activation, out_dtype=torch.float32, layout="TN", use_split_accumulator=True)
    result: torch.Tensor = out
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu_parts.parity_dump")
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--backend", choices=("reference", "compiled"), required=True)
    parser.add_argument("--capability", choices=("9.0", "10.0"), required=True)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    if options.backend == "reference":
        major, minor = map(int, options.capability.split("."))
        reference.install(capability=(major, minor))
    torch.save(made(options.capability, torch.device(options.device)), options.file)


if __name__ == "__main__":
    main()
