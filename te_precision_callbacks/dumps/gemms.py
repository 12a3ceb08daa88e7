"""The errors of a dumped GEMM, as LogGemmError measures them in training."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.dumps.contents import HIGH_PRECISION, DumpError, operand_of
from te_precision_callbacks.dumps.dump_files import load
from te_precision_callbacks.gemm_error import (
    GemmCall,
    check_format,
    check_kernel,
    factor_of,
    probes,
    seed_of,
    thin,
)

PROBES = 64


class GemmErrors(NamedTuple):
    """The statistics of LogGemmError of one GEMM: docs/gemm-error.md.

    Attributes:
        kernel_error: |C - P| / |P|: the result C against the product P of the operands as stored.
        kernel_ratio: the largest error of a row relative to what rounding explains; above 1, the kernel is wrong.
        gain: <C, P> / |P|^2.
        format_error: |P - H| / |H|: P against the product H of the operands before quantization; None unless both are
            in the dump.
    """

    kernel_error: float
    kernel_ratio: float
    gain: float
    format_error: float | None


@torch.no_grad()
def gemm_errors(path: str | os.PathLike[str]) -> GemmErrors:
    """Return the errors of a GEMM that DumpTensors has written, without Transformer Engine or a GPU.

    Rows with inf or nan are left out.

    Raises:
        DumpError: the file is not a dump of a GEMM, or is damaged.
    """
    dump = load(path)
    gemm = dump.header.gemm
    if gemm is None:
        raise DumpError(f"{path}: has a single tensor, not a whole GEMM. DumpTensors writes GEMMs with 'gemms'.")
    tensors = dump.tensors
    x = probes(gemm.m, PROBES, seed_of("dump"), torch.device("cpu")).double()
    results = {}
    for name in ("out", "before"):
        if name in tensors:
            result = tensors[name].reshape(gemm.n, gemm.m)
            results[name] = thin(factor_of(result, columnwise=False), x)
    call = GemmCall(
        dtype=tensors["out"].dtype,
        alpha=gemm.alpha,
        beta=gemm.beta,
        bias=tensors.get("bias"),
        before=results.get("before"),
        split_accumulator=gemm.split_accumulator,
        capability=gemm.capability,
    )
    factors = []
    high = []
    for side, operand in gemm.operands().items():
        stored = operand_of(dump, side, operand)
        factors.append(factor_of(stored, columnwise=operand.columnwise))
        exact = tensors.get(f"{side}.{HIGH_PRECISION}") if isinstance(stored, Stored) else stored
        if exact is not None:
            high.append(factor_of(exact, columnwise=operand.columnwise))
    check = check_kernel(results["out"], factors[0], factors[1], x, call)
    gain = check.gain_dot / check.stored_square if check.stored_square else check.stored_square + 1
    format_error = None
    if len(high) == 2:
        product = gemm.alpha * high[0].multiply(high[1].t.multiply(x).product).product
        error, square = check_format(check.stored, product).tolist()
        format_error = (error / square) ** 0.5 if square else 0.0
    return GemmErrors(float(check.error), float(check.ratio), float(gain), format_error)
