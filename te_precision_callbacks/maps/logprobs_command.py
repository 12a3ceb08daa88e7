"""``te-precision logprobs``: the difference of per-token log-probabilities between trainer and rollout.

Usage::

    te-precision logprobs tokens.parquet --noise bf16.parquet
    te-precision logprobs tokens.jsonl --by group --column trainer=old_log_probs --limit 0.05

The exit code is 0, or 2 for wrong use. ``--json`` prints one JSON object.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Json

if TYPE_CHECKING:
    from te_precision_callbacks.maps.logprobs import TokenDifference

_MOST_ROWS = 40

_PUBLISHED = (
    "Published: the mean difference of probabilities is about 0.004 with training and rollout in BF16, and 0.015 with"
    " quantized training and rollout (verl, pull request 7519)."
)


def logprobs_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A table with sample, token, trainer and rollout, as .parquet, .jsonl or .safetensors.",
        ),
    ],
    *,
    noise: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A table of the same model with both sides in high precision: the floor."),
    ] = None,
    by: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Also by the values of a column. Can be repeated.")
    ] = None,
    limit: Annotated[float, typer.Option(metavar="NATS", help="Count tokens whose difference is above this.")] = 0.1,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COLUMN", help="The name of a column in the file, such as trainer=old_log_probs."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how far the log-probabilities of trainer and rollout are apart, overall, by position and by group."""
    from te_precision_callbacks.maps.logprobs import SAMPLE, SIDES, TOKEN, read_logprobs

    pairs = [entry.partition("=") for entry in column or ()]
    for name, _, own in pairs:
        if name not in (SAMPLE, TOKEN, *SIDES) or not own:
            raise typer.BadParameter(f"{name!r} is not sample, token, trainer or rollout", param_hint="--column")
    if not (math.isfinite(limit) and limit > 0):
        raise typer.BadParameter(f"{limit} is not a positive number of nats", param_hint="--limit")
    names = {name: own for name, _, own in pairs}
    table = read_logprobs(file, names)
    whole = table.difference(limit)
    floor = None if noise is None else read_logprobs(noise, names).difference(limit)
    parts = {"position": dict(table.by_position(limit))}
    parts |= {name: dict(table.by(name, limit)) for name in by or ()}
    if as_json:
        terminal.show_json({"source": table.source, "limit": limit, "all": whole, "floor": floor, "by": parts})
        return
    sample, token = whole.worst
    place = f"sample {sample}, token {token}"
    terminal.show_text(f"{file}: {whole.tokens:,} tokens. The largest difference is at {place}.")
    rows = {"all": whole}
    if floor is not None:
        rows["noise floor"] = floor
    _show("", rows, limit)
    for name, differences in parts.items():
        _show(name, differences, limit)
    if floor is not None and floor.mean:
        terminal.show_text(f"The mean difference is {whole.mean / floor.mean:.3g} times the noise floor.")
    elif floor is None:
        terminal.show_text("Without --noise, nothing says how much two engines in high precision differ anyway.")
    terminal.show_text(_PUBLISHED)


def _show(name: str, rows: dict[str, TokenDifference], limit: float) -> None:
    table = terminal.table(name, "tokens", "mean |d|", "max |d|", "mean |dp|", "KL (k1)", "KL (k3)", f"|d| > {limit:g}")
    for label, row in list(rows.items())[:_MOST_ROWS]:
        numbers = (f"{value:.3g}" for value in (row.mean, row.largest, row.probability, row.k1, row.k3))
        table.add_row(terminal.cell(label), f"{row.tokens:,}", *numbers, f"{100 * row.beyond:.3g} %")
    terminal.show(table)
    if len(rows) > _MOST_ROWS:
        terminal.show_text(f"and {len(rows) - _MOST_ROWS} more values of {name}; --json lists all.")
