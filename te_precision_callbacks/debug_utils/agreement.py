"""Agreement of ranks: all stop together, with the first culprit of any rank, or because a rank could not look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from te_precision_callbacks.ranks import all_reduce, message_device

_MOST_RANKS = 2**20
_LAST = 2**40


@dataclass(frozen=True)
class Find:
    """An overflow.

    Attributes:
        path, class_name, role, batch, evaluation, rank: as in ActivationOverflowError.
        sequence: the number of the event since the last look.
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


@dataclass(frozen=True)
class Failure:
    """A failure of detection itself.

    Attributes:
        rank: the rank on which it happened.
        text: the class and text of the exception.
    """

    rank: int
    text: str


def agree(own: Find | Failure | None, group: dist.ProcessGroup | None) -> Find | Failure | None:
    """The find of the rank whose first bad event came first, or else a failure of any rank; None if there is neither.

    All ranks must call it.

    One number is reduced by MAX; a find or a failure is then sent to all ranks.

    Args:
        own: this rank's find or failure.
        group: the process group; None for all ranks.
    """
    own_rank = dist.get_rank(group)
    # A failure ranks below every find, whose number is above zero.
    order = _LAST - min(own.sequence, _LAST - 1) if isinstance(own, Find) else 0
    key = 0 if own is None else order * _MOST_RANKS + (_MOST_RANKS - 1 - own_rank)
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
    found: Find | Failure = sent[0]
    return found
