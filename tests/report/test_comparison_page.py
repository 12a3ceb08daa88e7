"""The page of a comparison."""

from pathlib import Path

import numpy as np
import pytest

from te_precision_callbacks.views.compare import ComparedNumbers, Comparison, compare, write_comparison
from te_precision_callbacks.views.compare.departures import ComparedValues
from tests.compare.recorded import Values, layers, record
from tests.report.conftest import Look

EVIL = 'fc<script>alert(1)</script>"$x$'
NAMES = [*layers(4), EVIL]
STEPS = 60


def values(seed: int, factor: float = 1.0) -> Values:
    draw = np.random.default_rng(seed)
    results = {
        (layer, tensor, statistic): np.exp(draw.normal(0, 0.1, STEPS))
        for layer in NAMES
        for tensor in ("activation", "weight")
        for statistic in ("cur_amax", "underflows%")
    }
    results[EVIL, "weight", "cur_amax"][30:] *= factor
    if factor != 1:
        results["layers.3.fc", "activation", "cur_amax"][40:50] = np.inf
    return results


def loss(off: float) -> dict[str, np.ndarray]:
    return {"loss": np.linspace(4, 1, STEPS) * (1 + off)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compared")


@pytest.fixture(scope="module")
def compared(folder: Path) -> tuple[Comparison, ComparedNumbers]:
    a = record(folder / "a", values(0), order=NAMES, scalars=loss(0), te_backend="compiled")
    b = record(folder / "b", values(2, 64.0), order=NAMES, scalars=loss(0.02), te_backend="reference")
    again = record(folder / "again", values(1), order=NAMES, scalars=loss(0.001))
    numbers = ComparedNumbers()
    return compare(a, b, noise=[again], numbers=numbers), numbers


@pytest.fixture(scope="module")
def page(folder: Path, compared: tuple[Comparison, ComparedNumbers]) -> Path:
    return write_comparison(*compared, folder / "compare.html")


@pytest.mark.extended
@pytest.mark.slow
def test_every_plot_of_every_page_is_drawn(look: Look, page: Path) -> None:
    look.open_in_the_dark(page, {"layer": 1, "layer&layer=layers.0.fc": 4, "summary": 2})


@pytest.mark.slow
def test_a_finding_leads_to_both_curves(
    look: Look,
    page: Path,
    compared: tuple[Comparison, ComparedNumbers],
) -> None:
    first = compared[0].first
    assert first is not None
    assert (first.layer, first.tensor, first.iteration) == (EVIL, "weight", 30)
    look.open(page)
    said = look.page.locator("main").inner_text()
    assert f"First at step 30: {EVIL} weight, made here. cur_amax is" in said
    assert "te_backend" in said
    assert "NOT within" not in said
    row = look.page.locator("table").first.locator("tbody tr").first
    assert f"{first.strongest.a:.4g}" in row.inner_text()
    look.go(row.locator("a"))
    assert look.page.locator("h1").inner_text() == EVIL
    drawn = dict(look.plot("plot.data.map((trace) => [trace.name, Array.from(trace.y)])"))
    assert drawn["A"] == pytest.approx(values(0)[EVIL, "weight", "cur_amax"].tolist())
    assert drawn["B"] == pytest.approx(values(2, 64.0)[EVIL, "weight", "cur_amax"].tolist())
    counts = np.array(drawn["below the threshold"])
    assert (counts > drawn["A"]).all()
    assert (np.array(drawn["B"]) > counts).tolist() == [step >= 30 for step in range(STEPS)]


def test_without_noise_it_is_the_difference_itself(tmp_path: Path) -> None:
    first = {("fc1", "weight", "cur_amax"): np.ones(20), ("fc1", "weight", "sqnr_db"): np.full(20, 30.0)}
    other = {("fc1", "weight", "cur_amax"): np.full(20, 8.0), ("fc1", "weight", "sqnr_db"): np.full(20, 25.0)}
    numbers = ComparedNumbers()
    result = compare(record(tmp_path / "a", first), record(tmp_path / "b", other), numbers=numbers)
    (parting,) = result.parted
    results = {(departure.statistic, departure.unit): departure.difference for departure in parting.departures}
    assert results == pytest.approx({("cur_amax", "powers of two"): 3.0, ("sqnr_db", "dB"): -5.0})
    limits = {curve.values.subject.statistic: curve.values.limit[0] for curve in numbers.curves}
    assert limits == pytest.approx({"cur_amax": 1.0, "sqnr_db": 3.0}), "a factor of 2, and 3 dB, count"
    assert write_comparison(result, numbers, tmp_path / "small.html", most=1).exists()


def growing(seed: int) -> np.ndarray:
    """The loss of a seed's run in another order of sums: the runs are equal before the first update, and diverge."""
    apart = 0.05 * np.random.default_rng(seed).normal(size=STEPS) * np.minimum(1, np.arange(STEPS) / 8)
    return np.asarray((1 + 9 * np.exp(-np.arange(STEPS) / 6)) * np.exp(apart))


def loss_curve(folder: Path, *losses: np.ndarray) -> tuple[Comparison, ComparedValues]:
    a, b, *noise = [record(folder / str(n), values(0), scalars={"loss": item}) for n, item in enumerate(losses)]
    numbers = ComparedNumbers()
    result = compare(a, b, noise=noise, numbers=numbers)
    (curve,) = [curve for curve in numbers.curves if curve.values.subject.statistic == "loss"]
    return result, curve.values


def test_what_is_ordinary_in_the_first_step_is_what_the_noise_is_apart_there(tmp_path: Path) -> None:
    losses = [growing(seed) for seed in range(4)]
    result, curve = loss_curve(tmp_path, *losses)
    assert not result.has_findings
    places = np.arcsinh(np.array([curve.pair.a, curve.pair.b]) / curve.resolution) / curve.scale.step
    assert curve.limit[0] < curve.limit[30:].mean() / 2, "before the first update all are equal"
    assert (np.abs(places[1] - places[0]) <= curve.limit).all()


def test_of_equal_runs_nothing_is_apart_and_the_smallest_spread_counts(tmp_path: Path) -> None:
    loss = growing(0)
    off = np.where(np.arange(STEPS) < 30, 1.0, 1.5)
    result, _ = loss_curve(tmp_path, loss, loss * off, loss)
    assert [(parting.name, parting.iteration) for parting in result.parted] == [("loss", 30)]


@pytest.mark.extended
def test_curves_are_thinned_and_keep_the_step_of_a_departure(tmp_path: Path) -> None:
    steps = 1100
    first, other = np.ones(steps), np.ones(steps)
    other[701:711] = 4.0
    numbers = ComparedNumbers()
    a, b = (record(tmp_path / name, {("fc1", "weight", "std"): item}) for name, item in (("a", first), ("b", other)))
    compare(a, b, numbers=numbers)
    (curve,) = numbers.curves
    assert curve.every == 2
    assert len(curve.values.pair.a) <= 1001
    assert 701 in curve.values.pair.iterations
