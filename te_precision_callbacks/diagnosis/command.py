"""``te-precision diagnose`` and ``te-precision rules``: problems of a run, and the rules that find them.

Usage::

    te-precision diagnose logs
    te-precision diagnose logs --all
    te-precision diagnose logs --json
    te-precision diagnose logs --known known.txt
    te-precision rules
    te-precision rules stale-scale

The exit code of ``diagnose`` is 0 if no problems were found, though there may be notes; 1 with an error or a warning; 2
for wrong use; 3 if not enough was checked for an all-clear, or the run did not reach its end; of several runs, the
worst. ``--json`` prints one JSON object.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.base.suggestions import suggestion
from te_precision_callbacks.base.terminal import Json
from te_precision_callbacks.diagnosis.finding import SEVERITIES, Finding, Verdict
from te_precision_callbacks.layers.folding import fold_names

if TYPE_CHECKING:
    from te_precision_callbacks.diagnosis.rule import Rule
    from te_precision_callbacks.runs.recorded import RecordedRun

FOUND = 1
NOT_CHECKED = 3
"""Exit codes."""

_INDENT = 2
_MOST_LAYERS = 8


def diagnose_command(
    path: Annotated[str, typer.Argument(metavar="RUN", help="A recorded run: its log folder.")],
    *,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="NAME",
            help="Name, or beginning of the name, of a run in a folder with several runs. Default: all runs of the"
            " last launch.",
        ),
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Check all runs of the folder.")] = False,
    known: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file of known findings to leave out. Each line has a rule, optionally followed by layers, such"
            " as 'h.*.fc2' or 'h.{0-2}.fc1, head'. With each finding, diagnose prints its line. '#' starts a comment.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the problems of a run: the findings of the rules, root causes first, each with its remedy.

    Of a folder with several runs, print the verdict on each run of the last launch.
    """
    from te_precision_callbacks.runs.reading import chosen_run, list_runs, open_run, runs_of_last_launch

    if all_runs and run is not None:
        raise OptionError("--all and --run exclude each other: --all checks every run of the folder.")
    lines = [] if known is None else read_known(known)
    names = () if run is not None else list_runs(path) if all_runs else runs_of_last_launch(path)
    if len(names) > 1:
        checked = [_check(open_run(path, run=name), known, lines) for name in names]
    else:
        recorded, note = chosen_run(path, run)
        if note:
            terminal.show_text(f"{note} --all checks all runs.", err=as_json)
        checked = [_check(recorded, known, lines)]
    worst = min(checked, key=_order_of_verdicts)
    if len(names) > 1:
        _show_runs(path, checked, worst, as_json=as_json)
    elif as_json:
        terminal.show_json(worst.as_json())
    else:
        _show(worst)
    if not worst.verdict.healthy:
        if worst.verdict.wrong:
            raise typer.Exit(FOUND)
        for entry in checked:
            entry.run.require_undamaged()
        raise typer.Exit(NOT_CHECKED)


class _Checked(NamedTuple):
    run: RecordedRun
    verdict: Verdict
    outcome: list[str]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        lacks = filter(None, [self.run.missing_contents])
        return {
            **self.verdict.as_json(),
            "outcome": self.outcome,
            "unread": self.run.unread,
            "notes": [*lacks, *self.run.unread, *self.notes],
        }


def _order_of_verdicts(checked: _Checked) -> tuple[bool, bool, int]:
    """A key that sorts runs, the worst first: by the state of the verdict, then by severity."""
    verdict = checked.verdict
    return not verdict.wrong, verdict.healthy, (*SEVERITIES, "").index(verdict.severity)


def _check(recorded: RecordedRun, known_file: Path | None, lines: Sequence[KnownLine]) -> _Checked:
    from te_precision_callbacks.diagnosis.replay import diagnose
    from te_precision_callbacks.runs.summary import outcome_notes

    notes = [note for note in recorded.notes if note not in recorded.unread]
    verdict, left_out, unused = leave_out(lines, diagnose(recorded))
    if left_out:
        notes.append(f"{known_file} leaves out {many(left_out, 'known finding')}.")
    notes += [f"{known_file}:{line.number}: {line.text!r} matches no finding." for line in unused]
    return _Checked(recorded, verdict, outcome_notes(recorded), notes)


def _show_runs(path: str, checked: list[_Checked], worst: _Checked, *, as_json: bool) -> None:
    from te_precision_callbacks.runs.reading import list_runs

    if as_json:
        runs = [{"run": entry.run.run_id, **entry.as_json()} for entry in checked]
        whole = {name: getattr(worst.verdict, name) for name in ("state", "severity", "healthy")}
        terminal.show_json({**whole, "runs": runs})
        return
    count = len(list_runs(path))
    more = "" if count == len(checked) else f" of the last launch; it has {count} runs, and --all checks all"
    terminal.show_text(f"{path}: {len(checked)} runs{more}.")
    for entry in checked:
        terminal.show_text(f"{entry.run.run_id}: {entry.verdict}", hanging=_INDENT)
    command = terminal.shell_command("te-precision", "diagnose", path, "--run", worst.run.run_id)
    typer.echo(f"For details: {command}")


def rules_command(
    rule: Annotated[str | None, typer.Argument(metavar="[ID]", help="The rule to explain.")] = None,
    *,
    as_json: Json = False,
) -> None:
    """List the rules, or explain one: its condition, its source, why it matters, and what to do."""
    from te_precision_callbacks.diagnosis.rules import RULE_OF_ID

    if rule not in (None, *RULE_OF_ID):
        raise OptionError(f"There is no rule {rule!r}.{suggestion(str(rule), RULE_OF_ID)}")
    chosen = [*RULE_OF_ID.values()] if rule is None else [RULE_OF_ID[rule]]
    if as_json:
        terminal.show_json({"rules": list(map(_as_json, chosen))})
    elif rule is None:
        table = terminal.table("rule", "severity", "what is wrong")
        for row in chosen:
            table.add_row(row.id, row.severity, row.title)
            for variant in row.variants:
                table.add_row("", variant.severity, variant.title)
        terminal.show(table)
        terminal.show_text("For details: te-precision rules ID")
    else:
        for variant in (*chosen, *chosen[0].variants):
            _explain(variant)


def _as_json(rule: Rule) -> dict[str, Any]:
    texts = {name: value for name, value in vars(rule).items() if name != "check"}
    return {**texts, "variants": list(map(_as_json, rule.variants))}


def _explain(rule: Rule) -> None:
    terminal.show_text(f"{rule.id} ({rule.severity}): {rule.title}")
    _show_texts(
        ("fires when", rule.condition),
        ("does not fire for", rule.silent),
        ("recipes", ", ".join(rule.recipes) or "all"),
        ("needs", rule.needs),
        ("how to provide it", rule.collect),
        ("why", rule.why),
        ("what to do", rule.remedy),
        ("cost", rule.cost),
        ("not a problem if", rule.disproof),
        ("source", rule.source),
    )


def _show_texts(*texts: tuple[str, str]) -> None:
    """Print the named texts that are not empty."""
    for name, text in texts:
        if text:
            terminal.show_text(f"{name}: {text}", indent=_INDENT, hanging=_INDENT)


def _show(checked: _Checked) -> None:
    for text in checked.outcome:
        terminal.show_text(text)
    run = checked.run
    if run.missing_contents:
        terminal.show_text(f"{run.path} has no records. {run.missing_contents} Rules that need them are not checked.")
        terminal.show_text("")
    if run.unread:
        terminal.show_text("A part of the run cannot be read. Only the rest was checked:")
        for text in run.unread:
            terminal.show_text(text, indent=_INDENT, hanging=_INDENT)
        terminal.show_text("")
    verdict = checked.verdict
    terminal.show_text(verdict.summary)
    for finding in verdict:
        terminal.show_text("")
        _show_finding(finding)
    reasons = {rule.why for rule in verdict.not_checked}
    if len(reasons) > 1 or (reasons and verdict.checked):  # else the summary has the only reason
        optional = "" if any(rule.essential for rule in verdict.not_checked) else " (optional)"
        terminal.show_text("")
        terminal.show_text(f"Not checked{optional}:")
        for rule in verdict.not_checked:
            collect = f". To provide it: {rule.collect}" if rule.collect else ""
            _show_texts((rule.rule, f"{rule.why}{collect}"))
    terminal.show_notes(checked.notes)


def _show_finding(finding: Finding) -> None:
    terminal.show_text(
        f"{finding.severity}: {f'{finding.subject}: ' if finding.layers else ''}{finding.seen_in_words}",
        hanging=_INDENT,
    )
    span = f"step {finding.since}" if finding.since == finding.until else f"steps {finding.since} to {finding.until}"
    good = "no earlier step is known to be good"
    if finding.last_good is not None:
        saved = f"no checkpoint from before step {finding.since} is known"
        if finding.checkpoint is not None:
            saved = f"last earlier checkpoint: before step {finding.checkpoint}"
        good = f"last step without the problem: {finding.last_good}; {saved}"
    layers = fold_names(finding.layers, most=_MOST_LAYERS) if len(finding.layers) > 1 else ()
    _show_texts(
        ("caused by", finding.caused_by),
        ("seen in", "" if finding.since is None else f"{f'{span} {finding.where}'.rstrip()}; {good}"),
        ("layers", ", ".join(layers)),
        ("why it matters", finding.why),
        ("what to do", finding.remedy),
        ("not a problem if", finding.disproof),
        ("rule", finding.rule),
        ("source", finding.source),
    )
    ignored = "to ignore it, add to a --known file"
    typer.echo(f"{' ' * _INDENT}{ignored}: {terminal.visible(known_line(finding))}")  # one line, to be copied
    if finding.patch:
        terminal.show_text("config:", indent=_INDENT)
        terminal.show_as_it_is(finding.patch, indent=2 * _INDENT)


class KnownFindingsError(PrecisionDebugError, ValueError):
    """A file of known findings cannot be read."""


class KnownLine(NamedTuple):
    """A line of the file; ``patterns``: names of layers, or patterns of them."""

    number: int
    text: str
    rule: str
    patterns: tuple[str, ...]

    def covers(self, name: str) -> bool:
        return any(name == pattern or fnmatchcase(name, pattern) for pattern in self.patterns)


def leave_out(known_lines: Sequence[KnownLine], verdict: Verdict) -> tuple[Verdict, int, list[KnownLine]]:
    """Return a verdict without known findings, their count, and the unused lines."""
    findings = []
    used: set[KnownLine] = set()
    for finding in verdict:
        names = finding.layers or ("",)
        lines = [line for line in known_lines if line.rule == finding.rule and any(map(line.covers, names))]
        if all(any(line.covers(name) for line in lines) for name in names):
            used.update(lines)
        else:
            findings.append(finding)
    unused = [line for line in known_lines if line not in used]
    return replace(verdict, findings=tuple(findings)), len(verdict) - len(findings), unused


def known_line(finding: Finding) -> str:
    return " ".join(filter(None, (finding.rule, ", ".join(fold_names(finding.layers, most_ranges=None)))))


def read_known(path: Path) -> list[KnownLine]:
    """Read a file of known findings; raises KnownFindingsError if a line names no rule.

    # the router's gradients are small on purpose
    sibling model.layers.*.router
    sibling h.{0-2,5}.fc1, head
    bf16-state
    """
    from te_precision_callbacks.diagnosis.rules import RULE_OF_ID

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise KnownFindingsError(
            f"--known {path} cannot be read: {why}. Give a UTF-8 text file with one known finding per line."
        ) from None
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        rule = words[0]
        if rule not in RULE_OF_ID:
            raise KnownFindingsError(f"{path}:{number}: there is no rule {rule!r}.{suggestion(rule, RULE_OF_ID)}")
        layers = words[1].strip() if len(words) > 1 else "*"
        if _SHORTENED.search(layers):
            raise KnownFindingsError(
                f"{path}:{number}: {layers!r} is an incomplete list of layers. Copy the line that"
                " diagnose prints with the finding, or write a pattern such as 'h.*.fc2'."
            )
        texts = [text.strip() for text in _COMMA.split(layers) if text.strip()]
        patterns = (layers, *chain.from_iterable(map(_expand_ranges, texts)))
        lines.append(KnownLine(number, " ".join(words), rule, patterns))
    return lines


_SHORTENED = re.compile(r"\b\d+ more(?:\}|,|$| layer)")

_COMMA = re.compile(r",\s*(?![^{}]*\})")
_BRACES = re.compile(r"\{(\s*\d+(?:-\d+)?(?:\s*,\s*\d+(?:-\d+)?)*\s*)\}")


def _expand_ranges(text: str) -> list[str]:
    braces = _BRACES.search(text)
    if braces is None:
        return [text]
    texts = []
    for numbers in braces[1].split(","):
        first, _, last = numbers.partition("-")
        for number in range(int(first), int(last or first) + 1):
            texts += _expand_ranges(f"{text[: braces.start()]}{number}{text[braces.end() :]}")
    return texts
