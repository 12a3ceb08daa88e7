"""Results that a run leaves when it ends: its coverage, verdict and page, and the lines on stderr."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.coverage.contract_keeper import PrecisionContractError
from te_precision_callbacks.coverage.coverage import NOTHING, Coverage
from te_precision_callbacks.coverage.other_steps import in_lines
from te_precision_callbacks.diagnosis.engine import PrecisionFindingError
from te_precision_callbacks.diagnosis.finding import Verdict
from te_precision_callbacks.runs.answers import broken_in_short, ended_by
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.session.delivery import RunFiles

logger = logging.getLogger(__name__)

MOST_LINES = 8

_QUIET = "TE_PRECISION_QUIET"


class ClosingReport:
    def __init__(self, context: RunContext, files: RunFiles) -> None:
        self._context = context
        self._results = context.results
        self._files = files
        self._coverage = NOTHING
        self._other_steps: list[str] = []

    def check_whole_run(self) -> None:
        """Check a resumed run with its earlier starts, as ``te-precision diagnose`` does."""
        place = self._files.place
        if place is not None and place.segment:
            from te_precision_callbacks.diagnosis.replay import diagnose
            from te_precision_callbacks.runs import open_run

            self._results.whole_run = diagnose(open_run(self._results.log_dir, run=place.run_id))

    def log_coverage(self) -> None:
        self._coverage = self._results.coverage_with_other_ranks(None)
        if self._coverage:
            self._other_steps = in_lines(self._results.other_steps())
            for text in (str(self._coverage), *self._other_steps):
                logger.info("%s.", text)
                self._context.inspector.log(text)

    def write_page(self, error: BaseException | None) -> None:
        """Log the command that makes a page of the run; write the page if that is wanted and no error ended the run."""
        if (run_id := self._files.log_command()) and self._context.options.report and error is None:
            self._files.write_page(run_id)

    def print_verdict(self, error: BaseException | None, trace: Path | None) -> None:
        if self._context.options.quiet or os.environ.get(_QUIET, "") not in ("", "0"):
            return
        has_folder = not self._context.failures.has_lost_folder and self._results.log_dir.is_dir()
        trace = trace if has_folder else None
        lines = closing_lines(
            self._results.findings,
            self._coverage,
            self._results.log_dir if has_folder else None,
            self._files.page,
            other_steps=self._other_steps,
            trace="" if trace is None else str(trace),
            speed="" if trace is None else self._files.speed_command(),
            ended_by="" if error is None else in_short(error),
        )
        sys.stderr.write("".join(f"{line}\n" for line in lines))


def in_short(error: BaseException) -> str:
    """Return the class and the first line of an error; of an error about findings or a contract, what it is about."""
    if isinstance(error, PrecisionFindingError):
        names = "; ".join(finding.in_short for finding in error.findings)
        return f"{names or 'a finding of another rank'}, by on_finding="
    if isinstance(error, PrecisionContractError):
        return f"{type(error).__name__}: {broken_in_short(str(error))}"
    first_line = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    return ended_by(first_line) or first_line


def closing_lines(
    verdict: Verdict,
    coverage: Coverage,
    log_dir: Path | None,
    page: str,
    *,
    other_steps: Sequence[str] = (),
    trace: str = "",
    speed: str = "",
    ended_by: str = "",
) -> Sequence[str]:
    """Return the verdict, findings, coverage, and paths of a run: at most :data:`MOST_LINES` lines and ``other_steps``.

    Args:
        page: the page, or the command that makes it; empty if there is nothing for a page.
        other_steps: a line for steps that ran in another precision than the last one.
        ended_by: the error that ended the run, shown first.
    """
    places = {"logs": str(log_dir or ""), "trace": trace, "speed": speed, "page": page}
    ran = [f"  {line}." for line in (coverage, *other_steps)] if coverage else []
    last = [f"  {what}: {where}" for what, where in places.items() if where]
    repeated = f"ended by {ended_by}".rstrip(":. ")
    findings = [finding for finding in verdict.findings if not finding.seen.endswith(repeated)]
    first = [f"te-precision: stopped: {ended_by}"] if ended_by else []
    room = MOST_LINES - 1 - len(first) - bool(ran) - len(last)
    shown = findings if len(findings) <= room else findings[: room - 1]
    everywhere = log_dir is not None and page and verdict.rank is not None
    all_ranks = f" For all ranks: te-precision diagnose {shlex.quote(str(log_dir))}" if everywhere else ""
    lines = [*first, f"te-precision: {verdict.summary}{all_ranks}"]
    lines += [f"  {finding.severity}: {finding}" for finding in shown]
    if len(shown) < len(findings):
        command = "" if log_dir is None else f": te-precision diagnose {shlex.quote(str(log_dir))}"
        lines.append(f"  and {len(findings) - len(shown)} more{command}")
    return [visible(line) for line in (*lines, *ran, *last)]
