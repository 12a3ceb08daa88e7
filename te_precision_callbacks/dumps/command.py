"""``te-precision dumps``: lists, shows and compares dumped tensors.

``list`` and ``show`` return exit code 0; ``diff`` returns 0 if the dumps are equal and 1 if they differ. Wrong use,
such as a file that is not a dump, returns 2. ``--json`` prints one JSON object; non-finite numbers are strings.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import first_of
from te_precision_callbacks.base.numerics.gemm_shapes import layer_sizes
from te_precision_callbacks.base.terminal import Json

if TYPE_CHECKING:
    from te_precision_callbacks.dumps.difference import Difference

_MOST_FOREIGN = 3
"""The maximum number of files that are not dumps in a list."""

app = typer.Typer(name="dumps", help="List, show and compare dumped tensors.", no_args_is_help=True)


@app.callback()
def _commands() -> None:
    """List, show and compare dumped tensors."""


@app.command("list")
def list_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder, including its subfolders.")],
    as_json: Json = False,
) -> None:
    """List the dumps in a folder: the layer, tensor and step of each dump, and its content."""
    from te_precision_callbacks.dumps.dump_files import list_dumps

    listing = list_dumps(folder)
    if as_json:
        rows = []
        for entry in listing:
            content = dataclasses.asdict(entry.header)
            rows.append({"path": str(entry.path), "size": entry.size, "header": content})
        others = [{"path": str(file.path), "why": file.why} for file in listing.foreign]
        terminal.show_json({"dumps": rows, "foreign": others})
        return
    table = terminal.table("iteration", "layer", "tensor", "micro-batch", "rank", "holds", "bytes", "file")
    for entry in listing:
        header = entry.header
        place = entry.path
        if folder.is_dir():
            place = place.relative_to(folder)
        contents = []
        if header.high_precision is not None:
            contents.append(header.high_precision.dtype)
        if header.quantized is not None:
            contents.append(header.quantized.class_name)
        if (gemm := header.gemm) is not None:
            sizes = _by(layer_sizes(gemm.gemm, gemm.n, gemm.m, gemm.k))
            contents.append(f"a GEMM, {sizes} (tokens x in x out)")
        iteration: int | str = ""
        if header.iteration is not None:
            iteration = header.iteration
        cells = (iteration, header.layer, header.tensor, header.micro_batch, header.rank, ", ".join(contents))
        table.add_row(*map(terminal.cell, (*cells, f"{entry.size:,}", place)))
    if listing:
        terminal.show(table)
    else:
        terminal.show_text(f"{folder}: no dumps. DumpTensors writes them below <log_dir>/tensor_dumps.")
    foreign = (f"not a dump: {file.path}: {file.why}" for file in listing.foreign)
    for text in first_of(foreign, _MOST_FOREIGN, "and {} more; --json lists them."):
        terminal.show_text(text, hanging=2)


@app.command("show")
def show_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The dump.")],
    as_json: Json = False,
) -> None:
    """Show a dump: its header, the numbers of each tensor, and the quantization error."""
    from te_precision_callbacks.dumps.difference import compare, tensor_numbers
    from te_precision_callbacks.dumps.dump_files import load
    from te_precision_callbacks.dumps.errors import DifferentShapesError, NothingToCompareError
    from te_precision_callbacks.dumps.header import HIGH_PRECISION

    errors: tuple[Difference, ...] = ()
    not_compared: tuple[str, ...] = ()
    dump = load(file)
    tensors = tensor_numbers(dump)
    try:
        result = compare(dump)
        errors = result.differences
        not_compared = result.not_compared
    except (DifferentShapesError, NothingToCompareError) as error:
        # A comparison needs both tensors.
        if HIGH_PRECISION in dump.tensors and dump.header.quantized is not None:
            not_compared = (str(error),)
    header = dataclasses.asdict(dump.header)
    if as_json:
        described = {
            "tensors": tensors,
            "quantization_error": errors,
            "not_compared": not_compared,
        }
        terminal.show_json({"path": str(file), "header": header} | terminal.plain(described))
        return
    table = terminal.table("header", "")
    for row in _flat(header):
        table.add_row(*map(terminal.cell, row))
    terminal.show(table)
    table = terminal.table("tensor", "dtype", "shape", "min", "max", "mean", "nan", "inf", "zeros")
    for tensor in tensors:
        numbers = (f"{tensor[key]:.6g}" for key in ("minimum", "maximum", "mean"))
        counts = (str(tensor[key]) for key in ("nan", "inf", "zeros"))
        table.add_row(terminal.cell(tensor["name"]), tensor["dtype"], _by(tensor["shape"]), *numbers, *counts)
    terminal.show(table)
    if errors:
        terminal.show(_difference_table(errors))
    _print_not_compared(not_compared)


@app.command("diff")
def diff_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="The reference dump.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The dump to compare with A.")],
    as_json: Json = False,
) -> None:
    """Compare two dumps: the numbers, and the codes and scales. Returns exit code 1 if they differ."""
    from te_precision_callbacks.dumps.difference import compare
    from te_precision_callbacks.dumps.dump_files import load

    result = compare(load(a), load(b))
    if as_json:
        terminal.show_json({"equal": result.equal, **terminal.plain(result)})
    else:
        terminal.show(_difference_table(result.differences))
        _print_not_compared(result.not_compared)
        if result.equal:
            terminal.show("The dumps are equal.")
        else:
            terminal.show("The dumps differ.")
    raise typer.Exit(int(not result.equal))


def _print_not_compared(what: tuple[str, ...]) -> None:
    for text in what:
        terminal.show_text(f"not compared: {text}", hanging=2)


def _difference_table(differences: Any) -> Table:
    table = terminal.table(
        "A / B", "elements", "differ", "max error", "at", "mean error", "SQNR dB", "nan", "inf", "codes", "scales"
    )
    for difference in differences:
        codes = ""
        scales = ""
        inside = difference.internals
        if inside is not None:
            codes = f"{inside.codes_differing:,}"
            scales = f"{inside.scales_differing:,} of {inside.blocks:,}"
        table.add_row(
            difference.what,
            f"{difference.elements:,}",
            f"{difference.differing:,} ({100 * difference.share:.3g}%)",
            f"{difference.max_abs_error:.6g}",
            _by(difference.max_at or (), ", "),
            f"{difference.mean_abs_error:.6g}",
            f"{difference.sqnr_db:.2f}",
            _by(difference.nan, " / "),
            _by(difference.inf, " / "),
            codes,
            scales,
        )
    return table


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, (tuple, list)):
            rows.append((prefix + name, _by(value)))
        elif value not in (None, ""):
            rows.append((prefix + name, str(value)))
    return rows


def _by(values: Any, between: str = " x ") -> str:
    return between.join(map(str, values))
