"""The share of attention that masks leave, against masks of torch."""

from typing import Any

import pytest
import torch

from te_precision_callbacks.coverage.matrix_products import causal_share, share_left


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 5), (3, 7), (7, 3)])
def test_a_causal_mask(rows: int, columns: int) -> None:
    first, last = torch.ones(rows, columns).tril(), torch.ones(rows, columns).tril(columns - rows)
    assert causal_share(rows, columns) == pytest.approx(first.mean().item())
    assert causal_share(rows, columns, at_the_end=True) == pytest.approx(last.mean().item())


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({"attn_mask_type": "no_mask"}, 1.0),
        ({"attn_mask_type": "no_mask", "window_size": (-1, -1)}, 1.0),
        ({"attn_mask_type": "no_mask", "window_size": (-1, 0)}, None),
        ({"attn_mask_type": "causal", "window_size": (-1, 0)}, 5 / 8),
        ({"attn_mask_type": "padding_causal"}, 5 / 8),
        ({"attn_mask_type": "causal_bottom_right", "window_size": None}, 5 / 8),
        ({"attn_mask_type": "causal", "window_size": (1, 0)}, None),
        ({"attn_mask_type": "causal", "qkv_format": "thd"}, None),
        ({"attn_mask_type": "padding_causal", "qkv_layout": "t3hd"}, None),
        ({"attn_mask_type": "padding"}, None),
        ({"attn_mask_type": "arbitrary"}, None),
        ({}, None),
    ],
)
def test_the_masks_of_transformer_engine(given: dict[str, Any], share: float | None) -> None:
    assert share_left(given, 4, 4) == share
