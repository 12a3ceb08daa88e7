"""``te-precision compare``: the differences between two recorded runs, and where they diverge first.

Usage::

    te-precision compare bf16 fp8 --noise bf16_again
    te-precision compare bf16 fp8 --noise bf16_again --report compare.html
    te-precision compare logs --run 20261122-130144 --run 20261122-151210
    te-precision compare --a bf16_1 bf16_2 bf16_3 --b fp8_1 fp8_2 fp8_3 --tolerance 0.0025

The exit code is 0 without a finding; 1 if statistics or losses diverge, or if paired seeds do not show that the
tolerance is held; 2 for wrong use. ``--json`` prints one JSON object.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.terminal import Json

if TYPE_CHECKING:
    from te_precision_callbacks.runs import RecordedRun

_SIDES = ("--a", "--b")

RunNames = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Name, or beginning of the name, of a run in a folder with several runs: first for A, then for B"
        " (default: same folder), then for --noise. Default: the latest.",
    ),
]

Tolerance = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="With --a and --b: the difference of final losses that is allowed, as a share of A's loss"
        " (default: 0.0025).",
    ),
]


class SeveralRuns(TyperCommand):
    """A command with several values for each of the options ``--a`` and ``--b``."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        side = ""
        expanded: list[str] = []
        for word in args:
            if word.startswith("-"):
                side = word if word in _SIDES else ""
            elif side and expanded[-1] != side:
                expanded.append(side)
            expanded.append(word)
        return super().parse_args(context, expanded)


def compare_command(
    a: Annotated[
        str | None, typer.Argument(metavar="[A]", help="A recorded run, the reference: its log folder.")
    ] = None,
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
    run: RunNames = None,
    seeds_a: Annotated[
        list[str] | None,
        typer.Option("--a", metavar="RUN...", help="Instead of A and B: runs of the reference with several seeds."),
    ] = None,
    seeds_b: Annotated[
        list[str] | None,
        typer.Option("--b", metavar="RUN...", help="The runs to compare with --a, with the same seeds in this order."),
    ] = None,
    tolerance: Tolerance = None,
    as_json: Json = False,
) -> None:
    """Show the findings that only B has, the facts that differ, and where the numbers of two runs diverge first.

    With --a and --b: the difference of final losses over paired seeds, and whether it is within a tolerance.
    """
    if seeds_a or seeds_b:
        if a is not None or b is not None or noise or run or report is not None:
            raise typer.BadParameter("A, B, --noise, --run and --report compare single runs", param_hint="--a")
        _compare_seeds(seeds_a or [], seeds_b or [], tolerance, as_json=as_json)
        return
    if tolerance is not None:
        raise typer.BadParameter(
            "a tolerance is for several seeds: give them with --a and --b", param_hint="--tolerance"
        )
    names = run or []
    if b is None and len(names) == 2:
        b = a
    if a is None or b is None:
        raise typer.BadParameter(
            "give a second run to compare with A, two --run of A, or several seeds with --a and --b", param_hint="B"
        )
    _compare_runs(_open_runs([a, b, *(noise or ())], names, as_json=as_json), lasting, report, as_json=as_json)


def _open_runs(paths: list[str], names: list[str], *, as_json: bool) -> list[RecordedRun]:
    from te_precision_callbacks.runs.reading import chosen_run

    if len(names) > len(paths):
        raise typer.BadParameter(f"{len(names)} runs are chosen, of {len(paths)} folders", param_hint="--run")
    runs, notes = zip(*itertools.starmap(chosen_run, itertools.zip_longest(paths, names)), strict=True)
    for line in filter(None, dict.fromkeys(notes)):
        terminal.show_text(line, err=as_json)
    return list(runs)


def _compare_runs(opened: list[RecordedRun], lasting: int, report: Path | None, *, as_json: bool) -> None:
    """Compare the second run with the first; the others are the noise."""
    from te_precision_callbacks.views.compare import comparison, comparison_page, wording
    from te_precision_callbacks.views.report.page import output_path

    numbers = None
    if report is not None:
        output_path(report)
        numbers = comparison_page.ComparedNumbers()
    result = comparison.compare(opened[0], opened[1], noise=opened[2:], lasting=lasting, numbers=numbers)
    if report is not None and numbers is not None:
        comparison_page.write_comparison(result, numbers, report)
    if as_json:
        verdicts = None if result.verdicts is None else result.verdicts.as_json()
        terminal.show_json({"findings": result.has_findings, **vars(result), "verdicts": verdicts})
    else:
        wording.show(result)
        if report is not None:
            typer.echo()
            terminal.show_text(f"{report}: {report.stat().st_size / 1e6:.1f} MB")
    _end(opened, is_good=not result.has_findings)


def _compare_seeds(seeds_a: list[str], seeds_b: list[str], tolerance: float | None, *, as_json: bool) -> None:
    from te_precision_callbacks.views.compare import paired, wording

    side_a = _open_runs(seeds_a, [], as_json=as_json)
    side_b = _open_runs(seeds_b, [], as_json=as_json)
    result = paired.compare_seeds(side_a, side_b, paired.TOLERANCE if tolerance is None else tolerance)
    if as_json:
        terminal.show_json(vars(result))
    else:
        wording.show_seeds(result)
    _end([*side_a, *side_b], is_good=result.paired.decision == "within")


def _end(opened: list[RecordedRun], *, is_good: bool) -> None:
    for recorded in opened:
        recorded.require_undamaged()
    if not is_good:
        raise typer.Exit(1)
