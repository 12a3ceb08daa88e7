"""The uses of torch.distributed that several parts share: the rank, and small messages among ranks."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

WAITING = 60.0
"""Seconds after which a rank warns that it waits for the others."""

Entry = TypeVar("Entry", bound=Hashable)


def own_rank() -> int:
    """The rank of this process; 0 for a single process."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if is_initialized() else 1


def is_initialized() -> bool:
    """Whether torch.distributed is available and in use."""
    return dist.is_available() and dist.is_initialized()


def is_distributed(group: dist.ProcessGroup | None) -> bool:
    """Whether there is more than one rank to reduce over."""
    return is_initialized() and dist.get_world_size(group) > 1


_FINISHED: deque[dist.Work] = deque(maxlen=16)
"""The last reductions of tensors on the CPU, kept for the reason that :func:`all_reduce` gives."""


def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    """Reduce a tensor over the group, in place; all ranks must call it alike.

    Gloo's thread releases a tensor some time after the reduction has ended, and needs Python's lock to do so. A process
    group that is destroyed with a DistributedDataParallel module waits for that thread while it holds the lock, so a
    script that ends at that moment hangs (seen in torch 2.13, whose own Python groups release the lock). The thread
    does not need the lock as long as we hold the reduction's handle, which holds the tensor.

    Args:
        tensor: of any shape, on the group's :func:`message_device`.
        op: the reduction.
        group: the process group; None for all ranks.
    """
    if tensor.device.type != "cpu":
        dist.all_reduce(tensor, op=op, group=group)
    elif (work := dist.all_reduce(tensor, op=op, group=group, async_op=True)) is not None:
        work.wait()
        _FINISHED.append(work)


def pooled(own: Iterable[Entry], group: dist.ProcessGroup | None) -> list[Entry]:
    """The entries of all ranks, each once, in the same order everywhere; all ranks must call it alike.

    Repeatedly, the lowest rank with entries that were not sent yet sends all of them. So every entry travels once, and
    the number of messages grows with the number of different lists (pipeline stages times tensor-parallel shards), not
    with the number of ranks.

    Args:
        own: this rank's entries; they must survive pickling.
        group: the process group; None for all ranks.
    """
    missing = list(dict.fromkeys(own))
    found: dict[Entry, None] = {}
    device = message_device(group)
    rank, nobody = dist.get_rank(group), dist.get_world_size(group)
    while True:
        lowest = torch.tensor([rank if missing else nobody], device=device)
        all_reduce(lowest, dist.ReduceOp.MIN, group)
        sender = int(lowest.item())
        if sender == nobody:
            return list(found)
        sent: list[Any] = [missing]
        source = sender if group is None else dist.get_global_rank(group, sender)
        dist.broadcast_object_list(sent, src=source, group=group, device=device)
        found.update(dict.fromkeys(sent[0]))
        missing = [entry for entry in missing if entry not in found]


def by_rank(numbers: Sequence[int], group: dist.ProcessGroup | None) -> dict[int, tuple[int, ...]]:
    """The numbers of each rank of the group: global rank -> as many as this rank gives; all must call it alike.

    Args:
        numbers: whole numbers that fit in an int64.
        group: the process group; None for all ranks.
    """
    of_all = torch.zeros(dist.get_world_size(group), len(numbers), dtype=torch.int64)
    of_all[dist.get_rank(group)] = torch.tensor(numbers)
    of_all = of_all.to(message_device(group))
    all_reduce(of_all, dist.ReduceOp.SUM, group)
    ranks = range(len(of_all)) if group is None else dist.get_process_group_ranks(group)
    return {rank: tuple(row) for rank, row in zip(ranks, of_all.tolist(), strict=True)}


def in_words(of_rank: Mapping[int, Any]) -> str:
    """Which ranks have what, the most frequent first: ``5 on ranks 0, 2-7; 4 on rank 1``."""
    ranks_with: dict[Any, list[int]] = {}
    for rank, value in sorted(of_rank.items()):
        ranks_with.setdefault(value, []).append(rank)
    most_first = sorted(ranks_with.items(), key=lambda entry: -len(entry[1]))
    shown = [f"{value} on {ranks_in_words(ranks)}" for value, ranks in most_first[:_MOST_NAMED]]
    more = len(most_first) - len(shown)
    return "; ".join([*shown, f"and {more} others"] if more else shown)


_MOST_NAMED = 8


def ranks_in_words(ranks: Sequence[int]) -> str:
    """The numbers of ranks in few words: ``ranks 0, 2-7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    shown = ["-".join(map(str, span)) for span in spans[:_MOST_NAMED]]
    more = [f"and {len(spans) - len(shown)} more spans"] if len(spans) > len(shown) else []
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown + more)}"


@contextlib.contextmanager
def waiting(purpose: str) -> Iterator[None]:
    """Warn if the other ranks do not arrive in time: they may never do, and without a warning that is a silent hang.

    Args:
        purpose: why this rank waits for them, and why they may not arrive.
    """

    def say() -> None:
        logger.warning("Rank %d has waited %g s for the other ranks, %s", rank, WAITING, purpose)

    rank = dist.get_rank()
    timer = threading.Timer(WAITING, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the group takes tensors, of the same kind on all ranks: the GPU if the group uses NCCL."""
    if "nccl" in dist.get_backend_config(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
