"""Each rule, on numbers that are made: what it finds, and what it leaves alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from te_precision_callbacks.diagnosis import RULES, Finding, Verdict
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import Facts, Settings
from te_precision_callbacks.diagnosis.numbers import Splitter, StepNumbers
from te_precision_callbacks.diagnosis.rule import Judge
from te_precision_callbacks.sinks.step_records import Event, Row
from te_precision_callbacks.statistics.series import SeriesTable
from tests.step_records import records_from_rows

LAYERS = [f"h.{block}.{part}" for block in range(10) for part in ("fc1", "fc2")]


def row(layer: str, gemm: str, **changes: Any) -> dict[str, Any]:
    made = {"layer": layer, "gemm": gemm, "family": "te", "m": 64, "k": 64, "macs": 1, "calls": 1, "runs": "seen"}
    return {**made, "not_run": "", "reason": None, "reason_ref": "", "recipe": "fp8_current_scaling", **changes}


def facts(
    layers: Sequence[str] = LAYERS,
    recipe: str = "fp8_current_scaling",
    formats: Mapping[str, str] | None = None,
    states: Sequence[dict[str, Any]] = (),
    changed: Mapping[str, dict[str, Any]] | None = None,
    settings: Settings | None = None,
    **of_all: Any,
) -> Facts:
    """Facts of layers that run one after the other; ``changed`` has what is otherwise for some."""
    texts = formats or {"activation": "FP8 E4M3", "weight": "FP8 E4M3", "gradient": "FP8 E5M2"}
    rows = [
        {
            "layer": layer,
            "class": "Linear",
            "exec_fwd": place,
            "exec_bwd": len(layers) - place,
            "weight_dtype": "bfloat16",
        }
        for place, layer in enumerate(layers)
    ]
    gemms = [
        row(layer, gemm, **{"recipe": recipe, **of_all, **(changed or {}).get(layer, {})})
        for layer in layers
        for gemm in ("fprop", "dgrad", "wgrad")
    ]
    operands = [
        {"layer": layer, "tensor": tensor, "format": text} for layer in layers for tensor, text in texts.items()
    ]
    return Facts.from_rows(rows, gemms, operands, states, settings)


Numbers = Mapping[tuple[str, str, str], float]
"""(layer, tensor, statistic) -> value."""


def judged(
    steps: Sequence[Numbers],
    known: Facts | None = None,
    checkpoints: Sequence[int] = (),
    at: Sequence[int] | None = None,
    unscaled: frozenset[str] = frozenset(),
) -> Verdict:
    """The verdict over steps, which are 10 iterations apart unless ``at`` has theirs."""
    diagnosis, table = Diagnosis(), SeriesTable()
    splitter = Splitter(table.__getitem__)
    if known is not None:
        diagnosis.know(known, 0)
    for checkpoint in checkpoints:
        diagnosis.note_checkpoint(checkpoint)
    if steps:
        checked = {"checked": ["missing-gradient", "frozen-weight"], "problems": []}
        diagnosis.event(Event("parameters", "Parameters were checked.", 0, data=checked))
    for iteration, step in zip(range(0, 10 * len(steps), 10) if at is None else at, steps, strict=True):
        rows = [Row(layer, tensor, None, statistic, value) for (layer, tensor, statistic), value in step.items()]
        records = records_from_rows(iteration, iteration, rows, table=table)
        diagnosis.step(splitter.step(iteration, records.series, np.frombuffer(records.values), unscaled))
        diagnosis.scalars(iteration, {"loss": 2.0} if step else {})
    return diagnosis.verdict


def ordinary(**changes: float) -> dict[tuple[str, str, str], float]:
    """The numbers of a healthy step; a key such as ``h_3_fc1_gradient_std`` changes one."""
    results: dict[tuple[str, str, str], float] = {}
    for place, layer in enumerate(LAYERS):
        for tensor, size in (("activation", 1.0), ("weight", 0.02), ("gradient", 1e-4 * 1.1**place)):
            results[layer, tensor, "std"] = size
            results[layer, tensor, "cur_amax"] = 4 * size
            results[layer, tensor, "nonfinite_num"] = 0.0
            results[layer, tensor, "underflows%"] = 0.1
            results[layer, tensor, "overflows%"] = 0.0
            scale = 4 * size / (57344.0 if tensor == "gradient" else 448.0)
            results[layer, tensor, "scale_inv_max"] = results[layer, tensor, "scale_inv_min"] = scale
    for key, value in changes.items():
        block, part, tensor, statistic = key.split("_", 3)
        name = {"underflows": "underflows%", "overflows": "overflows%"}.get(statistic, statistic)
        results[f"h.{block[1:]}.{part}", tensor, name] = value
    return results


NAN = ordinary(b3_fc1_activation_nonfinite_num=1.0)


def only(verdict: Verdict, rule: str) -> Finding:
    """The one finding, which is of a rule."""
    assert [finding.rule for finding in verdict] == [rule], str(verdict)
    return verdict.findings[0]


def test_a_healthy_run_has_no_finding() -> None:
    verdict = judged([ordinary()] * 6, facts())
    assert not len(verdict)
    assert verdict.healthy
    assert str(verdict) == f"No problems found ({len(verdict.judged)} of {_all(verdict)} rules checked)."
    assert {"nonfinite", "overflow", "underflow", "sibling", "growth", "hole", "dead-gradient"} <= set(verdict.judged)


def _all(verdict: Verdict) -> int:
    return len(verdict.judged) + len(verdict.not_judged)


def test_nothing_is_judged_without_numbers() -> None:
    verdict = judged([])
    assert not verdict.judged
    assert str(verdict) == "Not enough checked: no training step has run."
    assert judged([{}]).not_judged[0].why == "only one collection step has run"
    verdict = judged([{}, {}])
    assert str(verdict).startswith("Not enough checked: ")
    assert all(item.why.startswith("it needs ") and item.collect for item in verdict.not_judged)


def test_nonfinite_names_the_first_layer_by_execution() -> None:
    step = ordinary(b7_fc1_activation_nonfinite_num=3.0, b4_fc2_activation_nonfinite_num=2.0)
    step["h.0.fc1", "gradient", "nonfinite_num"] = 5.0
    finding = only(judged([ordinary(), step, step], facts()), "nonfinite")
    assert (finding.severity, finding.layers, finding.tensor) == ("error", ("h.4.fc2",), "activation")
    assert (finding.since, finding.last_good) == (10, 0)
    assert finding.seen == "2 elements are inf or nan; 2 more layers have some in the same step"
    step = ordinary(b7_fc1_activation_nonfinite_num=3.0, b4_fc2_activation_nonfinite_num=1.0)
    first = only(judged([step], facts()), "nonfinite")
    assert first.seen == "1 element is inf or nan; 1 more layer has some in the same step"


@pytest.mark.parametrize(("checkpoints", "last"), [((7, 14), 7), ((10, 11), 10), ((14,), None), ((), None)])
def test_the_checkpoint_is_from_before_the_last_good_step(checkpoints: Sequence[int], last: int | None) -> None:
    """The step 20 shows a nan that may have come in each step after 10."""
    finding = only(judged([ordinary(), ordinary(), NAN], facts(), checkpoints), "nonfinite")
    assert (finding.since, finding.last_good, finding.checkpoint) == (20, 10, last)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nonfinite_is_seen_in_amax_too(value: float) -> None:
    step = {("h.0.fc1", "weight", "cur_amax"): value}
    assert only(judged([step]), "nonfinite").layers == ("h.0.fc1",)


def test_overflow_of_delayed_scaling_lasts() -> None:
    saturated = ordinary(b3_fc1_activation_overflows=1.0)
    delayed = facts(recipe="fp8_delayed_scaling")
    assert not len(judged([ordinary(), saturated, ordinary(), saturated], delayed)), "single steps are ordinary"
    assert not len(judged([ordinary(), saturated, saturated, ordinary()], delayed)), "gradients grow in the first steps"
    finding = only(judged([ordinary(), *[saturated] * 3], delayed), "overflow")
    assert (finding.layers, finding.since, finding.last_good) == (("h.3.fc1",), 10, 0)
    assert not len(judged([saturated] * 3, facts())), "current scaling is above the range only by rounding"
    falling = [ordinary(b3_fc1_weight_overflows=60.0 / 2**step) for step in range(6)]
    assert not len(judged(falling, delayed)), "as LoRA's B, which grows from 0"


UNDERFLOWS = [("FP8 E4M3", "fp8_current_scaling", 20.0), ("MXFP8 E4M3", "mxfp8", 20.0), ("NVFP4", "nvfp4", 40.0)]


@pytest.mark.parametrize(("text", "recipe", "most"), UNDERFLOWS)
def test_underflow_by_format(text: str, recipe: str, most: float) -> None:
    """Without std, the part of the norm is not known, but with FP8 in blocks it is always small."""
    known = facts(formats={"activation": text}, recipe=recipe)
    below, above = (
        {key: value for key, value in ordinary(b3_fc1_activation_underflows=most + by).items() if key[2] != "std"}
        for by in (-1, 1)
    )
    assert "underflow" not in [finding.rule for finding in judged([below] * 2, known)]
    finding = next(finding for finding in judged([above, above], known) if finding.rule == "underflow")
    assert (finding.layers, finding.severity) == (("h.3.fc1",), "note" if recipe == "mxfp8" else "warning")


def test_underflow_is_weighed_by_the_norm_that_is_lost() -> None:
    """As of the gradient of a tied head, whose few large elements have all of the norm; and of a stale scale."""
    known = facts(recipe="fp8_delayed_scaling")
    finding = only(judged([ordinary(b3_fc1_gradient_underflows=96.0)] * 4, known), "underflow")
    assert (finding.severity, finding.patch) == ("note", "")
    assert finding.seen == "96 % of the elements round to 0, with at most 5.2e-08 % of the tensor's norm"
    stale = ordinary(b3_fc1_activation_underflows=8.0, b3_fc1_activation_scale_inv_max=512.0)
    warning = next(finding for finding in judged([stale] * 4, known) if finding.rule == "underflow")
    assert (warning.severity, warning.layers) == ("warning", ("h.3.fc1",))
    assert warning.seen.endswith("with at most 14 % of the tensor's norm")


def test_the_first_step_of_delayed_scaling_does_not_count() -> None:
    lossy = ordinary(b3_fc1_activation_underflows=90.0)
    known = facts(recipe="fp8_delayed_scaling")
    assert not len(judged([lossy] * 3, known, unscaled=frozenset(LAYERS)))


def test_a_stale_scale() -> None:
    known = facts(recipe="fp8_delayed_scaling")
    after_spike = ordinary(b3_fc1_activation_scale_inv_max=1000 * 4 / 448, b3_fc1_activation_underflows=2.0)
    finding = only(judged([ordinary(), after_spike, after_spike], known), "stale-scale")
    assert finding.seen == "the range of its scale is 1e+03 times its amax, and 2 % of the elements round to 0"
    assert not len(judged([after_spike] * 3, facts())), "of delayed scaling alone"
    growing = ordinary(b3_fc1_activation_scale_inv_max=1 / 448)
    assert only(judged([growing] * 3, known), "stale-scale").seen == "amax is 4 times the range of its scale"
    assert not len(judged([growing] * 2, known))


@pytest.mark.parametrize("factor", [2.0**-18, 2.0**18])
def test_a_sibling_needs_three_steps(factor: float) -> None:
    odd = ordinary(b4_fc1_gradient_std=1e-4 * factor, b4_fc1_gradient_cur_amax=4e-4 * factor)
    assert "sibling" not in [finding.rule for finding in judged([odd] * 2, facts())]
    finding = next(finding for finding in judged([odd] * 3, facts()) if finding.rule == "sibling")
    assert (finding.severity, finding.layers, finding.tensor) == ("warning", ("h.4.fc1",), "gradient")


@pytest.mark.parametrize("shown", ["nonfinite_num", "cur_amax"])
def test_a_scale_of_a_tensor_with_inf_is_not_stale(shown: str) -> None:
    """Its scale follows the inf, and the rule nonfinite names it."""
    broken = ordinary(b3_fc1_weight_scale_inv_max=2.0, b3_fc1_weight_underflows=4.0)
    assert [finding.rule for finding in judged([broken] * 4, facts(recipe="fp8_delayed_scaling"))] == ["stale-scale"]
    broken["h.3.fc1", "weight", shown] = 1.0 if shown == "nonfinite_num" else math.inf
    assert only(judged([broken] * 4, facts(recipe="fp8_delayed_scaling")), "nonfinite").layers == ("h.3.fc1",)


def test_a_sibling_with_a_consequence_may_be_nearer() -> None:
    changes = {"b4_fc1_gradient_std": 1e-4 * 2.0**-7, "b4_fc1_gradient_cur_amax": 4e-4 * 2.0**-7}
    assert not len(judged([ordinary(**changes)] * 5, facts()))
    finding = only(judged([ordinary(**changes, b4_fc1_gradient_underflows=8.0)] * 2, facts()), "sibling")
    assert finding.layers == ("h.4.fc1",)


def test_the_amax_of_an_activation_alone_is_a_note() -> None:
    massive = ordinary(b4_fc1_activation_cur_amax=4.0 * 2**14)
    finding = only(judged([massive] * 4, facts()), "sibling")
    assert finding.severity == "note"
    assert not judged([massive] * 4, facts()).wrong


def test_a_gradient_that_jumps_up_is_named_where_it_begins() -> None:
    step = ordinary()
    for block in range(6):  # the backward comes from h.9; from h.5 on all are larger
        for statistic in ("std", "cur_amax"):
            for part in ("fc1", "fc2"):
                step[f"h.{block}.{part}", "gradient", statistic] *= 2.0**16
    finding = next(finding for finding in judged([step] * 3, facts()) if finding.rule == "sibling")
    assert finding.layers[0] == "h.5.fc2"


def test_trends_with_depth_are_no_finding() -> None:
    step = ordinary()
    for place, layer in enumerate(LAYERS):
        for statistic in ("std", "cur_amax"):
            step[layer, "gradient", statistic] *= 8.0 ** (place // 2)  # 27 powers of two over the model
    assert not len(judged([step] * 5, facts()))


def of_blocks(count: int, step: Numbers) -> Numbers:
    return {key: value for key, value in step.items() if key[0] in LAYERS[: 2 * count]}


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 10])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_weight_that_differs_from_that_of_few_alike_layers(count: int, block: int) -> None:
    changes = {f"b{block}_fc2_weight_{name}": 0.02 * size * 1000 for name, size in (("std", 1), ("cur_amax", 4))}
    known = facts(LAYERS[: 2 * count])
    assert not len(judged([of_blocks(count, ordinary())] * 4, known))
    finding = only(judged([of_blocks(count, ordinary(**changes))] * 3, known), "sibling")
    assert (finding.layers, finding.severity) == ((f"h.{block}.fc2",), "warning")
    assert finding.seen == "std is 20, 1e+03 times larger than in alike layers"


@pytest.mark.parametrize("count", [3, 6])
def test_few_alike_layers_need_stronger_evidence(count: int) -> None:
    known = facts(LAYERS[: 2 * count])

    def step(times: float, trend: float = 1.0) -> Numbers:
        results = dict(of_blocks(count, ordinary()))
        for (layer, tensor, statistic), value in results.items():
            if tensor == "gradient" and statistic in ("std", "cur_amax", "scale_inv_max"):
                results[layer, tensor, statistic] = value * trend ** int(layer.split(".")[1])
        for statistic in ("std", "cur_amax"):
            results["h.1.fc1", "gradient", statistic] *= times
        return results

    assert not len(judged([step(2.0**-11)] * 4, known))
    assert only(judged([step(2.0**-13)] * 3, known), "sibling").layers == ("h.1.fc1",)
    assert not len(judged([step(1.0, trend=2.0**9)] * 4, known)), "a trend with depth"


def test_of_two_alike_layers_the_one_farther_from_all_layers_is_odd() -> None:
    few = of_blocks(2, ordinary())
    assert not len(judged([few] * 3, facts(LAYERS[:4])))
    for block, factor in ((0, 2.0**13), (1, 2.0**-13)):
        layer = f"h.{block}.fc1"
        odd = {key: value * factor if key[:2] == (layer, "gradient") else value for key, value in few.items()}
        finding = next(item for item in judged([odd] * 3, facts(LAYERS[:4])) if item.rule == "sibling")
        assert (finding.layers, finding.tensor) == ((layer,), "gradient")


def test_a_share_of_underflows_far_above_that_of_alike_layers() -> None:
    """As in the log of a published run, without the numbers that say how much of the norm it is."""
    few = {key: value for key, value in ordinary(b3_fc1_activation_underflows=18.6).items() if key[2] == "underflows%"}
    finding = only(judged([few] * 3), "sibling")
    assert (finding.layers, finding.tensor, finding.severity) == (("h.3.fc1",), "activation", "warning")
    assert finding.seen == "18.6 % of the elements round to 0, 0.1 % in alike layers"
    assert not len(judged([few] * 2))
    light = only(judged([ordinary(b3_fc1_activation_underflows=18.6)] * 4, facts()), "sibling")
    assert light.severity == "note", "nothing of the norm"


def test_a_dead_gradient() -> None:
    dead = ordinary(b4_fc2_gradient_cur_amax=0.0, b4_fc2_gradient_std=0.0)
    finding = only(judged([dead] * 3, facts()), "dead-gradient")
    assert (finding.layers, finding.seen) == (("h.4.fc2",), "all elements are 0")
    assert not len(judged([dead, dead, ordinary()], facts())), "as LoRA's A at the start"
    idle = ordinary(b4_fc2_gradient_cur_amax=0.0, b4_fc2_activation_cur_amax=0.0, b4_fc2_activation_std=0.0)
    assert not len(judged([idle] * 4, facts())), "an expert without tokens"


DUE = (0, 1, 2, 5, *range(10, 101, 10))
"""The collection steps of a config with freq: 10 and early_steps=True."""


@pytest.mark.parametrize("is_absent", [False, True], ids=["0", "absent"])
@pytest.mark.parametrize(
    ("trains_in", "since"),
    [
        (range(0, 101, 3), None),
        (range(2, 101, 3), None),
        (range(0, 101, 5), None),
        (range(1), 1),
        (range(21), 30),
        (range(0, 31, 3), 40),
    ],
    ids=["every third", "every third, the last", "every fifth", "only the first", "up to one", "a rhythm that ends"],
)
def test_a_layer_that_trains_in_a_rhythm_is_not_dead(trains_in: range, since: int | None, is_absent: bool) -> None:
    """As a generator that trains in every third step, where its gradient is 0 or absent in the others."""
    alive, dead = ordinary(), ordinary(b4_fc2_gradient_cur_amax=0.0, b4_fc2_gradient_std=0.0)
    if is_absent:
        dead = {key: value for key, value in dead.items() if key[:2] != ("h.4.fc2", "gradient")}
    steps = {step: alive if step in trains_in else dead for step in DUE}
    results = [finding for finding in judged(list(steps.values()), facts(), at=DUE) if finding.rule == "dead-gradient"]
    assert [finding.since for finding in results] == ([] if since is None else [since])


def test_a_gradient_of_nan_is_no_training() -> None:
    dead = ordinary(b4_fc2_gradient_cur_amax=0.0, b4_fc2_gradient_std=0.0)
    lost = dead | {("h.4.fc2", "gradient", "nonfinite_num"): 64.0}
    result = judged([lost, *[dead] * 3], facts(), at=DUE[:4])
    assert [(finding.rule, finding.since) for finding in result if finding.rule == "dead-gradient"] == [
        ("dead-gradient", 1)
    ]


@pytest.mark.parametrize(("not_run", "found"), [("no backward has reached it", 1), ("frozen weight", 0)])
def test_a_backward_that_never_comes(not_run: str, found: int) -> None:
    step = {key: value for key, value in ordinary().items() if key[:2] != ("h.4.fc2", "gradient")}
    known = facts(changed={"h.4.fc2": {"runs": "never", "not_run": not_run}})
    verdict = judged([step] * 3, known)
    assert [finding.rule for finding in verdict] == ["dead-gradient"] * found


def test_growth_is_a_note_unless_something_is_lost() -> None:
    steps = [ordinary(b4_fc2_activation_cur_amax=4.0 * 2.0 ** (2 * step)) for step in range(6)]
    notes = [finding for finding in judged(steps, facts()) if finding.rule == "growth"]
    assert [finding.severity for finding in notes] == ["note"]
    lossy = [{**step, ("h.4.fc2", "activation", "underflows%"): 15.0} for step in steps]
    grown = [finding for finding in judged(lossy, facts()) if finding.rule == "growth"]
    assert [finding.severity for finding in grown] == ["warning"]


@pytest.mark.parametrize(("tensor", "bits"), [("weight", 8), ("gradient", 11), ("activation", 12)])
def test_growth_far_above_the_start_is_a_warning_although_nothing_is_lost(tensor: str, bits: int) -> None:
    def growth(power: float) -> Finding:
        size = ordinary()["h.4.fc2", tensor, "cur_amax"]
        grown = ordinary(**{f"b4_fc2_{tensor}_cur_amax": size * 2.0**power})
        return next(item for item in judged([*[ordinary()] * 3, *[grown] * 2], facts()) if item.rule == "growth")

    assert growth(bits - 0.5).severity == "note"
    far = growth(bits)
    assert (far.severity, far.patch) == ("warning", ""), "high precision would not stop the growth"
    assert far.remedy.startswith("Look for what makes this layer grow")


def test_zeros_in_wgrad_are_a_note() -> None:
    step = {("h.0.fc1", "wgrad", "zeros%"): 9.0}
    assert only(judged([step] * 3), "zeros-in-wgrad").severity == "note"
    assert not len(judged([{("h.0.fc1", "wgrad", "zeros%"): 100.0}] * 3))


HIGH = {"recipe": "none", "reason": "NO_AUTOCAST", "reason_ref": "runs outside of te.autocast"}


def test_a_hole() -> None:
    verdict = judged([ordinary()], facts(changed={"h.4.fc2": HIGH}))
    finding = only(verdict, "hole")
    assert (finding.layers, finding.since) == (("h.4.fc2",), None)
    assert finding.seen == (
        "ran in high precision: runs outside of te.autocast; 9 alike layers are in low precision, such as h.0.fc2"
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"h.4.fc2": {**HIGH, "reason": "SECTION", "reason_ref": "section 'keep' (config.yaml:3)"}},
        {"h.4.fc2": {**HIGH, "reason": "RECIPE_EXCEPTION"}},
        {"h.4.fc2": {**HIGH, "reason_ref": "runs inside te.autocast(enabled=False)"}},
        {"h.0.fc2": HIGH, "h.9.fc2": HIGH},
    ],
    ids=["section", "recipe", "region", "first and last"],
)
def test_what_is_no_hole(changed: dict[str, dict[str, Any]]) -> None:
    assert not len(judged([ordinary()], facts(changed=changed)))


def test_most_layers_outside_of_autocast_are_a_note() -> None:
    """FP8 in a few layers may be meant."""
    of_te = {f"h.{block}.fc2": {**HIGH, "is_of_te": True} for block in range(8)}
    finding = only(judged([ordinary()], facts(changed=of_te)), "hole")
    assert (finding.severity, finding.seen) == ("note", "8 of 10 alike layers run outside of te.autocast")


def test_mxfp8_with_e5m2_gradients() -> None:
    formats = {"activation": "MXFP8 E4M3", "gradient": "MXFP8 E5M2"}
    assert only(judged([ordinary()], facts(recipe="mxfp8", formats=formats)), "mxfp8-hybrid").tensor == "gradient"
    formats = {"activation": "FP8 block E4M3", "gradient": "FP8 block E5M2"}
    assert not len(judged([ordinary()], facts(recipe="fp8_block_scaling", formats=formats)))


def test_nvfp4_to_the_end_is_a_note() -> None:
    assert only(judged([ordinary()], facts(recipe="nvfp4")), "nvfp4-tail").layers == ("h.8.fc2", "h.9.fc1", "h.9.fc2")
    assert not len(judged([ordinary()], facts(recipe="nvfp4", changed={"h.9.fc2": {"recipe": "mxfp8"}})))


def test_low_precision_state_is_a_note() -> None:
    states = [{"subject": "optimizer_state", "dtype": "bfloat16"}, {"subject": "reduce", "dtype": "bfloat16"}]
    assert only(judged([ordinary()], facts(states=states)), "bf16-state").severity == "note"
    many = judged([ordinary()], facts(states=states, calls=8))
    assert [finding.seen for finding in many] == [
        "the optimizer keeps its state in bfloat16",
        "gradients are reduced over ranks in bfloat16 over 8 micro-batches",
    ]


@pytest.mark.parametrize(
    ("name", "low", "high", "rule"),
    [
        (("h.0.fc1", "weight", "stale_codes%"), 1.0, 20.0, "stale-weights"),
        (("", "", "unchanged_weights%"), 50.0, 99.0, "lost-updates"),
        (("", "", "gradients_below_eps%"), 10.0, 100.0, "below-eps"),
    ],
)
def test_what_a_step_of_the_optimizer_shows(name: tuple[str, str, str], low: float, high: float, rule: str) -> None:
    assert not len(judged([{name: low}] * 4))
    finding = only(judged([{name: low}, {name: high}, {name: high}]), rule)
    assert (finding.since, finding.layers) == (10, tuple(filter(None, [name[0]])))


def test_a_rule_that_fails_is_not_judged_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Judge):
        def step(self, numbers: StepNumbers, facts: Facts) -> Any:
            raise ZeroDivisionError("of a rule")

    failing = RULES[0].__class__(**{**vars(RULES[0]), "id": "failing", "judge": Failing})
    diagnosis = Diagnosis([failing, RULES[1]])
    numbers = Splitter(SeriesTable().__getitem__).step(3, np.empty(0, np.int32), np.empty(0))
    assert diagnosis.step(numbers) == []
    assert diagnosis.verdict.not_judged[0][:2] == ("failing", "it failed in step 3: ZeroDivisionError: of a rule")


def test_scales_that_differ_by_rank() -> None:
    two = facts(recipe="fp8_delayed_scaling", settings=Settings(ranks=2))
    alike = judged([ordinary()] * 3, two)
    assert not len(alike)
    assert "scales-differ" in alike.judged
    scale = ordinary()["h.3.fc1", "weight", "scale_inv_max"]
    near = ordinary(b3_fc1_weight_scale_inv_min=0.9 * scale)
    assert only(judged([near] * 2, two), "scales-differ").severity == "note"
    far = ordinary(b3_fc1_weight_scale_inv_min=0.25 * scale)
    assert not len(judged([ordinary(), far, ordinary()], two)), "a single step"
    finding = only(judged([ordinary(), far, far], two), "scales-differ")
    assert (finding.severity, finding.layers, finding.tensor, finding.since) == ("warning", ("h.3.fc1",), "weight", 10)
    assert finding.seen == "the largest scale of a rank is 4 times the least of another"


@pytest.mark.parametrize(
    ("known", "is_listed"),
    [
        ({"recipe": "fp8_delayed_scaling", "settings": Settings(ranks=1)}, False),
        ({"recipe": "fp8_current_scaling", "settings": Settings(ranks=2)}, False),
        ({"recipe": "fp8_delayed_scaling", "settings": Settings(ranks=2), "calls": 4}, False),
        ({"recipe": "fp8_delayed_scaling"}, True),
    ],
    ids=["one rank", "current scaling", "micro-batches", "no settings"],
)
def test_scales_that_may_differ(known: dict[str, Any], is_listed: bool) -> None:
    far = ordinary(b3_fc1_activation_scale_inv_min=1e-6)
    verdict = judged([far] * 3, facts(**known))
    assert "scales-differ" not in [*verdict.judged, *(finding.rule for finding in verdict)]
    assert ("scales-differ" in [item.rule for item in verdict.not_judged]) == is_listed


def test_a_scaler_without_float16() -> None:
    scaled = Settings(loss_is_scaled=True)
    finding = only(judged([ordinary()], facts(settings=scaled)), "grad-scaler")
    assert (finding.severity, finding.since) == ("warning", None)
    assert "grad-scaler" in judged([ordinary()], facts(settings=Settings())).judged
    assert "grad-scaler" in [item.rule for item in judged([ordinary()], facts()).not_judged]
    in_float16 = [
        facts(settings=Settings(loss_is_scaled=True, float16=True)),
        facts(settings=scaled, states=[{"subject": "gradient", "dtype": "float16"}]),
        facts(settings=scaled, formats={"activation": "FP16", "weight": "FP16"}, recipe=""),
    ]
    assert not [finding for known in in_float16 for finding in judged([ordinary()], known)]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"reduced": True, "ranks": 4, "tensor_parallel": 2, "outside": 0}, []),
        ({"reduced": True, "ranks": 2, "tensor_parallel": 1, "outside": 0}, ["note"]),
        ({"reduced": False, "ranks": 1, "tensor_parallel": 1, "outside": 0}, ["note"]),
        ({"reduced": True, "ranks": 2, "tensor_parallel": 2, "outside": 1}, ["warning"]),
        ({"reduced": False, "ranks": 1, "tensor_parallel": 2, "outside": 1}, ["warning"]),
    ],
    ids=["all", "smaller group", "not reduced", "group without tensor parallelism", "not reduced, tensor parallel"],
)
def test_amaxes_that_are_not_reduced(row: dict[str, Any], found: list[str]) -> None:
    def verdict(**changes: Any) -> Verdict:
        settings = Settings(**{"ranks": 4, "amaxes": [{**row, "layers": ["h.0.fc1"]}], **changes})
        return judged([ordinary()], facts(recipe="fp8_delayed_scaling", settings=settings))

    assert [(finding.rule, finding.severity) for finding in verdict()] == [("amax-reduction", item) for item in found]
    assert not len(verdict(ranks=1))
    stages = verdict(alike=False)
    assert len(stages) == (0 if row["reduced"] and not row["outside"] else len(found)), "a group without other stages"


def logged(norms: Sequence[float], losses: Sequence[float]) -> Verdict:
    diagnosis = Diagnosis()
    for iteration, (norm, loss) in enumerate(zip(norms, losses, strict=True)):
        diagnosis.scalars(iteration, {"loss": loss, "eval_loss": 9.0, "grad_norm": norm, "lr": 1e-3})
    return diagnosis.verdict


def wave(steps: int) -> list[float]:
    """Noise of 10 %."""
    return [1 + 0.1 * math.sin(7.7 * step * step) for step in range(steps)]


@pytest.mark.parametrize("steps", [30, 30 * 64])
def test_a_gradient_norm_that_creeps_up(steps: int) -> None:
    growing = [noise * 4 ** (step / steps) for step, noise in enumerate(wave(steps))]
    flat = [2.0 * (1 + 0.01 * (noise - 1)) for noise in wave(steps)]
    finding = only(logged(growing, flat), "gradient-norm")
    assert (finding.severity, finding.since) == ("note", 0)
    assert re.match(r"grad_norm has become [23]\.\d+ times as large in \d+ logged steps, while", finding.seen)
    rising = [loss * (1 + 0.4 * step / steps) for step, loss in enumerate(flat)]
    assert only(logged(growing, rising), "gradient-norm").severity == "warning"


@pytest.mark.parametrize(
    ("norms", "losses"),
    [
        ([1.02**step for step in range(90)], [3 * 0.98**step for step in range(90)]),
        (wave(90), [2.0] * 90),
        ([1.0] * 60 + [8.0] * 3 + [1.0] * 27, [2.0] * 90),
        ([1.0] * 45 + [8.0] * 45, [2.0] * 90),
        ([1.0] * 90, [2.0 + 0.02 * step for step in range(90)]),
        ([math.nan] * 90, [2.0] * 90),
    ],
    ids=["the loss falls", "noise", "a spike", "a jump", "the loss alone", "nan"],
)
def test_gradient_norms_that_are_no_finding(norms: list[float], losses: list[float]) -> None:
    assert "gradient-norm" not in [finding.rule for finding in logged(norms, losses)]


def told(*logged: Mapping[str, float]) -> Verdict:
    """The verdict on what the trainer logs in one iteration after the other."""
    diagnosis = Diagnosis()
    diagnosis.has_run = True
    for iteration, values in enumerate(logged):
        diagnosis.scalars(iteration, values)
    return diagnosis.verdict


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["loss", "train_loss", "train/loss_step", "Loss/train", "loss/total", "lm loss", "train/lm_loss"]
)
def test_a_loss_that_is_not_finite(name: str, value: float) -> None:
    finding = only(told({name: 2.0}, {name: value}, {name: 2.0}, {name: value}), "nonfinite-loss")
    assert (finding.severity, finding.layers, finding.seen) == ("error", (), f"{name} is {value}")
    assert (finding.since, finding.last_good, finding.until) == (1, 0, 3)


@pytest.mark.parametrize(
    "name", ["eval_loss", "val/loss", "loss/validation", "grad_norm", "loss_scale", "aux_loss", "best_loss", "accuracy"]
)
def test_numbers_that_are_not_the_loss_of_the_training(name: str) -> None:
    verdict = told(*[{"loss": 2.0, name: math.nan}] * 3)
    assert not len(verdict)
    assert "nonfinite-loss" in verdict.judged
    alone = told(*[{name: math.nan}] * 3)
    assert not len(alone)
    assert "nonfinite-loss" in [item.rule for item in alone.not_judged]


def saturated(*blocks: int) -> Numbers:
    return ordinary(**{f"b{block}_fc1_activation_overflows": 1.0 for block in blocks})


def test_more_layers_join_a_finding() -> None:
    steps = [saturated(5), saturated(5, 2), saturated(5, 2), saturated(5, 2)]
    finding = only(judged(steps, facts(recipe="fp8_delayed_scaling")), "overflow")
    assert (finding.layers, finding.since, finding.until) == (("h.5.fc1", "h.2.fc1"), 0, 30)
    assert finding.subject == "activation of h.{2,5}.fc1"


def test_the_rule_book_is_complete() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        for name in ("title", "needs", "collect", "condition", "silent", "source", "why", "disproof", "remedy"):
            assert getattr(rule, name), f"{rule.id} has no {name}"


def test_a_rule_that_cannot_fire_yet_is_not_judged() -> None:
    """A finding that needs three collection steps can not come after one."""
    delayed = facts(recipe="fp8_delayed_scaling")
    first = judged([ordinary()], delayed)
    assert {"nonfinite", "hole"} <= set(first.judged)
    waiting = {item.rule: item for item in first.not_judged}
    for rule in ("overflow", "stale-scale", "sibling", "dead-gradient", "growth"):
        assert waiting[rule][:3] == (rule, "it needs 3 collection steps, and has had 1", "")
    assert {"overflow", "stale-scale", "sibling", "dead-gradient", "growth"} <= set(
        judged([ordinary()] * 3, delayed).judged
    )
    stale: Numbers = {("h.0.fc1", "weight", "stale_codes%"): 0.0}
    assert "stale-weights" in [item.rule for item in judged([stale]).not_judged]
    assert "stale-weights" in judged([stale] * 2).judged


KEPT = {"reason": "SECTION", "reason_ref": "DisableFP8Layer in section 'keep' (config.yaml:3)"}


def test_what_is_not_quantized_loses_nothing() -> None:
    """A what-if statistic of a layer that is kept in high precision: the remedy itself."""
    lossy = ordinary(b3_fc1_activation_underflows=90.0, b3_fc1_activation_overflows=9.0)
    what_if = {
        (layer, tensor, f"fp8_current_scaling_{statistic}" if statistic == "underflows%" else statistic): value
        for (layer, tensor, statistic), value in lossy.items()
    }
    for step in (lossy, what_if):
        assert only(judged([step] * 4, facts()), "underflow").layers == ("h.3.fc1",)
        assert not len(judged([step] * 4, facts(changed={"h.3.fc1": KEPT})))
    delayed = "fp8_delayed_scaling"
    kept = facts(recipe=delayed, changed={"h.3.fc1": KEPT})
    saturated = ordinary(b3_fc1_activation_overflows=9.0, b3_fc1_activation_scale_inv_max=1e-9)
    assert len(judged([saturated] * 4, facts(recipe=delayed))) >= 2
    assert not len(judged([saturated] * 4, kept))


def test_a_gradient_that_one_of_two_products_quantizes_is_judged() -> None:
    rows = [row("h.0.fc1", gemm, **(KEPT if gemm == "wgrad" else {})) for gemm in ("fprop", "dgrad", "wgrad")]
    step: Numbers = {("h.0.fc1", "gradient", "underflows%"): 90.0}
    assert only(judged([step] * 2, Facts.from_rows((), rows, ())), "underflow").tensor == "gradient"
    rows = [row("h.0.fc1", gemm, **(KEPT if gemm != "fprop" else {})) for gemm in ("fprop", "dgrad", "wgrad")]
    assert not len(judged([step] * 2, Facts.from_rows((), rows, ())))


@pytest.mark.parametrize(
    ("rule", "recipe", "tensor", "numbers"),
    [
        ("underflow", "mxfp8", "gradient", {"underflows%": 100.0}),
        ("overflow", "fp8_delayed_scaling", "gradient", {"overflows%": 100.0}),
        ("sibling", "mxfp8", "gradient", {"std": 1e-12, "cur_amax": 1e-12}),
        ("growth", "mxfp8", "weight", {"cur_amax": 20.0}),
        ("zeros-in-wgrad", "mxfp8", "wgrad", {"zeros%": 50.0}),
        ("dead-gradient", "mxfp8", "gradient", {"std": 0.0, "cur_amax": 0.0}),
    ],
)
def test_what_is_left_of_a_tensor_with_nan_is_not_judged(
    rule: str, recipe: str, tensor: str, numbers: dict[str, float]
) -> None:
    """Statistics leave out inf and nan, and the scale may follow an inf."""
    whole: Numbers = {**ordinary(), **{("h.4.fc1", tensor, name): value for name, value in numbers.items()}}
    lost: Numbers = {**whole, ("h.4.fc1", tensor, "nonfinite_num"): 3.0}
    begin: Sequence[Numbers] = [ordinary()] * 2
    assert rule in {finding.rule for finding in judged([*begin, *[whole] * 4], facts(recipe=recipe))}
    result = only(judged([*begin, *[lost] * 4], facts(recipe=recipe)), "nonfinite")
    assert (result.layers, result.tensor) == (("h.4.fc1",), tensor)


def test_the_span_of_a_nan_goes_on() -> None:
    other = ordinary(b5_fc1_gradient_nonfinite_num=2.0)
    finding = only(judged([ordinary(), NAN, other, NAN], facts()), "nonfinite")
    assert (finding.layers, finding.tensor, finding.since, finding.until) == (("h.3.fc1",), "activation", 10, 30)
    assert only(judged([ordinary(), NAN, ordinary()], facts()), "nonfinite").until == 10


def test_the_place_of_a_nan_that_came_between_due_steps_is_not_known() -> None:
    everywhere = {key: 5.0 if key[2] == "nonfinite_num" else value for key, value in ordinary().items()}
    finding = only(judged([ordinary(), everywhere], facts()), "nonfinite")
    assert finding.layers == ()
    assert finding.seen == (
        "the weights of 20 layers have inf or nan, so the layer where it began is not known. It arose in the steps 1 to"
        " 10: run from step 1 on again to find the layer"
    )
    assert only(judged([everywhere], facts()), "nonfinite").layers == ("h.0.fc1",), "it is there from the begin"


def growing(growth: float, steps: int, share: float = 0.1) -> list[Numbers]:
    """Steps in which amax grows, and the scale is that of the step before."""
    return [
        ordinary(
            b3_fc1_gradient_cur_amax=1e-4 * growth**step,
            b3_fc1_gradient_scale_inv_max=1e-4 * growth ** (step - 1) / 57344,
            b3_fc1_gradient_overflows=share,
        )
        for step in range(steps)
    ]


def test_gradients_that_grow_in_the_first_steps_are_healthy() -> None:
    """The scale of delayed scaling is always a step late."""
    known = facts(recipe="fp8_delayed_scaling")
    slow = [*growing(1.4, 6), *[growing(1.4, 6)[-1]] * 4]
    assert not [finding for finding in judged(slow, known) if finding.rule == "stale-scale"]
    fast = [*growing(2.8, 3), *[ordinary()] * 3]
    assert not [finding for finding in judged(fast, known) if finding.rule == "stale-scale"]
    lasting = next(finding for finding in judged(growing(1.4, 12), known) if finding.rule == "stale-scale")
    assert (lasting.seen, lasting.since) == ("amax rises, and is 1.4 times the range of its scale", 10)
    saturated = next(finding for finding in judged(growing(2.1, 5, 3.0), known) if finding.rule == "stale-scale")
    assert saturated.seen == "amax is 2.1 times the range of its scale"


def test_what_does_not_apply_is_not_listed() -> None:
    """No layer runs in low precision, so nothing can be lost in it."""
    high = facts(recipe="none", reason="NO_AUTOCAST", reason_ref="runs outside of te.autocast")
    numbers = {key: value for key, value in ordinary().items() if not key[2].endswith("flows%")}
    listed = {item.rule for item in judged([numbers] * 3, high).not_judged}
    assert not listed & {"underflow", "overflow"}
    assert {"underflow", "overflow"} <= {item.rule for item in judged([numbers] * 3, facts()).not_judged}


def test_one_tensor_has_one_finding_of_a_rule() -> None:
    """First a note, since nothing is lost, and then a warning."""
    steps = [ordinary(b4_fc2_activation_cur_amax=4.0 * 2.0 ** (2 * step)) for step in range(6)]
    lossy = [{**steps[5], ("h.4.fc2", "activation", "underflows%"): 15.0}] * 3
    results = [finding for finding in judged([*steps, *lossy], facts()) if finding.rule == "growth"]
    assert len(results) == 1
    assert (results[0].severity, results[0].until, bool(results[0].patch)) == ("warning", 80, True)
    odd = ordinary(b4_fc1_activation_std=2.0**-14, b4_fc1_activation_cur_amax=2.0**-12)
    odd_and_lossy = {**odd, ("h.4.fc1", "activation", "underflows%"): 9.0}
    again = [ordinary(), *[odd] * 4, ordinary(), *[odd_and_lossy] * 4]
    assert [finding.rule for finding in judged(again, facts())].count("sibling") == 1


HEALTHY_GEMM = {
    "gemm_kernel_ratio": 0.4,
    "gemm_gain": 1.0,
    "gemm_kernel_error": 0.002,
    **{f"gemm_kernel_{what}_{end}": -1.0 for what in ("row", "column", "rank") for end in ("first", "last")},
    "gemm_kernel_rows": 0.0,
    "gemm_kernel_columns": 0.0,
    "gemm_excess": 1.0,
    "gemm_wrong_codes_a%": 0.0,
    "gemm_wrong_scales_b%": 0.0,
    "gemm_rounding_bias_b": 0.01,
}
TILE = {
    "gemm_kernel_ratio": 9.0,
    "gemm_kernel_error": 0.03,
    "gemm_kernel_rows": 128.0,
    "gemm_kernel_columns": 64.0,
    "gemm_kernel_row_first": 256.0,
    "gemm_kernel_row_last": 383.0,
    "gemm_kernel_column_first": 0.0,
    "gemm_kernel_column_last": 63.0,
    "gemm_kernel_rank_first": 3.0,
    "gemm_kernel_rank_last": 5.0,
}


@pytest.mark.parametrize(
    ("changed", "rule", "seen"),
    [
        ({}, "", ""),
        (TILE, "gemm-kernel", "128 rows from 256 to 383, 64 columns from 0 to 63"),
        ({**TILE, "gemm_gain": 0.5}, "gemm-gain", "GEMM dgrad gives 0.5 times"),
        ({**TILE, "gemm_kernel_rank_last": 3.0}, "gemm-one-rank", "on rank 3 alone"),
        ({"gemm_wrong_codes_a%": 40.0}, "gemm-quantizer", "operand A of the GEMM dgrad: 40 % of the codes"),
        ({"gemm_wrong_scales_b%": 100.0}, "gemm-quantizer", "100 % of the scales"),
        ({"gemm_rounding_bias_b": -0.4}, "gemm-quantizer", "a bias of -0.4"),
        ({"gemm_excess": 30.0}, "gemm-excess", "30 times that of its operands"),
    ],
)
def test_who_makes_the_error_of_a_gemm(changed: dict[str, float], rule: str, seen: str) -> None:
    def step(numbers: Mapping[str, float]) -> Numbers:
        return {("h.3.fc1", "dgrad", name): value for name, value in {**HEALTHY_GEMM, **numbers}.items()}

    known = facts(settings=Settings(ranks=8))
    verdict = judged([step({}), step(changed), step(changed)], known)
    results = [finding for finding in verdict.findings if finding.rule.startswith("gemm-")]
    assert [item.rule for item in results] == ([rule] if rule else [])
    if rule:
        assert seen in results[0].seen
        assert (results[0].layers, results[0].since) == (("h.3.fc1",), 10)
        assert results[0].severity == ("note" if rule == "gemm-excess" else "error")
    else:
        assert {"gemm-kernel", "gemm-gain", "gemm-one-rank", "gemm-quantizer", "gemm-excess"} <= set(verdict.judged)
    assert not [item for item in judged([ordinary()], known).judged if item.startswith("gemm-")]


def test_the_number_of_a_finding_comes_with_its_step_and_layer() -> None:
    """It was that of the first sighting, and read as that of all layers and steps."""
    grown = [{"b3_fc1_weight_cur_amax": 0.08 * 2.0**times} for times in (0, 9, 10, 14)]
    grown[3]["b5_fc1_weight_cur_amax"] = 0.08 * 2.0**15
    grown.append({key: 2 * value for key, value in grown[3].items()})
    verdict = judged([ordinary(**changes) for changes in grown], facts())
    (results,) = (finding for finding in verdict if finding.rule == "growth")
    assert (results.layers, results.since, results.until) == (("h.3.fc1", "h.5.fc1"), 10, 40)
    assert (results.seen_at, results.as_json()["seen_at"]) == (20, 20)
    shown = "in one of them at step 20, amax is 1.02e+03 times"
    assert str(results).startswith(f"weight of h.{{3,5}}.fc1: {shown}")
    assert results.as_json()["seen_in_words"].startswith(shown)


def test_a_run_in_which_nothing_ran_is_not_judged() -> None:
    """A training of 0 steps has layers and settings, which nothing has used."""
    rows = [{"layer": layer, "class": "Linear", "weight_dtype": "bfloat16"} for layer in LAYERS]
    verdict = judged([], Facts.from_rows(rows, (), (), settings=Settings(ignored=[{}])))
    assert not verdict.judged
    assert not len(verdict)


def test_a_gradient_that_is_all_nan_is_not_dead() -> None:
    """Statistics leave out what is not finite, so its amax is 0."""
    lost = ordinary(b4_fc2_gradient_cur_amax=0.0, b4_fc2_gradient_std=0.0, b4_fc2_gradient_nonfinite_num=64.0)
    assert [finding.rule for finding in judged([lost] * 4, facts())] == ["nonfinite"]
