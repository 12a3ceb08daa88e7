"""``te-precision check``: a config's errors, and what a model will run in.

Usage::

    te-precision check config.yaml
    te-precision check config.yaml --model package.module:factory --recipe mxfp8 --tokens 4096
    te-precision check config.yaml --model package.module:factory --batch package.module:another_factory

The exit code is 0; 1 with findings, such as an error of the config; 2 for wrong use. ``--json`` prints one JSON object.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from te_precision_callbacks import terminal
from te_precision_callbacks.notices import gathered_warnings
from te_precision_callbacks.terminal import Json

if TYPE_CHECKING:
    from te_precision_callbacks.check.model import CheckedModel
    from te_precision_callbacks.config import Config

_INDENT = 2
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
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="A function without arguments that returns what the model's forward is called with, in place of"
            " --tokens: a tensor, a mapping of keywords, or a tuple of positional arguments. The plan then has the"
            " sizes of all products.",
        ),
    ] = None,
    require: Annotated[
        str | None,
        typer.Option(
            metavar="CONTRACT",
            help="What the plan must hold, such as 'fp8 >= 95%', or the path of a YAML file with a precision_contract.",
        ),
    ] = None,
    observe: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="The path that layers take while features look at them, as in a run: auto (the default), fused or"
            " debug.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a config, and plan on a model what each of its matrix products will run in, without running it.

    The environment variable TE_PRECISION_REFERENCE_CAPABILITY (9.0 or 10.0) chooses the GPU that is planned for where
    there is none.
    """
    given = {"--recipe": recipe, "--tokens": tokens, "--batch": batch, "--require": require, "--observe": observe}
    for name, value in given.items():
        if model is None and value is not None:
            raise typer.BadParameter("it is for a plan; give --model, too", param_hint=name)
    if tokens is not None and tokens < 1:
        raise typer.BadParameter(
            f"{tokens} is less than 1; give the tokens of a step on one rank", param_hint="--tokens"
        )
    if tokens is not None and batch is not None:
        raise typer.BadParameter("a batch tells the tokens of each layer; give one of the two", param_hint="--tokens")
    loaded, warnings = _loaded(config, as_json=as_json)
    if model is None:
        from te_precision_callbacks.config.idle import notes_of

        notes = (*warnings, *notes_of(loaded))
        if as_json:
            terminal.show_json({"config": config, "errors": [], "notes": notes})
        else:
            terminal.show_text(_without_errors(config, loaded))
            terminal.show_notes(notes)
        return
    from te_precision_callbacks.check.printing import as_json as plan_as_json
    from te_precision_callbacks.check.printing import show

    with gathered_warnings() as more:
        checked, device = _checked(model, loaded, recipe or _AUTO, tokens, batch, require, observe or _AUTO)
    checked = replace(checked, notes=(*warnings, *more, *checked.notes))
    if as_json:
        terminal.show_json({"config": config, "errors": [], **plan_as_json(checked, model, device, batch)})
    else:
        terminal.show_text(_without_errors(config, loaded))
        show(checked, model, device, batch)
    if checked.findings:
        raise typer.Exit(1)


def _loaded(path: str, *, as_json: bool) -> tuple[Config, list[str]]:
    """The config, and what loading it warns of; its errors are printed, and end the command."""
    from te_precision_callbacks.config import ConfigError, load_config

    if not Path(path).expanduser().is_file():
        load_config(path)  # whose error is one of use
    try:
        with gathered_warnings() as warnings:
            return load_config(path), warnings
    except ConfigError as error:
        if as_json:
            errors = {"errors": error.problems, "further_errors": error.more}
            terminal.show_json({"config": path, **errors, "notes": warnings})
        else:
            number = len(error.problems) + error.more
            terminal.show_text(f"{path}: {number} error{'s' if number > 1 else ''}")
            for problem in error.problems:
                typer.echo()
                terminal.show_text(problem, _INDENT, hanging=_INDENT)
            if error.more:
                terminal.show_text(f"and {error.more} more", _INDENT)
            terminal.show_notes(warnings)
        raise typer.Exit(1) from None


def _checked(
    spec: str,
    config: Config,
    recipe: str,
    tokens: int | None,
    batch_spec: str | None,
    require: str | None,
    observe: str,
) -> tuple[CheckedModel, str]:
    """The plan, and the device that the model was made on."""
    from te_precision_callbacks import reference

    reference.install_where_needed()
    from te_precision_callbacks.session.upstream import warn_unless_supported

    warn_unless_supported()
    from te_precision_callbacks.check.dry_run import NotOnMetaError
    from te_precision_callbacks.check.factory import build_batch, build_model
    from te_precision_callbacks.check.model import check_model
    from te_precision_callbacks.check.recipes import recipe_named
    from te_precision_callbacks.config.contract import read_contract
    from te_precision_callbacks.options import read_observe

    recipe_named(recipe)  # a wrong name is told before a model is made
    path = read_observe(observe)
    contract = read_contract(require)
    batch = None if batch_spec is None else build_batch(batch_spec)
    check = functools.partial(
        check_model, config=config, recipe=recipe, tokens=tokens, batch=batch, require=contract, observe=path
    )
    made, device = build_model(spec)
    try:
        return check(made), device
    except NotOnMetaError:  # many forwards cannot run there: the CPU tells whether it is the batch's fault
        made, device = build_model(spec, on_meta=False)
        return check(made), device


def _without_errors(path: str, config: Config) -> str:
    number, enabled = len(config.sections), len(config.enabled_sections)
    rest = "" if enabled == number else f", of which {number - enabled} not enabled"
    return f"{path}: no errors in {number} section{'' if number == 1 else 's'}{rest}."
