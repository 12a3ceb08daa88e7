"""Expected and measured times of matrix products.

``te-precision speed`` expects the times for this GPU, and ``--calibrate`` measures them: BF16 by
torch, low precision by Transformer Engine's GEMM and its casts, for the three GEMMs of a linear layer. On a CPU the
same code runs on the reference backend, with the expected times of an H200.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpu_parts.rows import Rows, Settings
from te_precision_callbacks.base.vocabulary import OPERANDS, GemmName
from te_precision_callbacks.base.vocabulary import RECIPES as FORMATS
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.speed import Shape, SpeedError, device_named, device_reported
from te_precision_callbacks.speed.calibration import Calibration, calibrate
from te_precision_callbacks.speed.expected import ProductTime, time_products, with_recipes

LARGE = (
    Shape(15872, 4096, 12288),
    Shape(15872, 4096, 4096),
    Shape(15872, 4096, 16384),
    Shape(15872, 16384, 4096),
    Shape(4096, 1024, 256),
)
"""Those of Transformer Engine's tutorial, and one that is too small to gain."""

SMALL = (Shape(64, 64, 128), Shape(64, 64, 64))

RECIPES = ("fp8_current_scaling", "fp8_delayed_scaling", "fp8_block_scaling", "mxfp8", "nvfp4")


def check(settings: Settings, rows: Rows) -> None:
    settings.transformer_engine()
    name = torch.cuda.get_device_name(settings.device) if settings.on_gpu else "cpu"
    known = device_reported(name)
    rows.measured("device", name, note="" if known else "no known device: the expected times are those of an H200")
    device = known or device_named("h200")
    table: Calibration | None = None
    for recipe in RECIPES:
        try:
            device.check_recipe(recipe)
        except SpeedError as error:
            rows.left_out(recipe, str(error))
            continue
        with rows.of(recipe):
            products = with_recipes(_products_of_shapes(LARGE if settings.on_gpu else SMALL, recipe), recipe)
            modeled = time_products(products, device)
            table = calibrate(products, device=settings.device.type, table=table)
            measured = time_products(products, device, table=table)
            _beside(rows, modeled, measured, settings.backend_note)


def _products_of_shapes(shapes: Iterable[Shape], recipe: str) -> list[Product]:
    """Return the three GEMMs of a linear layer of each shape, named after it."""
    products = []
    for shape in shapes:
        tokens, k, n = shape[:3]
        sizes: dict[GemmName, tuple[int, int, int]] = {
            "fprop": (tokens, n, k),
            "dgrad": (tokens, k, n),
            "wgrad": (n, k, tokens),
        }
        for gemm, size in sizes.items():
            operands: dict[str, str] = dict.fromkeys(map(str, OPERANDS[gemm]), FORMATS[recipe].format)
            macs = shape.operations // 2
            products.append(Product(str(shape), "te", gemm, gemm != "fprop", *size, 1, 1, macs, operands))
    return products


def _beside(rows: Rows, modeled: list[ProductTime], measured: list[ProductTime], note: str) -> None:
    for model, product in zip(modeled, measured, strict=True):
        name = f"{product.recipe}, {product.layer}, {product.gemm}"
        if product.source != "calibrated":
            rows.left_out(f"{name}: measured", "the GEMM did not run")
            continue
        low, high = model.interval
        inside = "inside" if low <= product.speedup <= high else "outside"
        rows.measured(f"{name}: BF16", product.high_ms, "ms", f"expected {model.high_ms:.3f}")
        rows.measured(
            f"{name}: low precision", product.low_ms, "ms", f"expected {model.low_ms:.3f}; {note}".rstrip("; ")
        )
        beside = f"expected {model.speedup:.2f} ({low:.2f} to {high:.2f}): {inside} of the interval"
        rows.measured(f"{name}: speed-up", product.speedup, "times", beside)
