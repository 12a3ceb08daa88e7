"""Compare the quantizers of all recipes on the GPU and on the CPU, bit for bit, and their GEMMs.

The reference backend quantizes the same tensors on both devices, once for each compute capability that it emulates.
A compiled Transformer Engine's quantizers are compared too, in the recipes of the GPU. On a CPU the
backend is compared with itself, in two processes: each has one backend and one compute capability.

A GEMM is compared with the product in float64 of the dequantized operands. Its error is given as a share of the sum of
the magnitudes of the products: float32 rounds each of them and each addition by at most 2^-24; the tensor cores of a
GPU keep some 13 bits of the larger addend in FP8.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gpu_parts.rows import Rows, Settings, in_one_line, layouts
from te_precision_callbacks.te.tensors import read_stored

ROWS, COLUMNS, OUTPUTS = 256, 384, 128
"""Multiples of 128, which all recipes take; the number of outputs is that of a weight's rows."""

SCALE = 3.7  # of delayed scaling: no power of two

IN_FLOAT32 = COLUMNS * 2.0**-24
IN_TENSOR_CORES = 2.0**-10

WEIGHT, ACTIVATION = "weight", "normal, bfloat16"  # what is multiplied


def tensors() -> dict[str, torch.Tensor]:
    """Return the tensors to quantize, on the CPU, with the same values in every process."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(ROWS, COLUMNS, generator=generator)
    spread = normal * torch.exp(4 * torch.randn(ROWS, COLUMNS, generator=generator))
    rows = torch.arange(ROWS).view(-1, 1)
    return {
        ACTIVATION: normal.bfloat16(),
        "normal, float32": normal,
        "normal, float16": normal.half(),
        "of many magnitudes, bfloat16": spread.bfloat16(),
        "of many magnitudes, float32": spread,
        "small, float32": spread * 1e-33,
        "huge, bfloat16": (normal.clamp(-3, 3) * 1e38).bfloat16(),
        "with zero blocks, bfloat16": normal.where(rows % 64 > 31, 0.0).bfloat16(),
        WEIGHT: torch.randn(OUTPUTS, COLUMNS, generator=generator).bfloat16(),
    }


def quantizers(capability: str, device: torch.device) -> dict[str, tuple[str, Callable[[bool], Any]]]:
    """Name -> the recipe, as Transformer Engine's checks name it, and a function that makes a quantizer, of a weight or
    not. Nothing is drawn at random."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import DType

    e4m3, e5m2 = DType.kFloat8E4M3, DType.kFloat8E5M2

    def delayed(dtype: Any) -> Any:
        return te.Float8Quantizer(torch.tensor([SCALE], device=device), torch.zeros(1, device=device), dtype)

    def current(dtype: Any, **options: Any) -> Any:
        return te.Float8CurrentScalingQuantizer(dtype, device, **options)

    def blocks(dtype: Any, weight: bool, **options: Any) -> Any:
        dimensions = 2 if weight else 1
        return te.Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, block_scaling_dim=dimensions, **options)

    # There is no GEMM of E5M2 with E5M2, so weights are E4M3.
    results: dict[str, tuple[str, Callable[[bool], Any]]] = {
        "delayed scaling, E4M3": ("fp8", lambda weight: delayed(e4m3)),
        "delayed scaling, E5M2": ("fp8", lambda weight: delayed(e4m3 if weight else e5m2)),
        "current scaling, E4M3": ("fp8", lambda weight: current(e4m3)),
        "current scaling, E5M2": ("fp8", lambda weight: current(e4m3 if weight else e5m2)),
        "current scaling, powers of two": ("fp8", lambda weight: current(e4m3, force_pow_2_scales=True)),
    }
    if capability == "9.0":
        return results | {
            "FP8 blocks, E4M3": ("fp8_block_scaling", lambda weight: blocks(e4m3, weight)),
            "FP8 blocks, E5M2": ("fp8_block_scaling", lambda weight: blocks(e4m3 if weight else e5m2, weight)),
            "FP8 blocks, float32 scales": (
                "fp8_block_scaling",
                lambda weight: blocks(e4m3, weight, force_pow_2_scales=False),
            ),
        }
    hadamard = {"with_rht": True, "with_post_rht_amax": True}
    return results | {
        "MXFP8, E4M3": ("mxfp8", lambda weight: te.MXFP8Quantizer(e4m3)),
        "MXFP8, E5M2": ("mxfp8", lambda weight: te.MXFP8Quantizer(e4m3 if weight else e5m2)),
        "NVFP4": ("nvfp4", lambda weight: te.NVFP4Quantizer(with_2d_quantization=weight)),
        "NVFP4, Hadamard transform": (
            "nvfp4",
            lambda weight: te.NVFP4Quantizer(with_2d_quantization=weight, **hadamard),
        ),
    }


def _make(number: int, sides: list[Settings], folder: Path) -> None:
    """Save what a side makes of each quantizer: ``refused``, or the parts of each quantized tensor, what failed, and
    the result of a GEMM."""
    side = sides[number]
    torch.set_float32_matmul_precision("highest")
    side.transformer_engine()
    from transformer_engine.pytorch import quantization
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    results: dict[str, Any] = {}
    for name, (recipe, make) in quantizers(side.capability or "9.0", side.device).items():
        runs, why = getattr(quantization, f"check_{recipe}_support")()
        if not runs:
            results[name] = {"refused": str(why)}
            continue
        parts, operands, failures = dict[str, torch.Tensor](), dict[str, Any](), dict[str, str]()
        results[name] = {"parts": parts, "failures": failures}
        for key, tensor in tensors().items():
            if "Hadamard" in name and (tensor.dtype != torch.bfloat16 or key == WEIGHT):
                continue  # it takes bfloat16 alone, and no weights
            quantizer = make(key == WEIGHT)
            try:
                quantized = quantizer(tensor.to(side.device))
                parts.update({f"{key}, {part}": value.cpu() for part, value in _parts(quantized, quantizer)})
            except Exception as error:  # the others may be fine
                failures[key] = in_one_line(error)
                continue
            rowwise = read_stored(quantized, columnwise=False)
            if key in (WEIGHT, ACTIVATION) and rowwise is not None:
                operands[key] = quantized
                results[name][key] = rowwise.dequantized().cpu()
        if len(operands) == 2:
            try:
                both = operands[WEIGHT], operands[ACTIVATION]
                out, *_ = general_gemm(*both, out_dtype=torch.float32, layout="TN", use_split_accumulator=True)
                results[name]["product"] = out.cpu()
            except Exception as error:
                failures["GEMM"] = in_one_line(error)
    torch.save(results, folder / f"{number}.pt")


def _parts(quantized: Any, quantizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Data, scales and amaxes, without what pads them."""
    for direction in ("rowwise", "columnwise"):
        part = read_stored(quantized, columnwise=direction == "columnwise")
        if part is None:
            continue
        yield f"{direction} data", part.codes
        yield f"{direction} scales", part.scales
        if part.amax is not None:
            yield f"{direction} amax", part.amax
    amax = getattr(quantizer, "amax", None)
    if isinstance(amax, torch.Tensor):
        yield "amax", amax


def _name(side: Settings) -> str:
    what = "compiled" if side.backend == "compiled" else "backend"
    return f"{what} on the {'GPU' if side.on_gpu else 'CPU'}"


def compare(sides: list[Settings], made: list[dict[str, Any]], rows: Rows) -> None:
    """Rows for each quantizer: the bytes that differ, and the errors of the GEMM."""
    (side, other), (ours, theirs) = sides, made
    for quantizer, right in theirs.items():
        results, name = ours[quantizer], f"{quantizer}, {side.capability}"
        check = f"{name}: {_name(side)} and {_name(other)}"
        refused = results.get("refused") or right.get("refused")
        if refused is not None:
            rows.left_out(check, refused)
            continue
        differing = {part: _differing(results["parts"].get(part), value) for part, value in right["parts"].items()}
        where = [f"{part}: {count}" for part, count in differing.items() if count]
        where += [f"only {_name(side)}: {part}" for part in sorted(results["parts"].keys() - differing.keys())]
        for place, made_there in ((side, results), (other, right)):
            where += [f"{_name(place)}, {key}: {why}" for key, why in made_there["failures"].items()]
        total = sum(value.nbytes for value in right["parts"].values())
        bytes_that_differ = sum(differing.values())
        rows.add(f"{check}, bytes that differ", bytes_that_differ, f"of {total}", 0, not where, "; ".join(where))
        if "product" in right and "product" in results:
            weight, activation = right[WEIGHT].double(), right[ACTIVATION].double()
            exact, magnitudes = activation @ weight.t(), activation.abs() @ weight.abs().t()
            limit = IN_TENSOR_CORES if side.backend == "compiled" else IN_FLOAT32
            error = float(((results["product"].double() - exact).abs() / magnitudes).max())
            rows.at_most(f"{name}: GEMM, {_name(side)}", error, limit, "of the magnitudes")
            apart = float((results["product"].double() - right["product"].double()).abs().max())
            note = f"of numbers up to {float(exact.abs().max()):.3g}"
            rows.measured(f"{name}: GEMM, largest difference", apart, note=note)


def _differing(value: torch.Tensor | None, expected: torch.Tensor) -> int:
    """Count the bytes that differ: all of them if there is no value, or the shapes differ."""
    if value is None or value.shape != expected.shape or value.dtype != expected.dtype:
        return expected.nbytes
    ours, theirs = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (value, expected))
    return int((ours != theirs).sum())


def check(settings: Settings, rows: Rows) -> None:
    for capability in ("9.0", "10.0"):
        on_cpu = Settings(torch.device("cpu"), "reference", capability)
        sides = [on_cpu, Settings(settings.device, "reference", capability)]
        if settings.backend == "compiled" and capability == layouts():
            sides.append(Settings(settings.device, "compiled", capability))
        with tempfile.TemporaryDirectory() as folder:
            arguments = sides, Path(folder)
            torch.multiprocessing.spawn(_make, arguments, len(sides))  # type: ignore[attr-defined,no-untyped-call]
            right, *made = (torch.load(Path(folder, f"{number}.pt"), weights_only=True) for number in range(len(sides)))
        for side, results in zip(sides[1:], made, strict=True):
            compare([side, on_cpu], [results, right], rows)
    if not settings.on_gpu:
        rows.left_out("the backend on a GPU", "needs a GPU")
    if settings.backend != "compiled":
        rows.left_out("the compiled Transformer Engine", "there is none that can be used on this device")
