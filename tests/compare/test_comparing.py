"""The first difference of two runs, its size, and the noise that it exceeds."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.runs.recorded import Curve
from te_precision_callbacks.runs.tables import STATES
from te_precision_callbacks.views.compare import Comparison, ComparisonError, compare
from te_precision_callbacks.views.compare.comparison import facts_that_differ
from te_precision_callbacks.views.compare.departures import MAGNITUDE, NoiseFloor, scale_of
from te_precision_callbacks.views.compare.result import FactDifference
from te_precision_callbacks.views.compare.wording import (
    describe_first,
    describe_losses,
    describe_pairing,
    difference,
    first_lines,
)
from tests.compare.recorded import Subject, Values, layers, record
from tests.runs.making import RunWriter

Floats = npt.NDArray[np.float64]
LAYERS = layers(6)
FAMILIES = (("activation", "cur_amax"), ("weight", "cur_amax"), ("gradient", "cur_amax"), ("activation", "zeros%"))
STEPS = 60
LOSS = 2 + 8 * np.exp(-np.arange(STEPS) / 20)


def numbers(seed: int, *, steps: int = STEPS, names: list[str] = LAYERS) -> dict[Subject, Floats]:
    """Effect of a seed on a training: each series has its own level, and moves about it."""
    draw = np.random.default_rng(seed)
    results = {}
    for tensor, statistic in FAMILIES:
        for number, layer in enumerate(names):
            offset, noise = draw.normal(0, 0.05), draw.normal(0, 0.1, steps)
            if statistic == "zeros%":
                results[layer, tensor, statistic] = np.clip(20 + number + 3 * (offset + noise), 0, 100)
            else:
                results[layer, tensor, statistic] = (1 + number) * np.exp(offset + noise)
    return results


def changed(values: Values, factors: dict[tuple[str, str], float], since: int = 30) -> dict[Subject, Floats]:
    results = {subject: curve.copy() for subject, curve in values.items()}
    for (layer, tensor), factor in factors.items():
        results[layer, tensor, "cur_amax"][since:] *= factor
    return results


class Runs:
    def __init__(self, folder: Path, a: RecordedRun, noise: RecordedRun) -> None:
        self.folder, self.a, self.noise = folder, a, noise

    def record(self, name: str, values: Values, **options: Any) -> RecordedRun:
        return record(self.folder / name, values, order=LAYERS, **options)

    def compared(self, ours: dict[str, Any], theirs: dict[str, Any]) -> Comparison:
        return compare(*(self.record(name, numbers(0), **of) for name, of in (("ours", ours), ("theirs", theirs))))

    def with_floor(self, values: Values) -> Comparison:
        return compare(self.a, self.record("b", values), noise=[self.noise])


@pytest.fixture(scope="module")
def a_and_noise(tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedRun, RecordedRun]:
    a, noise = (record(tmp_path_factory.mktemp("run"), numbers(seed), order=LAYERS) for seed in (0, 1))
    return a, noise


@pytest.fixture
def runs(tmp_path: Path, a_and_noise: tuple[RecordedRun, RecordedRun]) -> Runs:
    return Runs(tmp_path, *a_and_noise)


def origins(comparison: Comparison) -> dict[str, tuple[str, str]]:
    return {parting.name: (parting.origin, parting.source) for parting in comparison.parted}


GROWS, BEHIND, BEFORE = LAYERS[2], LAYERS[3:], LAYERS[:2]
GROWN = {
    (GROWS, "weight"): 16.0,
    **{(layer, "activation"): 16.0 for layer in BEHIND},
    **{(layer, "gradient"): 16.0 for layer in BEFORE},
}
"""A weight grows by 2^4: with it all activations behind it, and the gradients of the layers before."""


def test_the_first_is_where_it_is_made_and_what_follows_inherits(runs: Runs) -> None:
    result = runs.with_floor(changed(numbers(2), GROWN))
    assert (result.first.name, result.first.iteration, result.first.origin) == (f"{GROWS} weight", 30, "made here")
    departure = result.first.strongest
    assert departure.difference == pytest.approx(4, abs=0.5)
    assert (departure.unit, departure.to_the_end, departure.steps) == ("powers of two", True, 30)
    assert departure.b / departure.a == pytest.approx(16, rel=0.3)
    assert 0.02 < departure.spread < 0.6
    inherited = [*(f"{layer} activation" for layer in BEHIND), *(f"{layer} gradient" for layer in reversed(BEFORE))]
    actual = origins(result)
    assert [(name, origin) for name, (origin, _) in actual.items()] == [
        (f"{GROWS} weight", "made here"),
        *((name, "inherited") for name in inherited),
    ]
    assert actual[inherited[0]][1] == f"{GROWS} weight"


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((8, 8, 512), [("made here", ""), ("inherited", f"{LAYERS[1]} activation"), ("made here", "")]),
        ((16, 1 / 16), [("made here", ""), ("made here", "")]),
    ],
    ids=["grows beyond its input", "goes the other way"],
)
def test_what_is_made_here_and_what_is_inherited(
    runs: Runs, factors: tuple[float, ...], expected: list[tuple[str, str]]
) -> None:
    activations = {(layer, "activation"): factor for layer, factor in zip(LAYERS[1:], factors, strict=False)}
    result = origins(runs.with_floor(changed(numbers(2), activations)))
    assert result == {f"{layer} activation": origin for layer, origin in zip(LAYERS[1:], expected, strict=False)}


def test_the_first_step_counts_before_the_first_layer(runs: Runs) -> None:
    values = changed(changed(numbers(2), {(LAYERS[4], "gradient"): 16.0}, 20), {(LAYERS[0], "activation"): 16.0}, 25)
    assert [(parting.name, parting.iteration) for parting in runs.with_floor(values).parted] == [
        (f"{LAYERS[4]} gradient", 20),
        (f"{LAYERS[0]} activation", 25),
    ]


def test_a_difference_that_does_not_last_does_not_count(runs: Runs) -> None:
    values = numbers(2)
    values[LAYERS[2], "weight", "cur_amax"][30:34] *= 64
    b = runs.record("b", values)
    assert not compare(runs.a, b, noise=[runs.noise]).has_findings
    result = compare(runs.a, b, noise=[runs.noise], lasting=4)
    departure = result.first.strongest
    assert (result.first.iteration, departure.until, departure.to_the_end) == (30, 33, False)


def test_a_number_that_is_none_any_more_counts(runs: Runs) -> None:
    first = runs.with_floor(changed(numbers(2), {(LAYERS[2], "weight"): math.inf}, 40)).first
    assert (first.name, first.iteration) == (f"{LAYERS[2]} weight", 40)


def test_percentages_differ_by_points(runs: Runs) -> None:
    values = numbers(2)
    values[LAYERS[2], "activation", "zeros%"][30:] += 30
    result = runs.with_floor(values)
    departure = result.first.strongest
    assert (departure.statistic, departure.unit, result.first.iteration) == ("zeros%", "points", 30)
    assert departure.difference == pytest.approx(30, abs=1)


@pytest.mark.extended
def test_seeds_alone_have_no_finding_among_hundreds_of_series(tmp_path: Path) -> None:
    """One comparison in a hundred may have one, by :data:`FALSE_FINDINGS`."""
    names = layers(80)
    a, noise = (record(tmp_path / str(seed), numbers(seed, names=names), order=names) for seed in (0, 1))
    results = [
        compare(a, record(tmp_path / str(seed), numbers(seed, names=names), order=names), noise=[noise]).parted
        for seed in range(2, 6)
    ]
    assert results == [()] * 4


@pytest.mark.parametrize("kind", ["slow, of layers that differ", "growing", "of all layers together"])
def test_ordinary_noise_is_no_finding_of_whatever_kind(tmp_path: Path, kind: str) -> None:
    names, steps = layers(40), 100
    sizes = np.exp(np.random.default_rng(0).normal(0, 0.7, len(names)))

    def noise(seed: int) -> dict[Subject, Floats]:
        draw = np.random.default_rng(seed)
        result = draw.normal(size=(len(names), steps))
        if kind.startswith("slow"):  # of a correlation of 0.95 from step to step, and an offset that stays
            for step in range(1, steps):
                result[:, step] = 0.95 * result[:, step - 1] + 0.31 * result[:, step]
            result = sizes[:, None] * (result + draw.normal(size=(len(names), 1)))
        elif kind == "growing":  # as runs diverge that differ in the order of sums
            result *= np.minimum(1, 1e-6 * np.exp(0.25 * np.arange(steps)))
        else:
            result += draw.normal(size=steps).cumsum()
        return {(name, "weight", "cur_amax"): np.exp(0.1 * row) for name, row in zip(names, result, strict=True)}

    a, floor, *others = (record(tmp_path / str(seed), noise(seed), order=names) for seed in range(5))
    assert [compare(a, other, noise=[floor]).parted for other in others] == [()] * 3


def test_a_few_series_that_differ_much_widen_the_noise_of_their_family() -> None:
    """As smallest magnitudes of weights at random, of which a run has one sample a layer."""
    offsets = np.array([0.1] * 8 + [1.0] * 2)
    noise = [[Curve(np.arange(20), np.full(20, offset))] for offset in offsets]
    floor = NoiseFloor(noise, MAGNITUDE.least, lasting=5)
    expected = np.sqrt(np.mean(np.minimum(offsets, 0.3) ** 2)) / 0.9118**2  # of a series, then of the family
    for series in range(8):
        assert floor.spread(series, np.arange(20)) == pytest.approx(expected, rel=0.01)


def test_a_noisy_layer_needs_more_than_its_quiet_siblings(runs: Runs) -> None:
    """A difference within a series' own spread is ordinary, though a finding in another series."""
    a, noise, b = numbers(0), numbers(1), numbers(2)
    draw = np.random.default_rng(9)
    for values in (a, noise, b):
        values[LAYERS[0], "weight", "cur_amax"] *= np.exp2(draw.normal(0, 3, STEPS))
    b = changed(b, {(LAYERS[0], "weight"): 16.0, (LAYERS[3], "weight"): 16.0})
    first, second, third = (record(runs.folder / f"n{n}", item, order=LAYERS) for n, item in enumerate((a, noise, b)))
    assert [parting.name for parting in compare(first, third, noise=[second]).parted] == [f"{LAYERS[3]} weight"]


def test_without_noise_fixed_bounds_hold_and_it_says_so(runs: Runs) -> None:
    b = runs.record("b", changed(numbers(0), {(LAYERS[1], "weight"): 1.8, (LAYERS[3], "weight"): 2.2}))
    result = compare(runs.a, b)
    (parting,) = result.parted
    assert (parting.name, parting.strongest.spread) == (f"{LAYERS[3]} weight", None)
    assert (result.floor, result.all_equal) == (None, False)


def test_equal_runs_are_equal_to_the_last_bit(runs: Runs) -> None:
    result = compare(runs.a, runs.record("b", numbers(0)), noise=[runs.noise])
    assert (result.has_findings, result.all_equal) == (False, True)


def test_steps_pair_by_their_number(tmp_path: Path) -> None:
    a = record(tmp_path / "a", numbers(0), order=LAYERS)
    tenth = {subject: curve[::10] for subject, curve in changed(numbers(0), {(LAYERS[3], "weight"): 16.0}).items()}
    result = compare(a, record(tmp_path / "b", tenth, freq=10), lasting=2)
    assert (result.pairing.series, result.pairing.steps) == (len(tenth), 6)
    assert (result.first.name, result.first.iteration) == (f"{LAYERS[3]} weight", 30)


def seldom(values: Values) -> dict[Subject, Floats]:
    steps = np.arange(STEPS)
    return {key: np.where((key[1] != "weight") | (steps % 5 == 0), curve, np.nan) for key, curve in values.items()}


@pytest.mark.parametrize("since", [30, 34])
def test_a_weight_with_fewer_numbers_comes_before_the_activations_that_it_made(runs: Runs, since: int) -> None:
    """Schedules of freq 1 and freq 5 in one config: the weight is seen to depart up to four steps later."""

    a, noise = (runs.record(f"seldom {seed}", seldom(numbers(seed))) for seed in (0, 1))
    b = runs.record("seldom b", seldom(changed(numbers(2), GROWN, since)))
    for result in (compare(a, b), compare(a, b, noise=[noise])):
        actual = origins(result)
        assert next(iter(actual)) == f"{GROWS} weight"
        assert [name for name, (origin, _) in actual.items() if origin == "made here"] == [f"{GROWS} weight"]
        assert result.first.iteration == -(-since // 5) * 5
        assert result.first.since <= since
        assert ("This statistic has no values between steps 30 and 35" in " ".join(describe_first(result))) == (
            since > 30
        )


def test_gradients_that_depart_before_are_what_makes_a_weight_with_fewer_numbers_depart(runs: Runs) -> None:
    values = changed(changed(numbers(2), {(LAYERS[2], "gradient"): 16.0}, 22), {(LAYERS[2], "weight"): 16.0}, 32)
    a, noise, b = (
        runs.record(f"few {name}", seldom(curves))
        for name, curves in (("a", numbers(0)), ("noise", numbers(1)), ("b", values))
    )
    assert origins(compare(a, b, noise=[noise])) == {
        f"{LAYERS[2]} gradient": ("made here", ""),
        f"{LAYERS[2]} weight": ("inherited", f"{LAYERS[2]} gradient"),
    }


def test_statistics_of_other_recipes_do_not_pair(runs: Runs) -> None:
    mine, other = numbers(0), numbers(0)
    mine[LAYERS[0], "weight", "fp8_current_scaling_mse"] = np.ones(STEPS)
    other |= {(layer, "weight", "mxfp8_mse"): np.ones(STEPS) for layer in LAYERS}
    pairing = compare(runs.record("mine", mine), runs.record("other", other)).pairing
    assert (pairing.series, pairing.only_a, pairing.only_b) == (24, 1, 6)
    assert (pairing.statistics_only_a, pairing.statistics_only_b) == (("fp8_current_scaling_mse",), ("mxfp8_mse",))


def test_without_an_order_layers_come_as_in_the_records(tmp_path: Path) -> None:
    both = {(LAYERS[1], "activation"): 16.0, (LAYERS[2], "activation"): 16.0}
    a, b = (record(tmp_path / name, values) for name, values in (("a", numbers(0)), ("b", changed(numbers(0), both))))
    result = compare(a, b)
    assert not result.ordered
    assert [parting.layer for parting in result.parted] == LAYERS[1:3]


def test_pipeline_stages_follow_one_another(tmp_path: Path) -> None:
    runs = []
    for name, factor in (("a", 1.0), ("b", 16.0)):
        with RunWriter.begin(tmp_path / name) as run:
            series = [
                run.series("fc", tensor, "cur_amax", scope=scope)
                for scope in ("pp1", "pp0")
                for tensor in ("activation", "gradient")
            ]
            for step in range(10):
                run.add_step(step)
                run.add_values(step, np.array(series, np.int32), np.full(4, factor if step > 4 else 1.0))
            run.put_facts(
                "layers",
                [{"scope": f"pp{n}", "layer": "fc", "exec_fwd": 0, "exec_bwd": 0} for n in (0, 1)],
            )
        runs.append(open_run(tmp_path / name))
    parted = compare(*runs).parted
    assert [(item.scope, item.tensor) for item in parted] == [
        ("pp0", "activation"),
        ("pp1", "activation"),
        ("pp1", "gradient"),
        ("pp0", "gradient"),
    ]
    assert [item.origin for item in parted] == ["made here", "inherited", "made here", "inherited"]


# ---------------------------------------------------------------------- facts and losses


CONFIG = """
s:
  enabled: true
  layers: {layer_types: [all]}
of all:
  enabled: true
  transformer_engine:
    # each step
    LogTensorStats: {tensors_struct: [{tensor: activation, stats: [max]}], freq: 1}
last:
  enabled: true
"""
OTHER_CONFIG = (
    CONFIG.replace("[all]", "[fc1]")
    .replace("# each step", "# rarely")
    .replace("freq: 1", "freq: 5")
    .replace("last:\n  enabled: true\n", "")
)


def gemm_rows(precision: str) -> list[dict[str, Any]]:
    row = {"scope": "", "gemm": "fprop", "macs": 100, "runs": "seen"}
    return [
        {**row, "gemm_id": number, "layer": layer, "precision": precision if number else "bf16"}
        for number, layer in enumerate(LAYERS)
    ]


def products(rows: int, calls: int = 1) -> list[dict[str, Any]]:
    sizes = {"n": rows, "m": 32, "k": 16, "batch": 1, "calls": calls, "macs": rows * 512 * calls}
    names = {"scope": "", "gemm": "fprop", "backward": False, "precision": "fp8", "runs": "seen"}
    return [{"gemm_id": number, "layer": layer, **names, **sizes} for number, layer in enumerate(LAYERS)]


FACTS: dict[str, Any] = {"versions": {"torch": "2.9"}, "recipes": ["none"], "world": 2, "host": "one"}


@pytest.mark.parametrize(
    ("ours", "theirs", "stated"),
    [
        (
            FACTS,
            FACTS | {"versions": {"torch": "2.10"}, "recipes": ["mxfp8"], "host": "another"},
            [("versions.torch", "2.9", "2.10"), ("recipes", '["none"]', '["mxfp8"]')],
        ),
        (
            {"config_text": CONFIG, "config_hash": "0"},
            {"config_text": OTHER_CONFIG, "config_hash": "1"},
            [
                ("config.last.enabled", "true", ""),
                ("config.of all.transformer_engine.LogTensorStats.freq", "1", "5"),
                ("config.s.layers.layer_types", '["all"]', '["fc1"]'),
            ],
        ),
        (
            {"gemms": gemm_rows("bf16")},
            {"gemms": gemm_rows("fp8")},
            [("coverage", "BF16 100 %", "FP8 83.3 %, BF16 16.7 %"), ("fprop of layers.{1-5}.fc", "BF16", "FP8")],
        ),
        (
            {"gemms": products(128)},
            {"gemms": [row | {"m": 64} for row in products(128)]},
            [("weight of layers.{0-5}.fc", "32 x 16", "64 x 16")],
        ),
    ],
    ids=["versions and recipes", "options of the config", "coverage", "sizes of weights"],
)
def test_facts_that_differ_come_with_their_values(
    runs: Runs, ours: dict[str, Any], theirs: dict[str, Any], stated: list[tuple[str, str, str]]
) -> None:
    assert [(fact.name, fact.a, fact.b) for fact in runs.compared(ours, theirs).facts] == stated


def test_what_a_run_writes_at_its_end_is_no_fact_that_differs(runs: Runs) -> None:
    record(runs.folder / "killed", numbers(0))
    (file,) = (runs.folder / "killed").rglob("run.json")
    facts = json.loads(file.read_text())
    assert facts.pop("files")
    file.write_text(json.dumps(facts))
    assert facts_that_differ(runs.a, open_run(runs.folder / "killed")) == []


def test_another_batch_size_is_a_fact_and_has_no_yardstick(runs: Runs) -> None:
    high = [row | {"precision": "bf16"} for row in products(128)]
    low = {"gemms": products(128, calls=8), "scalars": {"loss": LOSS * 1.1}}
    result = runs.compared({"gemms": high, "scalars": {"loss": LOSS}}, low)
    assert ("rows in a step of layers.{0-5}.fc", "128", "1,024") in [
        (fact.name, fact.a, fact.b) for fact in result.facts
    ]
    assert result.pairing.with_other_rows == tuple(LAYERS)
    assert any("for example another batch size" in sentence for sentence in describe_pairing(result))
    assert [yardstick.holds for yardstick in result.loss.yardsticks] == [None, None]


@pytest.mark.few
@pytest.mark.parametrize(
    ("statistic", "ours", "theirs", "said"),
    [
        ("min", -0.00119, -0.000297, "x 0.25"),
        ("min", 0.000297, 0.00119, "x 4.01"),
        ("max", 0.001, -0.001, "another sign"),
        ("cur_amax", 0.0, 0.001, "from 0"),
        ("cur_amax", 0.001, 0.0, "to 0"),
    ],
)
def test_the_factor_of_a_number_is_that_of_its_magnitude(
    runs: Runs, statistic: str, ours: float, theirs: float, said: str
) -> None:
    a, b = (
        runs.record(name, numbers(0) | {(LAYERS[0], "weight", statistic): np.full(STEPS, value)})
        for name, value in (("ours", ours), ("theirs", theirs))
    )
    assert difference(compare(a, b).first.strongest) == said


@pytest.mark.parametrize("statistic", ["cur_amax", "mse", "mean", "nonfinite_num", "underflows%", "sqnr_db"])
def test_a_limit_is_drawn_at_its_value(statistic: str) -> None:
    values = np.array([-3e4, -1e-3, 0.0, 2e-3, 1.0, 70.0])
    scale = scale_of("weight", statistic)
    resolution = scale.resolution_of([Curve(np.arange(len(values)), values)])
    places = scale.places(values, resolution)
    assert (np.diff(places) > 0).all()
    drawn = places if np.isnan(scale.step) else resolution * np.sinh(places * scale.step)  # as the page does
    assert drawn == pytest.approx(values)


@pytest.mark.few
@pytest.mark.parametrize(
    ("low", "high", "off", "holds"),
    [
        ("fp8", "bf16", 0.002, {"FP8": True, "NVFP4": None}),
        ("fp8", "bf16", 0.003, {"FP8": False, "NVFP4": None}),
        ("nvfp4", "fp8", 0.003, {"FP8": None, "NVFP4": True}),
        ("nvfp4", "fp8", 0.02, {"FP8": None, "NVFP4": False}),
        ("bf16", "fp8", 0.02, {"FP8": None, "NVFP4": None}),
        ("fp8", "fp32", 0.003, {"FP8": False, "NVFP4": None}),
    ],
)
def test_losses_are_held_against_the_yardstick_that_is_for_them(
    runs: Runs, low: str, high: str, off: float, holds: dict[str, bool | None]
) -> None:
    loss = runs.compared(
        {"gemms": gemm_rows(high), "scalars": {"lr": np.ones(STEPS), "loss": LOSS}},
        {"gemms": gemm_rows(low), "scalars": {"loss": LOSS * (1 + off)}},
    ).loss
    assert loss.relative == pytest.approx(off, rel=1e-6)
    assert {yardstick.name.split()[0]: yardstick.holds for yardstick in loss.yardsticks} == holds
    assert loss.is_finding is (False in holds.values())
    assert loss.precisions == (high, low)
    said = " ".join(describe_losses(loss))
    assert ("0.25 %, the bound for FP8 against BF16" in said) is (holds["FP8"] is not None)
    assert ("A ran in FP32." in said) is (high == "fp32" and low == "fp8")
    assert ("No bound is known for this pair" in said) is (low != high and set(holds.values()) == {None})


def test_a_loss_within_the_noise_is_no_finding(runs: Runs) -> None:
    gemms = {"a": "bf16", "b": "fp8", "noise": "bf16"}
    factors = {"a": 1.0, "b": 1.004, "noise": 0.99}
    a, b, noise = (
        runs.record(f"loss {name}", numbers(0), gemms=gemm_rows(gemms[name]), scalars={"loss": LOSS * factors[name]})
        for name in ("a", "b", "noise")
    )
    assert compare(a, b).has_findings
    assert not compare(a, b, noise=[noise]).has_findings


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("since", [0, STEPS - 1])
def test_a_loss_that_is_lost_is_said_of_the_run_that_has_it(runs: Runs, since: int) -> None:
    good, lost = (
        runs.record(f"{name} {since}", numbers(0), scalars={"loss": values})
        for name, values in (("good", LOSS), ("lost", np.where(np.arange(STEPS) < since, LOSS, math.nan)))
    )
    when = f"from step {since} on" if since < STEPS - 1 else f"at its last logged step, {since}"
    for a, b, side, other in ((good, lost, "B", "A"), (lost, good, "A", "B")):
        result = compare(a, b)
        assert result.has_findings
        assert list(first_lines(result)) == [f"The loss of {side} is nan {when}; in {other} it is finite."]
        assert " inf." not in " ".join(describe_losses(result.loss))
        assert (result.loss.spike, result.loss.steps) == (None, since)
    both = compare(lost, lost)
    assert len(list(first_lines(both))) == 2
    assert not both.has_findings
    assert not re.search("inf|nan", " ".join(describe_losses(compare(good, good, noise=[lost]).loss)))


def test_a_loss_that_the_trainer_hides_is_not_compared_in_its_place(runs: Runs) -> None:
    """The Hugging Face Trainer logs 0 in the place of a nan, and its session the loss of each step."""
    lost = np.where(np.arange(STEPS) < 20, LOSS, math.nan)
    hidden = {"loss": np.nan_to_num(lost), "loss_step": lost}
    result = runs.compared({"scalars": {"loss": LOSS, "loss_step": LOSS}}, {"scalars": hidden})
    assert list(first_lines(result)) == ["The loss_step of B is nan from step 20 on; in A it is finite."]
    assert result.loss.name == "loss_step"


@pytest.mark.parametrize("peak", [1e6, math.nan])
def test_a_spike_of_the_loss_is_told_though_its_running_median_is_not(runs: Runs, peak: float) -> None:
    spiked = LOSS.copy()
    spiked[[20, 21]] = 100.0, peak
    recorded = {"a": LOSS, "b": spiked, "alike": spiked}
    a, b, alike = (
        runs.record(f"spike {peak} {name}", numbers(0), scalars={"loss": values}) for name, values in recorded.items()
    )
    result = compare(a, b)
    assert (result.loss.spike.steps, result.loss.spike.iteration, result.loss.spike.a) == (2, 21, LOSS[21])
    assert result.has_findings
    assert any(text.startswith("There is a spike at step ") for text in describe_losses(result.loss))
    assert compare(a, b, noise=[alike]).loss.spike is None, "the noise has it too"
    higher = runs.record(f"spike {peak} higher", numbers(0), scalars={"loss": 1.5 * LOSS})
    assert compare(a, higher).loss.spike is None


# ---------------------------------------------------------------------- what cannot be compared


@pytest.mark.parametrize(
    ("values", "first", "said"),
    [
        (
            {(f"blocks.{n}", "weight", "cur_amax"): np.ones(5) for n in range(3)},
            0,
            r"have no common layers: one has 'layers\.0\.fc', the other 'blocks\.0'",
        ),
        (
            {(layer, "weight", "mxfp8_mse"): np.ones(5) for layer in LAYERS},
            0,
            "common layers, but no common statistics",
        ),
        (numbers(0), 100, r"no common steps: .*steps 0 to 59.*steps 100 to 159"),
    ],
    ids=["layer", "statistic", "step"],
)
def test_runs_that_share_nothing(runs: Runs, values: Values, first: int, said: str) -> None:
    with pytest.raises(ComparisonError, match=said):
        compare(runs.a, record(runs.folder / "other", values, first=first))


def test_a_run_without_statistics_is_named(runs: Runs) -> None:
    none = record(runs.folder / "none", {}, scalars={"loss": np.ones(5)})
    for pair in ((runs.a, none), (none, runs.a)):
        with pytest.raises(ComparisonError, match=r"none has no statistics of layers, so no layer can be compared"):
            compare(*pair)


def test_runs_without_a_layer_in_common_compare_the_numbers_of_the_trainer(runs: Runs) -> None:
    losses = {"loss": np.linspace(4, 2, STEPS)}
    a = record(runs.folder / "with", numbers(0), scalars=losses)
    b = record(runs.folder / "without", {}, scalars={"loss": 2.1 * losses["loss"]})
    other = record(runs.folder / "other", {("blocks.0", "weight", "cur_amax"): np.ones(STEPS)}, scalars=losses)
    result = compare(a, b)
    assert result.loss.relative == pytest.approx(1.1)
    assert result.has_findings
    assert list(describe_first(result)) == ["No layer was compared."]
    first, second = first_lines(result)
    assert second == "The loss is 2.241 in A and 4.705 in B (+110 %) from step 45 on."
    assert first.startswith(f"{runs.folder / 'without'} has no statistics of layers, so no layer can be compared.")
    assert first.endswith("Only trainer metrics are compared.")
    same = compare(a, other)
    (first,) = first_lines(same)
    assert "have no common layers" in first
    assert not same.has_findings


@pytest.mark.few
@pytest.mark.parametrize(
    ("end_a", "end_b", "is_finding"),
    [(1.0, 2.1, True), (2.1, 1.0, True), (1.0, 1.9, False), (0.001, 0.01, False), (-1.0, 3.0, False)],
)
def test_a_loss_of_twice_the_other_is_a_finding_unless_both_are_near_0(
    runs: Runs, end_a: float, end_b: float, is_finding: bool
) -> None:
    early = np.arange(STEPS) < STEPS // 4
    a, b = ({"scalars": {"loss": np.where(early, 4.0, end)}} for end in (end_a, end_b))
    assert runs.compared(a, b).loss.is_finding is is_finding


def test_the_types_of_what_is_kept_are_facts(runs: Runs) -> None:
    def kept(run: RecordedRun, dtype: str) -> RecordedRun:
        rows = [("parameter", dtype), ("optimizer_state", "float32")]
        table = [{"subject": subject, "dtype": item, "bytes": 8, "count": 1} for subject, item in rows]
        return dataclasses.replace(run, states=pa.Table.from_pylist(table, STATES))

    result = facts_that_differ(kept(runs.a, "float32"), kept(runs.a, "bfloat16"))
    assert [fact for fact in result if fact.name.startswith("type of")] == [
        FactDifference("type of parameter", "float32", "bfloat16")
    ]


@pytest.mark.parametrize(("ours", "theirs"), [("", "net."), ("model.net.", "module.")])
def test_layers_pair_by_the_end_of_their_names(runs: Runs, ours: str, theirs: str) -> None:
    """Lightning's names begin at its module, other integrations' names at the model."""

    def named(name: str, prefix: str, values: Values, precision: str) -> RecordedRun:
        rows = [{**row, "layer": prefix + row["layer"], "precision": precision} for row in products(128)]
        results = {(prefix + layer, tensor, statistic): curve for (layer, tensor, statistic), curve in values.items()}
        return record(runs.folder / name, results, order=[prefix + layer for layer in LAYERS], gemms=rows)

    a = named("named", ours, numbers(0), "bf16")
    noise = named("again", theirs, numbers(1), "bf16")
    b = named("otherwise", theirs, changed(numbers(2), {(LAYERS[2], "weight"): 16.0}), "fp8")
    result = compare(a, b, noise=[noise])
    assert [parting.name for parting in result.parted] == [f"{ours}{LAYERS[2]} weight"]
    assert (result.ordered, result.pairing.layers) == (True, len(LAYERS))
    assert any(fact.name.startswith("fprop of ") and fact.b == "FP8" for fact in result.facts)
    assert len(result.notes) == 2
    assert f"prefixes: {theirs!r} in {b.path}, {ours!r} in {a.path}" in result.notes[0]
    assert result.notes[0].startswith("6 layers ")


@pytest.mark.parametrize(("steps", "is_above"), [(60, True), (4, False)])
def test_a_difference_that_lasts_within_the_noise_raises_the_bound(steps: int, is_above: bool) -> None:
    """Of five steps, in one of two series; a curve shorter than that has no lasting difference."""
    iterations = np.arange(steps)
    quiet = np.random.default_rng(0).normal(size=steps)
    lasting = quiet.copy()
    lasting[-5:] = 60.0
    floor = NoiseFloor([[Curve(iterations, quiet)] for _ in range(20)] + [[Curve(iterations, lasting)]], 1e-3, 5)
    usual = NoiseFloor([[Curve(iterations, quiet)]], 1e-3, 5)
    assert (floor.bound > usual.bound) == is_above
