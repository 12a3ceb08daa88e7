"""Old steps are thinned where a run reaches its limit. What must be left is computed here, from all that was recorded."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from te_precision_callbacks.records.model import Scalars
from te_precision_callbacks.statistics.series import SeriesTable
from te_precision_callbacks.store import RecordedRun, Thinned, open_run
from te_precision_callbacks.store import aging as aging_module
from te_precision_callbacks.store.files import make_segment, rank_name
from te_precision_callbacks.store.recording import Place, Recording, Step
from te_precision_callbacks.store.tables import EXTREME, STEP0
from tests.store.making import info, records

RUN = "20261122-130144-507-9f3c21"
SERIES = 40

Truth = dict[int, dict[int, float]]
"""Series -> iteration -> value."""


def begin(folder: Path, limit: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Recording:
    number, _ = make_segment(folder / "precision_records" / RUN)
    place = Place(RUN, number)
    runs, run = folder / "precision_records", info(folder, rank=rank, world=world, start=start)
    return Recording(runs, place, run, writes_reduced=True, limit=limit)


def value(series: int, iteration: int) -> float:
    """Smooth, with noise, and a spike that only one step has."""
    if iteration == 777 + series:
        return 1e6 + series
    if iteration == 1234 and series % 4 == 0:
        return math.nan if series % 8 else math.inf
    return math.sin(iteration / 50 + series) + ((iteration * 7919 + series * 104729) % 1000) / 1000


def record(recording: Recording, iterations: Iterable[int], truth: Truth, *, every: int = 1) -> None:
    """Steps in which series n has a number in each (1 + n % 3)-th iteration that is a multiple of ``every``."""
    table = SeriesTable()
    for name in range(SERIES):
        table.intern(f"layer{name}", "weight", "amax")
    for iteration in iterations:
        due = [n for n in range(SERIES) if iteration % (every * (1 + n % 3)) == 0]
        values = [value(n, iteration) if n in due else 0.0 for n in range(SERIES)]
        made = records(iteration, table, values)
        kept = np.array(due, np.int32)
        step = type(made)(
            iteration, iteration, table, kept, type(made.values)("d", [values[n] for n in due]), own=[False] * len(due)
        )
        recording.take(Step(step, 1.0 * iteration, 0.1))
        recording.take(Scalars(iteration, iteration, {"loss": 1 / (1 + iteration)}))
        if iteration % 20 == 19:
            recording.flush()
        for n in due:
            truth.setdefault(n, {})[iteration] = values[n]
    recording.flush()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def layer_numbers(run: RecordedRun) -> dict[int, int]:
    return {
        number: int(layer.removeprefix("layer"))
        for number, layer in enumerate(run.series["layer"].to_pylist())
    }


def check(run: RecordedRun, truth: Truth) -> dict[int, Thinned | None]:
    """Hold what is left against all that was recorded; iteration -> the stretch that it is in."""
    assert all(each.table == "values" for each in run.thinned)
    table = run.values()
    name_of = layer_numbers(run)
    rows = [
        (name_of[number], iteration, number_value, flags)
        for number, iteration, number_value, flags in zip(
            *(table[name].to_pylist() for name in ("series", "iteration", "value", "flags")), strict=True
        )
    ]
    assert len({row[:2] for row in rows}) == len(rows), "no number is there twice"
    for name, iteration, number_value, _ in rows:
        np.testing.assert_equal(number_value, truth[name][iteration])
    stretch_of: dict[int, Thinned | None] = {}
    for iteration in sorted({iteration for values in truth.values() for iteration in values}):
        inside = [each for each in run.thinned if each.first <= iteration <= each.last]
        assert len(inside) <= 1
        stretch_of[iteration] = inside[0] if inside else None
    left: dict[int, dict[int, int]] = {}
    for name, iteration, _, flags in rows:
        left.setdefault(name, {})[iteration] = flags
    for name, values in truth.items():
        own = left.get(name, {})
        regular = {iteration for iteration, flags in own.items() if not flags & EXTREME}
        iterations = np.array(sorted(values))
        step = int(np.gcd.reduce(np.diff(iterations)))
        for each in {None, *stretch_of.values()}:
            here = [iteration for iteration in iterations.tolist() if stretch_of[iteration] == each]
            if each is None:
                assert set(here) <= regular, "all recent steps"
            elif each.every == 0:
                assert not own.keys() & set(here)
            else:
                wanted = {iteration for iteration in here if iteration // step % each.every == 0}
                assert {iteration for iteration in regular if iteration in set(here)} == wanted
                finite = [iteration for iteration in here if math.isfinite(values[iteration])]
                if finite:
                    lowest = min(finite, key=lambda iteration: values[iteration])
                    highest = max(finite, key=lambda iteration: values[iteration])
                    assert {lowest, highest} <= own.keys()
                odd = [iteration for iteration in here if not math.isfinite(values[iteration])]
                assert set(odd[:1]) <= own.keys()
    return stretch_of


def test_recent_steps_are_whole_and_old_ones_ever_thinner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit, truth = 400_000, {}
    recording = begin(tmp_path, limit)
    sizes = []
    with mock.patch.object(Recording, "flush", autospec=True, side_effect=Recording.flush) as flush:
        flush.side_effect = lambda self, flush=flush.side_effect: (flush(self), sizes.append(size(tmp_path)))
        record(recording, range(6000), truth)
    recording.end(None)
    assert max(sizes) <= limit
    run = open_run(tmp_path)
    stretches = check(run, truth)
    assert [each.every for each in run.thinned] == [100, 10]
    assert stretches[0] == run.thinned[0]
    assert stretches[5999] is None
    whole = sum(stretch is None for stretch in stretches.values())
    assert whole > 600, "recent steps, and not a handful"
    spikes = {name: 1e6 + name for name in truth if 777 + name in truth[name]}
    highs = dict(zip(layer_numbers(run).values(), run.series["high"].to_pylist(), strict=True))
    assert {name: highs[name] for name in spikes} == spikes, "what happened long ago is there"
    assert run.steps["iteration"].to_pylist() == list(range(6000))
    assert len(run.scalars) == 6000, "the loss is kept whole"
    (first, second) = run.notes
    assert first.startswith("Of the statistics of iterations 0 to ")
    assert "every 100th step is left, and the lowest and highest value of each series" in first
    assert "every 10th step" in second
    assert caplog.text.count("have reached their limit of 400,000 bytes") == 1
    kinds = run.events["kind"].to_pylist()
    assert kinds.count("records_thinned") == 2
    assert run.is_thinned([0, 5999]).tolist() == [True, False]
