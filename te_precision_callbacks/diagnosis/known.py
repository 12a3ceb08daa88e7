"""Acknowledged findings, in a file for ``te-precision diagnose --known``.

# the router's gradients are small on purpose
sibling model.layers.*.router
sibling h.{0-2,5}.fc1, head
bf16-state
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.suggestions import suggestion
from te_precision_callbacks.diagnosis.finding import Finding, Verdict
from te_precision_callbacks.diagnosis.rules import RULE_OF_ID
from te_precision_callbacks.layers.folding import fold_names


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
    return dataclasses.replace(verdict, findings=tuple(findings)), len(verdict) - len(findings), unused


def known_line(finding: Finding) -> str:
    return " ".join(filter(None, (finding.rule, ", ".join(fold_names(finding.layers, most_ranges=None)))))


def read_known(path: Path) -> list[KnownLine]:
    """Read a file of known findings; raises KnownFindingsError if a line names no rule."""
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
