"""``te-precision features`` and ``te-precision statistics``: reference of configs.

The exit code is 0, or 2 for an unknown name.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.suggestions import nearest, suggestion
from te_precision_callbacks.base.terminal import Json

if TYPE_CHECKING:
    from te_precision_callbacks.cli.manual.features import FeatureEntry
    from te_precision_callbacks.statistics.names import Request

_INDENT = 2


def features_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The feature to explain, in any case.")] = None,
    as_json: Json = False,
) -> None:
    """List the features that a config may name, or explain one: its keys, where it acts, an example."""
    from te_precision_callbacks.cli.manual.features import features, find

    listed = features() if name is None else find(name)
    if as_json:
        terminal.show_json({"features": listed})
    elif name is None:
        _list_features(listed)
    else:
        for number, feature in enumerate(listed):
            if number:
                typer.echo()
            _explain_feature(feature)


def statistics_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="List only this statistic, optionally with a recipe prefix, such as mxfp8_mse."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the statistics that features collect: formula, unit, worse direction, and a line for a config."""
    from te_precision_callbacks.statistics import names
    from te_precision_callbacks.statistics.table import STATISTICS

    listed = []
    for label in STATISTICS if name is None else [name]:
        try:
            request = names.named_request(label)
        except names.UnknownStatisticError as error:
            hint = (
                suggestion(label, nearest(label, [*STATISTICS, *names.quantized_names()]))
                or " List all: te-precision statistics."
            )
            raise names.UnknownStatisticError(f"{error}.{hint}") from None
        features, line = _options(label, request)
        statistic = request.statistic
        listed.append(
            {
                "name": label,
                "formula": statistic.formula,
                "unit": statistic.unit,
                "worse": statistic.worse.value,
                "is_upstream": statistic.upstream,
                "collected_by": features,
                "example": line,
            }
        )
    if as_json:
        terminal.show_json({"statistics": listed})
        return
    _list_statistics(listed)
    if name is not None:
        terminal.show_as_it_is(line, _INDENT)


def _options(name: str, request: Request) -> tuple[tuple[str, ...], str]:
    from te_precision_callbacks.statistics.table import BLOCKWISE, GEMM_SOURCES

    if request.statistic.source in GEMM_SOURCES:
        return ("LogGemmError",), "gemms: [fprop, dgrad, wgrad]"
    if blocks := request.blocks:
        return ("LogTensorStats",), f"stats: [{BLOCKWISE}: {{block_size: {blocks.size}, dims: {blocks.dims}}}]"
    if request.recipe is None:
        return ("LogTensorStats",), f"stats: [{name}]"
    return ("LogFp8TensorStats", *(() if request.recipe else ("LogNvfp4TensorStats",))), f"stats: [{name}]"


def _list_features(listed: tuple[FeatureEntry, ...]) -> None:
    for folder in dict.fromkeys(feature.place for feature in listed):
        terminal.show_text(f"In {folder}")
        table = terminal.table("feature", "does")
        for feature in listed:
            if feature.place == folder:
                table.add_row(*map(terminal.cell, (feature.name, feature.paragraphs[0])))
        terminal.show(table)
    terminal.show_text("Names are case-insensitive: DisableFp8Gemm is DisableFP8GEMM.")
    terminal.show_text("For details: te-precision features NAME")


def _explain_feature(feature: FeatureEntry) -> None:
    terminal.show_text(f"{feature.name}, in {feature.place}")
    for paragraph in feature.paragraphs:
        typer.echo()
        terminal.show_text(paragraph, _INDENT)
    for heading, names in (("Tensors", feature.tensors), ("GEMMs", feature.gemms)):
        if names:
            typer.echo()
            terminal.show_text(f"{heading}: {', '.join(names)}", hanging=_INDENT)
    if feature.keys:
        typer.echo("\nKeys")
    for key in feature.keys:
        typer.echo()
        terminal.show_text(f"{key.name}: {key.values}", _INDENT, hanging=_INDENT)
        facts = [f"where: {key.places}"]
        if key.required or key.default is not None:
            facts.append("required" if key.required else f"default: {key.default}")
        terminal.show_text("; ".join(facts), 2 * _INDENT)
        terminal.show_text(key.meaning, 2 * _INDENT)
    if feature.example:
        typer.echo(f"\nExample\n\n{feature.example}")


def _list_statistics(listed: list[dict[str, Any]]) -> None:
    from te_precision_callbacks.statistics.table import SYMBOLS

    for features, statistics in itertools.groupby(listed, key=lambda statistic: statistic["collected_by"]):
        terminal.show_text(f"In the options of {' or '.join(features)}")
        table = terminal.table("statistic", "formula", "unit", "worse")
        for statistic in statistics:
            name = f"{statistic['name']} *" if statistic["is_upstream"] else statistic["name"]
            table.add_row(*map(terminal.cell, (name, statistic["formula"], statistic["unit"], statistic["worse"])))
        terminal.show(table)
    terminal.show_text(f"{SYMBOLS} *: also in Transformer Engine 2.20. Recipe prefixes: docs/statistics.md.")
