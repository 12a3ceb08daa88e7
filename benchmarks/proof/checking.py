"""Check recorded trainings, and write tables of the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.compute as pc
from defects import TABLE

from te_precision_callbacks.diagnosis import Finding, diagnose
from te_precision_callbacks.runs import open_run

PAGE = Path(__file__).with_name("README.md")


Row = dict[str, Any]
"""A checked training with a defect.

``right``: whether the first finding is an error or a warning of a right rule, and its first layer is right; ``layer``:
whether its first layer is; ``exact``: whether its first layer is one of the defect's first layers; ``anywhere``:
whether any finding that is an error or a warning is right; ``delay``: steps from the first one of the defect to the
finding, None where the first finding is not right; ``first``: the first finding, as text.
"""


def check_defect(log_dir: Path, truth: Mapping[str, Any]) -> Row:
    wrong = diagnose(log_dir).wrong
    first = wrong[0] if wrong else None
    right = first is not None and _is_right(first, truth)
    step = None if first is None else _reported_in(log_dir, first)
    where = "the model" if truth["right_layers"] is None else ", ".join(truth["exact_layers"])
    return {
        "name": log_dir.name,
        "kind": truth["kind"],
        "model": truth["model"],
        "recipe": truth["recipe"],
        "blocks": truth["count"],
        "right": right,
        "layer": first is not None and has_layer(first, truth["right_layers"]),
        "exact": first is not None and has_layer(first, truth["exact_layers"]),
        "anywhere": any(_is_right(finding, truth) for finding in wrong),
        "delay": max(0, step - truth["start"]) if right and step is not None else None,
        "first": "nothing" if first is None else f"{first.severity} {first}",
        "truth": f"{' or '.join(sorted(TABLE[truth['kind']].rules))} in {where} from step {truth['start']}",
    }


def _reported_in(log_dir: Path, finding: Finding) -> int | None:
    """Return the step in which the session reported a finding first."""
    subject = [finding.rule, finding.tensor, *finding.layers[:1]]
    reported = []
    for event in open_run(log_dir).events.filter(pc.field("kind") == "finding").to_pylist():
        data = json.loads(event["data"])
        if [data["rule"], data["tensor"], *data["layers"][:1]] == subject:
            reported.append(event["iteration"])
    return min(reported, default=finding.since)


def _is_right(finding: Finding, truth: Mapping[str, Any]) -> bool:
    return finding.rule in TABLE[truth["kind"]].rules and has_layer(finding, truth["right_layers"])


def has_layer(finding: Finding, right: Sequence[str] | None) -> bool:
    """Return whether the first layer is one of these, or inside one."""
    if right is None:
        return True
    first = f"{finding.layers[0]}." if finding.layers else ""
    return any(first.startswith(f"{layer.removesuffix('.')}.") for layer in right)


def contest_table(rows: Sequence[Row], by: str, heading: str) -> str:
    """A line for each kind, or for each number of blocks, in Markdown."""
    columns = "draws | first finding right | its layer right | found at all | steps until found, median (most)"
    groups = dict.fromkeys(row[by] for row in rows)
    lines = [_line(str(group), [row for row in rows if row[by] == group]) for group in groups]
    return "\n".join([f"| {heading} | {columns} |", "|---|---|---|---|---|---|", *lines, _line("all", rows)])


def _line(name: str, rows: Sequence[Row]) -> str:
    delays = [row["delay"] for row in rows if row["delay"] is not None]
    delay = f"{median(delays):g} ({max(delays)})" if delays else ""
    counts = " | ".join(str(sum(row[key] for row in rows)) for key in ("right", "layer", "anywhere"))
    return f"| {name} | {len(rows)} | {counts} | {delay} |"


def write_into_page(name: str, text: str) -> None:
    """Put a text between the markers of its name in benchmarks/proof/README.md."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
