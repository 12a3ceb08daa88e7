"""Judges recorded trainings, and writes tables of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from defects import TABLE
from running import truth_of

from te_precision_callbacks.diagnosis import Finding, Verdict, diagnose, replay
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.numbers import StepNumbers

PAGE = Path(__file__).parent.parent.parent / "docs" / "proof.md"


class _Noting(Diagnosis):
    """Note the step of each finding."""

    came: dict[tuple[str, str, tuple[str, ...]], int]

    def know(self, facts: Facts, iteration: int) -> list[Finding]:
        return self._note(super().know(facts, iteration), iteration)

    def step(self, numbers: StepNumbers) -> list[Finding]:
        return self._note(super().step(numbers), numbers.iteration)

    def _note(self, found: list[Finding], iteration: int) -> list[Finding]:
        for each in found:
            self.came.setdefault((each.rule, each.tensor, each.layers[:1]), iteration)
        return found


def judged(log_dir: Path) -> tuple[Verdict, dict[tuple[str, str, tuple[str, ...]], int]]:
    """Return the verdict, and the step of each finding by rule, tensor and first layer."""
    came: dict[tuple[str, str, tuple[str, ...]], int] = {}
    with mock.patch.object(_Noting, "came", came, create=True), mock.patch.object(replay, "Diagnosis", _Noting):
        return diagnose(log_dir), came


@dataclass(frozen=True)
class Row:
    """A judged training with a defect.

    Attributes:
        name: of its folder.
        right: whether the first finding is an error or a warning of a right rule, and its first layer is right.
        layer: whether its first layer is.
        exact: whether its first layer is one of the defect's first layers.
        anywhere: whether any finding that is an error or a warning is right.
        as_note: whether a note is right.
        delay: steps from the first one of the defect to the finding; None where the first finding is not right.
        first: the first finding, in words.
        as_live: whether the session had the same findings at its end; None where it was recorded before that was kept.
    """

    name: str
    kind: str
    model: str
    recipe: str
    blocks: int
    start: int
    right: bool
    layer: bool
    exact: bool
    anywhere: bool
    as_note: bool
    delay: int | None
    first: str
    truth: str
    as_live: bool | None


def row_of(log_dir: Path) -> Row:
    """Diagnose a training with a defect."""
    truth = truth_of(log_dir)
    verdict, came = judged(log_dir)
    loud = verdict.wrong
    first = loud[0] if loud else None
    right = first is not None and _is_right(first, truth)
    step = None if first is None else came.get((first.rule, first.tensor, first.layers[:1]), first.since)
    where = "the model" if truth["right_layers"] is None else ", ".join(truth["exact_layers"])
    return Row(
        name=log_dir.name,
        kind=truth["kind"],
        model=truth["model"],
        recipe=truth["recipe"],
        blocks=truth["count"],
        start=truth["start"],
        right=right,
        layer=first is not None and _has_layer(first, truth["right_layers"]),
        exact=first is not None and _has_layer(first, truth["exact_layers"]),
        anywhere=any(_is_right(each, truth) for each in loud),
        as_note=any(_is_right(each, truth) for each in verdict.findings if each.severity == "note"),
        delay=max(0, step - truth["start"]) if right and step is not None else None,
        first="nothing" if first is None else f"{first.severity} {first}",
        truth=f"{' or '.join(sorted(TABLE[truth['kind']].rules))} in {where} from step {truth['start']}",
        as_live=[str(each) for each in verdict.findings] == truth["live"] if "live" in truth else None,
    )


def _is_right(finding: Finding, truth: dict[str, Any]) -> bool:
    return finding.rule in TABLE[truth["kind"]].rules and _has_layer(finding, truth["right_layers"])


def _has_layer(finding: Finding, right: Sequence[str] | None) -> bool:
    """Return whether the first layer is one of these, or inside one."""
    if right is None:
        return True
    first = f"{finding.layers[0]}." if finding.layers else ""
    return any(first.startswith(f"{each.removesuffix('.')}.") for each in right)


def contest_table(rows: Sequence[Row], by: str = "kind") -> str:
    """A line for each kind, or for each number of blocks, in Markdown."""
    first = "defect" if by == "kind" else by
    heading = (
        f"| {first} | draws | first finding right | its layer right | found at all | steps until found, median (most) |"
    )
    groups = dict.fromkeys(getattr(row, by) for row in rows)
    lines = [
        _line(str(group), [row for row in rows if getattr(row, by) == group])
        for group in (groups if by == "kind" else sorted(groups))
    ]
    return "\n".join([heading, "|---|---|---|---|---|---|", *lines, _line("all", rows)])


def _line(name: str, rows: Sequence[Row]) -> str:
    delays = [row.delay for row in rows if row.delay is not None]
    delay = f"{median(delays):g} ({max(delays)})" if delays else ""
    counts = [sum(getattr(row, key) for row in rows) for key in ("right", "layer", "anywhere")]
    shares = " | ".join(f"{count} ({100 * count // len(rows)} %)" for count in counts)
    return f"| {name} | {len(rows)} | {shares} | {delay} |"


def misses(rows: Iterable[Row]) -> list[str]:
    """Return a line for each training with a wrong first finding."""
    return [
        f"{row.name} ({row.model} of {row.blocks} blocks, {row.recipe}): {row.truth}; first: {row.first}"
        f"{'' if not row.as_note else '; right as a note'}"
        for row in rows
        if not row.right
    ]


@dataclass(frozen=True)
class Silence:
    """A judged healthy training."""

    name: str
    shape: str
    alarms: tuple[str, ...]
    notes: tuple[str, ...]


def silence_of(log_dir: Path) -> Silence:
    """Diagnose a healthy training."""
    truth = truth_of(log_dir)
    verdict, _ = judged(log_dir)
    loud = tuple(f"{each.severity} {each}" for each in verdict.wrong)
    notes = tuple(f"{each}" for each in verdict.findings if each.severity == "note")
    return Silence(log_dir.name, truth["shape"], loud, notes)


def silence_table(found: Sequence[Silence]) -> str:
    """A line for each shape of training, in Markdown."""
    lines = ["| training | runs | with a false alarm | notes |", "|---|---|---|---|"]
    groups: dict[str, list[Silence]] = {}
    for each in found:
        groups.setdefault(each.shape, []).append(each)
    for name, group in [*groups.items(), ("all", list(found))]:
        alarms = sum(bool(each.alarms) for each in group)
        lines.append(f"| {name} | {len(group)} | {alarms} | {sum(len(each.notes) for each in group)} |")
    return "\n".join(lines)


def as_json(rows: Iterable[Row | Silence]) -> list[dict[str, Any]]:
    """For a file."""
    return [asdict(row) for row in rows]


def write_into_page(name: str, text: str, page: Path = PAGE) -> None:
    """Put a text between the markers of its name in a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
