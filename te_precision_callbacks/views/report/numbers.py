"""A run in numbers, for JSON: the verdict, what it was, its coverage, its worst layers, and what each series spans.

numbers(run)["worst"][0]                # {"statistic": "underflows%", "tensor": "activation", "layers": [...]}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from te_precision_callbacks.coverage.recorded import other_steps_of_run
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.runs.answers import no_step_in_words, not_measured_in_words
from te_precision_callbacks.runs.index import REDUCED
from te_precision_callbacks.runs.outcomes import outcome_in_words
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.views.report import facts
from te_precision_callbacks.views.report.data import families_beside, nonempty, worst_layers
from te_precision_callbacks.views.report.overview import Columns, Overview, overviews
from te_precision_callbacks.views.report.speed import speed_facts
from te_precision_callbacks.views.report.subjects import FamilySeries, ReportError, Subjects


def numbers(
    run: RecordedRun,
    *,
    layer: str | None = None,
    statistic: str | None = None,
    tensor: str | None = None,
    device: Device | None = None,
) -> dict[str, Any]:
    """The numbers of a run.

    Args:
        run: the run.
        layer, statistic, tensor: give only these series, with all of their numbers.
        device: the device that times are expected for; None for the run's own GPU.

    Raises:
        ReportError: the run has no numbers, or none of these.
    """
    subjects = nonempty(run)
    chosen: list[FamilySeries] = subjects.families
    if layer is not None:
        subjects.layer(layer)
    if statistic is not None or tensor is not None:
        subjects.family(statistic, tensor)
        chosen = [
            one for one in chosen if statistic in (None, one.family.statistic) and tensor in (None, one.family.tensor)
        ]
    whole = (layer, statistic, tensor) != (None, None, None)
    made = list(overviews(run, families_beside(chosen, subjects.families), Columns.of(run, 1)))
    wanted = {one.family for one in chosen}
    series = []
    for number, found in (each for one in made if one.family in wanted for each in _series_of(one, subjects)):
        if layer in (None, found["layer"]):
            if whole:
                table = run.values([number])
                found["steps"], found["values"] = table["iteration"].to_pylist(), table["value"].to_pylist()
            series.append(found)
    if whole and not series:
        raise ReportError(
            f"The run has no number of the layer {layer!r} that was asked for. Leave out --statistic or --tensor to get"
            " all that it has."
        )
    return {
        **diagnose(run).as_json(),
        "run": {"path": str(run.path), "run_id": run.run_id, "source": run.source},
        "outcome": outcome_in_words(run),
        "notes": [*no_step_in_words(run), *run.notes, *not_measured_in_words(run)],
        "unread": list(run.unread),
        "segments": facts.segments(run),
        "duration": facts.duration(run),
        "coverage": facts.coverage(run),
        "other_steps": other_steps_of_run(run),
        "speed": speed_facts(run, device),
        "scalars": [
            {"name": one.name, "first": one.values[0], "last": one.values[-1], "numbers": one.total}
            for one in facts.scalars(run)
            if one.total
        ],
        "worst": [
            {
                "statistic": made[each["family"]].family.statistic,
                "tensor": made[each["family"]].family.tensor,
                "layers": [
                    {**item, "layer": subjects.layers[item["layer"]].name, "rank": _rank(item["rank"])}
                    for item in each["items"]
                ],
            }
            for each in worst_layers(made)
            if made[each["family"]].family in wanted
        ],
        "series": series,
    }


def _series_of(overview: Overview, subjects: Subjects) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each series of an overview, and what it spans."""
    for rank, of_rank in overview.series.items():
        for row in np.flatnonzero(of_rank >= 0).tolist():
            yield (
                int(of_rank[row]),
                {
                    "layer": subjects.layers[int(overview.layers[row])].name,
                    "tensor": overview.family.tensor,
                    "statistic": overview.family.statistic,
                    "gemm": overview.family.gemm,
                    "rank": _rank(rank),
                    "worst": float(overview.worst[rank][row]),
                    "worst_at": int(overview.worst_at[rank][row]),
                    "last": float(overview.last[rank][row]),
                    "last_at": int(overview.last_at[rank][row]),
                },
            )


def _rank(rank: int) -> int | None:
    return None if rank == REDUCED else rank
