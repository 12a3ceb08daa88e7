"""Which of a feature's options hold for a tensor and a GEMM."""

from __future__ import annotations

from typing import Any

import pytest
from transformer_engine.debug.features.api import TEConfigAPIMapper

from te_precision_callbacks.features.base import matching_options

TENSORS = ["activation", "weight", "gradient"]
GEMMS = ["fprop", "dgrad", "wgrad"]


class Upstream(TEConfigAPIMapper):  # type: ignore[misc]
    """Transformer Engine's own choice, which knows one set of options."""


@pytest.mark.parametrize(
    "options",
    [
        {"tensors": ["activation", "weight"], "gemms": ["fprop"], "margin": 1},
        {"tensors_struct": [{"tensor": "weight", "margin": 2}], "gemms": ["fprop", "dgrad"], "margin": 1},
        {"gemms_struct": [{"gemm": "fprop", "tensors": ["weight"], "margin": 3}, {"gemm": "dgrad", "tensors": []}]},
        {
            "quant_format": "MXFP8E4M3",
            "gemms_struct": [
                {"gemm": "fprop", "tensors": ["activation", "weight"]},
                {
                    "gemm": "dgrad",
                    "tensors_struct": [{"tensor": "gradient", "quant_format": "FP8E5M2"}, {"tensor": "weight"}],
                },
            ],
        },
    ],
)
def test_as_upstream_where_upstream_takes_it(options: dict[str, Any]) -> None:
    config = {"enabled": True, **options}
    for tensor in TENSORS:
        for gemm in GEMMS:
            matches, theirs = Upstream().parse_config_and_api(
                config, gemm_parsing=True, tensor_parsing=True, tensor_name=tensor, gemm=gemm
            )
            assert matching_options(config, tensor=tensor, gemm=gemm) == ([theirs] if matches else [])
    assert config == {"enabled": True, **options}


def test_more_than_upstream() -> None:
    """Tensors beside gemms_struct, a bare name, several items of one tensor, and no choice at all."""
    beside = {"tensors": "weight", "margin": 1, "gemms_struct": [{"gemm": "fprop"}, {"gemm": "dgrad", "margin": 2}]}
    assert matching_options(beside, tensor="weight", gemm="dgrad") == [
        {"gemm": "dgrad", "tensor": "weight", "margin": 2}
    ]
    assert matching_options(beside, tensor="weights", gemm="fprop") == []  # a name, not a part of one
    inner = {"tensors": ["weight"], "gemms_struct": [{"gemm": "fprop", "tensors": ["activation"]}]}
    assert matching_options(inner, tensor="weight", gemm="fprop") == []
    assert matching_options(inner, tensor="activation", gemm="fprop") == [{"gemm": "fprop", "tensor": "activation"}]
    several = {"freq": 1, "tensors_struct": [{"tensor": "weight"}, {"tensor": "weight", "freq": 5}]}
    assert matching_options(several, tensor="weight", gemm=None) == [
        {"tensor": "weight", "freq": 1},
        {"tensor": "weight", "freq": 5},
    ]
    assert matching_options({"enabled": True, "mine": 1}, tensor="weight", gemm="fprop") == [{"mine": 1}]
