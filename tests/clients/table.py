"""The table of tests/clients/README.md, written by ``make clients``.

The page has the table between two comments; what stands around it is left alone.
"""

import re
from collections.abc import Sequence
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


def write_table(page: Path, trials: Sequence[Trial]) -> None:
    """Put the trials into the page, in the order of the table of clients. Rows of other clients stay as they are.

    Raises:
        ValueError: the page lacks the two comments.
    """
    text = page.read_text(encoding="utf-8")
    if not text.count(BEGIN) == text.count(END) == 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"it needs {BEGIN} and after it {END}, each once")
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table(trials, old)}{END}{after}", encoding="utf-8")


def table(trials: Sequence[Trial], old: str = "") -> str:
    """The table, the versions under it, and what explains rows.

    Args:
        trials: new results.
        old: an earlier table; its lines of other clients are kept.
    """
    parts = _old_lines(old)
    for trial in trials:
        client = trial.client
        versions = ", ".join(f"{name} {version}" for name, version in trial.versions.items())
        stands_in = f"; stand-ins: {client.stands_in}" if client.stands_in else ""
        row = "| " + " | ".join(_row(trial)) + " |"
        for part, line in zip(
            parts,
            (
                row,
                f"- `{client.name}`: folder `{trial.tree}`; {versions}{stands_in}",
                client.differs and f"- `{client.name}`: {client.differs}.",
                client.fails and f"- `{client.name}`: {client.fails}.",
            ),
            strict=True,
        ):
            part[client.name] = line
    rows, *below = ([part[client.name] for client in CLIENTS if part.get(client.name)] for part in parts)
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD), *rows]
    for title, items in zip(TITLES, below, strict=True):
        if items:
            lines += ["", title, "", *items]
    return "\n".join(lines) + "\n"


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


def _row(trial: Trial) -> tuple[str, ...]:
    named = (f"`{trial.client.name}`", trial.client.what)
    if trial.ran != RAN:
        return (*named, _cell(trial.ran), "", "", "", "")
    unchecked = sum(trial.unchecked.values())
    not_seen = f", {unchecked} not checked" if unchecked else ""
    return (
        *named,
        "yes",
        _cell(trial.losses) or f"the same, {trial.steps} steps",
        _cell(trial.gemms) or f"the same, {trial.compared}",
        _cell(trial.statistics) or f"{trial.checked} within {trial.largest:.0e}{not_seen}",
        _cell(trial.analysis),
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
