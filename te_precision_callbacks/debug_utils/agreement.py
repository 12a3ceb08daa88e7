"""Over ranks: all stop together, with the first culprit of any of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from te_precision_callbacks.engine.reduction import all_reduce, message_device

_MOST_RANKS = 2**20
_LAST = 2**40


@dataclass(frozen=True)
class Find:
    """An overflow.

    Attributes:
        path, class_name, role, batch, evaluation, rank: as in ActivationOverflowError.
        sequence: the number of its event since the last look.
        headline: which tensor is bad.
        advice: what to do.
        report: the whole report.
    """

    path: str
    class_name: str
    role: str
    batch: int
    evaluation: bool
    rank: int
    sequence: int
    headline: str
    advice: str
    report: str


def agree(own: Find | None, group: dist.ProcessGroup | None) -> Find | None:
    """The find of the rank whose first bad event came first; None if no rank has one. All ranks must call it.

    One MAX of one number; where there is a find, its text is sent to all.

    Args:
        own: this rank's.
        group: the process group; None for all ranks.
    """
    rank = dist.get_rank(group)
    key = 0 if own is None else (_LAST - min(own.sequence, _LAST - 1)) * _MOST_RANKS + (_MOST_RANKS - 1 - rank)
    device = message_device(group)
    greatest = torch.tensor([key], dtype=torch.int64, device=device)
    all_reduce(greatest, dist.ReduceOp.MAX, group)
    first = int(greatest.item())
    if first == 0:
        return None
    owner = _MOST_RANKS - 1 - first % _MOST_RANKS
    sent: list[Any] = [own]
    source = owner if group is None else dist.get_global_rank(group, owner)
    dist.broadcast_object_list(sent, src=source, group=group, device=device)
    find: Find = sent[0]
    return find
