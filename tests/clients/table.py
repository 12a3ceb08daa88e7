"""The table of tests/clients/README.md, written by ``make clients``.

The page has the table between two comments; what stands around it is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.clients.known import CLIENTS
from tests.clients.trial import RAN, Trial

BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"
TITLES = (
    "Versions, and the stand-ins for downloads:",
    "Why the losses and GEMMs of a row differ:",
    "Why a client does not run, with the debugger or without:",
)
HEAD = ("client", "what trains", "runs", "losses and parameters", "GEMMs", "statistics", "fp8_analysis")


def not_a_page(page: Path) -> str:
    """Return the reason why a file cannot take the table; empty if it can."""
    if not page.is_file():
        return "there is no such file"
    text = page.read_text(encoding="utf-8")
    alright = text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END)
    return "" if alright else f"it needs {BEGIN} and after it {END}, each once"


def write_table(page: Path, trials: Sequence[Trial]) -> None:
    """Put the trials into the page, in the order of the table of clients. Rows of other clients stay as they are.

    Raises:
        ValueError: the page lacks the two comments.
    """
    if wrong := not_a_page(page):
        raise ValueError(f"{page}: {wrong}")
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table(trials, old)}{END}{after}", encoding="utf-8")


def table(trials: Sequence[Trial], old: str = "") -> str:
    """The table, the versions under it, and what explains rows.

    Args:
        trials: new results.
        old: an earlier table, of which the lines of other clients are kept.
    """
    parts = [_lines(trials, part) for part in (_row_of, _versions, _differs, _fails)]
    new = {trial.name for trial in trials}
    for part, kept in zip(parts, _old_lines(old), strict=True):
        part |= {name: line for name, line in kept.items() if name not in new}
    rows, versions, differing, failing = (
        [part[client.name] for client in CLIENTS if client.name in part] for part in parts
    )
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD), *rows]
    for title, below in zip(TITLES, (versions, differing, failing), strict=True):
        if below:
            lines += ["", title, "", *below]
    return "\n".join(lines) + "\n"


def _lines(trials: Sequence[Trial], line: Callable[[Trial], str]) -> dict[str, str]:
    return {trial.name: text for trial in trials if (text := line(trial))}


def _old_lines(old: str) -> list[dict[str, str]]:
    """The lines of an earlier table by client: rows, and those below each title."""
    results: list[dict[str, str]] = [{} for _ in range(1 + len(TITLES))]
    part = 0
    for line in old.splitlines():
        if line in TITLES:
            part = 1 + TITLES.index(line)
        elif match := re.match(r"(?:\||-) `([^`]+)`", line):
            results[part][match[1]] = line
    return results


def _row_of(trial: Trial) -> str:
    return "| " + " | ".join(_row(trial)) + " |"


def _versions(trial: Trial) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in trial.versions.items())
    stands_in = f"; stand-ins: {trial.stands_in}" if trial.stands_in else ""
    return f"- `{trial.name}`: folder `{trial.tree}`; {versions}{stands_in}"


def _differs(trial: Trial) -> str:
    return trial.differs and f"- `{trial.name}`: {trial.differs}."


def _fails(trial: Trial) -> str:
    return trial.fails and f"- `{trial.name}`: {trial.fails}."


def _row(trial: Trial) -> tuple[str, ...]:
    if trial.ran != RAN:
        return (f"`{trial.name}`", trial.what, _cell(trial.ran), "", "", "", "")
    unchecked = sum(trial.unchecked.values())
    not_seen = f", {unchecked} not checked" if unchecked else ""
    return (
        f"`{trial.name}`",
        trial.what,
        "yes",
        _cell(trial.losses) or f"the same, {trial.steps} steps",
        _cell(trial.gemms) or f"the same, {trial.compared}",
        _cell(trial.statistics) or f"{trial.checked} within {trial.largest:.0e}{not_seen}",
        _cell(trial.analysis),
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
