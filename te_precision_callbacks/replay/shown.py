"""The body of the script of ``te-precision replay --repro``: it runs a recorded GEMM with Transformer Engine.

Read from Transformer Engine 2.20.2: ``general_gemm`` (``pytorch/cpp_extensions/gemm.py``) and the arguments of the
classes in ``pytorch/tensor/storage``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks import reference
from te_precision_callbacks.base.environment import installed_version
from te_precision_callbacks.base.vocabulary import direction_name
from te_precision_callbacks.dumps import Dump, load
from te_precision_callbacks.dumps.header import Direction, DumpedGemm
from te_precision_callbacks.replay import replay


def quantized(direction: Direction, tensors: dict[str, torch.Tensor], device: torch.device) -> Any:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    data = tensors[direction.data].view(torch.uint8).to(device)
    scales = tensors[direction.scale]
    dtypes = {"E4M3": tex.DType.kFloat8E4M3, "E5M2": tex.DType.kFloat8E5M2, "E2M1": tex.DType.kFloat4E2M1}
    dtype = dtypes[direction.format]
    if direction.scaling_mode == "per_tensor":
        whole: dict[str, Any] = {"data": data, "data_transpose": None}
        if direction.transposed:
            whole = {"data": None, "data_transpose": data}
        return Float8TensorStorage(**whole, fp8_scale_inv=scales.to(device), fp8_dtype=dtype)
    if direction.scaling_mode == "fp8_block_1d":
        scales = scales.t()
    if direction.scale_format != "float32":
        scales = scales.view(torch.uint8)
    padded = scales.new_zeros(direction.stored_scale_shape)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    buffers: dict[str, Any] = dict.fromkeys(
        ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "quantizer")
    )
    side = direction_name(".columnwise" in direction.data)
    buffers |= {f"{side}_data": data, f"{side}_scale_inv": padded.to(device)}
    if direction.scaling_mode == "mxfp8":
        return MXFP8TensorStorage(**buffers, fp8_dtype=dtype, with_gemm_swizzled_scales=False)
    if direction.amax is None or direction.largest_scale is None:
        is_2d = direction.scaling_mode == "fp8_block_2d"
        return Float8BlockwiseQTensorStorage(**buffers, fp8_dtype=dtype, is_2D_scaled=is_2d)
    amax = tensors[direction.amax].to(device)
    buffers |= {"amax_rowwise": None, "amax_columnwise": None, f"amax_{side}": amax}
    return NVFP4TensorStorage(
        **buffers,
        fp4_dtype=dtype,
        with_gemm_swizzled_scales=False,
        row_scaled_nvfp4=amax.numel() > 1,
        nvfp4_use_4over6=direction.largest_scale != 448.0,
        nvfp4_e4m3_max=int(direction.largest_scale),
    )


def run_now(recorded: Dump, gemm: DumpedGemm, device: torch.device) -> Dump:
    """Return the record with the result of its GEMM on a device."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    tensors = recorded.tensors
    operands = []
    for side, operand in gemm.operands().items():
        if operand.direction is None:
            operands.append(tensors[f"{side}.values"].to(device))
        else:
            operands.append(quantized(operand.direction, tensors, device))
    optional: dict[str, Any] = {}
    if "bias" in tensors:
        optional["bias"] = tensors["bias"].to(device)
    if "before" in tensors:
        before = tensors["before"].to(device, copy=True)
        optional |= {"out": before, "beta": gemm.beta, "accumulate": True}
    result, *_ = general_gemm(
        *operands,
        out_dtype=tensors["out"].dtype,
        alpha=gemm.alpha,
        layout=gemm.layout,
        use_split_accumulator=gemm.split_accumulator,
        **optional,
    )
    capability = None
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    header = replace(recorded.header, gemm=replace(gemm, capability=capability))
    return replace(recorded, header=header, tensors={**tensors, "out": result.cpu()})


def main() -> int:
    """Return the exit code: 1 if the GEMM is wrong, rerun or as recorded if it cannot run; 2 without the record."""
    record = Path(__file__).with_suffix(".safetensors")
    if not record.is_file():
        print(f"{record} is missing: it has the recorded GEMM. Put it in the folder of this script.", file=sys.stderr)
        return 2
    recorded = load(record)
    replayed = replay(recorded)
    print(f"recorded on {replayed.gemm.device}: {replayed.verdict}")
    device = torch.device("cpu")
    where = "cpu"
    if torch.cuda.is_available():
        device = torch.device("cuda")
        where = torch.cuda.get_device_name()
    try:
        if reference.install_where_needed() is not None:  # Transformer Engine without its extension, as on a CPU
            where += ", reference backend"
        again = run_now(recorded, replayed.gemm, device)
    except Exception as error:
        print(f"not run now on {where}: {type(error).__name__}: {error}")
    else:
        replayed = replay(again)
        version = installed_version("transformer_engine")
        print(f"run now by Transformer Engine {version} on {where}: {replayed.verdict}")
    return int(bool(replayed.faults))


if __name__ == "__main__":
    sys.exit(main())
