"""``te-precision map``: the format of each module in a plan, a run, a checkpoint or a precision file.

Usage::

    te-precision map logs
    te-precision map checkpoint --engine vllm --json > rollout.json
    te-precision map precision.yaml --modules package.module:function --recipe mxfp8
    te-precision map logs rollout.json --alignment alignment.yaml

The exit code is 0; 1 with findings, or if two sources differ; 2 for wrong use. ``--json`` prints one JSON object.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.base.terminal import Json
from te_precision_callbacks.check.command import Alignment, install_backend, plan_function
from te_precision_callbacks.layers.folding import fold_names, form_of

if TYPE_CHECKING:
    from te_precision_callbacks.maps.comparing import MapComparison
    from te_precision_callbacks.maps.precision_map import PrecisionMap
    from te_precision_callbacks.maps.tool_files import Surroundings

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
        Literal["vllm", "sglang"] | None,
        typer.Option(
            help="Apply the matching of this engine to a quantization_config. Default: the matching of the tool that"
            " wrote it.",
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
        tuple[int, int],
        typer.Option(
            metavar="FIRST LAST",
            min=0,
            help="For Megatron's file: the numbers of blocks at the start and at the end that"
            " first_last_layers_bf16 keeps in BF16, such as 1 1.",
        ),
    ] = (0, 0),
    alignment: Alignment = None,
    as_json: Json = False,
) -> None:
    """Show the format of each module and its origin; of two sources, the modules that only one of them quantizes."""
    from te_precision_callbacks.maps import alignment as alignments
    from te_precision_callbacks.maps import comparing, tool_files

    if b is None and alignment is not None:
        raise typer.BadParameter("an alignment is for two sources", param_hint="--alignment")
    around = tool_files.Surroundings(engine, recipe, bf16_layers)
    first = _open(a, modules, around)
    if b is None:
        has_findings = bool(first.findings)
        if as_json:
            terminal.show_json(first.as_json())
        else:
            _show_map(first)
    else:
        comparison = comparing.compare_maps(first, _open(b, modules, around), alignments.read_alignment(alignment))
        has_findings = bool(comparison.broken or comparison.a.findings or comparison.b.findings)
        if as_json:
            sides = {"a": comparison.a.as_json(), "b": comparison.b.as_json()}
            differences = [difference._asdict() for difference in comparison.differences]
            terminal.show_json({**vars(comparison), **sides, "differences": differences, "broken": comparison.broken})
        else:
            _show_comparison(comparison)
    if has_findings:
        raise typer.Exit(1)


def _open(source: str, modules: str | None, around: Surroundings) -> PrecisionMap:
    from te_precision_callbacks.check.factory import build_model
    from te_precision_callbacks.maps.sources import is_function, open_map

    if is_function(source):
        return _plan(source, around.recipe or "auto")
    built: Any = modules
    if modules is not None and is_function(modules):
        install_backend(None)
        built, _ = build_model(modules)
    return open_map(source, modules=built, around=around)


def _plan(spec: str, recipe: str) -> PrecisionMap:
    from te_precision_callbacks.config import load_config
    from te_precision_callbacks.maps.precision_map import from_products

    checked, _ = plan_function(spec, recipe, None, config=load_config({}))
    planned = from_products(checked.coverage, f"plan of {spec}, recipe {checked.recipe or 'none'}")
    if checked.not_counted:
        missing = f"Not known before a run: {', '.join(checked.not_counted)}."
        planned = replace(planned, notes=(missing,))
    return planned


def _show_map(shown: PrecisionMap) -> None:
    from te_precision_callbacks.maps.comparing import fold_said

    terminal.show_text(f"{shown.source}: {many(len(shown.modules), 'module')} with weights.")
    table = terminal.table("module", "weight", "activation", "gradient", "said by")
    keys = (((*formats[:3], form_of(formats.said)), name) for name, formats in shown.modules.items())
    for (*formats, _), names in group_by_key(keys).items():
        cells = [text or "-" for text in formats]
        cells.append(fold_said(shown.modules[name].said for name in names))
        table.add_row(terminal.cell_lines(fold_names(names, most=_MOST_NAMES)), *map(terminal.cell, cells))
    terminal.show(table, optional=("gradient",))
    _show_findings([finding.text for finding in shown.findings])
    terminal.show_notes(shown.notes)


def _show_findings(texts: list[str]) -> None:
    for text in texts:
        typer.echo()
        terminal.show_text(text, _INDENT, hanging=_INDENT)


def _show_comparison(comparison: MapComparison) -> None:
    from te_precision_callbacks.maps.precision_map import join_names

    terminal.show_text(f"A: {comparison.a.source}, {many(len(comparison.a.modules), 'module')}")
    terminal.show_text(f"B: {comparison.b.source}, {many(len(comparison.b.modules), 'module')}")
    differing = many(len(comparison.differences), "difference")
    sentences = [f"{many(comparison.compared, 'pair')} of modules compared: {differing}."]
    alone = len(comparison.only_a) + len(comparison.only_b)
    if alone:
        sentences.append(f"Not compared: {many(alone, 'module')} of one side.")
    for tensor, count in comparison.not_said.items():
        sentences.append(f"Not compared: the {tensor} of {many(count, 'pair')}, which a side does not say.")
    terminal.show_text(" ".join(sentences))
    names_by_title = {
        "Allowed to differ": comparison.allowed,
        "Not compared, only in A": comparison.only_a,
        "Not compared, only in B": comparison.only_b,
    }
    for title, names in names_by_title.items():
        if names:
            terminal.show_text(f"{title}: {join_names(names)}.")
    findings = (*comparison.a.findings, *comparison.b.findings)
    _show_findings([*comparison.broken, *(finding.text for finding in findings)])
    terminal.show_notes(dict.fromkeys((*comparison.a.notes, *comparison.b.notes)))
