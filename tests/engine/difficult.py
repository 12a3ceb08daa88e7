"""Tensors that were made to be difficult, drawn with a seed."""

import math

import numpy as np
import torch

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (0,), (7,), (1, 1), (33, 65), (3, 5, 37), (2, 130), (128, 17), (48, 144)]


def drawn(seed: int, *, columns: int | None = None, rows: int | None = None) -> torch.Tensor:
    random = np.random.default_rng(seed)
    dtype = DTYPES[seed % 4] if rows is None else DTYPES[1 + seed % 2]
    shape = SHAPES[random.integers(len(SHAPES))] if rows is None else (rows, columns or 1)
    x = random.standard_normal(shape) * np.exp(random.choice([0.0, 2.0, 8.0]) * random.standard_normal(shape))
    x = x * 10.0 ** random.choice([-44, -38, -12, 0, 0, 0, 12, 37])
    for value in random.choice([0.0, math.inf, -math.inf, math.nan, 1e30, 1e-30, -0.0], 3):
        if random.random() < 0.5:
            x = np.where(random.random(shape) < random.choice([0.02, 0.3, 1.0], p=[0.6, 0.3, 0.1]), value, x)
    if random.random() < 0.2 and x.size:
        x.reshape(-1)[random.integers(x.size)] *= 1e7
    values = torch.from_numpy(np.asarray(x)).to(dtype)
    if rows is None and random.random() < 0.4:
        values = values.transpose(0, -1) if values.ndim > 1 else torch.stack([values, values], -1)[:, 1]
    return values
