"""Tables of a session's results, for the terminal.

Usage::

    from rich.console import Console
    Console().print(summary(session))

A session writes the same tables to ``<log_dir>/precision_summary.txt`` when it ends. Names come from a user's model and
config, so they are shown as text, not as markup, and without control characters.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from te_precision_callbacks.base.opening import own_file
from te_precision_callbacks.base.terminal import Paragraph, fitted_table, visible
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.base.wrapping import wrapped
from te_precision_callbacks.coverage.coverage import Coverage, Product, percent
from te_precision_callbacks.coverage.gemm_precision import GemmPrecision, in_short
from te_precision_callbacks.coverage.other_steps import in_lines
from te_precision_callbacks.diagnosis.finding import Verdict
from te_precision_callbacks.layers.folding import folded, form_of
from te_precision_callbacks.runs.run_files import replace_whole
from te_precision_callbacks.session.results import Results
from te_precision_callbacks.sinks.statistics_log import EVENTS_FOLDER, STATISTICS_FOLDER
from te_precision_callbacks.sinks.worst import RunStatistics, StatisticColumn, worst_first
from te_precision_callbacks.statistics.table import OF_GEMMS, Of, Worse

__all__ = ["summary"]

SUMMARY_FILE = "precision_summary.txt"

MOST_ROWS = 12
"""The most tensors in a table of statistics. The others are named below the table."""

MOST_LAYERS = 200
"""The most rows of a table of layers. If there are more layers, those that differ in their numbers alone share one."""

_FILE_WIDTH = 120

_MOST_EARLIER = 1 << 22
"""The bytes of earlier summaries that the file of a log folder keeps."""

_NOTEBOOK_WIDTH = 120

_NAME_WIDTH = 29
"""The width of a layer's name, so that the table of precision fits into 80 columns."""

_LONGEST_PART = 60
"""The longest part of a name that is not broken, although the table then leaves the terminal."""

_HEADER_WIDTH = 20

_FIRST_HEADER = "layer and tensor"
"""Of the first column of a table of statistics."""


class Summary(Group):
    """What :func:`summary` gives: for a terminal, by rich, and for a notebook."""

    def _repr_html_(self) -> str:
        console = Console(record=True, width=_NOTEBOOK_WIDTH, file=io.StringIO(), force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def summary(session: Results) -> Summary:
    """The verdict; how much runs in low precision, in one line; tables of each GEMM's precision, of what is not in low
    precision, and of each watched tensor's last and worst statistics; and the log folder.

    Args:
        session: a session, running or stopped, or the results that it has left.
    """
    return _summary(session, session.precision, session.coverage(), in_lines(session._results.other_steps()))


def _summary(
    session: Results, precision: Sequence[GemmPrecision], coverage: Coverage, other_steps: Sequence[str]
) -> Summary:
    tables = (
        precision_table(session, precision),
        coverage_table(coverage),
        unconverted_table(session.unconverted),
        refused_table(session),
        not_measured_table(session),
    )
    statistics = StatisticsTables(session._results.statistics, _given_names(session))
    logs = [f"Logs: {session.log_dir / EVENTS_FOLDER}"]
    if (session.log_dir / STATISTICS_FOLDER).is_dir():  # statistics_log="off"
        logs.append(f"      {session.log_dir / STATISTICS_FOLDER}")
    return Summary(
        *verdict_lines(session.findings),
        *([Paragraph(session._results.never_due), Text()] if session._results.never_due else ()),
        *([*(Paragraph(f"{line}.") for line in (coverage, *other_steps)), Text()] if coverage else ()),
        *(_Fitted(table) for table in tables if table.row_count),
        *([statistics] if statistics else ()),
        *(Text(visible(line), overflow="fold") for line in logs),
    )


class _Fitted:
    """A table that breaks no word where there is room for that."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield fitted_table(self._table, options.max_width) or self._table


def verdict_lines(verdict: Verdict) -> Iterator[RenderableType]:
    """The verdict, and a line for each error and warning."""
    yield Paragraph(verdict.summary)
    for finding in verdict.wrong:
        yield Paragraph(f"- {finding.severity}: {finding}. {finding.remedy}.")
    yield Text()


def write_summary(session: Results, coverage: Coverage, other_steps: Sequence[str]) -> None:
    """Write the summary of a session into the file in its log folder, before those of earlier runs there.

    Args:
        session: the session.
        coverage: its coverage.
        other_steps: the lines on the steps in which other products ran in low precision.

    Raises:
        OSError: the file cannot be written.
    """
    precision = session.precision
    console = Console(file=io.StringIO(), width=_FILE_WIDTH, color_system=None)
    console.print(f"Summary of {datetime.now():%Y-%m-%d %H:%M:%S}, at iteration {session.iteration}\n", highlight=False)
    console.print(_summary(session, precision, coverage, other_steps))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    path = session.log_dir / SUMMARY_FILE
    earlier = b""
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=own_file) as file:
        earlier = file.read(_MOST_EARLIER)
    replace_whole(path, lambda file: file.write(f"{lines}\n\n".encode("utf-8", "backslashreplace") + earlier))


def _table(title: str, first: str) -> Table:
    """A table without rows, and its first column."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column(first, overflow="fold")
    return table


def precision_table(session: Results, precision: Sequence[GemmPrecision]) -> Table:
    """The formats of each GEMM's two operands, as in ``session.precision``: a row per layer, a column per GEMM."""
    table = _table("Precision that really ran", "layer")
    for gemm in GEMMS:
        table.add_column(gemm)
    by_layer: dict[str, dict[str, GemmPrecision]] = {}
    given_names = _given_names(session)
    for entry in precision:
        by_layer.setdefault(given_names.get(entry.layer, entry.layer), {})[entry.gemm] = entry
    changes = _changes(session, precision)
    cells = {layer: tuple(_operands(gemms.get(gemm), changes) for gemm in GEMMS) for layer, gemms in by_layer.items()}
    _add_layers(table, cells, "session.precision")
    if not all(entry.seen or entry.not_run for entry in precision):
        _add_caption(
            table, "Where a change of precision was not seen, the formats are those of the layer's quantizers."
        )
    return table


def _add_layers(table: Table, cells: Mapping[str, Sequence[str]], has_all: str) -> None:
    """Add a row per layer; of very many layers a row for those that differ in their numbers alone, and the first rows.

    Args:
        table: the table.
        cells: layer -> its cells.
        has_all: where all of them are.
    """
    if len(cells) <= MOST_LAYERS:
        for layer, texts in cells.items():
            table.add_row(_text(layer), *map(_text, texts))
        return
    rows: dict[tuple[str, Sequence[str]], list[str]] = {}
    for layer, texts in cells.items():
        rows.setdefault((form_of(layer), texts), []).append(layer)
    for (_, texts), layers in itertools.islice(rows.items(), MOST_LAYERS):
        table.add_row(_text(", ".join(folded(layers, most=1))), *map(_text, texts))
    if len(rows) > MOST_LAYERS:
        _add_caption(table, f"and {len(rows) - MOST_LAYERS} more: {has_all} has all.")


def _text(text: str) -> Text:
    return Text(visible(text))


def _add_caption(table: Table, text: str) -> None:
    table.caption = text if table.caption is None else f"{table.caption}\n{text}"
    table.caption_justify = "left"


def coverage_table(coverage: Coverage) -> Table:
    """The matrix products that do not run in low precision, the largest first: a row for layers that differ in their
    numbers alone."""
    table = _table("Not in low precision", "layer")
    table.add_column("products")
    table.add_column("in", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    whole = coverage.macs()
    rows: dict[tuple[str, str, str], list[Product]] = {}
    for product in coverage.in_high_precision:
        rows.setdefault((form_of(product.layer), product.precision, product.why), []).append(product)
    ranked = sorted(rows.items(), key=lambda row: -sum(product.macs for product in row[1]))
    for (_, precision, why), products in ranked[:MOST_ROWS]:
        names = folded((product.layer for product in products), most=1)
        gemms = ", ".join(dict.fromkeys(product.gemm for product in products))
        share = percent(sum(product.macs for product in products) / whole)
        table.add_row(_text(", ".join(names)), gemms, precision.upper(), f"{share} %", Text(visible(why)))
    if len(ranked) > MOST_ROWS:
        _add_caption(table, f"and {len(ranked) - MOST_ROWS} more: session.coverage() has all.")
    return table


def unconverted_table(unconverted: Mapping[str, str]) -> Table:
    """The layers that run without Transformer Engine, and why: a row per layer."""
    table = _table("Left unconverted, so without FP8", "layer")
    table.add_column("why")
    _add_layers(table, {layer: (why,) for layer, why in unconverted.items()}, "session.unconverted")
    return table


def not_measured_table(session: Results) -> Table:
    """The GEMMs of which LogGemmError does not measure all, and why: a row per layer and GEMM."""
    table = _table("Not measured by LogGemmError", "layer and GEMM")
    table.add_column("why")
    cells = {f"{layer} {gemm}": (why,) for (layer, gemm), why in session.not_measured.items()}
    _add_layers(table, cells, "session.not_measured")
    return table


def refused_table(session: Results) -> Table:
    """The layers that are left as they are, in all or some forwards, and what Transformer Engine refuses: a row per
    layer."""
    table = _table("Not observed", "layer")
    table.add_column("what Transformer Engine's debug path refuses")
    refused = {info.name: info.refused for info in session.layers if info.refused}
    if len(refused) <= MOST_LAYERS:
        above = ["", *refused.values()]
        told = zip(refused, refused.values(), above, strict=False)
        refused = {layer: "as above" if why == before else why for layer, why, before in told}
    _add_layers(table, {layer: (why,) for layer, why in refused.items()}, "session.layers")
    return table


_ORDER = {
    kind: place
    for place, kinds in enumerate(
        (
            {Of.QUANTIZED, Of.LOSSES, Of.SCALE_LIMITS},
            set(OF_GEMMS),
            {Of.TENSOR, Of.BLOCKS},
            {Of.SCALES, Of.SCALE_BINS},
            {Of.RANGES, Of.RANGE_BINS},
        )
    )
    for kind in kinds
}
"""The order of alike columns: losses first, then the GEMM, the tensor itself, its scales, and its blocks."""


class _Tensor(NamedTuple):
    """A watched tensor of a layer."""

    layer: str
    tensor: str


class StatisticsTables:
    """A row a watched tensor, a column a statistic: its last value, and in brackets its worst of the run with the
    iteration, where that is another.

    There are as many tables as the width asks for, so that no number is broken; those with a fault come first. Each
    table has the :data:`MOST_ROWS` tensors that are worst by one of its columns, and names the others below. A
    statistic without a worse direction has its last value only.

    Args:
        statistics: those of the run.
        given_names: layer -> the name that the script has given to the layer.
    """

    def __init__(self, statistics: RunStatistics, given_names: Mapping[str, str]) -> None:
        self._columns = statistics.columns()
        self._tensors = [_Tensor(given_names.get(layer, layer), tensor) for layer, tensor in statistics.tensors]
        self._values = {name: column.values for name, column in self._columns.items()}
        self._first = {name: self._ranked(name, column) for name, column in self._columns.items()}
        # A model may have thousands of layers: texts are made only of those that a table can show.
        shown = list({number for lists in self._first.values() for numbers in lists for number in numbers})
        self._names = [self._tensors[number] for number in shown]
        self._cells = {name: dict(_cells(column, shown)) for name, column in self._columns.items()}

    def __bool__(self) -> bool:
        return bool(self._columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        groups = list(self._groups(options.max_width))
        for number, group in enumerate(groups, 1):
            shown = self._shown(group)
            which = f", table {number} of {len(groups)}" if len(groups) > 1 else ""
            # Not as the title of the table, which would be broken to its width.
            yield Paragraph(f"Last statistics{which} (worst value of the run @ its step)", "italic")
            yield self._table(group, shown)
            others = np.setdiff1d(np.concatenate([self._columns[name].tensors for name in group]), shown).tolist()
            if others:
                rest = "; ".join(_folded(self._tensors[number] for number in others))
                yield Paragraph(f"and {len(others)} more: {rest}")
                yield Text("")

    def _groups(self, width: int) -> Iterator[list[str]]:
        """The statistics of each table."""
        names = max(len(line) for layer, _ in self._names for line in _lines(layer))
        names = max(names, len(_FIRST_HEADER), *(len(tensor) + 2 for _, tensor in self._names))
        group: list[str] = []
        # An edge on both sides, a blank on both sides of each column, and a divider between two columns.
        free = whole = width - (names + 4)
        for statistic in sorted(self._cells, key=self._place):
            needed = self._width(statistic) + 3
            if group and needed > free:
                yield group
                group, free = [], whole
            group.append(statistic)
            free -= needed
        yield group

    def _place(self, statistic: str) -> tuple[int, int]:
        """The place of a column among the others: what shows a fault comes first, then what is as good as it can be in
        all tensors, and last what has no worse direction, of which a user's own come last."""
        family, values = self._columns[statistic].family, np.array([*self._values[statistic].values()])
        if family.request is None:
            return 3, 0
        best = np.inf if family.worse is Worse.LOW else 0.0
        # inf and nan are lost too.
        place = 0 if statistic == "nonfinite_num" else _ORDER[family.request.statistic.of]
        return (2 if not family.has_direction else int(bool((values == best).all()))), place

    def _width(self, statistic: str) -> int:
        return max(map(len, [*self._cells[statistic].values(), *_header(statistic)]))

    def _ranked(self, statistic: str, column: StatisticColumn) -> tuple[list[int], list[int]]:
        """The worst tensors by a statistic, and the first ones that have it. A statistic that is equal everywhere, such
        as no inf and nan at all, has no worst tensor."""
        most, values = _RANKED_PER_ROW * MOST_ROWS, self._values[statistic]
        judges = len(set(values.values())) > 1
        worst = worst_first(most, column.family, values, lambda name: self._values.get(name, {})) if judges else ()
        return list(worst), column.tensors[:most].tolist()

    def _shown(self, group: Sequence[str]) -> list[int]:
        """The tensors that a table shows: the worst of each statistic, then the second of each; where no statistic has
        a direction in which it gets worse, the largest."""
        directed = [statistic for statistic in group if self._columns[statistic].family.has_direction]
        ranked = [self._first[statistic][0] for statistic in directed or group]
        told = [self._first[statistic][1] for statistic in group]
        taking_turns: Iterator[int | None] = chain.from_iterable(zip_longest(*ranked))
        found = dict.fromkeys(number for number in chain(taking_turns, *told) if number is not None)
        return list(itertools.islice(found, MOST_ROWS))

    def _table(self, statistics: Sequence[str], rows: Sequence[int]) -> Table:
        table = _table("", _FIRST_HEADER)
        table.columns[0].no_wrap = True
        for statistic in statistics:
            header = Text("\n".join(_header(statistic)))
            table.add_column(header, justify="right", no_wrap=True, min_width=self._width(statistic))
        above = None
        for row in rows:
            layer, tensor = self._tensors[row]
            if layer != above:
                table.add_row(_name(layer))
            above = layer
            cells = (self._cells[statistic].get(row, "") for statistic in statistics)
            table.add_row(Text(f"  {visible(tensor)}"), *map(Text, cells))
        return table


_RANKED_PER_ROW = 4
"""So many tensors of each statistic are ranked for each row of a table, since several GEMMs may have one statistic of a
tensor."""


def _cells(column: StatisticColumn, tensors: Sequence[int]) -> Iterator[tuple[int, str]]:
    """The texts of a column for some tensors."""
    for place in np.flatnonzero(np.isin(column.tensors, tensors)).tolist():
        text, worst = f"{column.last[place]:.3g}", f"{column.worst[place]:.3g}"
        more = "" if worst == text else f" ({worst} @ {column.iteration[place]})"
        yield int(column.tensors[place]), text + more


def _given_names(session: Results) -> dict[str, str]:
    """Layer -> the name that the script has given to the layer."""
    return {layer.name: layer.given for layer in session.layers if layer.given}


def _folded(tensors: Iterable[_Tensor]) -> list[str]:
    """``layers.{0-2,5}.fc1 activation, weight``: layers that differ in their numbers are named together."""
    layers: dict[str, list[str]] = {}
    for layer, tensor in tensors:
        layers.setdefault(tensor, []).append(layer)
    of_layers: dict[str, list[str]] = {}
    for tensor, found in layers.items():
        for name in folded(found):
            of_layers.setdefault(name, []).append(tensor)
    return [f"{name} {', '.join(found)}" for name, found in of_layers.items()]


def _name(layer: str) -> Text:
    return Text("\n".join(_lines(layer)))


def _lines(layer: str) -> list[str]:
    """A layer's name; a long one in lines that end behind a separator, those after the first one indented."""
    first, *others = _broken(visible(layer), _NAME_WIDTH - 2)
    return [first, *(f"  {line}" for line in others)]


def _header(statistic: str) -> list[str]:
    """A statistic's name, in lines that end behind an underscore."""
    return _broken(visible(statistic), _HEADER_WIDTH)


def _broken(text: str, width: int) -> list[str]:
    """A name in lines; only a part that is longer than :data:`_LONGEST_PART` is broken anywhere."""
    lines = wrapped(text, width).splitlines() or [""]
    return [line[at : at + _LONGEST_PART] for line in lines for at in range(0, len(line) or 1, _LONGEST_PART)]


def _changes(session: Results, precision: Sequence[GemmPrecision]) -> dict[tuple[str, str], list[str]]:
    """Layer and GEMM -> its formats in short, as often as they became others, of GEMMs whose formats have changed."""
    changed = {
        (entry.layer, entry.gemm) for entry in precision if any("->" in text for text in entry.operands.values())
    }
    found: dict[tuple[str, str], list[str]] = {}
    for span in session._results.audit.spans() if changed else ():
        key = span.layer, span.gemm
        formats = found.setdefault(key, [])
        if key in changed and not span.not_run and formats[-1:] != [in_short(span.operands)]:
            formats.append(in_short(span.operands))
    return found


def _operands(entry: GemmPrecision | None, changes: Mapping[tuple[str, str], Sequence[str]]) -> str:
    if entry is None:
        return "not run"
    if entry.not_run:
        return f"not run: {entry.not_run}"
    formats = changes.get((entry.layer, entry.gemm), ())
    several = f"; {len(formats) - 1} changes, now {formats[-1]}" if len(formats) > _LEAST_COUNTED else ""
    return f"{in_short(entry.operands)}{several}"


_LEAST_COUNTED = 2
"""The arrow of two formats shows one change."""
