"""``te-precision map``: the format of each module in a plan, a run, a checkpoint or a precision file.

Usage::

    te-precision map logs
    te-precision map checkpoint --engine vllm --json > rollout.json
    te-precision map precision.yaml --modules package.module:function --recipe mxfp8
    te-precision map logs rollout.json --alignment alignment.yaml

The exit code is 0; 1 with findings, or if two sources differ; 2 for wrong use. ``--json`` prints one JSON object.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.terminal import Json
from te_precision_callbacks.check.command import Alignment, install_backend, plan_function

if TYPE_CHECKING:
    from te_precision_callbacks.maps.comparing import MapComparison
    from te_precision_callbacks.maps.precision_map import PrecisionMap
    from te_precision_callbacks.maps.tool_files import Surroundings

_ENGINES = ("vllm", "sglang")
_MOST_NAMES = 8
_INDENT = 2


def map_command(
    a: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A recorded run, a checkpoint, a precision file, a saved map, or package.module:function, which"
            " returns a torch.nn.Module to plan.",
        ),
    ],
    b: Annotated[str | None, typer.Argument(metavar="[B]", help="A source to compare with the first one.")] = None,
    *,
    modules: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="The modules on which a precision file acts: a checkpoint, or package.module:function. Default: the"
            " checkpoint in the folder of the file.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="vllm or sglang: apply the matching of this engine to a quantization_config. Default: the matching of"
            " the tool that wrote it.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The recipe around the model, for Megatron's file and for package.module:function, as for te-precision"
            " check.",
        ),
    ] = None,
    bf16_layers: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST,LAST",
            help="For Megatron's file: the numbers of blocks at the start and at the end that"
            " first_last_layers_bf16 keeps in BF16, such as 1,1.",
        ),
    ] = None,
    alignment: Alignment = None,
    as_json: Json = False,
) -> None:
    """Show which format each module has, and where that is said; of two sources, what only one of them quantizes."""
    from te_precision_callbacks.maps.alignment import read_alignment
    from te_precision_callbacks.maps.comparing import compare_maps
    from te_precision_callbacks.maps.tool_files import Engine, Surroundings

    if engine not in (None, *_ENGINES):
        raise typer.BadParameter(f"{engine!r} is not an engine; known: {', '.join(_ENGINES)}", param_hint="--engine")
    if alignment is not None and b is None:
        raise typer.BadParameter("an alignment is for two sources", param_hint="--alignment")
    kept = re.fullmatch(r"(\d{1,6}),(\d{1,6})", bf16_layers or "0,0")
    if kept is None:
        raise typer.BadParameter(f"{bf16_layers!r} is not FIRST,LAST, such as 1,1", param_hint="--bf16-layers")
    around = Surroundings(cast("Engine | None", engine), recipe, (int(kept[1]), int(kept[2])))
    built = None if modules is None else _modules(modules)
    maps = [_open(source, built, around) for source in (a, b) if source is not None]
    given = {"engine": engine, "recipe": recipe, "bf16_layers": bf16_layers}
    for name, value in given.items():
        if value is not None and name not in around.used:
            raise typer.BadParameter("no source uses this option", param_hint=f"--{name.replace('_', '-')}")
    if b is None:
        if as_json:
            terminal.show_json(maps[0].as_json())
        else:
            _show_map(maps[0])
        has_findings = bool(maps[0].findings)
    else:
        comparison = compare_maps(maps[0], maps[1], read_alignment(alignment))
        has_findings = bool(comparison.broken) or any(source.findings for source in maps)
        if as_json:
            terminal.show_json(_comparison_as_json(comparison))
        else:
            _show_comparison(comparison)
    if has_findings:
        raise typer.Exit(1)


def _modules(source: str) -> Any:
    from te_precision_callbacks.check.factory import build_model
    from te_precision_callbacks.maps.sources import is_function

    if not is_function(source):
        return source
    install_backend(None)
    return build_model(source)[0]


def _open(source: str, modules: Any, around: Surroundings) -> PrecisionMap:
    from te_precision_callbacks.maps.sources import is_function, open_map

    if is_function(source):
        around.used.add("recipe")
        return plan_map(source, around.recipe)
    return open_map(source, modules=modules, around=around)


def plan_map(spec: str, recipe: str | None) -> PrecisionMap:
    """Plan the model of ``package.module:function``, and return its map."""
    from dataclasses import replace

    from te_precision_callbacks.config import load_config
    from te_precision_callbacks.maps.precision_map import from_products

    checked, _, _ = plan_function(spec, recipe or "auto", None, None, None, config=load_config({}))
    planned = from_products(checked.coverage, f"plan of {spec}, recipe {checked.recipe or 'none'}")
    left = [f"Not planned without te-precision check --batch: {', '.join(checked.not_counted)}."]
    return replace(planned, source=spec, notes=tuple(left if checked.not_counted else ()))


# ---------------------------------------------------------------------- printing


def _show_map(shown: PrecisionMap) -> None:
    from te_precision_callbacks.layers.folding import fold_names, form_of
    from te_precision_callbacks.maps.comparing import fold_said

    alike: dict[tuple[str, ...], list[str]] = {}
    for name, formats in shown.modules.items():
        alike.setdefault((*formats[:3], form_of(formats.said)), []).append(name)
    terminal.show_text(f"{shown.source}: {many(len(shown.modules), 'module')} with weights.")
    table = terminal.table("module", "weight", "activation", "gradient", "said by")
    for names in alike.values():
        formats = shown.modules[names[0]]
        folded = fold_names(names, most=_MOST_NAMES)
        cells = [text or "-" for text in formats[:3]]
        cells.append(fold_said(shown.modules[name].said for name in names))
        table.add_row(terminal.cell_lines(folded), *map(terminal.cell, cells))
    terminal.show(table, optional=("gradient",))
    _show_remarks(shown)


def _show_remarks(*sources: PrecisionMap) -> None:
    notes = (note for source in sources for note in source.notes)
    terminal.show_notes(dict.fromkeys(notes))
    findings = [finding for source in sources for finding in source.findings]
    if findings:
        typer.echo(f"\n{many(len(findings), 'finding')}")
    for finding in findings:
        typer.echo()
        terminal.show_text(finding.text, _INDENT, hanging=_INDENT)


def _show_comparison(comparison: MapComparison) -> None:
    from te_precision_callbacks.layers.folding import fold_names
    from te_precision_callbacks.maps.comparing import fold_said, group_alike

    terminal.show_text(f"A: {comparison.a.source}, {many(len(comparison.a.modules), 'module')}")
    terminal.show_text(f"B: {comparison.b.source}, {many(len(comparison.b.modules), 'module')}")
    grouped = group_alike(comparison.differences)
    if grouped:
        table = terminal.table("A", "B", "tensor", "in A", "in B", "said by")
        for (tensors, format_a, format_b, allowed), alike in grouped.items():
            ours = fold_names((entry.a for entry in alike), most=_MOST_NAMES)
            theirs = fold_names((entry.b for entry in alike), most=_MOST_NAMES)
            cells = [terminal.cell_lines(ours), terminal.cell_lines(theirs)]
            said = [
                f"A: {fold_said(entry.said_a for entry in alike)}",
                f"B: {fold_said(entry.said_b for entry in alike)}",
            ]
            if allowed:
                said.append("allowed by the alignment file")
            table.add_row(*cells, tensors, format_a, format_b, terminal.cell_lines(said))
        terminal.show(table)
    same = "no differences" if not comparison.differences else many(len(comparison.differences), "difference")
    terminal.show_text(f"{many(comparison.compared, 'pair')} of modules compared: {same}.")
    for tensor, count in comparison.not_said.items():
        terminal.show_text(f"Not compared: the {tensor} of {many(count, 'pair')}, which a side does not say.")
    for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            folded = ", ".join(fold_names(names, most=_MOST_NAMES))
            terminal.show_text(f"Not compared: only in {side}: {folded}.")
    for text in comparison.not_compared:
        typer.echo()
        terminal.show_text(text, _INDENT, hanging=_INDENT)
    _show_remarks(comparison.a, comparison.b)


def _comparison_as_json(comparison: MapComparison) -> dict[str, Any]:
    return {
        **vars(comparison),
        "a": comparison.a.source,
        "b": comparison.b.source,
        "differences": [difference._asdict() for difference in comparison.differences],
        "broken": comparison.broken,
        "findings": [*comparison.a.findings, *comparison.b.findings],
        "notes": [*comparison.a.notes, *comparison.b.notes],
    }
