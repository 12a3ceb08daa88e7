"""The command line, ``te-precision``. Commands import lazily, so that ``te-precision --help`` is quick."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import signal
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.check.command import check_command
from te_precision_callbacks.check.maps import map_command
from te_precision_callbacks.cli.doctor.command import doctor_command
from te_precision_callbacks.cli.manual.command import features_command, statistics_command
from te_precision_callbacks.diagnosis.command import diagnose_command, rules_command
from te_precision_callbacks.dumps.command import app as dumps
from te_precision_callbacks.reference import inherited
from te_precision_callbacks.reference.launch import (
    Backend,
    CommandError,
    launch,
    module_command,
    plan_launch,
    script_command,
)
from te_precision_callbacks.search.command import search_command
from te_precision_callbacks.startup import watch_environment
from te_precision_callbacks.te.environment import LAUNCH_VARIABLE
from te_precision_callbacks.views.compare.command import SeveralRuns, compare_command
from te_precision_callbacks.views.report.command import report_command
from te_precision_callbacks.views.show.command import show_command

app = typer.Typer(
    name="te-precision",
    help="Precision debugging for NVIDIA Transformer Engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(dumps)


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"te-precision-callbacks {version('te-precision-callbacks')}")
        raise typer.Exit


_READERS = {
    "compare",
    "diagnose",
    "dumps",
    "features",
    "report",
    "rules",
    "show",
    "statistics",
}
"""The commands that need no Transformer Engine."""


@app.callback()
def _commands(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Precision debugging for NVIDIA Transformer Engine."""
    if context.invoked_subcommand in _READERS:
        inherited.forget_pending()


@app.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[--watch] [--backend auto|te|reference] [-m]",
)
def run(
    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT", help="The unmodified Python script to run, or a launcher such as torchrun."),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS...", help="Arguments for the script.")] = None,
    *,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module name, as in python -m.")] = False,
    backend: Annotated[
        Backend,
        typer.Option(
            help="auto: the compiled Transformer Engine if a GPU is found and the build can be imported; otherwise"
            ' the reference backend, on the GPU if there is one, else on the CPU, where "cuda" means the CPU.'
        ),
    ] = Backend.AUTO,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Debug the script's precision: find its model, optimizer steps and loss with hooks."
        ),
    ] = False,
    config: Annotated[str | None, typer.Option(help="With --watch: the config of the session.")] = None,
    log_dir: Annotated[str | None, typer.Option(help="With --watch: the folder for logs and records.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="With --watch: an option of the session, such as strict=true."
        ),
    ] = None,
) -> None:
    """Run an unmodified GPU training script, with or without a GPU.

    The environment variable TE_PRECISION_REFERENCE_CAPABILITY (9.0 or 10.0) chooses the GPU that the reference backend
    emulates. The exit code is the script's own.
    """
    runner = ("-m", "te_precision_callbacks.startup") if watch else ()
    try:
        command = module_command(script, runner) if module else script_command(script, runner)
    except CommandError as error:
        raise typer.BadParameter(str(error), param_hint="SCRIPT") from None
    if not watch and (config, log_dir, settings) != (None, None, None):
        raise typer.BadParameter("--config, --log-dir and --set need --watch.")
    plan = plan_launch(backend)
    variables = {**plan.environment, LAUNCH_VARIABLE: secrets.token_hex(8)}
    if watch:
        from te_precision_callbacks.watch import read_options

        variables = {**variables, **watch_environment(read_options(config, log_dir, settings or []))}
    typer.echo(f"te-precision: {plan.description}", err=True)
    launch(variables, [*command, *(arguments or [])])


app.command("check")(check_command)
app.command("map")(map_command)
app.command("search")(search_command)
app.command("diagnose")(diagnose_command)
app.command("compare", cls=SeveralRuns)(compare_command)
app.command("show")(show_command)
app.command("report")(report_command)
app.command("features")(features_command)
app.command("statistics")(statistics_command)
app.command("rules")(rules_command)
app.command("doctor")(doctor_command)


def main() -> None:
    """Run the command in ``sys.argv``. Exceptions of this package and write errors of the output become a message and
    exit code 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    reads = bool(_READERS.intersection(sys.argv[1:2]))
    # In a pipe to head, the exit code 1 would mean that a problem was found in the run.
    handler = signal.signal(signal.SIGPIPE, signal.SIG_DFL) if reads and hasattr(signal, "SIGPIPE") else None
    try:
        app()
    except OSError as error:
        if error.filename is not None:
            _end(terminal.visible(str(error)))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would flush again at exit
        _end(f"the output cannot be written: {error}")
    except PrecisionDebugError as error:
        _end("\n".join(map(terminal.visible, str(error).split("\n"))))  # messages may contain names from files
    except Exception as error:
        if not reads:
            raise
        # Exit code 1 would mean that a problem was found in the run.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = terminal.visible(f"{type(error).__name__}: {error}".partition("\n")[0])
        _end(
            f"the files cannot be read: {what} (in {Path(frame.filename).name}:{frame.lineno}). Either a"
            " file is damaged, or this is a bug in te-precision-callbacks: please report it."
        )
    finally:
        if handler is not None:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            signal.signal(signal.SIGPIPE, handler)


def _end(message: str) -> NoReturn:
    typer.echo(f"te-precision: {message}", err=True)
    raise SystemExit(2) from None
