"""The fingerprints of all ranks in one checkpoint that rank 0 writes.

    found = Pool().pooled(fingerprint)         # on each rank that saves; on rank 0 with those of the other ranks
    saved = of_rank(found, rank)               # rank -> fingerprint, as from the files in a folder

No collective is used: a rank may save alone, as after an exception. Each rank leaves its fingerprint in the store of
torch's process group, and rank 0 alone waits for the others, not longer than :data:`WAITING`; a rank that does not come
is left out. Fingerprints that differ in nothing but the rank, and the name that each rank gives to the run, are one.

Read from torch 2.13: ``torch.distributed.distributed_c10d._get_default_store``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from te_precision_callbacks.fingerprints.model import Fingerprint, FingerprintError

WAITING = 10.0
"""The seconds that rank 0 waits for the other ranks."""

Pooled = list[dict[str, Any]]
"""``ranks``, and ``fingerprint``, the text of the first of them."""


class Pool:
    """Counts what was saved in an iteration, so that ranks meet in the same save."""

    def __init__(self) -> None:
        self._iteration = -1
        self._count = 0

    def pooled(self, own: Fingerprint) -> Pooled:
        """The fingerprints of all ranks that save with this one; on all but rank 0 its own.

        Raises:
            RuntimeError: the store of the process group does not answer.
        """
        self._count = self._count + 1 if own.iteration == self._iteration else 0
        self._iteration = own.iteration
        if own.world_size == 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return _grouped([own])
        store: Any = torch.distributed.distributed_c10d._get_default_store()
        place = f"te_precision_callbacks/fingerprint/{own.iteration}.{self._count}"
        if own.rank != 0:
            store.set(f"{place}/{own.rank}", own.to_text())
            return _grouped([own])
        keys = [f"{place}/{rank}" for rank in range(1, own.world_size)]
        try:
            store.wait(keys, timedelta(seconds=WAITING))
        except RuntimeError:  # of torch, which has waited so long
            keys = [key for key in keys if store.check([key])]
        others = [Fingerprint.from_text(store.get(key).decode()) for key in keys]
        for key in keys:
            store.delete_key(key)
        return _grouped([own, *others])


def of_rank(found: Iterable[Mapping[str, Any]], rank: int) -> dict[int, Fingerprint]:
    """The fingerprints that a rank is compared with: its own, or those of all ranks if it has none.

    Raises:
        FingerprintError: one of them is damaged, or of another version.
    """
    try:
        every = {int(each): str(entry["fingerprint"]) for entry in found for each in entry["ranks"]}
    except (TypeError, KeyError, ValueError) as error:
        raise FingerprintError(f"The fingerprints are damaged: {type(error).__name__}: {error}.") from error
    chosen = [rank] if rank in every else list(every)
    return {each: replace(Fingerprint.from_text(every[each]), rank=each) for each in chosen}


def _grouped(fingerprints: Iterable[Fingerprint]) -> Pooled:
    def text(fingerprint: Fingerprint) -> str:
        return replace(fingerprint, rank=0, run="").to_text()

    alike = itertools.groupby(sorted(fingerprints, key=text), text)
    groups = [sorted(members, key=lambda one: one.rank) for _, members in alike]
    return [
        {"ranks": [one.rank for one in group], "fingerprint": group[0].to_text()}
        for group in sorted(groups, key=lambda group: group[0].rank)
    ]
