"""One pass over a tensor that is quantized in blocks, and over its codes and scales, against plain torch on the CPU.

On a GPU it is the Triton kernel ``te_precision_callbacks/engine/kernels/triton_blocks.py``. Neither side of the tensors
is a multiple of the kernel's tiles.
"""

from __future__ import annotations

import torch

from gpu_parts.kernels import BOUNDS_ON_CPU, BOUNDS_ON_GPU, SUMS_AND_MAXIMA, compared, drawn
from gpu_parts.rows import Rows, Settings
from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, E8M0, FloatFormat
from te_precision_callbacks.base.numerics.layouts import ScaleMemory, Stored, pack_fp4
from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.kernels.columns import (
    LIMIT_SUMS,
    LOSS_MAXIMA,
    LOSS_SUMS,
    NOTHING,
    RANGE_MAXIMA,
    RANGE_SUMS,
    BlockScaledTensor,
    ColumnPlaces,
    Pending,
)

IN_FLOAT32 = ("MXFP8", "NVFP4 columnwise", "FP8 blocks of 128 x 128")
"""Forms that are also measured in float32: one for each format of scales. Others would only compile for longer."""

SUMS = (*SUMS_AND_MAXIMA[True][0], *LIMIT_SUMS, *LOSS_SUMS, *RANGE_SUMS)
MAXIMA_OF_BLOCKS = (*SUMS_AND_MAXIMA[True][1], *LOSS_MAXIMA, *RANGE_MAXIMA)

Form = tuple[str, FloatFormat, FloatFormat | None, tuple[int, int], tuple[int, int], bool]


FORMS: tuple[Form, ...] = (
    ("MXFP8", E4M3, E8M0, (1, 32), (1, 32), False),
    ("MXFP8 columnwise, E5M2", E5M2, E8M0, (32, 1), (32, 1), False),
    ("NVFP4", E2M1, E4M3, (1, 16), (1, 16), False),
    ("NVFP4 columnwise", E2M1, E4M3, (1, 16), (1, 16), True),
    ("NVFP4, 16 x 16", E2M1, E4M3, (1, 16), (16, 16), False),
    ("FP8 blocks of 1 x 128", E4M3, None, (1, 128), (1, 128), False),
    ("FP8 blocks of 128 x 128", E4M3, None, (128, 128), (128, 128), False),
    ("FP8 blocks of 128 x 1", E4M3, None, (1, 128), (1, 128), True),
)
"""Name, format of codes and of scales, stored block, block, and whether codes are of the transpose."""


def _in_blocks(form: Form, shape: tuple[int, int], device: torch.device) -> BlockScaledTensor:
    """Return random codes and scales; the rows of a square block share a scale."""
    _, codes_format, scale_format, stored_block, block, transposed = form
    generator = torch.Generator().manual_seed(3)
    rows, columns = shape[::-1] if transposed else shape
    largest = codes_format.max_code
    codes = torch.randint(largest, (rows, columns), dtype=torch.uint8, generator=generator)
    codes = pack_fp4(codes) if codes_format is E2M1 else codes
    down, along = block[0] // stored_block[0], block[1] // stored_block[1]
    size = (-(-rows // block[0]), -(-columns // block[1]))
    if scale_format is None:
        scales = torch.exp2(torch.randint(-9, 2, size, generator=generator).float())
    else:
        middle = 120 if scale_format is E8M0 else 56
        scales = torch.randint(middle, middle + 8, size, dtype=torch.uint8, generator=generator)
    scales = scales.repeat_interleave(down, 0).repeat_interleave(along, 1)
    part = Stored(
        mode=form[0], columnwise=transposed, codes=codes.to(device), transposed=transposed, element_format=codes_format,
        scale_memory=ScaleMemory(scales.to(device)), scale_format=scale_format, block=stored_block, shape=shape,
        stored_scale_shape=tuple(scales.shape),
        amax=torch.tensor([3.0], device=device) if codes_format is E2M1 else None,
        largest_scale=448.0 if codes_format is E2M1 else None,
    )  # fmt: skip
    return BlockScaledTensor(part, block)


def _blocks_wrong(form: Form, dtype: torch.dtype, settings: Settings) -> list[str]:
    """Return the columns that differ from plain torch with sums in float64."""
    shape = (2048 + 16, 4096 + 32) if settings.on_gpu else (80, 160)
    values = (drawn(*shape, seed=4) * 10).to(dtype)
    places = ColumnPlaces(0, 0, 6, 11, 3, limits=14, losses=18, ranges=21, loss_maxima=5, range_maxima=6)
    results = []
    for device in (settings.device, torch.device("cpu")):
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        maxima = torch.full((len(MAXIMA_OF_BLOCKS),), NOTHING, dtype=torch.float64, device=device)
        in_blocks = _in_blocks(form, shape, device)
        pending = Pending(values.to(device), None, None, False, places, in_blocks)
        kernels.add([pending], sums, maxima)
        results.append((sums, maxima))
    # The other side of the comparison may be as far off, where it is the pass in C++.
    bounds = {
        name: BOUNDS_ON_GPU.get(name, 0.0) + BOUNDS_ON_CPU.get(name, 0.0) + 1e-13 * ("sum" in name) for name in SUMS
    }
    ours, right = results
    return compared(ours, right, [*SUMS, *MAXIMA_OF_BLOCKS], bounds | dict.fromkeys(MAXIMA_OF_BLOCKS, 1e-14))[1]


def check(settings: Settings, rows: Rows) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for form in FORMS:
            if dtype == torch.float32 and form[0] not in IN_FLOAT32:
                continue
            name = f"{str(dtype).removeprefix('torch.')}, {form[0]}: columns that are wrong"
            with rows.of(name):
                wrong = _blocks_wrong(form, dtype, settings)
                rows.equal(name, len(wrong), 0, note="; ".join(wrong))
