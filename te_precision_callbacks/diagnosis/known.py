"""Findings that somebody has acknowledged: a file that ``te-precision diagnose --known`` reads.

# the router's gradients are small on purpose
sibling model.layers.*.router
bf16-state
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.config.problems import suggestion
from te_precision_callbacks.diagnosis.finding import Finding, Verdict
from te_precision_callbacks.diagnosis.rules import RULES


class KnownFindingsError(PrecisionDebugError, ValueError):
    """A file of known findings cannot be read."""


class _Line(NamedTuple):
    """A line of the file: its number, its text, the rule, and a pattern of layers; ``*`` for all."""

    number: int
    text: str
    rule: str
    layers: str

    def covers(self, finding: Finding) -> bool:
        names = finding.layers or ("",)
        return finding.rule == self.rule and all(fnmatchcase(name, self.layers) for name in names)


@dataclass(frozen=True)
class Known:
    """The findings that a file names."""

    lines: tuple[_Line, ...]

    def leave_out(self, verdict: Verdict) -> tuple[Verdict, int, list[tuple[int, str]]]:
        """A verdict without them.

        Returns:
            The verdict, how many findings it lacks, and the lines that leave out nothing: number and text.
        """
        left = tuple(finding for finding in verdict if not any(line.covers(finding) for line in self.lines))
        unused = [
            (line.number, line.text) for line in self.lines if not any(line.covers(finding) for finding in verdict)
        ]
        return dataclasses.replace(verdict, findings=left), len(verdict) - len(left), unused


def read_known(path: Path) -> Known:
    """Read a file of known findings.

    Raises:
        KnownFindingsError: the file cannot be read, or a line names no rule.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KnownFindingsError(f"--known {path}: {error}") from None
    rules = [rule.id for rule in RULES]
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        if words[0] not in rules:
            raise KnownFindingsError(f"{path}:{number}: there is no rule {words[0]!r}.{suggestion(words[0], rules)}")
        lines.append(_Line(number, " ".join(words), words[0], words[1].strip() if len(words) > 1 else "*"))
    return Known(tuple(lines))
