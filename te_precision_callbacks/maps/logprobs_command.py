"""``te-precision logprobs``: the difference of per-token log-probabilities between trainer and rollout.

Usage::

    te-precision logprobs tokens.parquet --noise bf16.parquet
    te-precision logprobs tokens.jsonl --by group --limit 0.05

The exit code is 0, or 2 for wrong use. ``--json`` prints one JSON object.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Json

if TYPE_CHECKING:
    from te_precision_callbacks.maps.logprobs import TokenDifference

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
    limit: Annotated[
        float, typer.Option(metavar="NATS", min=0, help="Count tokens whose difference is above this.")
    ] = 0.1,
    as_json: Json = False,
) -> None:
    """Show how far the log-probabilities of trainer and rollout are apart, overall, by position and by group."""
    from te_precision_callbacks.maps.logprobs import TOKEN, read_logprobs

    table = read_logprobs(file)
    whole = {"all": table.difference(limit)}
    if noise is not None:
        whole["noise floor"] = read_logprobs(noise).difference(limit)
    parts = {name: table.by(name, limit) for name in (TOKEN, *(by or ()))}
    if as_json:
        terminal.show_json({"source": table.source, "limit": limit, **whole, "by": parts})
        return
    _show(str(file), whole, limit)
    for name, differences in parts.items():
        _show(name, differences, limit)
    if noise is None:
        terminal.show_text("Without --noise, nothing says how much two engines in high precision differ anyway.")
    terminal.show_text(_PUBLISHED)


def _show(name: str, rows: dict[str, TokenDifference], limit: float) -> None:
    table = terminal.table(name, "tokens", "mean |d|", "max |d|", "mean |dp|", "KL (k1)", "KL (k3)", f"|d| > {limit:g}")
    for label, row in rows.items():
        numbers = map("{:.3g}".format, (row.mean, row.largest, row.probability, row.k1, row.k3))
        table.add_row(terminal.cell(label), f"{row.tokens:,}", *numbers, f"{100 * row.beyond:.3g} %")
    terminal.show(table)
