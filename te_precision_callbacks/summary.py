"""What a session found out, for the terminal.

from rich.console import Console
Console().print(summary(session))

Names come from a user's model and config: they are shown as text, not as markup, and without control characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from te_precision_callbacks.records.statistics_log import STATISTICS_FOLDER
from te_precision_callbacks.session import InspectSession, SessionOutcome
from te_precision_callbacks.session.precision import GEMMS, GemmPrecision
from te_precision_callbacks.session.upstream import EVENTS_FOLDER

_NAME_WIDTH = 29
"""Of a layer's name, so that the table of precision fits into 80 columns."""

_HEADER_WIDTH = 20


def summary(
    session: InspectSession | SessionOutcome, *, unconverted: Mapping[str, str] | None = None
) -> RenderableType:
    """The precision of each GEMM, the last and the worst statistics of each watched tensor, and where the logs are.

    Args:
        session: a session, also one that was stopped.
        unconverted: layers that a trainer left without Transformer Engine: name -> why.
    """
    tables = [precision_table(session), unconverted_table(unconverted or {}), refused_table(session)]
    statistics = StatisticsTables(session)
    logs = [f"Logs: {session.log_dir / EVENTS_FOLDER}"]
    if (session.log_dir / STATISTICS_FOLDER).is_dir():  # statistics_log="off"
        logs.append(f"      {session.log_dir / STATISTICS_FOLDER}")
    return Group(
        *(table for table in tables if table.row_count),
        *([statistics] if statistics else []),
        *(Text(_printable(line), overflow="fold") for line in logs),
    )


def precision_table(session: InspectSession | SessionOutcome) -> Table:
    """A row a layer, a column a GEMM: the formats of its two operands, as in ``session.precision``."""
    table = Table(title="Precision that really ran", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("layer", no_wrap=True)
    for gemm in GEMMS:
        table.add_column(gemm)
    by_layer: dict[str, dict[str, GemmPrecision]] = {}
    precision, given_names = session.precision, _given_names(session)
    for entry in precision:
        by_layer.setdefault(given_names.get(entry.layer, entry.layer), {})[entry.gemm] = entry
    for layer, gemms in by_layer.items():
        table.add_row(_name(layer), *(_operands(gemms.get(gemm)) for gemm in GEMMS))
    if not all(entry.seen or entry.not_run for entry in precision):
        table.caption = "A layer that no feature acts on runs Transformer Engine's own path: its quantizers' formats."
        table.caption_justify = "left"
    return table


def unconverted_table(unconverted: Mapping[str, str]) -> Table:
    """A row a layer that runs without Transformer Engine, and why."""
    table = Table(title="Left unconverted, so without FP8", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("layer", no_wrap=True)
    table.add_column("why")
    for layer, why in unconverted.items():
        table.add_row(_name(layer), Text(_printable(why)))
    return table


def refused_table(session: InspectSession | SessionOutcome) -> Table:
    """A row a layer that is left as it is, in all of its forwards or in some, and what Transformer Engine refuses."""
    table = Table(title="Not observed", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("layer", no_wrap=True)
    table.add_column("what Transformer Engine's debug path refuses")
    above = ""
    for info in session.layers:
        if info.refused:
            table.add_row(_name(info.name), Text("as above" if info.refused == above else info.refused))
            above = info.refused
    return table


class StatisticsTables:
    """A row a watched tensor below the name of its layer, a column a statistic: its last value, and in brackets its
    worst of the run with the iteration; in as many tables as the width asks for, so that no number is broken."""

    def __init__(self, session: InspectSession | SessionOutcome) -> None:
        worst = {worst.row[:4]: worst for worst in session.worst_statistics}
        given_names = _given_names(session)
        self._cells: dict[str, dict[tuple[str, str], str]] = {}
        self._tensors: dict[str, dict[str, None]] = {}
        for row in session.last_statistics:
            if not row.layer:
                continue
            cell = f"{row.value:.3g}"
            if row[:4] in worst:
                (*_, value), iteration = worst[row[:4]]
                cell += f" ({value:.3g} @ {iteration})"
            layer = given_names.get(row.layer, row.layer)
            self._cells.setdefault(row.statistic, {})[layer, row.tensor] = cell
            self._tensors.setdefault(layer, {})[row.tensor] = None

    def __bool__(self) -> bool:
        return bool(self._cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = {statistic: self._width(statistic) for statistic in self._cells}
        names = max(len(line) for layer in self._tensors for line in _lines(layer))
        names = max(names, *(len(tensor) + 2 for of_layer in self._tensors.values() for tensor in of_layer))
        group: list[str] = []
        # An edge on both sides, a blank on both sides of each column, and one between two of them.
        used = free = options.max_width - (names + 4)
        for statistic, width in columns.items():
            if group and width + 3 > free:
                yield self._table(group, columns)
                group, free = [], used
            group.append(statistic)
            free -= width + 3
        yield self._table(group, columns)

    def _width(self, statistic: str) -> int:
        return max(map(len, [*self._cells[statistic].values(), *_header(statistic)]))

    def _table(self, statistics: Sequence[str], widths: Mapping[str, int]) -> Table:
        title = "Last statistics (the worst of the run @ its iteration)"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
        table.add_column("layer and tensor", no_wrap=True)
        for statistic in statistics:
            header = Text("\n".join(_header(statistic)))
            table.add_column(header, justify="right", no_wrap=True, min_width=widths[statistic])
        for layer, tensors in self._tensors.items():
            shown = [
                (tensor, cells)
                for tensor in tensors
                if any(cells := [self._cells[statistic].get((layer, tensor), "") for statistic in statistics])
            ]
            if shown:
                table.add_row(_name(layer))
            for tensor, cells in shown:
                table.add_row(Text(f"  {_printable(tensor)}"), *map(Text, cells))
        return table


def _given_names(session: InspectSession | SessionOutcome) -> dict[str, str]:
    """Layer -> the name that the script has given to it."""
    return {layer.name: layer.given for layer in session.layers if layer.given}


def _printable(text: str) -> str:
    """A text without what moves a terminal's cursor, sets its colours or turns its writing around."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _name(layer: str) -> Text:
    return Text("\n".join(_lines(layer)))


def _lines(layer: str) -> list[str]:
    """A layer's name; a long one in lines that end after a dot, those after the first one indented."""
    return _broken(_printable(layer), ".", _NAME_WIDTH, "  ")


def _header(statistic: str) -> list[str]:
    """A statistic's name, in lines that end after an underscore."""
    return _broken(_printable(statistic), "_", _HEADER_WIDTH, "")


def _broken(text: str, after: str, width: int, indent: str) -> list[str]:
    """A text in lines, broken after a character; a part that is longer than a line is broken anywhere."""
    if len(text) <= width:
        return [text]
    lines, line = [], ""
    *parts, last = text.split(after)
    for part in [*(part + after for part in parts), last]:
        if line.strip() and len(line) + len(part) > width:
            lines.append(line)
            line = indent
        while len(line) + len(part) > width:
            room = width - len(line)
            lines.append(line + part[:room])
            line, part = indent, part[room:]
        line += part
    return [*lines, line] if line.strip() else lines


def _operands(entry: GemmPrecision | None) -> str:
    """``FP8 E5M2 * E4M3``; one format where both operands have it, and those of an operand that changed in brackets."""
    if entry is None:
        return "not run"
    if entry.not_run:
        return f"not run: {entry.not_run}"
    formats = list(entry.operands.values())
    if len(set(formats)) == 1:
        return formats[0]
    if any("->" in text for text in formats):
        return " * ".join(f"({text})" if "->" in text else text for text in formats)
    if all(" " in text and text.split()[0] == formats[0].split()[0] for text in formats):
        return " * ".join([formats[0], *(text.split(maxsplit=1)[1] for text in formats[1:])])
    return " * ".join(formats)
