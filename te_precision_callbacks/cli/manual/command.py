"""``te-precision features`` and ``te-precision statistics``: reference of configs.

Usage::

    te-precision features
    te-precision features FakeQuant
    te-precision statistics
    te-precision statistics mxfp8_underflows%_columnwise

The exit code is 0, or 2 for an unknown name. ``--json`` prints one JSON object.
"""

from __future__ import annotations

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

    found = features() if name is None else find(name)
    if as_json:
        terminal.show_json({"features": found})
    elif name is None:
        _list_features(found)
    else:
        for number, feature in enumerate(found):
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

    found = statistics() if name is None else (find(name),)
    if as_json:
        terminal.show_json({"statistics": found})
    elif name is None:
        _list_statistics(found)
    else:
        _explain_statistic(found[0])


def _list_features(found: tuple[FeatureEntry, ...]) -> None:
    for place in dict.fromkeys(feature.place for feature in found):
        terminal.show_text(f"In {place}")
        table = terminal.table("feature", "does")
        for feature in found:
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


def _list_statistics(found: tuple[Explained, ...]) -> None:
    from te_precision_callbacks.statistics.table import SYMBOLS

    groups: dict[tuple[tuple[str, tuple[str, ...]], ...], list[Explained]] = {}
    for statistic in found:
        groups.setdefault(tuple(statistic.collected_by.items()), []).append(statistic)
    for features, rows in groups.items():
        _, tensors = features[0]
        terminal.show_text(f"{' and '.join(name for name, _ in features)}, of {', '.join(tensors)}", hanging=_INDENT)
        table = terminal.table("statistic", "formula, unit, and how ranks are merged")
        for row in rows:
            name = f"{row.name} *" if row.is_upstream else row.name
            table.add_row(*map(terminal.cell, (name, f"{row.formula}; unit: {row.unit}; ranks: {row.merged}")))
        terminal.show(table)
    terminal.show_text(f"{SYMBOLS} *: Transformer Engine 2.20 has it, too.")
    terminal.show_text("te-precision statistics NAME explains a statistic, also with a recipe: mxfp8_mse_columnwise.")


def _explain_statistic(statistic: Explained) -> None:
    from te_precision_callbacks.statistics.table import SYMBOLS

    terminal.show_text(statistic.name)
    typer.echo()
    terminal.show_text(statistic.formula, _INDENT)
    terminal.show_text(SYMBOLS, _INDENT)
    typer.echo()
    for heading, text in _facts(statistic):
        terminal.show_text(f"{heading}: {text}", hanging=_INDENT)
    features = list(statistic.collected_by)
    typer.echo(f"\nIn the options of {' or '.join(features)}:\n\n{' ' * _INDENT}{statistic.example}")


def _facts(statistic: Explained) -> list[tuple[str, str]]:
    """Headings and texts beside the formula."""
    found = [("unit", statistic.unit), ("computed from", statistic.of)]
    if statistic.is_histogram:
        found.append(("value", "a histogram"))
    if statistic.block_size is not None:
        found.append(("blocks", f"block_size {statistic.block_size}, dims {statistic.dims}"))
    if statistic.is_of_own_recipe:
        found.append(("recipe", "the one that the layer runs"))
    if statistic.recipe is not None:
        recipe = statistic.recipe
        others = "for other layers what it would give" if recipe.is_simulated else "other layers have no such statistic"
        found += [
            ("recipe", f"{recipe.name}; {others}"),
            ("elements that share a factor", recipe.shares),
            ("factor", recipe.factor),
            ("elements", statistic.element_format.upper() if statistic.element_format else recipe.elements),
        ]
    if statistic.direction is not None:
        read = ", ".join(f"{gemm} of the {tensor}" for tensor, gemm in statistic.read_by.items())
        found.append(("direction", f"{statistic.direction}, read by {read}"))
    found.append(("over micro-batches and ranks", statistic.merged))
    if statistic.worse:
        found.append(("worse", statistic.worse))
    found += [(f"collected by {feature}", f"of {', '.join(of)}") for feature, of in statistic.collected_by.items()]
    return [*found, ("in Transformer Engine 2.20", "yes" if statistic.is_upstream else "no")]
