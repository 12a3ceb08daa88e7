"""The fingerprints of all ranks in one checkpoint that rank 0 writes.

    found = Pool().pooled(fingerprint)         # on each rank that saves; on rank 0 with those of the other ranks
    saved = of_rank(found, rank)               # rank -> fingerprint, as from the files in a folder

No collective is used: a rank may save alone, as after an exception. Fingerprints that differ in nothing but the rank,
and the name that each rank gives to the run, are one. Each rank leaves a hash in the store of torch's process group,
and its text if no rank has left one with that hash. Rank 0 alone waits: for the hashes not longer than
:data:`WAITING`, for the texts not longer than :data:`FETCHING`. Ranks that come later, or whose text is one too much,
are left out, with a warning.

Rank 0 deletes the texts, and says up to which save it has collected. When another rank saves again, it deletes what it
left for saves up to that one.

Read from torch 2.13: ``torch.distributed.distributed_c10d._get_default_store``.
"""

from __future__ import annotations

import hashlib
import logging
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.ranks import ranks_in_words
from te_precision_callbacks.runs.fingerprints.fingerprint import Fingerprint, FingerprintError

WAITING = 10.0
"""The seconds that rank 0 waits for the hashes of the other ranks."""

FETCHING = 10.0
"""The seconds after which rank 0 fetches no further text."""

MOST_BYTES = 64 << 20
"""The size of all texts after which rank 0 fetches no further one: a checkpoint has to hold them."""

logger = logging.getLogger(__name__)

_PLACE = "te_precision_callbacks/fingerprint"
_COLLECTED = f"{_PLACE}/collected"

Pooled = list[dict[str, Any]]
"""``ranks``, and ``fingerprint``, the text of one of them."""


class _Save(NamedTuple):
    """Which save it is: the ``number``-th, from 0, of an iteration."""

    iteration: int
    number: int

    @classmethod
    def read(cls, text: bytes) -> _Save:
        iteration, number = text.decode().split(".")
        return cls(int(iteration), int(number))

    def __str__(self) -> str:
        return f"{self.iteration}.{self.number}"

    def rank_key(self, rank: int) -> str:
        """The key of the hash of a rank's fingerprint."""
        return f"{_PLACE}/{self}/{rank}"

    def text_key(self, digest: str) -> str:
        """The key of the text with that hash, compressed."""
        return f"{_PLACE}/{self}/text/{digest}"


class Pool:
    """Counts what was saved in an iteration, so that ranks meet in the same save."""

    def __init__(self) -> None:
        self._iteration = -1
        self._count = 0
        self._left: dict[_Save, list[str]] = {}
        self._said = False

    def pooled(self, own: Fingerprint) -> Pooled:
        """The fingerprints of all ranks that save with this one; on all but rank 0 its own.

        Raises:
            RuntimeError: the store of the process group does not answer.
        """
        self._count = self._count + 1 if own.iteration == self._iteration else 0
        self._iteration = own.iteration
        text = own.to_text()
        if own.world_size == 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return [{"ranks": [own.rank], "fingerprint": text}]
        store: Any = torch.distributed.distributed_c10d._get_default_store()
        save = _Save(own.iteration, self._count)
        if own.rank == 0:
            return self._collect(store, save, own, text)
        self._leave(store, save, own, text)
        return [{"ranks": [own.rank], "fingerprint": text}]

    def _leave(self, store: Any, save: _Save, own: Fingerprint, text: str) -> None:
        """Leave a fingerprint for rank 0: the text first, so that it is there for whoever has seen the hash."""
        collected = _Save.read(store.get(_COLLECTED)) if store.check([_COLLECTED]) else None
        for earlier in [earlier for earlier in self._left if collected is not None and earlier <= collected]:
            for key in self._left.pop(earlier):
                store.delete_key(key)
        digest = _digest(own)
        rank_key, text_key = save.rank_key(own.rank), save.text_key(digest)
        self._left[save] = [rank_key]
        if not store.check([text_key]):
            self._left[save].append(text_key)
            store.set(text_key, zlib.compress(text.encode(), 1))
        store.set(rank_key, digest)

    def _collect(self, store: Any, save: _Save, own: Fingerprint, text: str) -> Pooled:
        """The fingerprints that the other ranks have left, those of most ranks first."""
        own_digest = _digest(own)
        ranks_with = {own_digest: [own.rank]}
        missing = []
        for rank, digest in _digests(store, save, own.world_size).items():
            if digest is None:
                missing.append(rank)
            else:
                ranks_with.setdefault(digest, []).append(rank)
        texts = {own_digest: text}
        size, deadline = len(text), time.monotonic() + FETCHING
        others = sorted(ranks_with.keys() - {own_digest}, key=lambda digest: (-len(ranks_with[digest]), digest))
        for digest in others:
            if size <= MOST_BYTES and time.monotonic() <= deadline:
                texts[digest] = zlib.decompress(store.get(save.text_key(digest))).decode()
                size += len(texts[digest])
        for digest in ranks_with:
            store.delete_key(save.text_key(digest))
        store.set(_COLLECTED, str(save))
        self._say_missing(missing, [rank for digest in others if digest not in texts for rank in ranks_with[digest]])
        found = [{"ranks": ranks_with[digest], "fingerprint": text} for digest, text in texts.items()]
        return sorted(found, key=lambda entry: entry["ranks"][0])

    def _say_missing(self, late: list[int], too_many: list[int]) -> None:
        """Warn once of ranks whose fingerprint the checkpoint lacks."""
        if self._said or not (late or too_many):
            return
        self._said = True
        causes = [f"{ranks_in_words(late)} did not save within {WAITING:g} s"] if late else []
        if too_many:
            causes.append(
                f"{ranks_in_words(too_many)} would have been more than {MOST_BYTES >> 20} MiB, or {FETCHING:g} s"
            )
        logger.warning(
            "The checkpoint lacks the fingerprints of some ranks: %s. A resume compares these ranks with the others'"
            " fingerprints.",
            "; ".join(causes),
        )


def _digests(store: Any, save: _Save, world_size: int) -> dict[int, str | None]:
    """Rank -> hash of its fingerprint, of all ranks but 0; None for a rank that has left none in time."""
    keys = {rank: save.rank_key(rank) for rank in range(1, world_size)}
    try:
        store.wait(list(keys.values()), timedelta(seconds=WAITING))
        there = set(keys)
    except RuntimeError:  # of torch, which has waited so long
        there = {rank for rank, key in keys.items() if store.check([key])}
    asked = [keys[rank] for rank in sorted(there)]
    values = store.multi_get(asked) if asked and store.has_extended_api() else [store.get(key) for key in asked]
    found = dict(zip(sorted(there), values, strict=True))
    return {rank: found[rank].decode() if rank in found else None for rank in keys}


def _digest(fingerprint: Fingerprint) -> str:
    """The hash of all but the rank, and the rank's name for the run."""
    return hashlib.sha256(replace(fingerprint, rank=0, run="").to_text().encode()).hexdigest()


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
