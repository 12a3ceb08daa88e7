"""Exchange and decisions of the ranks that reduce statistics together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed

from te_precision_callbacks.base.errors import ObservationError, PrecisionDebugError, SessionError
from te_precision_callbacks.base.ranks import in_words, is_distributed
from te_precision_callbacks.base.ranks.messages import Messages, RanksLostError
from te_precision_callbacks.config.differences import FlatConfig, config_hash, difference
from te_precision_callbacks.config.problems import ConfigError

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry", bound=Hashable)
Found = TypeVar("Found")

_CONFIG = tuple[tuple[str, Any], ...]


def leads(group: torch.distributed.ProcessGroup | None, *, reduce: bool) -> bool:
    return not (reduce and is_distributed(group)) or torch.distributed.get_rank(group) == 0


class Ranks:
    """The ranks that reduce their statistics together, or only this one.

    From :meth:`meet` on they exchange messages (:mod:`te_precision_callbacks.base.ranks`). After a failure, each rank
    continues with local values.

    Args:
        group: the process group of these ranks; None for all.
        reduce: whether statistics are reduced.
        report: receives failures; in a strict session it raises.

    Attributes:
        messages: the messages to the other ranks; None before :meth:`meet`.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup | None,
        *,
        reduce: bool,
        report: Callable[[str, str, Exception], None],
    ) -> None:
        self.messages: Messages | None = None
        self._group = group
        self._reduce = reduce
        self._report = report
        self._error: type[PrecisionDebugError] | None = None
        self._note = False

    @property
    def several(self) -> bool:
        """Return whether there are other ranks. The process group may be made after the start of a session."""
        return self._reduce and is_distributed(self._group)

    @property
    def size(self) -> int:
        return torch.distributed.get_world_size(self._group) if self.several else 1

    @property
    def are_together(self) -> bool:
        return self.messages is not None and self.messages.is_open

    @property
    def leads(self) -> bool:
        """Return whether this rank writes and logs for all; each does without reduction."""
        return leads(self._group, reduce=self._reduce)

    # ------------------------------------------------------------------ together, and apart

    def meet(self) -> None:
        if not self.several:
            return
        try:
            if self.messages is None:
                self.messages = Messages(self._group, "session")
            self.messages.open("to attach a session")
        except RanksLostError as error:
            self._lost("meeting", error)
        except Exception as error:  # before the others have heard of this rank
            self.messages = self.messages or Messages(self._group, "session")
            self.messages.decline(error)
            self._report("meeting", "together with the other ranks", error)

    @contextmanager
    def together(
        self, doing: str, *, agree: bool, error: type[PrecisionDebugError], on_all: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Surround code that all ranks run. A rank with a failure leaves the others, so that none waits for it.

        Args:
            doing: the action, for messages.
            agree: whether all ranks raise the failure of one.
            error: the exception of the other ranks; a ConfigError stays one everywhere.
            on_all: exceptions that all ranks raise by themselves.
        """
        self._error = error if agree else None
        try:
            yield
            if agree:
                self._agree(doing)
        except on_all:
            raise
        except BaseException as failure:
            self.leave(failure, raises=agree)
            raise
        finally:
            self._error = None

    def _agree(self, doing: str) -> None:
        """Raise if another rank failed. A failure of the exchange itself is only reported, since no other rank would
        raise it."""
        try:
            self.any("agreement", doing, own=False)
        except (ConfigError, SessionError, ObservationError):  # those of another rank
            raise
        except Exception as failure:
            self.leave(failure)
            self._report(doing, "together with the other ranks", failure)

    def leave(self, error: BaseException, *, raises: bool = False) -> None:
        """Leave the other ranks after a failure on this one: see :meth:`Messages.leave`."""
        if self.messages is not None:
            self.messages.leave(error, raises=raises)

    def settle(self) -> None:
        """Begin the steps of training. A failure is only reported, since no other rank would raise it."""
        if self.messages is None:
            return
        try:
            self.messages.settle()
        except Exception as error:
            self.leave(error)
            self._report("settling", "together with the other ranks", error)

    def look(self, iteration: int, optimizer_steps: int) -> int | None:
        """Search for lost ranks: see :meth:`Messages.tick`."""
        if self.messages is None or self.messages.is_open:
            return None
        found = self.messages.tick(iteration, optimizer_steps)
        if found is not None and self.leads:
            logger.warning("The ranks have met again: statistics are reduced from iteration %d on.", found)
        return found

    def end(self) -> None:
        if self.messages is not None:
            self.messages.close()

    def _lost(self, doing: str, error: RanksLostError) -> None:
        departure = error.departure
        if departure.raises and self._error is not None and self.messages is not None:
            kind = ConfigError if departure.kind == ConfigError.__name__ else self._error
            raise kind(f"On {self.messages.name(departure.rank)}: {departure.text}") from None
        self._report(doing, "together with the other ranks", error)

    # ------------------------------------------------------------------ what they tell one another

    def pool(self, entries: Iterable[Entry], kind: str, of: Any) -> list[Entry]:
        """The entries of all ranks without duplicates; unchanged without other ranks.

        Args:
            entries: the entries of this rank.
            kind: a name, equal on all ranks.
            of: the type of an entry: see :meth:`Messages.pooled`.
        """
        own = list(entries)
        why = f"to tell them: {kind}"
        return self._exchange(f"exchanging {kind}", lambda messages: messages.pooled(own, kind, why, of), own)

    def add(self, numbers: Sequence[float], kind: str) -> list[float]:
        """The sums of numbers over all ranks; unchanged without other ranks. ``kind`` is a name, equal on all ranks."""

        def added(messages: Messages) -> list[float]:
            found = np.array(numbers, np.float64)
            messages.merge(kind, f"to add them up: {kind}", found, len(numbers))
            return [float(number) for number in found]

        return self._exchange(f"exchanging {kind}", added, list(numbers))

    def largest(self, numbers: npt.NDArray[np.float64], kind: str) -> npt.NDArray[np.float64] | None:
        """The maximum of each number over all ranks; None without other ranks, or if a rank is lost."""

        def merged(messages: Messages) -> npt.NDArray[np.float64] | None:
            found = numbers.copy()
            messages.merge(kind, f"to compare {kind}", found, 0)
            return found

        return self._exchange(f"comparing {kind}", merged, None)

    def any(self, kind: str, doing: str, *, own: bool) -> bool:
        holds = (1.0,)
        return self._exchange(doing, lambda messages: messages.largest(kind, f"in {doing}", float(own)) == holds, own)

    def _exchange(self, doing: str, exchange: Callable[[Messages], Found], own: Found) -> Found:
        """Exchange with the other ranks; returns ``own`` without them, and if a rank is lost."""
        if self.messages is None or not self.messages.is_open:
            return own
        try:
            return exchange(self.messages)
        except RanksLostError as error:
            self._lost(doing, error)
            return own

    def still_together(self) -> bool:
        """Return whether all ranks are connected, so that all can raise."""
        self.any("agreement", "judging", own=False)
        return not self.several or self.are_together

    @property
    def note(self) -> bool:
        """Whether this rank wants a check; sent with the next values of a step."""
        return self._note

    @note.setter
    def note(self, note: bool) -> None:
        self._note = note
        if self.messages is not None:
            self.messages.note = note
            self.messages.take_noted()

    def noted(self, *, asks: bool) -> bool:
        """Return whether any rank wants a check. Without values in the step, a message is sent only if ``asks`` is
        set."""
        if not self.several:
            return self._note
        if self.messages is None or not self.messages.is_open:
            return False
        found = self.messages.take_noted()
        if found is None and asks:
            found = self.any("notes", "to ask whether precision has changed", own=self._note)
        return bool(found) and self.are_together

    def stop_together(self, *, own: bool) -> bool:
        """Return whether all ranks stop now. The request of a rank is sent with the next values; all receive it in one
        step."""
        if not self.several:
            return own
        if self.messages is None or not self.messages.is_open:
            return False
        self.messages.wants_stop = own
        return self.messages.stop_is_wanted

    def require_alike(self, config: FlatConfig, iteration: int) -> None:
        """Require equal configs and first iterations on all ranks. Otherwise all ranks raise.

        Raises:
            ConfigError: the configs differ.
            SessionError: the iterations differ.
        """
        messages = self.messages
        if messages is None or not messages.is_open:
            return
        own = int(config_hash(config)[:13], 16), iteration  # 52 bits, which a float64 holds
        try:
            found = messages.largest("facts", "to compare configs", *own, *(-number for number in own))
            if found[:2] == tuple(-number for number in found[2:]):
                return
            of_rank = messages.by_rank(own, "facts of ranks", "to compare configs")
            configs = messages.pooled([tuple(config.items())], "configs", "to compare configs", _CONFIG)
        except RanksLostError as error:
            self._lost("comparing the configs", error)
            return
        if len({number for number, _ in of_rank.values()}) > 1:
            names = {number: f"config {nth}" for nth, number in enumerate({n: 0 for n, _ in of_rank.values()}, 1)}
            raise ConfigError(
                f"The ranks were given different configs: {in_words({r: names[n] for r, (n, _) in of_rank.items()})}."
                f" The first difference: {difference(dict(configs[0]), dict(configs[1]))}. To reduce statistics, all"
                " ranks need the same config; with reduce=False each rank can have its own."
            )
        raise SessionError(
            "The ranks begin at different iterations:"
            f" {in_words({rank: f'iteration {begun}' for rank, (_, begun) in of_rank.items()})}. Give all of them"
            " the same start_step, or resume all of them from the same checkpoint."
        )
