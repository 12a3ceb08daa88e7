"""What the products of a run ran in, on all ranks, and whether the run's contract holds."""

from __future__ import annotations

import functools
from collections.abc import Callable

from te_precision_callbacks.config.problems import ConfigError
from te_precision_callbacks.coverage.contract_keeper import ContractKeeper, PrecisionContractError, require_layers
from te_precision_callbacks.coverage.coverage import MOST_WITHOUT_BACKWARD, NOTHING, Coverage
from te_precision_callbacks.coverage.other_steps import in_lines
from te_precision_callbacks.coverage.parallel import Ranks
from te_precision_callbacks.coverage.shared_products import shared_products
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.session.chronicle import Chronicle
from te_precision_callbacks.session.results import Results, RunResults


class Judgement:
    """Shares the products of the first steps with the other ranks, until all have had a backward, and judges the
    contract.

    Args:
        options: the session's options.
        results: the results of the run.
        ranks: those that reduce together.
        chronicle: receives what was found.

    Attributes:
        coverage: that of the end of the run, once it was asked for.
        other_steps: the lines on steps in which other products ran in low precision, once they were asked for.
    """

    def __init__(self, options: SessionOptions, results: RunResults, ranks: Ranks, chronicle: Chronicle) -> None:
        self.coverage = NOTHING
        self.other_steps: list[str] = []
        self._results = results
        self._ranks = ranks
        self._chronicle = chronicle
        self._contract = options.require
        self._keeper = None if options.require is None else ContractKeeper(options.require, options.on_broken)
        self._shares_left = 0

    @property
    def demands(self) -> bool:
        """Whether there is a contract."""
        return self._keeper is not None

    def attach(self, names: list[str]) -> None:
        """Share the products of the next step; refuse a contract about layers that no rank has.

        Args:
            names: of all modules of this rank and of their layers.

        Raises:
            ConfigError: the contract has such a pattern.
        """
        self._shares_left = MOST_WITHOUT_BACKWARD if self._ranks.several else 0
        if self._contract is not None:
            try:
                require_layers(self._contract, self._ranks.pool(names, "names", str))
            except ConfigError:
                self._keeper = None  # a contract that is refused is not judged at the end of the run
                raise

    @property
    def _changes(self) -> int:
        return self._results.audit.changes + self._results.coverage.changes

    def begin_step(self, iteration: int) -> None:
        """Note for the other ranks whether there is something to judge; before the numbers of the step are sent."""
        if self._keeper is not None:
            self._keeper.begin_step(self._changes, iteration, self._ranks)

    def end_step(self, iteration: int) -> None:
        """Judge a step, if it is time.

        Raises:
            PrecisionContractError: the contract is broken, and that is to end the run.
        """
        results = self._results
        if self._shares_left:
            own = results.coverage_at(iteration)
            shared = Coverage(shared_products(own, self._ranks, "products of the first step", of_one=True))
            results.coverage.put_of_ranks(shared)
            is_over = all(self._ranks.pool([own.has_backward or not own], "backwards of the first step", bool))
            is_over = is_over or not self._ranks.are_together  # ranks that are apart share nothing again
            self._shares_left = 0 if is_over else self._shares_left - 1
        if self._keeper is not None:
            keeper, changes = self._keeper, self._changes
            self._judge(iteration, lambda: keeper.end_step(results.coverage_at, changes, iteration, self._ranks))

    def end_run(self, iteration: int, why_not: str, *, has_step: bool, raises: bool) -> None:
        """Judge at the end of the run what was not judged yet.

        Args:
            iteration: the last step.
            why_not: why there is nothing to judge, if there is nothing.
            has_step: whether a step has run.
            raises: False if something else ends the run, which must not be hidden.

        Raises:
            PrecisionContractError: as :meth:`end_step`.
        """
        if self._keeper is not None:
            has_run = has_step and iteration in self._results.iterations
            coverage = Results(self._results).coverage(iteration) if has_run else NOTHING
            judge = functools.partial(
                self._keeper.end_run, self._results.coverage_at, coverage, self._changes, iteration, self._ranks
            )
            self._judge(iteration, lambda: judge(why_not=why_not, raises=raises))

    def _judge(self, iteration: int, judge: Callable[[], str | None]) -> None:
        """Judge, and tell the sinks what was found."""
        try:
            broken = judge()
        except PrecisionContractError as error:
            self._chronicle.tell_judgement(str(error), iteration)
            raise
        if broken is not None:
            self._chronicle.tell_judgement(broken, iteration)

    def end_coverage(self) -> list[str]:
        """How much ran in low precision, in the last step and in others, in lines; kept for the summary. Empty if no
        step has run."""
        self.coverage = Results(self._results).coverage()
        self.other_steps = in_lines(self._results.other_steps()) if self.coverage else []
        return [str(self.coverage), *self.other_steps] if self.coverage else []
