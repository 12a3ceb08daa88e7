"""The split of a model's layers over ranks, and decisions that ranks must make together.

Read from Transformer Engine 2.20.2: the attributes ``tp_group``, ``tp_size``, ``parallel_mode`` and
``sequence_parallel`` of the modules in ``pytorch/module``. Other differences are unknown: layers that differ from rank
to rank under one name count as copies, unless they have numbers (``Layer.by_number``), or ``process_group`` keeps them
apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch.distributed
from torch.optim.optimizer import register_optimizer_step_post_hook

from te_precision_callbacks.config.comparing import FlatConfig, config_hash, difference
from te_precision_callbacks.config.problems import ConfigError
from te_precision_callbacks.engine.engine import Placement
from te_precision_callbacks.errors import PrecisionDebugError
from te_precision_callbacks.forwards import outside_of_dynamo
from te_precision_callbacks.naming import NamedModule
from te_precision_callbacks.ranks import by_rank, in_words, is_distributed, pooled, waiting
from te_precision_callbacks.session.errors import SessionError

Entry = TypeVar("Entry", bound=Hashable)
Result = TypeVar("Result")

_MLP_MODES = {"fc1": "column", "fc2": "row"}
"""The halves of a LayerNormMLP: its weights are always split so; ``set_parallel_mode`` only adds communication."""


def placements(
    modules: Iterable[NamedModule], reduced_over: torch.distributed.ProcessGroup | None
) -> dict[str, Placement]:
    """Layer name -> placement, for the layers that have a tensor-parallel group of several ranks.

    Args:
        modules: the modules of this rank.
        reduced_over: the group over which statistics are reduced; None for all ranks.
    """
    found: dict[str, Placement] = {}
    ranks_of = torch.distributed.get_process_group_ranks
    for named in modules:
        module: Any = named.module
        group = getattr(module, "tp_group", None)
        if getattr(module, "tp_size", 1) < 2 or group is None:
            continue
        rank = torch.distributed.get_rank(group)
        lower = ranks_of(group)[:rank]
        first = not lower if reduced_over is None else set(lower).isdisjoint(ranks_of(reduced_over))
        # GroupedLinear communicates nothing, and shows the input of its GEMMs, which was gathered before the layer.
        gathers = getattr(module, "num_gemms", None) is None
        sequence_parallel = gathers and bool(getattr(module, "sequence_parallel", False))
        for layer in named.layers:
            mode = getattr(module, "parallel_mode", None)
            if hasattr(module, "set_parallel_mode"):
                mode = _MLP_MODES.get(layer.name.rpartition(".")[2])
            found[layer.name] = Placement(rank, first, mode, sequence_parallel)
    return found


class OptimizerSteps:
    """Counts the optimizer steps of this process: those of the optimizer that has made the most steps.

    Ranks that train together make the same number of steps. Each rank may have other optimizers.
    """

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._most = 0
        self._hook = register_optimizer_step_post_hook(_after_step(weakref.ref(self)))

    def __call__(self) -> int:
        """The number of steps; negative if there was none, as on a rank without parameters."""
        return self._most or -1

    def remove(self) -> None:
        """Stop counting."""
        self._hook.remove()

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer."""
        count = self._of[optimizer] = self._of.get(optimizer, 0) + 1
        self._most = max(self._most, count)


def _after_step(counter: weakref.ref[OptimizerSteps]) -> Callable[..., None]:
    @outside_of_dynamo
    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = counter()
        if found is not None:
            found.note(optimizer)

    return note


class Ranks:
    """The ranks that reduce their statistics together, or this one alone.

    Args:
        group: the process group; None for all ranks.
        reduce: whether statistics are reduced at all.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None, *, reduce: bool) -> None:
        self._group = group
        self._several = reduce and is_distributed(group)

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self._several

    @property
    def leads(self) -> bool:
        """Whether this rank writes what all of them have."""
        return not self._several or torch.distributed.get_rank(self._group) == 0

    def meeting(self) -> AbstractContextManager[None]:
        """Surrounds the first collective of an attach, and warns if the other ranks do not reach theirs."""
        if not self._several:
            return nullcontext()
        return waiting(
            "to attach a session together with them. Every rank must start or attach its session at the same place,"
            " before any rank waits for another: in a pipeline before the first schedule, not in a stage's first"
            " forward. With reduce=False no rank waits."
        )

    def any(self, own: bool) -> bool:
        """Whether something is true on any rank."""
        return any(flag for (flag,) in by_rank([int(own)], self._group).values()) if self._several else own

    def pool(self, entries: Iterable[Entry]) -> list[Entry]:
        """The entries of all ranks, each once."""
        return pooled(entries, self._group) if self._several else list(entries)

    def require_alike(self, config: FlatConfig, iteration: int) -> None:
        """Require that all ranks have the same config and first iteration. Otherwise all ranks raise.

        Args:
            config: this rank's config.
            iteration: the debug iteration at which this rank begins.

        Raises:
            ConfigError: the configs differ.
            SessionError: the iterations differ.
        """
        if not self._several:
            return
        of_rank = by_rank([int(config_hash(config)[:14], 16), iteration], self._group)
        if len({number for number, _ in of_rank.values()}) > 1:
            configs = self.pool([tuple(config.items())])
            names = {number: f"config {nth}" for nth, number in enumerate({n: 0 for n, _ in of_rank.values()}, 1)}
            raise ConfigError(
                f"The ranks were given different configs: {in_words({r: names[n] for r, (n, _) in of_rank.items()})}."
                f" The first difference: {difference(dict(configs[0]), dict(configs[1]))}. To reduce statistics, all"
                " ranks need the same config; with reduce=False each rank can have its own."
            )
        if len({begun for _, begun in of_rank.values()}) > 1:
            raise SessionError(
                "The ranks begin at different iterations:"
                f" {in_words({rank: f'iteration {begun}' for rank, (_, begun) in of_rank.items()})}. Give all of them"
                " the same start_step, or resume all of them from the same checkpoint."
            )

    def together(self, compute: Callable[[], Result]) -> Result:
        """Gives the result of ``compute`` on this rank. If it fails on any rank, all raise, and no rank waits for
        another.

        Raises:
            ConfigError: the config cannot be used on another rank.
            SessionError: another failure on another rank.
        """
        if not self._several:
            return compute()
        failures: list[tuple[type[ConfigError] | type[SessionError], str]] = []
        try:
            result = compute()
        except Exception as error:
            kind = ConfigError if isinstance(error, ConfigError) else SessionError
            known = isinstance(error, PrecisionDebugError)
            failures.append((kind, str(error) if known else f"{type(error).__name__}: {error}"))
            self.pool(failures)
            raise
        for kind, text in self.pool(failures):
            raise kind(f"On another rank: {text}")
        return result
