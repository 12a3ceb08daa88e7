"""``te-precision check``: errors of a config, and the planned precision of a model.

Usage::

    te-precision check config.yaml
    te-precision check config.yaml --model package.module:factory --recipe mxfp8 --tokens 4096
    te-precision check config.yaml --model package.module:factory --tokens 4096 --speed h200

The exit code is 0; 1 with findings, such as an error of the config; 2 for wrong use. ``--json`` prints one JSON object.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.errors import rename_keywords
from te_precision_callbacks.base.garbage import without_collections
from te_precision_callbacks.base.notices import collect_warnings
from te_precision_callbacks.base.terminal import Json
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.te.package import warn_unless_supported

if TYPE_CHECKING:
    from te_precision_callbacks.check.checked_model import CheckedModel
    from te_precision_callbacks.config import Config
    from te_precision_callbacks.config.contract import Contract

_INDENT = 2
_AUTO = "auto"

Alignment = Annotated[
    Path | None,
    typer.Option(
        "--alignment",
        metavar="FILE",
        help="A YAML file with the partners of modules whose names cannot be aligned (names), and patterns of modules"
        " that may differ (allow).",
    ),
]


def check_command(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file.")],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="A function without arguments that returns a torch.nn.Module: print the precision of its matrix"
            " products. The model is created on the meta device if possible, otherwise on the CPU.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The recipe: fp8_delayed_scaling, fp8_current_scaling, fp8_block_scaling, mxfp8, nvfp4, none, or"
            " package.module:function, the factory of a CustomRecipe;"
            " auto (default): Transformer Engine's default for the GPU.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens per step on one rank, to compute multiply-adds and to find shapes that GEMMs do not support.",
        ),
    ] = None,
    require: Annotated[
        str | None,
        typer.Option(
            metavar="CONTRACT",
            help="A precision contract that the plan must meet, such as 'fp8 >= 95%', or the path of a YAML file"
            " with a precision_contract.",
        ),
    ] = None,
    same_as: Annotated[
        str | None,
        typer.Option(
            metavar="MAP",
            help="A map or a checkpoint whose quantized layers the plan must quantize too, as for te-precision map.",
        ),
    ] = None,
    alignment: Alignment = None,
    observe: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="The path of layers while features observe them, as in a run: auto (default), fused or debug.",
        ),
    ] = None,
    allow_unmatched: Annotated[
        bool,
        typer.Option(
            "--allow-unmatched",
            help="Report a section that matches no layer as a note, not a finding, like allow_unmatched=True in a run.",
        ),
    ] = False,
    speed: Annotated[
        str | None,
        typer.Option(
            "--speed",
            metavar="DEVICE",
            help="Also print the expected milliseconds of each layer and GEMM on a device, such as h100, h200_nvl or"
            " b300, and the layers that gain nothing from low precision.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a config, and plan the precision of a model's matrix products, without running it.

    The environment variable TE_PRECISION_REFERENCE_CAPABILITY (9.0 or 10.0) chooses the planned GPU if there is none.
    """
    plan_options = {
        "--recipe": recipe,
        "--tokens": tokens,
        "--require": require,
        "--same-as": same_as,
        "--observe": observe,
        "--allow-unmatched": allow_unmatched,
        "--speed": speed,
    }
    if model is None:
        _refuse(plan_options, "also give --model: this option is for a plan")
    if same_as is None:
        _refuse({"--alignment": alignment}, "an alignment is for --same-as")
    if speed is not None and tokens is None:
        raise typer.BadParameter("expected times need --tokens", param_hint="--speed")
    loaded, warnings = _load(config, as_json=as_json)
    if model is None:
        _show_config(config, loaded, warnings, as_json=as_json)
        return
    from te_precision_callbacks.check import printing
    from te_precision_callbacks.speed import devices, expected

    device = None
    capability = None
    if speed is not None:
        device = devices.device_named(speed)
        capability = device.capability
        if recipe and recipe in RECIPES:
            device.check_recipe(recipe)  # its error names a recipe for this device
    renamed = rename_keywords({"observe": "--observe", "require": "--require"})
    with collect_warnings() as more, without_collections(), renamed:
        checked, made_on = plan_function(
            model,
            recipe or _AUTO,
            capability,
            observe=observe or _AUTO,
            require=_contract(require, same_as, alignment),
            config=loaded,
            tokens=tokens,
            allow_unmatched=allow_unmatched,
        )
    checked = replace(checked, notes=(*warnings, *more, *checked.notes))
    times = None
    if device is not None:
        times = expected.estimate_step(checked.coverage, device)
    if as_json:
        content = {"config": config, "errors": [], **printing.as_json(checked, model, made_on)}
        if times is not None:
            content["speed"] = times.as_json()
        terminal.show_json(content)
    else:
        terminal.show_text(_first_line(config, loaded, len(checked.findings), checked.undecided))
        printing.show(checked, model, made_on)
        if times is not None:
            typer.echo()
            expected.show(times)
    if checked.findings:
        raise typer.Exit(1)


def _refuse(options: Mapping[str, object], text: str) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise typer.BadParameter(text, param_hint=name)


def _show_config(path: str, config: Config, warnings: list[str], *, as_json: bool) -> None:
    from te_precision_callbacks.config.loading import notes_of

    notes = (*warnings, *notes_of(config))
    if as_json:
        terminal.show_json({"config": path, "errors": [], "notes": notes})
    else:
        terminal.show_text(_first_line(path, config))
        terminal.show_notes(notes)


def _load(path: str, *, as_json: bool) -> tuple[Config, list[str]]:
    from te_precision_callbacks.config import ConfigError, load_config

    if not Path(path).expanduser().is_file():
        load_config(path)  # raises the error for a missing file
    try:
        with collect_warnings() as warnings:
            return load_config(path, features=()), warnings
    except ConfigError as error:
        if as_json:
            terminal.show_json({"config": path, "errors": error.problems, "notes": warnings})
        else:
            terminal.show_text(f"{path}: {many(len(error.problems), 'error')}")
            for problem in error.problems:
                typer.echo()
                terminal.show_text(problem, _INDENT, hanging=_INDENT)
            terminal.show_notes(warnings)
        raise typer.Exit(1) from None


def install_backend(capability: tuple[int, int] | None) -> None:
    """Install the reference backend where Transformer Engine cannot run, for a GPU's capability if given."""
    from te_precision_callbacks import reference
    from te_precision_callbacks.reference import target

    emulated = None  # from the environment variable, if set
    if capability is not None and not (reference.is_installed() or os.environ.get(target.ENVIRONMENT_VARIABLE)):
        emulated = max((other for other in target.ALLOWED if other <= capability), default=target.DEFAULT)
    reference.install_where_needed(emulated)


def plan_function(
    spec: str, recipe: str, capability: tuple[int, int] | None, **keywords: Any
) -> tuple[CheckedModel, str]:
    """Plan the model that a function builds, with further arguments of check_model; returns the plan and the device."""
    install_backend(capability)
    warn_unless_supported()
    from te_precision_callbacks.check import checked_model, factory

    factory.recipe_by_name(recipe)  # reports an unknown name before building a model
    model, device = factory.build_model(spec)
    return checked_model.check_model(model, recipe=recipe, **keywords), device


def _contract(require: str | None, same_as: str | None, alignment: Path | None) -> Contract | None:
    from te_precision_callbacks.config.contract import Contract
    from te_precision_callbacks.maps import alignment as alignments
    from te_precision_callbacks.maps import comparing, precision_map, sources

    contract = comparing.read_requirements(require)
    if same_as is None:
        return contract
    if contract is not None and contract.same_as is not None:
        raise precision_map.MapError("--require has a contract with same_as, so --same-as must not name another map.")
    required = comparing.SameAs(sources.open_map(same_as), alignments.read_alignment(alignment))
    return (contract or Contract.model_validate({})).model_copy(update={"same_as": required})


def _first_line(path: str, config: Config, findings: int = 0, undecided: Sequence[str] = ()) -> str:
    text = f"{path}: {many(findings, 'finding')} for this model, listed at the end"
    if not findings:
        text = f"{path}: {many(len(config.sections), 'section')}"
        disabled = len(config.sections) - len(config.enabled_sections)
        if disabled:
            text += f" ({disabled} not enabled)"
        text += ", no errors"
    if undecided:
        text += f"; not known before the run: {', '.join(undecided)}"
    return f"{text}."
