"""``te-precision compare``: the differences between two recorded runs, and where they diverge first.

Usage::

    te-precision compare bf16 fp8 --noise bf16_again
    te-precision compare bf16 fp8 --noise bf16_again --report compare.html
    te-precision compare logs --run 20261122-130144 --run 20261122-151210

The exit code is 0 without a finding; 1 if statistics or losses diverge; 2 for wrong use. ``--json`` prints one JSON
object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Json


def compare_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A recorded run, the reference: its log folder.")],
    b: Annotated[str | None, typer.Argument(metavar="[B]", help="The run that is compared with it.")] = None,
    *,
    noise: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            help="A baseline run like A with another seed, to measure the noise floor. Can be repeated.",
        ),
    ] = None,
    lasting: Annotated[int, typer.Option(metavar="N", help="The number of steps that a difference must last.")] = 5,
    report: Annotated[
        Path | None,
        typer.Option("--report", "-o", metavar="FILE", help="Also write an offline page, such as x.html."),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name, or beginning of the name, of a run in a folder with several runs: first for A, then for B"
            " (default: same folder), then for --noise. Default: the latest.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the findings that only B has, the facts that differ, and where the numbers of two runs diverge first."""
    from te_precision_callbacks.runs.reading import chosen_run
    from te_precision_callbacks.views.compare.comparison import compare
    from te_precision_callbacks.views.compare.wording import show

    chosen = list(run or ())
    if b is None and len(chosen) == 2:
        b = a
    if b is None:
        raise typer.BadParameter("give a second run to compare with A, or two --run", param_hint="B")
    paths = [a, b, *(noise or ())]
    if len(chosen) > len(paths):
        raise typer.BadParameter(f"{len(chosen)} runs are chosen, of {len(paths)} folders", param_hint="--run")
    wanted = [*chosen, *[None] * (len(paths) - len(chosen))]
    opened, notes = zip(*(chosen_run(path, name) for path, name in zip(paths, wanted, strict=True)), strict=True)
    for line in dict.fromkeys(filter(None, notes)):
        terminal.show_text(line, err=as_json)
    numbers = None
    if report is not None:
        from te_precision_callbacks.views.compare.comparison_page import ComparedNumbers, write_comparison
        from te_precision_callbacks.views.report.page import output_path

        output_path(report)
        numbers = ComparedNumbers()
    result = compare(opened[0], opened[1], noise=opened[2:], lasting=lasting, numbers=numbers)
    if report is not None and numbers is not None:
        write_comparison(result, numbers, report)
    if as_json:
        verdicts = None if result.verdicts is None else result.verdicts.as_json()
        terminal.show_json({"findings": result.has_findings, **vars(result), "verdicts": verdicts})
    else:
        show(result)
        if report is not None:
            typer.echo()
            terminal.show_text(f"{report}: {report.stat().st_size / 1e6:.1f} MB")
    for recorded in opened:
        recorded.require_undamaged()
    if result.has_findings:
        raise typer.Exit(1)
