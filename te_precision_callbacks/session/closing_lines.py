"""The lines that a session prints to stderr when it ends: the verdict first, then where to look."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.coverage.contract_keeper import PrecisionContractError
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.diagnosis.finding import Verdict
from te_precision_callbacks.diagnosis.reaction import PrecisionFindingError
from te_precision_callbacks.runs.answers import broken_in_short, ended_by

MOST_LINES = 8

_QUIET = "TE_PRECISION_QUIET"


def is_quiet(quiet: bool) -> bool:
    """Whether the lines are left out.

    Args:
        quiet: what the option says.
    """
    return quiet or os.environ.get(_QUIET, "") not in ("", "0")


def in_short(error: BaseException) -> str:
    """The class of an error, and the first line of what it says; of one that findings raise, the findings, of which the
    lines below have what was seen; of one about a contract, what is broken."""
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
    """The verdict, the first findings, the coverage, the folder, the trace, the page: at most :data:`MOST_LINES` lines
    and ``other_steps``.

    Args:
        verdict: what the rules have found.
        coverage: the products of the last step.
        log_dir: the folder of the session's files; None if none could be written.
        page: the page, or the command that makes it; empty if there is nothing for a page.
        other_steps: a line for steps in which other products ran in low precision than in the last one.
        trace, speed: the trace of ``profile=``, and the command that reads it; empty without one.
        ended_by: the error that ends the run, such as a finding, an overflow or one of the script: it comes before the
            verdict.
    """
    places = {"logs": str(log_dir or ""), "trace": trace, "speed": speed, "page": page}
    ran = [f"  {line}." for line in (coverage, *other_steps)] if coverage else []
    last = [f"  {what}: {where}" for what, where in places.items() if where]
    findings = verdict.findings
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
