"""Compares replicated parameters over ranks, by a checksum of a few elements of each.

Parameters marked as sharded are skipped. Without a mark, a parameter is a replica if it is equal on all ranks before
the first optimizer step.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from te_precision_callbacks.base.ranks.together import Ranks
from te_precision_callbacks.parameters.optimizers import TrainedModel
from te_precision_callbacks.parameters.parameter import NORMS_DIFFER, ParameterProblem, Problem
from te_precision_callbacks.parameters.weight_samples import local_part, raw_codes, sampled_view, stack_equal

TOLERANCE = 1e-6
"""Allowed difference of checksums relative to the sum of absolute values, as between GPU models."""

_WRAPPERS = frozenset(
    {"DistributedDataParallel", "FullyShardedDataParallel", "FullyShardedDataParallelV2", "DeepSpeedEngine"}
)

_COLUMNS = 6
"""Values per parameter in a message: whether its elements vary at the start; its checksums at the start and now, each
with its negative; the sum of its absolute values.
"""

_HEADER = 6
"""Values before them: whether there is news, the iteration and its negative, whether a rank lacks a parameter or has a
shard, and the norm that has clipped its gradients, with its negative.
"""

Sums = dict[str, list[float]]
"""Parameter -> whether its elements vary, its checksum, the checksum's negative, and the sum of its absolute values."""


class Replicas:
    """Compares parameters over ranks that reduce statistics together.

    Attributes:
        checked: rules that had enough data.
    """

    def __init__(self, model: TrainedModel, ranks: Ranks) -> None:
        self.checked: set[str] = set()
        self._model = model
        self._ranks = ranks
        self._start: Sums | None = None
        self._agreed: list[str] = []
        self._news: list[Problem] = []
        self._differing: set[str] = set()
        self._has_shards = False

    @property
    def needs_start(self) -> bool:
        """Return whether :meth:`begin` must be called, before the first optimizer step."""
        return self._start is None and self._ranks.several

    def begin(self) -> None:
        self._start = self._sums()

    def exchange(
        self, news: list[Problem], iteration: int, norm: torch.Tensor | None, *, is_due: bool
    ) -> list[Problem]:
        """Return the problems of all ranks, equal on each; or of this rank, if the ranks are not connected.

        Args:
            news: this rank's new problems.
            norm: this rank's norm in clipping; None without clipping.
            is_due: whether ranks exchange checksums; equal on all ranks.
        """
        if not self._ranks.several or not self._ranks.are_connected:
            return news
        self._news += news
        if not is_due:
            return []
        sums = self._sums()
        start = self._start or {}
        names = sums.keys() | start.keys()
        message = np.full(_HEADER + _COLUMNS * len(self._agreed), -np.inf)
        has_news = bool(self._news) or not names <= set(self._agreed)
        in_parts = self._has_shards or not sums.keys() >= set(self._agreed)
        message[:4] = has_news, iteration, -iteration, in_parts
        if norm is not None:
            message[4:_HEADER] = float(norm), -float(norm)
        for row, name in zip(message[_HEADER:].reshape(-1, _COLUMNS), self._agreed, strict=True):
            row[:3] = start.get(name, row)[:3]
            row[3:] = sums.get(name, row)[-3:]
        merged = self._ranks.merge(message, "parameters")
        if merged is None or merged[1] != -merged[2]:  # the ranks are apart, or out of step
            return []
        if merged[0] > 0:
            entries = self._ranks.pool([*sorted(names), *self._news], "names of parameters", str | Problem)
            self._agreed = sorted({*self._agreed, *(entry for entry in entries if isinstance(entry, str))})
            self._news = []
            pooled = [entry for entry in entries if isinstance(entry, Problem)]
            return pooled + self.exchange([], iteration, norm, is_due=True)
        columns = merged[_HEADER:].reshape(-1, _COLUMNS)
        most, least = merged[4], -merged[5]
        differs = 0 < least < math.inf and most > (1 + NORMS_DIFFER) * least
        norms = [Problem("norms_differ", "", iteration, most / least)] if differs else []
        return [*norms, *self._compare(columns, iteration, in_parts=bool(merged[3] > 0))]

    def take_news(self) -> list[Problem]:
        news = self._news
        self._news = []
        return news

    def _compare(self, merged: npt.NDArray[np.float64], iteration: int, *, in_parts: bool) -> Iterator[Problem]:
        with np.errstate(invalid="ignore"):
            allowed = TOLERANCE * merged[:, 5]
            differed = merged[:, 1] + merged[:, 2] > allowed
            differs = merged[:, 3] + merged[:, 4] > allowed
        varies = merged[:, 0] > 0
        is_parallel = all(
            type(root).__name__ == "DistributedDataParallel"
            and getattr(getattr(root, "process_group", None), "size", lambda: 0)() == self._ranks.size
            for root in self._model.roots
        )
        replicas = np.isfinite(merged[:, 1]) & ~differed  # unknown for a parameter added later
        if differed[varies].any():
            replicas &= varies
        replicas |= is_parallel
        if replicas.any() or not len(merged):
            self.checked |= {"replicas-differ", "no-reduction"}
        names = np.array(self._agreed, object)
        differing: list[str] = names[replicas & differs].tolist()
        new = [name for name in differing if name not in self._differing]
        if new:
            is_alone = len(differing) * 2 > np.count_nonzero(replicas) and not self._is_reduced()
            what: ParameterProblem = "no_sum" if in_parts or differed[varies].any() else "no_reduction"
            self._differing.update(new)
            for name in new:
                yield Problem(what if is_alone else "differs", name, iteration, len(new))
        elif not replicas.any() and differed.any() and not (self._differing or self._is_reduced()):
            self._differing.update(self._agreed)
            for name in names[differed].tolist():
                yield Problem("differs_from_start", name, iteration, int(differed.sum()))

    def _is_reduced(self) -> bool:
        """Return whether this process has a wrapper that reduces gradients, attached or not."""
        # Few classes have many objects, and the class of a class may have no hash.
        classes = {id(kind): kind for kind in map(type, gc.get_objects())}
        return any(base.__name__ in _WRAPPERS for kind in classes.values() for base in kind.__mro__[:-1])

    def _sums(self) -> Sums:
        sharded = {id(weight) for root in self._model.roots for module in root.modules() for weight in _sharded(module)}
        self._has_shards = bool(sharded)
        replicas = [(name, weight) for name, weight, _ in self._model.named_parameters() if id(weight) not in sharded]
        samples = [(name, sampled_view(codes)) for name, weight in replicas if (codes := raw_codes(weight)).numel()]
        sums: Sums = {}
        for indices, stack in stack_equal([sample for _, sample in samples]):
            values = stack.flatten(1)
            # Elements have different weights, so differences do not cancel.
            weighted = values * (1 + torch.arange(values.shape[1], device=values.device, dtype=torch.float64) % 7)
            varies = (values != values[:, :1]).any(1)
            checksums = weighted.sum(1)
            rows = torch.stack([varies.double(), checksums, -checksums, weighted.abs().sum(1)], 1).tolist()
            sums |= {samples[index][0]: row for index, row in zip(indices, rows, strict=True)}
        return sums


def _sharded(module: Any) -> Iterator[torch.nn.Parameter]:
    """Yield a module's parameters that are marked as sharded: by FSDP, a DTensor's placements, TE's and Megatron's
    attributes of tensor and expert parallelism, or DeepSpeed's.
    """
    strategy = getattr(getattr(module, "sharding_strategy", None), "name", "NO_SHARD")
    if type(module).__name__ == "FullyShardedDataParallel" and strategy != "NO_SHARD":
        yield from module.parameters()
    sizes = (getattr(module, name, None) for name in ("tp_size", "tensor_parallel_size"))
    is_split = next((size for size in sizes if size is not None), 2) > 1  # None in models of transformers
    for weight in (weight for weight in module._parameters.values() if weight is not None):
        is_shard = not all(placement.is_replicate() for placement in getattr(weight, "placements", ()))
        is_shard |= is_split and getattr(weight, "tensor_model_parallel", False)
        is_experts = getattr(weight, "allreduce", True) is False
        if is_shard or is_experts or hasattr(weight, "ds_id") or not local_part(weight).numel():
            yield weight
