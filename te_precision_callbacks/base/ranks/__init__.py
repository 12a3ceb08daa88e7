"""The rank of this process, and messages among ranks.

``group.py`` is the process group, ``meeting.py`` connects the ranks, ``messages.py`` exchanges messages, and
``together.py`` has the ranks of a session and their decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from te_precision_callbacks.base.counts import first_of, group_by_key


def own_rank() -> int:
    """Return the rank of this process; 0 without torch.distributed."""
    if is_initialized():
        return dist.get_rank()
    return 0


def world_size() -> int:
    if is_initialized():
        return dist.get_world_size()
    return 1


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_distributed(group: dist.ProcessGroup | None) -> bool:
    return is_initialized() and dist.get_world_size(group) > 1


def has_other_ranks(group: dist.ProcessGroup | None) -> bool:
    """Return whether there are other ranks; the backend "fake" only pretends to have them."""
    return is_distributed(group) and dist.get_backend(group) != "fake"


def format_by_rank(values: Mapping[int, Any]) -> str:
    """Format values with their ranks, most frequent first: ``5 on ranks 0, 2-7; 4 on rank 1``."""
    ranks_with = group_by_key((value, rank) for rank, value in sorted(values.items()))
    most_first = sorted(ranks_with.items(), key=lambda entry: -len(entry[1]))
    texts = (f"{value} on {format_ranks(ranks)}" for value, ranks in most_first)
    return "; ".join(first_of(texts, _MOST_NAMED, "and {} others"))


_MOST_NAMED = 8


def format_ranks(ranks: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    texts = ("-".join(map(str, span)) for span in spans)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(first_of(texts, _MOST_NAMED, 'and {} more spans'))}"
