"""Tables of a session's results, for the terminal.

Usage::

    from rich.console import Console
    Console().print(summary(session))

A session writes the same tables to ``<log_dir>/precision_summary.txt`` when it ends. ``te-precision show`` has the
statistics.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from te_precision_callbacks.base.terminal import paragraph
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.coverage import Coverage, Product, percent
from te_precision_callbacks.coverage.gemm_precision import GemmPrecision, in_short
from te_precision_callbacks.coverage.other_steps import in_lines
from te_precision_callbacks.layers.folding import folded, form_of
from te_precision_callbacks.runs.run_files import replace_whole
from te_precision_callbacks.session.results import Results
from te_precision_callbacks.sinks.statistics_log import EVENTS_FOLDER, STATISTICS_FOLDER

__all__ = ["summary"]

SUMMARY_FILE = "precision_summary.txt"

MOST_ROWS = 50

_WIDTH = 120

_MOST_EARLIER = 1 << 22
"""Bytes of earlier summaries that the file keeps."""


def summary(session: Results) -> Group:
    """Findings, the precision of each GEMM, layers that are not in low precision or not observed, and the log folder.

    Args:
        session: a session, running or stopped.
    """
    return _summary(session, session.coverage(), in_lines(session._results.other_steps()))


def write_summary(session: Results, coverage: Coverage, other_steps: Sequence[str]) -> None:
    output = io.StringIO()
    console = Console(file=output, width=_WIDTH, color_system=None)
    console.print(f"Summary of {datetime.now():%Y-%m-%d %H:%M:%S}, at iteration {session.iteration}\n", highlight=False)
    console.print(_summary(session, coverage, other_steps))
    lines = "\n".join(line.rstrip() for line in output.getvalue().splitlines())
    path = session.log_dir / SUMMARY_FILE
    earlier = b""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        earlier = file.read(_MOST_EARLIER)
    replace_whole(path, lambda file: file.write(f"{lines}\n\n".encode("utf-8", "backslashreplace") + earlier))


def _summary(session: Results, coverage: Coverage, other_steps: Sequence[str]) -> Group:
    verdict, never_due = session.findings, session._results.never_due
    tables = [
        _precision_table(session),
        _coverage_table(coverage),
        _reasons("Left unconverted, so without FP8", "layer", session.unconverted),
        _reasons("Not observed", "layer", {info.name: info.refused for info in session.layers if info.refused}),
        _reasons(
            "Not measured by LogGemmError",
            "layer and GEMM",
            {f"{layer} {gemm}": why for (layer, gemm), why in session.not_measured.items()},
        ),
    ]
    logs = [session.log_dir / folder for folder in (EVENTS_FOLDER, STATISTICS_FOLDER)]
    return Group(
        paragraph(verdict.summary),
        *(paragraph(f"- {finding.severity}: {finding}. {finding.remedy}.") for finding in verdict.wrong),
        Text(),
        *([paragraph(never_due), Text()] if never_due else ()),
        *([*(paragraph(f"{line}.") for line in (coverage, *other_steps)), Text()] if coverage else ()),
        *(table for table in tables if table.row_count),
        *(paragraph(f"Logs: {path}") for path in logs if path.is_dir()),
    )


def _precision_table(session: Results) -> Table:
    precision = list(session.precision)
    given_names = {layer.name: layer.given for layer in session.layers if layer.given}
    by_layer: dict[str, dict[str, str]] = {}
    for entry in precision:
        by_layer.setdefault(given_names.get(entry.layer, entry.layer), {})[entry.gemm] = _formats(entry)
    cells = ((layer, tuple(gemms.get(gemm, "not run") for gemm in GEMMS)) for layer, gemms in by_layer.items())
    table = _table("Precision that really ran", ("layer", *GEMMS), cells)
    if not all(entry.seen or entry.not_run for entry in precision):
        table.caption = "Where a change of precision was not seen, the formats are those of the layer's quantizers."
    return table


def _formats(entry: GemmPrecision) -> str:
    return f"not run: {entry.not_run}" if entry.not_run else in_short(entry.operands)


def _coverage_table(coverage: Coverage) -> Table:
    rows: dict[tuple[str, str, str], list[Product]] = {}
    for product in coverage.in_high_precision:
        rows.setdefault((form_of(product.layer), product.precision, product.why), []).append(product)
    cells = []
    for (_, precision, why), products in sorted(rows.items(), key=lambda row: -sum(product.macs for product in row[1])):
        share = percent(sum(product.macs for product in products) / coverage.macs())
        gemms = ", ".join(dict.fromkeys(product.gemm for product in products))
        layers = ", ".join(folded((product.layer for product in products), most=1))
        cells.append((layers, (gemms, precision.upper(), f"{share} %", why)))
    return _table("Not in low precision", ("layer", "products", "in", "share", "why"), cells)


def _reasons(title: str, first: str, reasons: Mapping[str, str]) -> Table:
    return _table(title, (first, "why"), ((name, (why,)) for name, why in reasons.items()))


def _table(title: str, columns: Sequence[str], cells: Iterable[tuple[str, tuple[str, ...]]]) -> Table:
    """A table with one row for names that differ only in their numbers and have the same cells."""
    table = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, caption_justify="left")
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, texts in cells:
        rows.setdefault((form_of(name), texts), []).append(name)
    for (_, texts), names in itertools.islice(rows.items(), MOST_ROWS):
        table.add_row(*map(paragraph, (", ".join(folded(names, most=1)), *texts)))
    if len(rows) > MOST_ROWS:
        table.add_row(f"and {len(rows) - MOST_ROWS} more")
    return table
