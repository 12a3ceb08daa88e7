"""The end of a run: its closing report, and stopping before the process ends."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from types import FrameType
from typing import TYPE_CHECKING, Any

from te_precision_callbacks.base.errors import SessionError, error_text, is_failure
from te_precision_callbacks.base.terminal import shell_command, visible
from te_precision_callbacks.coverage.contract_keeper import PrecisionContractError
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.coverage.other_steps import format_other_steps, other_steps
from te_precision_callbacks.diagnosis.engine import PrecisionFindingError
from te_precision_callbacks.diagnosis.finding import Verdict
from te_precision_callbacks.runs.summary import ended_by, summarize_broken_contract
from te_precision_callbacks.session.context import RunContext

if TYPE_CHECKING:
    from te_precision_callbacks.session.delivery import Sinks

logger = logging.getLogger(__name__)


class ProcessEnded(SessionError):
    """The process ended before the session was stopped, with an unknown exit status."""


def stop_at_exit(stop: Callable[[BaseException | None], None]) -> Finalize:
    """Call ``stop`` with the exception that ends the process, or None, at its end; return an object with ``cancel``."""

    def end() -> None:
        error = end_of_process()
        try:
            stop(error)
        except Exception as failure:  # must not hide the error that ends the process
            logger.error(
                "The session could not be stopped at the end of the process. Its files stay readable up to this point.",
                exc_info=failure,
            )
        finally:
            if isinstance(error, KeyboardInterrupt):
                # Let Python end the process by SIGINT, as shells and schedulers expect. It does so if the last source
                # text that it ran ended with KeyboardInterrupt (3.11, Python/pythonrun.c: run_eval_code_obj). The end
                # of a session may have run other source texts: collections.namedtuple does.
                with suppress(KeyboardInterrupt):
                    exec("raise KeyboardInterrupt")

    # A child of multiprocessing calls it too, although it calls no atexit functions.
    return Finalize(None, end, exitpriority=100)


def call_on_request(call: Callable[[int, FrameType | None], None]) -> None:
    """Call a function on SIGUSR1, unless the script or its trainer handles this signal. Only in the main thread.

    Trainers have set their handlers before their first step.
    """
    if not _is_main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, call)
    else:
        logger.info("SIGUSR1 has another handler, so it does not record the last steps.")


def forget_request(call: Callable[[int, FrameType | None], None]) -> None:
    if _is_main_thread() and signal.getsignal(signal.SIGUSR1) == call:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def end_of_process() -> BaseException | None:
    """Return the failure that ends the process, at its exit; None if the exit status is 0.

    Python keeps an uncaught exception in ``sys.last_value``. An uncaught SystemExit is known only in a child of
    multiprocessing, which ends while it handles the exception, and in a script that ``startup/__main__.py`` runs.
    Otherwise, and at an interactive prompt, which continues after exceptions, the result is a :class:`ProcessEnded`.
    """
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    is_known = hasattr(sys, "last_value") or multiprocessing.parent_process() is not None
    if not is_known or sys.flags.interactive or hasattr(sys, "ps1"):
        return ProcessEnded("The process ended before the session was stopped, and its exit status is not known.")
    return error if is_failure(error) else None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C, and a script's handler of SIGTERM, to the end of the block; a second Ctrl-C interrupts it.

    Does nothing outside the main thread.
    """
    handlers: dict[int, Any] = {}
    came: set[int] = set()

    def take(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in came:
            came.remove(number)
            handlers[number](number, frame)
        else:
            came.add(number)

    for deferred in (signal.SIGTERM, signal.SIGINT) if _is_main_thread() else ():
        if callable(handler := signal.getsignal(deferred)):
            handlers[deferred] = handler
            signal.signal(deferred, take)
    try:
        yield
    finally:
        for number, handler in handlers.items():  # Ctrl-C last: it may come again at once
            signal.signal(number, handler)
        for number in handlers:
            if number in came:
                handlers[number](number, None)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


MOST_LINES = 9


class ClosingReport:
    """Reports at the end of a session: coverage, the verdict, and the places of logs and page."""

    def __init__(self, context: RunContext, sinks: Sinks) -> None:
        self._context = context
        self._results = context.results
        self._sinks = sinks
        self._ran: list[str] = []

    def check_whole_run(self) -> None:
        """Check a resumed run including its earlier starts, as ``te-precision diagnose`` does."""
        records_place = self._sinks.place
        if records_place is not None and records_place.segment:
            from te_precision_callbacks import diagnosis, runs

            self._results.whole_run = diagnosis.diagnose(runs.open_run(self._results.log_dir, run=records_place.run_id))

    def log_coverage(self) -> None:
        results = self._results
        coverage = results.coverage_with_other_ranks(None)
        if coverage:
            further_lines: list[str] = []
            if results.coverage.has_changed:  # else no loop over thousands of layers
                further_lines = format_other_steps(other_steps(results.coverage.by_span()))
            if not further_lines and not results.table.history.has_changed:
                # The steps differ in sizes alone, as with a smaller last batch, so the line holds for all of them.
                coverage = Coverage(coverage, state=coverage.state)
            self._ran = [str(coverage), *further_lines]
            for text in self._ran:
                logger.info("%s.", text)
                self._context.inspector.log(text)

    def print_verdict(self, error: BaseException | None) -> None:
        folder = str(self._sinks.run_folder)
        log_dir = self._results.log_dir
        page = ""
        if folder != str(log_dir):  # the run has records
            page = shell_command("te-precision", "report", folder)
            logger.info("%s makes one page of this run.", page)
        if self._context.options.quiet or os.environ.get("TE_PRECISION_QUIET", "") not in ("", "0"):
            return
        logs = diagnose = ""
        if (lost := self._context.failures.lost_folder) is not None:
            logs = f"none, because {lost} cannot be written to"
        elif log_dir.is_dir():
            logs = str(log_dir)
            diagnose = shell_command("te-precision", "diagnose", folder)
        ended_by = "" if error is None else summarize_error(error)
        lines = closing_lines(self._results.findings, self._ran, logs, page, diagnose, ended_by)
        sys.stderr.write("\n".join((*lines, "")))


def summarize_error(error: BaseException) -> str:
    """Return class and first line of an error, or the findings or the contract that it is about."""
    if isinstance(error, PrecisionFindingError):
        names = "; ".join(finding.in_short for finding in error.findings)
        return f"{names or 'a finding of another rank'}, because of the option on_finding"
    if isinstance(error, PrecisionContractError):
        return f"{type(error).__name__}: {summarize_broken_contract(str(error))}"
    first_line = error_text(error).partition("\n")[0]
    return ended_by(first_line) or first_line


def closing_lines(
    verdict: Verdict, ran: Sequence[str], logs: str, page: str, diagnose: str, ended_by: str = ""
) -> Sequence[str]:
    """Return verdict, findings, coverage and paths of a run: at most :data:`MOST_LINES` lines, and more for ``ran``.

    Args:
        ran: the coverage of the last step, and lines about steps that ran in another precision.
        logs: the log folder, or why there is none.
        page: the command that writes the report page; empty without records.
        diagnose: the command that prints the findings.
        ended_by: the error that ended the run, shown first.
    """
    remedy = diagnose if page and verdict.wrong else ""
    values = {"what to do": remedy, "logs": logs, "make a page": page}
    last = [f"  {what}: {where}" for what, where in values.items() if where]
    repeated = f"ended by {ended_by}".rstrip(":. ")
    findings = [finding for finding in verdict.findings if not finding.seen.endswith(repeated)]
    first = [f"te-precision: stopped: {ended_by}"] if ended_by else []
    room = MOST_LINES - 1 - len(first) - bool(ran) - len(last)
    shown = findings if len(findings) <= room else findings[: room - 1]
    all_ranks = f" For all ranks: {diagnose}" if diagnose and page and verdict.rank is not None else ""
    lines = [*first, f"te-precision: {verdict.summary}{all_ranks}"]
    lines += [f"  {finding.severity}: {finding}" for finding in shown]
    if len(shown) < len(findings):
        lines.append(f"  and {len(findings) - len(shown)} more{'' if remedy or not diagnose else f': {diagnose}'}")
    return list(map(visible, (*lines, *(f"  {line}." for line in ran), *last)))
