"""``te-precision check``: a config's errors, and what a model will run in.

Usage::

    te-precision check config.yaml
    te-precision check config.yaml --model package.module:factory --recipe mxfp8 --tokens 4096

The exit code is 0; 1 with findings, such as an error of the config; 2 for wrong use. ``--json`` prints one JSON object.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_precision_callbacks import terminal
from te_precision_callbacks.terminal import Json

if TYPE_CHECKING:
    from te_precision_callbacks.check.model import CheckedModel
    from te_precision_callbacks.check.rows import Row
    from te_precision_callbacks.config import Config

_INDENT = 2
_MOST_NAMES = 8
_MOST_ROWS = 60
_AUTO = "auto"


def check_command(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file.")],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="A function without arguments that returns a torch.nn.Module: print what the model will run in. The"
            " model is made on the meta device if that works, otherwise on the CPU.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The recipe: fp8_delayed_scaling, fp8_current_scaling, fp8_block_scaling, mxfp8, nvfp4 or none; auto,"
            " the default, is the one that Transformer Engine takes by itself on the GPU.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The tokens of a step on one rank, for the multiply-adds and for the shapes that GEMMs refuse.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a config, and plan on a model what each of its matrix products will run in, without running it.

    The environment variable TE_PRECISION_REFERENCE_CAPABILITY (9.0 or 10.0) chooses the GPU that is planned for where
    there is none.
    """
    for name, value in (("--recipe", recipe), ("--tokens", tokens)):
        if model is None and value is not None:
            raise typer.BadParameter("it is for a plan; give --model, too", param_hint=name)
    if tokens is not None and tokens < 1:
        raise typer.BadParameter(
            f"{tokens} is less than 1; give the tokens of a step on one rank", param_hint="--tokens"
        )
    loaded = _loaded(config, as_json=as_json)
    if model is None:
        if as_json:
            terminal.show_json({"config": config, "errors": []})
        else:
            terminal.show_text(_without_errors(config, loaded))
        return
    checked, device = _checked(model, loaded, recipe or _AUTO, tokens)
    if as_json:
        terminal.show_json({"config": config, "errors": [], **_as_json(checked, model, device)})
    else:
        terminal.show_text(_without_errors(config, loaded))
        _show(checked, model, device)
    if checked.findings:
        raise typer.Exit(1)


def _loaded(path: str, *, as_json: bool) -> Config:
    """The config; its errors are printed, and end the command."""
    from te_precision_callbacks.config import ConfigError, load_config

    if not Path(path).expanduser().is_file():
        load_config(path)  # whose error is one of use
    try:
        return load_config(path)
    except ConfigError as error:
        if as_json:
            terminal.show_json({"config": path, "errors": error.problems, "further_errors": error.more})
        else:
            number = len(error.problems) + error.more
            terminal.show_text(f"{path}: {number} error{'s' if number > 1 else ''}")
            for problem in error.problems:
                typer.echo()
                terminal.show_text(problem, _INDENT, hanging=_INDENT)
            if error.more:
                terminal.show_text(f"and {error.more} more", _INDENT)
        raise typer.Exit(1) from None


def _checked(spec: str, config: Config, recipe: str, tokens: int | None) -> tuple[CheckedModel, str]:
    from te_precision_callbacks import reference

    reference.install_where_needed()
    from te_precision_callbacks.check.factory import build_model
    from te_precision_callbacks.check.model import check_model
    from te_precision_callbacks.check.recipes import recipe_named

    recipe_named(recipe)  # a wrong name is told before a model is made
    made, device = build_model(spec)
    return check_model(made, config, recipe=recipe, tokens=tokens), device


def _without_errors(path: str, config: Config) -> str:
    number, enabled = len(config.sections), len(config.enabled_sections)
    rest = "" if enabled == number else f", of which {number - enabled} not enabled"
    return f"{path}: no errors in {number} section{'' if number == 1 else 's'}{rest}."


def _show(checked: CheckedModel, model: str, device: str) -> None:
    from te_precision_callbacks.check.rows import rows

    terminal.show_text(
        f"{model}: {checked.layers} layers of Transformer Engine, made on {device}. {_conditions(checked)}"
    )
    found = rows(checked)
    table = terminal.table("layer", "fprop", "dgrad", "wgrad", "multiply-adds", "why not low, and what acts")
    for row in found[:_MOST_ROWS]:
        table.add_row(*_cells(row, checked.coverage.macs()))
    terminal.show(table)
    if found[_MOST_ROWS:]:
        layers = sum(len(row.layers) for row in found[_MOST_ROWS:])
        terminal.show_text(f"and {len(found) - _MOST_ROWS} more rows with {layers} layers, which --json has.")
    terminal.show_text(str(checked.coverage) if checked.coverage.macs() else "No matrix product is planned.")
    if checked.not_counted:
        from te_precision_callbacks.folding import folded

        names = ", ".join(folded(checked.not_counted, most=_MOST_NAMES))
        terminal.show_text(
            f"Not planned, since their classes do not tell what they multiply: {names}. session.coverage() counts them"
            " in a run."
        )
    for note in checked.notes:
        typer.echo()
        for number, line in enumerate(note.splitlines()):
            terminal.show_text(f"{'' if number else 'Note: '}{line}", hanging=_INDENT)
    if checked.findings:
        typer.echo(f"\n{len(checked.findings)} finding{'s' if len(checked.findings) > 1 else ''}")
    for finding in checked.findings:
        typer.echo()
        terminal.show_text(finding.text, _INDENT, hanging=_INDENT)


def _conditions(checked: CheckedModel) -> str:
    """The recipe, the GPU and the tokens that the plan is for."""
    from transformer_engine.pytorch.utils import get_device_compute_capability

    capability = "{}.{}".format(*get_device_compute_capability())
    tokens = "multiply-adds of one token" if checked.tokens is None else f"{checked.tokens} tokens a step"
    return f"Recipe: {checked.recipe or 'none'}, compute capability {capability}, {tokens}."


def _cells(row: Row, whole: int) -> list[str]:
    names, more = row.names[:_MOST_NAMES], len(row.names) - _MOST_NAMES
    gemms = [str(row.gemms[gemm]) if gemm in row.gemms else "" for gemm in ("fprop", "dgrad", "wgrad")]
    share = f" ({100 * row.macs / whole:.1f} %)" if whole else ""
    beside = [row.family] if row.family == "lookup" else []
    texts = [*beside, *([row.why] if row.why else []), *map(str, row.features)]
    return [
        terminal.cell_lines([*names, *([f"and {more} more"] if more > 0 else [])]),
        *map(terminal.cell, gemms),
        terminal.cell(f"{row.macs:.3g}{share}" if row.macs else ""),
        terminal.cell_lines(texts),
    ]


def _as_json(checked: CheckedModel, model: str, device: str) -> dict[str, Any]:
    from te_precision_callbacks.check.rows import rows
    from te_precision_callbacks.records.coverage import PRECISIONS

    coverage = checked.coverage
    return {
        "model": model,
        "device": device,
        "recipe": checked.recipe or "none",
        "tokens": checked.tokens,
        "macs": coverage.macs(),
        "share": {name: coverage.share(name) for name in PRECISIONS if coverage.macs(name)},
        "plan": [
            {
                "layers": row.layers,
                "family": row.family,
                "macs": row.macs,
                "gemms": dict(row.gemms),
                "features": [feature._asdict() for feature in row.features],
            }
            for row in rows(checked)
        ],
        "not_counted": checked.not_counted,
        "findings": checked.findings,
        "notes": checked.notes,
    }
