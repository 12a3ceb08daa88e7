"""``te-precision dumps``: lists and shows dumped tensors and GEMMs.

The exit code is 0, or 2 for wrong use, such as a file that is not a dump. ``--json`` prints one JSON object; non-finite
numbers are strings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import first_of
from te_precision_callbacks.base.terminal import Json
from te_precision_callbacks.te.gemm_shapes import layer_sizes

if TYPE_CHECKING:
    import torch

    from te_precision_callbacks.dumps.dump_files import Entry, Foreign

_MOST_FOREIGN = 3
"""The maximum number of files that are not dumps in a list."""

app = typer.Typer(name="dumps", help="List and show dumped tensors and GEMMs.", no_args_is_help=True)


@app.command("list")
def list_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder, including its subfolders.")],
    as_json: Json = False,
) -> None:
    """List the dumps in a folder: the layer, tensor and step of each dump, and its content."""
    from te_precision_callbacks.dumps.dump_files import list_dumps

    listing = list_dumps(folder)
    if as_json:
        terminal.show_json({"dumps": _rows(listing), "foreign": _rows(listing.foreign)})
        return
    table = terminal.table("iteration", "layer", "tensor", "micro-batch", "rank", "holds", "bytes", "file")
    for entry in listing:
        header = entry.header
        path = entry.path
        if folder.is_dir():
            path = path.relative_to(folder)
        contents = []
        if header.high_precision is not None:
            contents.append(header.high_precision.dtype)
        if header.quantized is not None:
            contents.append(header.quantized.class_name)
        if (gemm := header.gemm) is not None:
            sizes = _by(layer_sizes(gemm.gemm, gemm.n, gemm.m, gemm.k))
            contents.append(f"a GEMM, {sizes} (tokens x in x out)")
        iteration = "" if header.iteration is None else header.iteration
        cells = (iteration, header.layer, header.tensor, header.micro_batch, header.rank, ", ".join(contents))
        table.add_row(*map(terminal.cell, (*cells, f"{entry.size:,}", path)))
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
    """Show a dump: its header, and the numbers of each tensor. Numbers are of finite elements."""
    from te_precision_callbacks.dumps.dump_files import load

    dump = load(file)
    header = terminal.plain(dump.header)
    tensors = [_summary(name, tensor) for name, tensor in sorted(dump.tensors.items())]
    if as_json:
        terminal.show_json({"path": str(file), "header": header, "tensors": tensors})
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


def _rows(files: Iterable[Entry | Foreign]) -> list[dict[str, Any]]:
    return [{**terminal.plain(file), "path": str(file.path)} for file in files]


def _summary(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Summarize a tensor in float64; extremes and mean are nan without a finite element."""
    # On some devices float8 can be converted to float64 only through float32.
    values = (tensor.float() if tensor.element_size() == 1 else tensor).double()
    finite = values[values.isfinite()]
    low, high, mean = (finite.min(), finite.max(), finite.mean()) if finite.numel() else (math.nan,) * 3
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": tuple(tensor.shape),
        "nbytes": tensor.nbytes,
        "minimum": float(low),
        "maximum": float(high),
        "mean": float(mean),
        "nan": int(values.isnan().sum()),
        "inf": int(values.isinf().sum()),
        "zeros": int((values == 0).sum()),
    }


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            rows.append((prefix + name, _by(value)))
        elif value not in (None, ""):
            rows.append((prefix + name, str(value)))
    return rows


def _by(values: Any) -> str:
    return " x ".join(map(str, values))
