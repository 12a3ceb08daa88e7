"""The names of low precision in the line of a coverage."""

from __future__ import annotations

import pytest

from te_precision_callbacks.coverage.coverage import Coverage, Product


def product(macs: int, *formats: str) -> Product:
    operands = dict(zip(("activation", "weight"), formats, strict=True))
    return Product(f"layer{macs}", "te", "fprop", False, macs, 1, 1, 1, 1, macs, operands)


@pytest.mark.parametrize(
    ("products", "line"),
    [
        ([("MXFP8 E4M3", "MXFP8 E4M3")], "MXFP8 in 100 % of the multiply-adds"),
        ([("NVFP4", "NVFP4")], "NVFP4 in 100 % of the multiply-adds"),
        ([("FP8 block E4M3", "FP8 block E4M3")], "FP8 block in 100 % of the multiply-adds"),
        ([("FP8 E4M3", "FP8 E5M2")], "FP8 in 100 % of the multiply-adds"),
        (
            [("NVFP4", "NVFP4"), ("MXFP8 E4M3", "MXFP8 E4M3"), ("FP8 E4M3", "FP8 E4M3")],
            "NVFP4 in 16.7 % of the multiply-adds (fprop 16.7); MXFP8 in 33.3 % of the multiply-adds (fprop 33.3);"
            " FP8 in 50.0 % of the multiply-adds (fprop 50.0)",
        ),
    ],
)
def test_a_line_names_the_format(products: list[tuple[str, str]], line: str) -> None:
    coverage = Coverage(product(place, *formats) for place, formats in enumerate(products, 1))
    assert str(coverage).startswith(line)
    without_nvfp4 = sum(place for place, formats in enumerate(products, 1) if "NVFP4" not in formats)
    assert coverage.share("fp8") == pytest.approx(without_nvfp4 / coverage.macs()), "a contract's fp8 includes MXFP8"
