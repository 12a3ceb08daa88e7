"""The error that a format has at the least, as docs/gemm-error.md states it."""

from __future__ import annotations

import re

import pytest
import torch

from te_precision_callbacks.gemm_error.factors import factor_of
from tests.docs.pages import PAGES
from tests.gemm_error.gemms import BF16, quantizer


@pytest.mark.parametrize(
    ("name", "recipe", "gradient"),
    [
        ("E4M3 and E4M3", "current", False),
        ("E5M2 and E4M3", "current", True),
        ("NVFP4 without Hadamard", "nvfp4", False),
    ],
)
def test_the_floor_of_a_format(name: str, recipe: str, gradient: bool) -> None:
    page = PAGES["docs/gemm-error.md"].read_text(encoding="utf-8")
    stated = re.search(rf"\| {name} \| ([\d.]+) % \|", page)
    assert stated
    torch.manual_seed(0)
    high = [torch.randn(512, 512).to(BF16) for _ in range(2)]
    makers = [quantizer(recipe, gradient=gradient), quantizer(recipe)]
    decoded = [factor_of(make(item), columnwise=False).matrix() for make, item in zip(makers, high, strict=True)]
    exact = high[0].double() @ high[1].double().t()
    error = (decoded[0] @ decoded[1].t() - exact).norm() / exact.norm()
    assert 100 * error.item() == pytest.approx(float(stated[1]), abs=0.1)
