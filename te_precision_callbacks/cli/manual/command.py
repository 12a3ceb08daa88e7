"""``te-precision features`` and ``te-precision statistics``: reference of configs.

The exit code is 0, or 2 for an unknown name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Json

if TYPE_CHECKING:
    from te_precision_callbacks.cli.manual.features import FeatureEntry
    from te_precision_callbacks.cli.manual.statistics import Explained

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
        typer.Argument(metavar="NAME", help="The statistic to explain, also with a recipe, such as mxfp8_mse."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the statistics that features collect, or explain one: its formula, its unit, and an example."""
    from te_precision_callbacks.cli.manual.statistics import find, statistics

    listed = statistics() if name is None else (find(name),)
    if as_json:
        terminal.show_json({"statistics": listed})
    elif name is None:
        _list_statistics(listed)
    else:
        _explain_statistic(listed[0])


def _list_features(listed: tuple[FeatureEntry, ...]) -> None:
    for place in dict.fromkeys(feature.place for feature in listed):
        terminal.show_text(f"In {place}")
        table = terminal.table("feature", "does")
        for feature in listed:
            if feature.place == place:
                table.add_row(*map(terminal.cell, (feature.name, feature.paragraphs[0])))
        terminal.show(table)
    terminal.show_text("The case of a name does not matter: DisableFp8Gemm is DisableFP8GEMM.")
    terminal.show_text("te-precision features NAME explains a feature.")


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
        facts = [f"in: {key.places}"]
        if key.required or key.default is not None:
            facts.append("must be given" if key.required else f"default: {key.default}")
        terminal.show_text("; ".join(facts), 2 * _INDENT)
        terminal.show_text(key.meaning, 2 * _INDENT)
    if feature.example:
        typer.echo(f"\nExample\n\n{feature.example}")


def _list_statistics(listed: tuple[Explained, ...]) -> None:
    from te_precision_callbacks.statistics.table import SYMBOLS

    groups: dict[tuple[tuple[str, tuple[str, ...]], ...], list[Explained]] = {}
    for statistic in listed:
        groups.setdefault(tuple(statistic["collected_by"].items()), []).append(statistic)
    for features, statistics in groups.items():
        _, tensors = features[0]
        terminal.show_text(f"{' and '.join(name for name, _ in features)}, of {', '.join(tensors)}", hanging=_INDENT)
        table = terminal.table("statistic", "formula, unit, and how ranks are merged")
        for statistic in statistics:
            name = f"{statistic['name']} *" if statistic["is_upstream"] else statistic["name"]
            text = f"{statistic['formula']}; unit: {statistic['unit']}; ranks: {statistic['merged']}"
            table.add_row(*map(terminal.cell, (name, text)))
        terminal.show(table)
    terminal.show_text(f"{SYMBOLS} *: Transformer Engine 2.20 has it, too.")
    terminal.show_text("te-precision statistics NAME explains a statistic, also with a recipe: mxfp8_mse_columnwise.")


def _explain_statistic(statistic: Explained) -> None:
    from te_precision_callbacks.statistics.table import SYMBOLS

    terminal.show_text(statistic["name"])
    typer.echo()
    terminal.show_text(statistic["formula"], _INDENT)
    terminal.show_text(SYMBOLS, _INDENT)
    typer.echo()
    for heading, text in _facts(statistic):
        terminal.show_text(f"{heading}: {text}", hanging=_INDENT)
    features = list(statistic["collected_by"])
    typer.echo(f"\nIn the options of {' or '.join(features)}:\n\n{' ' * _INDENT}{statistic['example']}")


def _facts(statistic: Explained) -> Iterator[tuple[str, str]]:
    yield "unit", statistic["unit"]
    yield "computed from", statistic["of"]
    if statistic["is_histogram"]:
        yield "value", "a histogram"
    if statistic["block_size"] is not None:
        yield "blocks", f"block_size {statistic['block_size']}, dims {statistic['dims']}"
    if statistic["is_of_own_recipe"]:
        yield "recipe", "the one that the layer runs"
    if recipe := statistic["recipe"]:
        is_simulated = recipe["is_simulated"]
        others = "for other layers what it would give" if is_simulated else "other layers have no such statistic"
        yield "recipe", f"{recipe['name']}; {others}"
        yield "elements that share a factor", recipe["shares"]
        yield "factor", recipe["factor"]
        yield "elements", (statistic["element_format"] or "").upper() or recipe["elements"]
    if statistic["direction"]:
        read = ", ".join(f"{gemm} of the {tensor}" for tensor, gemm in statistic["read_by"].items())
        yield "direction", f"{statistic['direction']}, read by {read}"
    yield "over micro-batches and ranks", statistic["merged"]
    if statistic["worse"]:
        yield "worse", statistic["worse"]
    for feature, tensors in statistic["collected_by"].items():
        yield f"collected by {feature}", f"of {', '.join(tensors)}"
    yield "in Transformer Engine 2.20", "yes" if statistic["is_upstream"] else "no"
