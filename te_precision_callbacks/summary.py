"""What a session found out, for the terminal.

from rich import box
from rich.console import Console
Console().print(summary(session))
"""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from te_precision_callbacks.records.statistics_log import STATISTICS_FOLDER
from te_precision_callbacks.session import InspectSession, SessionOutcome
from te_precision_callbacks.session.precision import GEMMS, GemmPrecision
from te_precision_callbacks.session.upstream import EVENTS_FOLDER


def summary(
    session: InspectSession | SessionOutcome, *, unconverted: Mapping[str, str] | None = None
) -> RenderableType:
    """The precision of each GEMM, the last statistics of each watched tensor, and where the logs are.

    Args:
        session: a session, also one that was stopped.
        unconverted: layers that a trainer left without Transformer Engine: name -> why.
    """
    tables = [precision_table(session), unconverted_table(unconverted or {}), statistics_table(session)]
    logs = [f"Logs: {session.log_dir / EVENTS_FOLDER}"]
    if (session.log_dir / STATISTICS_FOLDER).is_dir():  # statistics_log="off"
        logs.append(f"      {session.log_dir / STATISTICS_FOLDER}")
    return Group(*(table for table in tables if table.row_count), *logs)


def precision_table(session: InspectSession | SessionOutcome) -> Table:
    """A row a layer, a column a GEMM: the formats of its two operands, as in ``session.precision``."""
    table = Table(title="Precision that really ran", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("layer", no_wrap=True)
    for gemm in GEMMS:
        table.add_column(gemm)
    by_layer: dict[str, dict[str, GemmPrecision]] = {}
    precision = session.precision
    for entry in precision:
        by_layer.setdefault(entry.layer, {})[entry.gemm] = entry
    for layer, gemms in by_layer.items():
        table.add_row(_two_lines(layer), *(_operands(gemms.get(gemm)) for gemm in GEMMS))
    if not all(entry.seen for entry in precision):
        table.caption = "A layer that no feature acts on runs Transformer Engine's own path: its quantizers' formats."
        table.caption_justify = "left"
    return table


def unconverted_table(unconverted: Mapping[str, str]) -> Table:
    """A row a layer that runs without Transformer Engine, and why."""
    table = Table(title="Left unconverted, so without FP8", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("layer", no_wrap=True)
    table.add_column("why")
    for layer, why in unconverted.items():
        table.add_row(_two_lines(layer), why)
    return table


def statistics_table(session: InspectSession | SessionOutcome) -> Table:
    """A row a watched tensor below the name of its layer, a column a statistic: its last value."""
    table = Table(title="Last statistics", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    rows = [row for row in session.last_statistics if row.layer]
    statistics = list(dict.fromkeys(row.statistic for row in rows))
    table.add_column("layer and tensor", no_wrap=True)
    for statistic in statistics:
        table.add_column(statistic, justify="right", overflow="fold")
    values = {(row.layer, row.tensor, row.statistic): row.value for row in rows}
    tensors: dict[str, dict[str, None]] = {}
    for row in rows:
        tensors.setdefault(row.layer, {})[row.tensor] = None
    for layer, of_layer in tensors.items():
        table.add_row(_two_lines(layer))
        for tensor in of_layer:
            cells = [values.get((layer, tensor, statistic)) for statistic in statistics]
            table.add_row(f"  {tensor}", *("" if cell is None else f"{cell:.3g}" for cell in cells))
    return table


def _two_lines(name: str, width: int = 29) -> str:
    """A long name broken before its last part, so that the table fits into 80 columns."""
    head, dot, tail = name.rpartition(".")
    return f"{head}.\n  {tail}" if dot and len(name) > width else name


def _operands(entry: GemmPrecision | None) -> str:
    """``FP8 E5M2 * E4M3``; one format where both operands have it."""
    if entry is None:
        return "not run"
    formats = list(entry.operands.values())
    if len(set(formats)) == 1:
        return formats[0]
    if all(" " in text and text.split()[0] == formats[0].split()[0] for text in formats):
        return " * ".join([formats[0], *(text.split(maxsplit=1)[1] for text in formats[1:])])
    return " * ".join(formats)
