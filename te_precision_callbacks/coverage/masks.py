"""The share of attention's multiply-adds that a mask keeps.

causal_share(1024, 1024)                        # 0.50049: (S + 1) / (2 S)
share_left({"attn_mask_type": "causal"}, 1024, 1024)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def causal_share(rows: int, columns: int, *, at_the_end: bool = False) -> float:
    """The share of the scores that a causal mask keeps.

    Args:
        rows, columns: the lengths of the queries and of the keys.
        at_the_end: whether the last query sees all keys (aligned to the bottom right); else the first query sees only
            the first key.
    """
    inside = min(rows, columns)
    triangle = inside * (inside + 1) // 2
    others = (columns - inside) * rows if at_the_end else (rows - inside) * columns
    return (triangle + others) / max(1, rows * columns)


def share_left(given: Mapping[str, Any], rows: int, columns: int) -> float | None:
    """The share that the mask of Transformer Engine's attention keeps.

    None if unknown: a custom mask, padding, a sliding window, or packed sequences. ``padding_causal`` counts as without
    padding.

    Read from Transformer Engine 2.20.2, ``pytorch/attention/dot_product_attention``: ``AttnMaskTypes`` and
    ``utils.check_set_window_size``.

    Args:
        given: the arguments ``attn_mask_type`` and ``window_size`` of its forward, and ``qkv_format`` or
            ``qkv_layout``.
        rows, columns: the lengths of the queries and of the keys.
    """
    if str(given.get("qkv_format") or given.get("qkv_layout") or "").startswith("t"):
        return None
    mask, window = str(given.get("attn_mask_type")), given.get("window_size")
    if window is not None and window[0] not in (None, -1):
        return None
    if mask == "no_mask":
        return 1.0 if window is None or window[1] in (None, -1) else None
    kind = mask.removeprefix("padding_")
    if kind not in ("causal", "causal_bottom_right"):
        return None
    return causal_share(rows, columns, at_the_end=kind == "causal_bottom_right")
