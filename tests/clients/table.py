"""The table of docs/clients.md, written by ``make clients``.

The page has the table between two comments; what stands around it is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.clients.known import CLIENTS
from tests.clients.trial import RAN, Trial

BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"
HEAD = ("client", "what trains", "runs", "losses and parameters", "GEMMs", "statistics", "fp8_analysis")


def write_table(page: Path, trials: Sequence[Trial]) -> None:
    """Put the trials into the page, in the order of the table of clients.

    Raises:
        ValueError: the page lacks the two comments.
    """
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page}: needs {BEGIN} and {END}, each once")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{table(trials)}{END}{after}", encoding="utf-8")


def table(trials: Sequence[Trial]) -> str:
    """The table, the versions under it, and what explains rows."""
    order = [client.name for client in CLIENTS]
    known = sorted((trial for trial in trials if trial.name in order), key=lambda trial: order.index(trial.name))
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(_row(trial)) + " |" for trial in known]
    lines += ["", "Versions, and what stood in for what the network would have brought:", ""]
    for trial in known:
        versions = ", ".join(f"{name} {version}" for name, version in trial.versions.items())
        stands_in = f"; stand-ins: {trial.stands_in}" if trial.stands_in else ""
        lines.append(f"- `{trial.name}`: folder `{trial.tree}`; {versions}{stands_in}")
    differing = [f"- `{trial.name}`: {trial.differs}." for trial in known if trial.differs]
    if differing:
        lines += ["", "Why losses and GEMMs of a row differ:", "", *differing]
    failing = [f"- `{trial.name}`: {trial.fails}." for trial in known if trial.fails]
    if failing:
        lines += ["", "Why a row does not run, with the debugger or without:", "", *failing]
    return "\n".join(lines) + "\n"


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
