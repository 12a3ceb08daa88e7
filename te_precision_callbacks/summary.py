"""What a session found out, for the terminal.

from rich.console import Console
Console().print(summary(session))
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from te_precision_callbacks.records.statistics_log import STATISTICS_FOLDER
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.session.precision import GEMMS, GemmPrecision
from te_precision_callbacks.session.upstream import EVENTS_FOLDER


def summary(session: InspectSession) -> RenderableType:
    """The precision of each GEMM, the last statistics of each watched tensor, and where the logs are."""
    return Group(
        precision_table(session),
        statistics_table(session),
        f"Logs: {session.log_dir / EVENTS_FOLDER}",
        f"      {session.log_dir / STATISTICS_FOLDER}",
    )


def precision_table(session: InspectSession) -> Table:
    """A row a layer, a column a GEMM: the formats of its two operands."""
    table = Table(title="Precision that really ran", title_justify="left")
    table.add_column("layer", overflow="fold")
    for gemm in GEMMS:
        table.add_column(gemm)
    by_layer: dict[str, dict[str, GemmPrecision]] = {}
    for entry in session.precision:
        by_layer.setdefault(entry.layer, {})[entry.gemm] = entry
    for layer, gemms in by_layer.items():
        table.add_row(layer, *(_operands(gemms.get(gemm)) for gemm in GEMMS))
    return table


def statistics_table(session: InspectSession) -> Table:
    """A row a watched tensor, a column a statistic: its last value."""
    table = Table(title="Last statistics", title_justify="left")
    rows = [row for row in session.last_statistics if row.layer]
    statistics = list(dict.fromkeys(row.statistic for row in rows))
    table.add_column("layer", overflow="fold")
    table.add_column("tensor")
    for statistic in statistics:
        table.add_column(statistic, justify="right")
    values = {(row.layer, row.tensor, row.statistic): row.value for row in rows}
    for layer, tensor in dict.fromkeys((row.layer, row.tensor) for row in rows):
        cells = [values.get((layer, tensor, statistic)) for statistic in statistics]
        table.add_row(layer, tensor, *("" if cell is None else f"{cell:.4g}" for cell in cells))
    return table


def _operands(entry: GemmPrecision | None) -> str:
    """``FP8 E5M2 x E4M3``; one format where both operands have it."""
    if entry is None:
        return "not run"
    formats = list(entry.operands.values())
    if len(set(formats)) == 1:
        return formats[0]
    if all(" " in text and text.split()[0] == formats[0].split()[0] for text in formats):
        return " x ".join([formats[0], *(text.split(maxsplit=1)[1] for text in formats[1:])])
    return " x ".join(formats)
