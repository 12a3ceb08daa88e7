"""Each rule, on made numbers with the defect and without it; and the order of findings."""

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from te_precision_callbacks.diagnosis import RULES, Finding, Verdict
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import UNKNOWN, Facts, Settings
from te_precision_callbacks.diagnosis.finding import Severity, root_causes_first
from te_precision_callbacks.diagnosis.numbers import Splitter, StepNumbers
from te_precision_callbacks.diagnosis.rule import AboveLimit, RuleCheck, RuleError
from te_precision_callbacks.diagnosis.rules import ROWS, RULE_OF_ID
from te_precision_callbacks.sinks.step_records import Event, Row
from te_precision_callbacks.statistics.names import CLIPPED_NORM, CLIPPING_LIMIT
from te_precision_callbacks.statistics.series import SeriesTable
from tests.step_records import records_from_rows

WEIGHTS = {"weight_dtype": "bfloat16"}
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
    settings: Settings = UNKNOWN,
    **of_all: Any,
) -> Facts:
    """Facts of layers that run one after the other; ``changed`` has the deviations of some."""
    texts = formats or {"activation": "FP8 E4M3", "weight": "FP8 E4M3", "gradient": "FP8 E5M2"}
    rows = [
        {"layer": layer, "class": "Linear", "exec_fwd": place, "exec_bwd": len(layers) - place, **WEIGHTS}
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


def checked(
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
        diagnosis.set_facts(known, 0)
    for checkpoint in checkpoints:
        diagnosis.note_checkpoint(checkpoint)
    iterations = range(0, 10 * len(steps), 10) if at is None else at
    checked = {"checked": ["missing-gradient", "frozen-weight"], "problems": []}
    for iteration, step in zip(iterations, steps, strict=True):
        rows = [Row(layer, tensor, None, statistic, value) for (layer, tensor, statistic), value in step.items()]
        records = records_from_rows(iteration, iteration, rows, table=table)
        diagnosis.step(splitter.step(iteration, records.series, np.frombuffer(records.values), unscaled))
        diagnosis.scalars(iteration, {"loss": 2.0} if step else {})
        if iteration == iterations[-1]:
            diagnosis.event(Event("parameters", "Parameters were checked.", iteration, data=checked))
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
            results[layer, tensor, "underflow_norm%"] = 1e-4
            results[layer, tensor, "overflows%"] = 0.0
            scale = 4 * size / (57344.0 if tensor == "gradient" else 448.0)
            results[layer, tensor, "scale_inv_max"] = results[layer, tensor, "scale_inv_min"] = scale
    for key, value in changes.items():
        block, part, tensor, statistic = key.split("_", 3)
        name = f"{statistic}%" if statistic in ("underflows", "underflow_norm", "overflows") else statistic
        results[f"h.{block[1:]}.{part}", tensor, name] = value
    return results


FC1_WEIGHT, FC1_WGRAD = ("h.0.fc1", "weight", "cur_amax"), ("h.0.fc1", "wgrad", "zeros%")
NAN = ordinary(b3_fc1_activation_nonfinite_num=1.0)


CURRENT, DELAYED = facts(), facts(recipe="fp8_delayed_scaling")


def only(verdict: Verdict, rule: str) -> Finding:
    assert [finding.rule for finding in verdict] == [rule], str(verdict)
    return verdict.findings[0]


def only_of(verdict: Verdict, rule: str) -> Finding:
    (finding,) = (finding for finding in verdict if finding.rule == rule)
    assert finding.layers == ("h.3.fc1",)
    return finding


def finds(what: str, rule: str, steps: Sequence[Numbers], known: Facts | None = CURRENT, **expected: Any) -> Any:
    """A case with this as the only finding, with these attributes; with ``alone=False``, of its rule."""
    return pytest.param(steps, known, rule, expected.pop("alone", True), expected, id=what)


def silent(what: str, steps: Sequence[Numbers], known: Facts | None = CURRENT, rule: str = "") -> Any:
    """A case without a finding; with a rule, without one of it."""
    return pytest.param(steps, known, rule, not rule, None, id=what)


def without(step: Numbers, *parts: str) -> Numbers:
    """The numbers without a statistic, or without a layer and tensor."""
    return {name: value for name, value in step.items() if parts not in (name[:2], name[2:])}


INF_HERE_AND_THERE = ordinary(
    b7_fc1_activation_nonfinite_num=3.0, b4_fc2_activation_nonfinite_num=2.0, b0_fc1_gradient_nonfinite_num=5.0
)
INF_EVERYWHERE = {key: 5.0 if key[2] == "nonfinite_num" else value for key, value in ordinary().items()}
SATURATED = ordinary(b3_fc1_activation_overflows=1.0)
SATURATED_LATER = ordinary(b5_fc1_activation_overflows=1.0)
TWO_SATURATED = SATURATED_LATER | {("h.2.fc1", "activation", "overflows%"): 1.0}
ALL_NAN = ordinary(b4_fc2_gradient_cur_amax=0.0, b4_fc2_gradient_std=0.0, b4_fc2_gradient_nonfinite_num=64.0)

RANGES = [
    silent("ordinary numbers", [ordinary()] * 6),
    finds(
        "inf in several layers",
        "nonfinite",
        [ordinary(), INF_HERE_AND_THERE, INF_HERE_AND_THERE],
        severity="error",
        layers=("h.4.fc2",),
        tensor="activation",
        since=10,
        last_good=0,
        seen="2 elements are inf or nan; 2 more layers have inf or nan in the same step",
    ),
    finds(
        "inf in two layers",
        "nonfinite",
        [ordinary(b7_fc1_activation_nonfinite_num=3.0, b4_fc2_activation_nonfinite_num=1.0)],
        seen="1 element is inf or nan; 1 more layer has inf or nan in the same step",
    ),
    *(
        finds(f"amax of {value}", "nonfinite", [{FC1_WEIGHT: value}], None, layers=("h.0.fc1",))
        for value in (math.inf, math.nan)
    ),
    finds(
        "nan that comes again",
        "nonfinite",
        [ordinary(), NAN, ordinary(b5_fc1_gradient_nonfinite_num=2.0), NAN],
        layers=("h.3.fc1",),
        tensor="activation",
        since=10,
        until=30,
    ),
    finds("nan that is gone", "nonfinite", [ordinary(), NAN, ordinary()], until=10),
    finds(
        "nan in all weights since a step that was not due",
        "nonfinite",
        [ordinary(), INF_EVERYWHERE],
        layers=(),
        seen="the weights of 20 layers have inf or nan, so the first layer is unknown. The values appeared in"
        " the steps 1 to 10: rerun from step 1 to find the layer",
    ),
    finds("nan in all weights since the begin", "nonfinite", [INF_EVERYWHERE], layers=("h.0.fc1",)),
    finds("a gradient that is all nan, so that its amax is 0", "nonfinite", [ALL_NAN] * 4),
    silent("overflows in single steps", [ordinary(), SATURATED, ordinary(), SATURATED], DELAYED),
    silent("overflows in two steps, as at the start", [ordinary(), SATURATED, SATURATED, ordinary()], DELAYED),
    finds(
        "overflows that last",
        "overflow",
        [ordinary(), *[SATURATED] * 3],
        DELAYED,
        layers=("h.3.fc1",),
        since=10,
        last_good=0,
    ),
    finds(
        "overflows that another layer joins",
        "overflow",
        [SATURATED_LATER, *[TWO_SATURATED] * 3],
        DELAYED,
        layers=("h.5.fc1", "h.2.fc1"),
        since=0,
        until=30,
        subject="activation of h.{2,5}.fc1",
    ),
    silent("overflows of current scaling, by rounding alone", [SATURATED] * 3),
    silent(
        "overflows that fall, as of LoRA's B, which grows from 0",
        [ordinary(b3_fc1_weight_overflows=60.0 / 2**step) for step in range(6)],
        DELAYED,
    ),
    finds(
        "overflows of a tensor that began at 0, after the first 20 steps",
        "overflow",
        [ordinary(b3_fc1_activation_cur_amax=0.0), ordinary(), *[SATURATED] * 3],
        DELAYED,
        layers=("h.3.fc1",),
        since=20,
    ),
    finds("a gradient of zeros", "zeros-in-wgrad", [{FC1_WGRAD: 9.0}] * 3, None, severity="note"),
    silent("a gradient of zeros alone", [{FC1_WGRAD: 100.0}] * 3, None),
]

AFTER_SPIKE = ordinary(b3_fc1_activation_scale_inv_max=1000 * 4 / 448, b3_fc1_activation_underflows=2.0)
BEHIND = ordinary(b3_fc1_activation_scale_inv_max=1 / 448)
LOSSY_BY_SCALE = ordinary(
    b3_fc1_activation_underflows=8.0,
    b3_fc1_activation_underflow_norm=14.0,
    b3_fc1_activation_scale_inv_max=512.0,
)
WITHOUT_NORM = {
    key: value for key, value in ordinary(b3_fc1_activation_underflows=99.0).items() if "norm" not in key[2]
}


def growing(growth: float, steps: int, share: float = 0.1) -> list[Numbers]:
    """Steps with a growing amax, each with the scale of the step before."""
    return [
        ordinary(
            b3_fc1_gradient_cur_amax=1e-4 * growth**step,
            b3_fc1_gradient_scale_inv_max=1e-4 * growth ** (step - 1) / 57344,
            b3_fc1_gradient_overflows=share,
        )
        for step in range(steps)
    ]


SCALES = [
    finds(
        "underflows of little of the norm, as in the gradient of a tied head",
        "underflow",
        [ordinary(b3_fc1_gradient_underflows=96.0)] * 4,
        DELAYED,
        severity="note",
        patch="",
        seen="96 % of the elements round to 0, with 0.0001 % of the tensor's norm",
    ),
    finds(
        "underflows by a stale scale",
        "underflow",
        [LOSSY_BY_SCALE] * 4,
        DELAYED,
        alone=False,
        severity="warning",
        layers=("h.3.fc1",),
        seen="8 % of the elements round to 0, with 14 % of the tensor's norm",
    ),
    finds(
        "a scale of before",
        "stale-scale",
        [ordinary(), AFTER_SPIKE, AFTER_SPIKE],
        DELAYED,
        seen="the range of its scale is 1,000 times its amax, and 2 % of the elements round to 0",
    ),
    silent("a large scale of current scaling", [AFTER_SPIKE] * 3),
    finds("a small scale", "stale-scale", [BEHIND] * 3, DELAYED, seen="amax is 4 times the range of its scale"),
    silent("a small scale in two steps", [BEHIND] * 2, DELAYED),
    silent("a scale behind a gradient that grows at first", [*growing(1.4, 6), *[growing(1.4, 6)[-1]] * 4], DELAYED,
           "stale-scale"),
    silent("a scale behind one that grows fast", [*growing(2.8, 3), *[ordinary()] * 3], DELAYED, "stale-scale"),
    finds(
        "a scale behind one that keeps growing",
        "stale-scale",
        growing(1.4, 12),
        DELAYED,
        alone=False,
        seen="amax rises and is 1.4 times the range of its scale",
        since=10,
    ),
    finds(
        "a scale behind one that saturates",
        "stale-scale",
        growing(2.1, 5, 3.0),
        DELAYED,
        alone=False,
        seen="amax is 2.1 times the range of its scale",
    ),
]  # fmt: skip


def of_blocks(count: int, step: Numbers) -> Numbers:
    return {key: value for key, value in step.items() if key[0] in LAYERS[: 2 * count]}


def scaled(step: Numbers, tensor: str, factor_of: Callable[[str], float]) -> Numbers:
    return {
        key: value * (factor_of(key[0]) if key[1:] in ((tensor, "std"), (tensor, "cur_amax")) else 1.0)
        for key, value in step.items()
    }


def times(factor: float, step: Numbers, layer: str, tensor: str) -> Numbers:
    return scaled(step, tensor, lambda name: factor if name == layer else 1.0)


NEAR = times(2.0**-6, ordinary(), "h.4.fc1", "gradient")
MASSIVE = ordinary(b4_fc1_activation_cur_amax=4.0 * 2**14)
UNDERFLOWS_ALONE = {
    key: value for key, value in ordinary(b3_fc1_activation_underflows=18.6).items() if key[2] == "underflows%"
}
LARGER_FROM_5_ON = scaled(ordinary(), "gradient", lambda layer: 2.0**16 if layer < "h.6" else 1.0)
TREND = scaled(ordinary(), "gradient", lambda layer: 8.0 ** int(layer[2]))
"""27 powers of two over the model."""
ODD = {power: times(2.0**power, ordinary(), "h.4.fc1", "gradient") for power in (-18, -8, 8, 12, 18)}

ALIKE = [
    *(silent(f"a gradient times 2^{power} in two steps", [ODD[power]] * 2, CURRENT, "sibling") for power in ODD),
    *(
        finds(
            f"a gradient times 2^{power}",
            "sibling",
            [ODD[power]] * 3,
            alone=False,
            severity="warning",
            layers=("h.4.fc1",),
            tensor="gradient",
        )
        for power in ODD
    ),
    silent("a gradient of nearly the size of others", [NEAR] * 5),
    finds(
        "one that loses elements too",
        "sibling",
        [{**NEAR, ("h.4.fc1", "gradient", "underflows%"): 8.0}] * 2,
        layers=("h.4.fc1",),
    ),
    finds("the amax of an activation alone", "sibling", [MASSIVE] * 4, severity="note"),
    *(
        finds(
            f"all elements of an activation near {offset:g}",
            "sibling",
            [ordinary(b4_fc1_activation_cur_amax=abs(offset) + 1, b4_fc1_activation_mean=offset)] * 4,
            severity="warning",
            seen=f"amax is {amax} times larger than in similar layers; nearly all elements are close to {near}",
        )
        for offset, amax, near in ((400.0, "401, 100", "400"), (-30000.0, "30,000, 7,500", "-30,000"))
    ),
    silent(
        "an activation with a mean as in similar layers",
        [ordinary(b4_fc1_activation_cur_amax=5.0, b4_fc1_activation_mean=4.5)] * 4,
    ),
    finds(
        "a gradient that jumps up on its way from h.9",
        "sibling",
        [LARGER_FROM_5_ON] * 3,
        alone=False,
        layers=tuple(reversed(LAYERS[:12])),
    ),
    silent("a trend with depth", [TREND] * 5),
    finds(
        "a share of underflows far above that of others, as in the log of a published run",
        "sibling",
        [UNDERFLOWS_ALONE] * 3,
        None,
        layers=("h.3.fc1",),
        tensor="activation",
        severity="warning",
        seen="18.6 % of the elements round to 0, 0.1 % in similar layers",
    ),
    silent("one in two steps", [UNDERFLOWS_ALONE] * 2, None),
    finds(
        "one of nothing of the norm",
        "sibling",
        [ordinary(b3_fc1_activation_underflows=18.6)] * 4,
        severity="note",
    ),
]

DEAD = ordinary(b4_fc2_gradient_cur_amax=0.0, b4_fc2_gradient_std=0.0)
IDLE = ordinary(b4_fc2_gradient_cur_amax=0.0, b4_fc2_activation_cur_amax=0.0, b4_fc2_activation_std=0.0)
ABSENT = without(ordinary(), "h.4.fc2", "gradient")
DEAD_ELSEWHERE = ordinary(b0_fc1_gradient_cur_amax=0.0)
GROWN = [ordinary(b4_fc2_activation_cur_amax=4.0 * 2.0 ** (2 * step)) for step in range(6)]
GROWN_AND_LOSSY = [{**step, ("h.4.fc2", "activation", "underflows%"): 15.0} for step in GROWN]


def never(why: str) -> Facts:
    return facts(changed={"h.4.fc2": {"runs": "never", "not_run": why}})


def gradients_times(factor: float, blocks: int) -> Numbers:
    layers = [f"h.{block}.{name}" for block in range(blocks) for name in ("fc1", "fc2")]
    return functools.reduce(lambda step, layer: times(factor, step, layer, "gradient"), layers, ordinary())


NO_BACKWARD = never("no backward has reached it")
GRADIENTS = [
    finds("a gradient of 0", "dead-gradient", [DEAD] * 3, layers=("h.4.fc2",), seen="all elements are 0"),
    silent("one that begins at 0, as of LoRA's A", [DEAD, DEAD, ordinary()]),
    silent("an expert without tokens", [IDLE] * 4),
    silent("an expert without tokens has no backward", [without(IDLE, "h.4.fc2", "gradient")] * 4, NO_BACKWARD),
    silent("a frozen weight", [ABSENT] * 3, never("frozen weight")),
    silent("a gradient of 0 of a frozen weight", [DEAD] * 4, never("frozen weight"), "dead-gradient"),
    finds(
        "gradients of 0 of all weights, also of a frozen one",
        "dead-gradient",
        [{**ordinary(), **{(layer, "gradient", name): 0.0 for layer in LAYERS for name in ("std", "cur_amax")}}] * 3,
        never("frozen weight"),
        alone=False,
        seen="all gradients are 0, in all 20 layers: from the loss or the last layers on",
    ),
    finds("growth without a loss", "growth", GROWN, alone=False, severity="note"),
    finds("growth with a loss", "growth", GROWN_AND_LOSSY, alone=False, severity="warning"),
    *(
        finds(
            f"a {tensor} that grows by 2^{power} without a loss",
            "growth",
            [*[ordinary()] * 3, *[times(2.0**power, ordinary(), "h.4.fc2", tensor)] * 2],
            alone=False,
            severity=severity,
            patch="",  # high precision would not stop the growth
        )
        for tensor, bits in (("weight", 8), ("gradient", 11), ("activation", 12))
        for power, severity in ((bits - 0.5, "note"), (bits, "warning"))
    ),
    finds(
        "a gradient that begins near 0, and grows to the size of others",
        "growth",
        [*[times(2.0**-12, step, "h.4.fc2", "gradient") for step in [DEAD_ELSEWHERE] * 3], *[DEAD_ELSEWHERE] * 2],
        alone=False,
        severity="note",
    ),
    *(
        finds(
            f"gradients of {2 * blocks} of 20 layers that grow together, the last time by 2^{last}",
            "growth",
            [ordinary()] * 3 + [gradients_times(2.0**power, blocks) for power in (*range(4, 13 - last, 4), 12, 12)],
            alone=False,
            severity=severity,
        )
        for blocks, last, severity in ((5, 4, "warning"), (6, 4, "note"), (6, 8, "warning"))
    ),
]

HIGH = {"recipe": "none", "reason": "NO_AUTOCAST", "reason_ref": "runs outside of te.autocast"}
STATES = [{"subject": "optimizer_state", "dtype": "bfloat16"}, {"subject": "reduce", "dtype": "bfloat16"}]
SCALED, TWO_RANKS = Settings(loss_is_scaled=True), facts(recipe="fp8_delayed_scaling", settings=Settings(ranks=2))
SCALE = ordinary()["h.3.fc1", "weight", "scale_inv_max"]
FAR = ordinary(b3_fc1_weight_scale_inv_min=0.25 * SCALE)


def holes(what: str, **changes: Any) -> Any:
    return silent(what, [ordinary()], facts(changed={"h.4.fc2": {**HIGH, **changes}}))


def formats(kind: str) -> dict[str, str]:
    return {"activation": f"{kind} E4M3", "gradient": f"{kind} E5M2"}


UPDATES = [
    (("h.0.fc1", "weight", "stale_codes%"), 1.0, 20.0, "stale-weights"),
    (("", "", "unchanged_weights%"), 50.0, 99.0, "lost-updates"),
    (("", "", "gradients_below_eps%"), 10.0, 100.0, "below-eps"),
]
"""What a step of the optimizer shows: little of it, much of it, and the rule."""

PRECISIONS = [
    finds(
        "a layer in high precision",
        "hole",
        [ordinary()],
        facts(changed={"h.4.fc2": HIGH}),
        layers=("h.4.fc2",),
        since=None,
        seen="ran in high precision: runs outside of te.autocast; 9 similar layers are in low precision, such as"
        " h.0.fc2",
    ),
    holes("one by a section", reason="SECTION", reason_ref="section 'keep' (config.yaml:3)"),
    holes("one by its recipe", reason="RECIPE_EXCEPTION"),
    finds(
        "one in a region",
        "hole",
        [ordinary()],
        facts(changed={"h.4.fc2": {**HIGH, "reason_ref": "runs inside te.autocast(enabled=False)"}}),
        severity="note",
        layers=("h.4.fc2",),
    ),
    silent("the first and the last layer", [ordinary()], facts(changed={"h.0.fc2": HIGH, "h.9.fc2": HIGH})),
    finds(
        "most layers outside of autocast, which may be meant",
        "hole",
        [ordinary()],
        facts(changed={f"h.{block}.fc2": {**HIGH, "is_of_te": True} for block in range(8)}),
        severity="note",
        seen="8 of 10 similar layers run outside of te.autocast",
    ),
    finds("MXFP8 with E5M2", "mxfp8-hybrid", [ordinary()], facts(recipe="mxfp8", formats=formats("MXFP8")),
          tensor="gradient"),
    silent("FP8 blocks with E5M2", [ordinary()], facts(recipe="fp8_block_scaling", formats=formats("FP8 block"))),
    finds("NVFP4 to the end", "nvfp4-tail", [ordinary()], facts(recipe="nvfp4"),
          layers=("h.8.fc2", "h.9.fc1", "h.9.fc2")),
    silent("another end", [ordinary()], facts(recipe="nvfp4", changed={"h.9.fc2": {"recipe": "mxfp8"}})),
    finds("states in bfloat16", "bf16-state", [ordinary()], facts(states=STATES), severity="note",
          seen="the optimizer keeps its state in bfloat16"),
    silent("scales of ranks that are alike", [ordinary()] * 3, TWO_RANKS),
    finds("scales of ranks that nearly are", "stale-scale", [ordinary(b3_fc1_weight_scale_inv_min=0.9 * SCALE)] * 2,
          TWO_RANKS, severity="note"),
    silent("scales of ranks that differ in a single step", [ordinary(), FAR, ordinary()], TWO_RANKS),
    finds(
        "scales of ranks that differ",
        "stale-scale",
        [ordinary(), FAR, FAR],
        TWO_RANKS,
        severity="warning",
        layers=("h.3.fc1",),
        tensor="weight",
        since=10,
        seen="the largest scale of one rank is 4 times the smallest scale of another",
    ),
    finds("a scaler in bfloat16", "grad-scaler", [ordinary()], facts(settings=SCALED), severity="warning", since=None),
    silent("a scaler in float16", [ordinary()], facts(settings=Settings(loss_is_scaled=True, float16=True))),
    silent("a scaler of gradients in float16", [ordinary()],
           facts(settings=SCALED, states=[{"subject": "gradient", "dtype": "float16"}])),
    silent("a scaler of layers in float16", [ordinary()],
           facts(settings=SCALED, formats={"activation": "FP16", "weight": "FP16"}, recipe="")),
    *(silent(f"little {name[2]}", [{name: low}] * 4, None) for name, low, _, _ in UPDATES),
    *(
        finds(f"much {name[2]}", rule, [{name: low}, {name: high}, {name: high}], None, since=10,
              layers=tuple(filter(None, [name[0]])))
        for name, low, high, rule in UPDATES
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "known", "rule", "is_alone", "expected"), [*RANGES, *SCALES, *ALIKE, *GRADIENTS, *PRECISIONS]
)
def test_what_the_rules_find(
    steps: Sequence[Numbers], known: Facts | None, rule: str, is_alone: bool, expected: dict[str, Any] | None
) -> None:
    verdict = checked(steps, known)
    results = [finding for finding in verdict if is_alone or finding.rule == rule]
    assert [finding.rule for finding in results] == [rule] * (expected is not None), str(verdict)
    for name, value in (expected or {}).items():
        assert getattr(results[0], name) == value, name


def test_a_healthy_run_says_so() -> None:
    verdict = checked([ordinary()] * 6, CURRENT)
    assert verdict.healthy
    count = len(verdict.checked)
    total = count + len(verdict.unchecked)
    assert str(verdict) == f"No problems found ({count} of {total} rules checked)."
    assert {"nonfinite", "overflow", "underflow", "sibling", "growth", "hole", "dead-gradient"} <= set(verdict.checked)


def test_nothing_is_checked_without_numbers() -> None:
    verdict = checked([])
    assert not verdict.checked
    assert str(verdict) == "Not enough checked: no training step has run."
    assert checked([{}]).not_checked[0].why == "only one collection step has run"
    verdict = checked([{}, {}])
    assert str(verdict).startswith("Not enough checked: ")
    assert all(item.why.startswith("needs ") and item.collect for item in verdict.not_checked)


@pytest.mark.parametrize(("checkpoints", "last"), [((7, 14), 7), ((10, 11), 10), ((14,), None), ((), None)])
def test_the_checkpoint_is_from_before_the_last_good_step(checkpoints: Sequence[int], last: int | None) -> None:
    """The step 20 shows a nan that may have come in each step after 10."""
    finding = only(checked([ordinary(), ordinary(), NAN], facts(), checkpoints), "nonfinite")
    assert (finding.since, finding.last_good, finding.checkpoint) == (20, 10, last)


@pytest.mark.parametrize(
    ("text", "recipe", "most"),
    [("FP8 E4M3", "fp8_current_scaling", 20.0), ("MXFP8 E4M3", "mxfp8", 20.0), ("NVFP4", "nvfp4", 40.0)],
)
def test_underflow_by_format(text: str, recipe: str, most: float) -> None:
    """Many elements are a note; a part of the norm is a warning, of however few elements."""
    known = facts(formats={"activation": text}, recipe=recipe)
    below, above = (ordinary(b3_fc1_activation_underflows=most + by) for by in (-1, 1))
    assert "underflow" not in [finding.rule for finding in checked([below] * 2, known)]
    assert only_of(checked([above, above], known), "underflow").severity == "note"
    heavy = ordinary(b3_fc1_activation_underflows=1.0, b3_fc1_activation_underflow_norm=11.0)
    assert only_of(checked([heavy, heavy], known), "underflow").severity == "warning"


@pytest.mark.parametrize(("underflows", "severity"), [(10.0, ""), (85.0, "note"), (95.0, "warning")])
def test_a_part_of_the_norm_that_is_not_recorded(underflows: float, severity: str) -> None:
    """As in logs of Transformer Engine's own features: a warning only if nearly all elements round to 0."""
    verdict = checked([{**WITHOUT_NORM, ("h.3.fc1", "activation", "underflows%"): underflows}] * 4)
    assert "underflow" in verdict.checked
    findings = [finding for finding in verdict if finding.rule == "underflow"]
    assert [finding.severity for finding in findings] == [severity] * bool(severity)
    assert all("is not recorded" in finding.seen for finding in findings)


def test_the_first_step_of_delayed_scaling_does_not_count() -> None:
    assert not len(checked([ordinary(b3_fc1_activation_underflows=90.0)] * 3, DELAYED, unscaled=frozenset(LAYERS)))


@pytest.mark.parametrize("shown", ["nonfinite_num", "cur_amax"])
def test_a_scale_of_a_tensor_with_inf_is_not_stale(shown: str) -> None:
    """Its scale follows the inf, and the rule nonfinite names it."""
    broken = ordinary(b3_fc1_weight_scale_inv_max=2.0, b3_fc1_weight_underflows=4.0)
    assert [finding.rule for finding in checked([broken] * 4, DELAYED)] == ["stale-scale"]
    broken["h.3.fc1", "weight", shown] = 1.0 if shown == "nonfinite_num" else math.inf
    assert only(checked([broken] * 4, DELAYED), "nonfinite").layers == ("h.3.fc1",)


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 10])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_weight_that_differs_from_that_of_few_alike_layers(count: int, block: int) -> None:
    known, few = facts(LAYERS[: 2 * count]), of_blocks(count, ordinary())
    assert not len(checked([few] * 4, known))
    finding = only(checked([times(1000, few, f"h.{block}.fc2", "weight")] * 3, known), "sibling")
    assert (finding.layers, finding.severity) == ((f"h.{block}.fc2",), "warning")
    assert finding.seen == "std is 20, 1,000 times larger than in similar layers"


OF_GRADIENTS = [("gradient", statistic) for statistic in ("std", "cur_amax", "scale_inv_max")]


@pytest.mark.parametrize("count", [3, 6])
def test_few_alike_layers_need_stronger_evidence(count: int) -> None:
    known, few = facts(LAYERS[: 2 * count]), of_blocks(count, ordinary())
    trend = {
        key: value * (2.0 ** (9 * int(key[0][2])) if key[1:] in OF_GRADIENTS else 1.0) for key, value in few.items()
    }
    assert not len(checked([times(2.0**-6, few, "h.1.fc1", "gradient")] * 4, known))
    assert only(checked([times(2.0**-8, few, "h.1.fc1", "gradient")] * 3, known), "sibling").layers == ("h.1.fc1",)
    assert not len(checked([trend] * 4, known)), "a trend with depth"


def test_a_gradient_that_is_damped_on_its_way_to_the_first_layers() -> None:
    """Most of it passes by the earlier blocks on their residual connections."""
    few, known = of_blocks(6, ordinary()), facts(LAYERS[:12])
    powers = {"h.2.fc1": 8, "h.1.fc1": 7, "h.0.fc1": 7}
    finding = only(checked([scaled(few, "gradient", lambda layer: 2.0 ** powers.get(layer, 0))] * 3, known), "sibling")
    assert finding.layers == ("h.2.fc1",)


@pytest.mark.parametrize(("block", "factor"), [(0, 2.0**13), (1, 2.0**-13)])
def test_of_two_alike_layers_the_one_farther_from_all_layers_is_odd(block: int, factor: float) -> None:
    few, layer = of_blocks(2, ordinary()), f"h.{block}.fc1"
    assert not len(checked([few] * 3, facts(LAYERS[:4])))
    odd = {key: value * factor if key[:2] == (layer, "gradient") else value for key, value in few.items()}
    (finding,) = (item for item in checked([odd] * 3, facts(LAYERS[:4])) if item.rule == "sibling")
    assert (finding.layers, finding.tensor) == ((layer,), "gradient")


@pytest.mark.parametrize(("parts", "finds"), [(("fc1", "fc2"), True), (("fc1", "fc2", "cross"), False)])
def test_blocks_with_other_parts_are_not_similar(parts: tuple[str, ...], finds: bool) -> None:
    """As encoders and decoders in one list."""
    late = [f"h.{block}.{part}" for block in range(7, 10) for part in parts]
    larger = scaled(ordinary(), "gradient", lambda layer: 2.0**16 if layer[2] in "789" else 1.0)
    verdict = checked([larger] * 4, facts([*LAYERS[:14], *late]))
    assert ("sibling" in [finding.rule for finding in verdict]) == finds


def of_torch(block: int) -> Facts:
    """A block of torch's layers, under other names."""
    names = {f"h.{block}.fc1": f"h.{block}.up", f"h.{block}.fc2": f"h.{block}.down"}
    high = {**HIGH, "reason": "NOT_TE", "family": "torch", "recipe": ""}
    return facts([names.get(name, name) for name in LAYERS], changed=dict.fromkeys(names.values(), high))


def test_a_block_of_layers_of_torch_among_blocks_of_transformer_engine() -> None:
    finding = only(checked([], of_torch(4)), "hole")
    assert (finding.severity, finding.layers) == ("warning", ("h.4.up", "h.4.down"))
    assert not len(checked([], of_torch(0))), "the first block may be another one"
    assert not len(checked([], of_torch(9)))


@pytest.mark.parametrize(("margin", "severity"), [(0, None), (2, None), (4, "note"), (8, "warning"), (-2, "warning")])
def test_the_severity_of_a_margin_grows_with_it(margin: float, severity: str | None) -> None:
    known = facts(recipe="fp8_delayed_scaling", settings=Settings(margins=[margin]))
    findings = [finding for finding in checked([ordinary()], known) if finding.rule == "stale-scale"]
    assert [finding.severity for finding in findings] == [severity] * (severity is not None)


def test_scales_that_a_resume_has_lost() -> None:
    diagnosis = Diagnosis()
    diagnosis.has_run = True
    assert "needs a resume" not in {rule.why for rule in diagnosis.verdict.not_checked}, "most runs are no resume"
    diagnosis.event(Event("resume_audited", "No differences.", 60, data={"lost": []}))
    assert not len(diagnosis.verdict)
    diagnosis.event(
        Event("resume_audited", "Lost.", 60, "warning", data={"lost": ["No scales."], "layers": ["h.0.fc1", "h.0.fc2"]})
    )
    finding = only(diagnosis.verdict, "resume")
    assert (finding.severity, finding.since, finding.layers) == ("warning", 60, ("h.0.fc1", "h.0.fc2"))


@pytest.mark.parametrize(("statistic", "factor"), [("std", 9.0), ("std", 1 / 9), ("cur_amax", 20.0)])
def test_weights_are_more_alike_than_other_tensors(statistic: str, factor: float) -> None:
    """A row times 40 in a weight of 256 rows, or a block with its own weight decay."""
    few = of_blocks(6, ordinary())
    odd, near = (
        {key: value * times if key == ("h.3.fc2", "weight", statistic) else value for key, value in few.items()}
        for times in (factor, factor**0.8)
    )
    assert not len(checked([near] * 4, facts(LAYERS[:12])))
    assert only(checked([odd] * 3, facts(LAYERS[:12])), "sibling").layers == ("h.3.fc2",)


def test_a_weight_of_zero_is_reported_in_its_first_collection_step() -> None:
    few = of_blocks(4, ordinary())
    zero = times(0.0, few, "h.2.fc2", "weight")
    known = facts(LAYERS[:8])
    assert not len(checked([zero], known)), "it may be initialized to 0"
    assert "sibling" in [finding.rule for finding in checked([zero] * 2, known)]
    assert "weight-jump" in [finding.rule for finding in checked([few, zero], known)]
    all_zero = {
        key: 0.0 if key[1:] in (("weight", "std"), ("weight", "cur_amax")) else value for key, value in few.items()
    }
    assert "sibling" not in [finding.rule for finding in checked([all_zero] * 3, known)], "as LoRA begins"
    all_nan: Numbers = {**zero, ("h.2.fc2", "weight", "nonfinite_num"): 64.0}
    assert {finding.rule for finding in checked([few, *[all_nan] * 3], known)} == {"nonfinite"}, "no element is 0"
    others = [(layer, "weight", "nonfinite_num") for layer in LAYERS[1:8:2] if layer != "h.2.fc2"]
    assert "sibling" not in [finding.rule for finding in checked([zero | dict.fromkeys(others, 64.0)] * 3, known)]


def test_experts_may_have_gradients_of_any_size() -> None:
    """Their gradients follow their share of the tokens."""
    names = [f"h.{block}.experts.{expert}.fc1" for block in range(2) for expert in range(4)]
    of_experts = {name: f"h.{place}.fc1" for place, name in enumerate(names)}
    step = {
        (name, *key[1:]): value
        for name, like in of_experts.items()
        for key, value in ordinary().items()
        if key[0] == like
    }
    layers = {name: dataclasses.replace(CURRENT.layers[like], name=name) for name, like in of_experts.items()}
    known = dataclasses.replace(CURRENT, layers=layers)
    assert not len(checked([times(2.0**-9, step, names[3], "gradient")] * 4, known))
    assert "sibling" in [finding.rule for finding in checked([times(2.0**-14, step, names[3], "gradient")] * 4, known)]


DUE = (0, 1, 2, 5, *range(10, 101, 10))
"""The collection steps of a config with freq: 10 and the early steps."""


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
def test_a_layer_that_trains_in_a_rhythm_is_not_dead(trains_in: range, since: int | None) -> None:
    """As a generator that trains in every third step, where its gradient is 0 in the others."""
    steps = [ordinary() if step in trains_in else DEAD for step in DUE]
    results = [finding for finding in checked(steps, CURRENT, at=DUE) if finding.rule == "dead-gradient"]
    assert [finding.since for finding in results] == ([] if since is None else [since])


@pytest.mark.parametrize(("trained", "severity"), [(1, "warning"), (2, "note")])
def test_a_gradient_that_comes_later(trained: int, severity: str) -> None:
    def findings(steps: list[Numbers]) -> list[tuple[str, tuple[str, ...]]]:
        verdict = checked(steps, CURRENT)
        return [(item.severity, item.layers) for item in verdict if item.rule == "dead-gradient"]

    steps = [*[DEAD] * 4, *[ordinary()] * trained]
    assert findings(steps) == [(severity, ("h.4.fc2",))]
    assert findings([*steps, *[DEAD] * 4]) == [("warning", ("h.4.fc2",))]
    assert findings([*steps, *[DEAD] * 2, ordinary()]) == [(severity, ("h.4.fc2",))]


def test_a_gradient_of_nan_is_no_training() -> None:
    verdict = checked([DEAD | {("h.4.fc2", "gradient", "nonfinite_num"): 64.0}, *[DEAD] * 3], CURRENT, at=DUE[:4])
    assert [finding.since for finding in verdict if finding.rule == "dead-gradient"] == [1]


def test_growth_that_comes_to_lose_something_is_one_finding() -> None:
    (lossless,) = (item for item in checked([*[ordinary()] * 3, *GROWN[4:]], CURRENT) if item.rule == "growth")
    assert lossless.remedy.startswith("Find the cause of the growth")
    (finding,) = (item for item in checked([*GROWN, *[GROWN_AND_LOSSY[-1]] * 3], CURRENT) if item.rule == "growth")
    assert (finding.severity, finding.until, bool(finding.patch)) == ("warning", 80, True)


def test_gradients_that_are_reduced_in_low_precision_over_micro_batches() -> None:
    assert [finding.seen for finding in checked([ordinary()], facts(states=STATES, calls=8))] == [
        "the optimizer keeps its state in bfloat16",
        "gradients are reduced over ranks in bfloat16 over 8 micro-batches",
    ]


def test_a_healthy_step_takes_no_call_for_each_layer() -> None:
    """The layers of each tensor are checked as arrays."""

    def calls_of_a_step(blocks: int) -> int:
        layers = [f"h.{block}.fc1" for block in range(blocks)]
        diagnosis, table = Diagnosis(), SeriesTable()
        splitter = Splitter(table.__getitem__)
        diagnosis.set_facts(facts(layers, recipe="fp8_delayed_scaling"), 0)
        numbers = ordinary()
        rows = [
            Row(layer, tensor, None, statistic, value)
            for layer in layers
            for (of, tensor, statistic), value in numbers.items()
            if of == LAYERS[0]
        ]
        count = 0

        def profile(*call: Any) -> None:
            nonlocal count
            count += call[1] in ("call", "c_call")

        for iteration in range(6):
            records = records_from_rows(iteration, iteration, rows, table=table)
            step = splitter.step(iteration, records.series, np.frombuffer(records.values))
            count = 0
            sys.setprofile(profile)
            try:
                diagnosis.step(step)
            finally:
                sys.setprofile(None)
        assert not diagnosis.verdict.findings
        return count

    assert calls_of_a_step(80) == calls_of_a_step(20) < 1500


def test_a_rule_that_fails_is_not_checked_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(RuleCheck):
        def step(self, numbers: StepNumbers) -> Any:
            raise ZeroDivisionError("of a rule")

    failing = RULES[0].__class__(**{**vars(RULES[0]), "id": "failing", "title": "failing", "check": Failing})
    diagnosis = Diagnosis([failing, RULES[1]])
    assert diagnosis.step(Splitter(SeriesTable().__getitem__).step(3, np.empty(0, np.int32), np.empty(0))) == []
    assert diagnosis.verdict.not_checked[0][:2] == (
        "failing",
        "the rule failed in step 3: ZeroDivisionError: of a rule",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"check": functools.partial(AboveLimit, limit=1.0, needed=2, seen="{}")}, "cannot be .*'statistic'"),
        ({"check": functools.partial(AboveLimit, statistic="zeros%", needed=2, seen="{}")}, "cannot be .*'limit'"),
        ({"condition": "at least {lim:g} %"}, "condition= names 'lim', which its check lacks"),
    ],
    ids=["no column", "no threshold", "another threshold"],
)
def test_a_row_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    row = next(rule for rule in RULES if rule.id == "zeros-in-wgrad")
    with pytest.raises(RuleError, match=f"rule 'zeros-in-wgrad': .*{message}"):
        dataclasses.replace(row, **changes)


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
    verdict = checked([ordinary(b3_fc1_activation_scale_inv_min=1e-6)] * 3, facts(**known))
    assert not [finding for finding in verdict if "differs between ranks" in finding.title]
    assert any("reduced over ranks" in item.why for item in verdict.not_checked) == is_listed


def test_rules_that_need_the_settings_of_a_run() -> None:
    assert {"grad-scaler", "stale-scale"} <= set(checked([ordinary()] * 3, TWO_RANKS).checked)
    assert "grad-scaler" in [item.rule for item in checked([ordinary()], CURRENT).not_checked]


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
        return checked([ordinary()], facts(recipe="fp8_delayed_scaling", settings=settings))

    assert [(finding.rule, finding.severity) for finding in verdict()] == [("stale-scale", item) for item in found]
    assert not len(verdict(ranks=1))
    stages = verdict(alike=False)
    assert len(stages) == (0 if row["reduced"] and not row["outside"] else len(found)), "a group without other stages"


def told(*logged: Mapping[str, float], settings: Settings = UNKNOWN) -> Verdict:
    diagnosis = Diagnosis()
    diagnosis.set_facts(Facts(settings=settings), 0)
    diagnosis.has_run = True
    for iteration, values in enumerate(logged):
        diagnosis.scalars(iteration, values)
    return diagnosis.verdict


def logged(norms: Sequence[float], losses: Sequence[float]) -> Verdict:
    return told(
        *(
            {"loss": loss, "eval_loss": 9.0, "grad_norm": norm, "lr": 1e-3}
            for norm, loss in zip(norms, losses, strict=True)
        )
    )


def wave(steps: int) -> list[float]:
    return [1 + 0.1 * math.sin(7.7 * step * step) for step in range(steps)]


@pytest.mark.parametrize(("steps", "times", "shown"), [(30, 4, "[23]"), (30, 16, "[567]"), (30 * 64, 4, "[23]")])
def test_a_gradient_norm_that_creeps_up(steps: int, times: int, shown: str) -> None:
    growing = [noise * times ** (step / steps) for step, noise in enumerate(wave(steps))]
    flat = [2.0 * (1 + 0.01 * (noise - 1)) for noise in wave(steps)]
    finding = only(logged(growing, flat), "gradient-norm")
    assert "creeps up" in finding.title
    assert (finding.severity, finding.since) == ("note", 0)
    assert re.match(rf"grad_norm has become {shown}\.\d+ times as large in \d+ logged steps, while", finding.seen)
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
    assert not [finding for finding in logged(norms, losses) if "creeps up" in finding.title]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["loss", "train_loss", "train/loss_step", "Loss/train", "loss/total", "lm loss", "train/lm_loss"]
)
def test_a_loss_that_is_not_finite(name: str, value: float) -> None:
    finding = only(told({name: 2.0}, {name: value}, {name: 2.0}, {name: value}), "nonfinite")
    assert (finding.severity, finding.layers, finding.seen) == ("error", (), f"{name} is {value}")
    assert (finding.since, finding.last_good, finding.until) == (1, 0, 3)


@pytest.mark.parametrize(("tensor", "severity"), [("gradient", "note"), ("activation", "error")])
def test_inf_in_a_step_that_a_scaler_skips(tensor: str, severity: str) -> None:
    scaled = facts(settings=Settings(loss_is_scaled=True, float16=True))
    broken: Numbers = {**ordinary(), ("h.4.fc2", "gradient", "nonfinite_num"): 3.0}
    broken[("h.4.fc2", tensor, "nonfinite_num")] = 3.0
    finding = only(checked([broken, ordinary()], scaled), "nonfinite")
    assert (finding.severity, "GradScaler skips" in finding.remedy) == (severity, severity == "note")
    assert [item.severity for item in checked([broken], facts()) if item.rule == "nonfinite"] == ["error"]


@pytest.mark.parametrize(("norm", "severity"), [(100.0, "note"), (2e4, "warning")])
def test_a_norm_far_above_the_limit_of_clipping(norm: float, severity: str) -> None:
    step = {"loss": 2.0, CLIPPED_NORM: norm, CLIPPING_LIMIT: 1.0}
    assert only(told(*[step] * 30), "gradient-norm").severity == severity


@pytest.mark.parametrize(("finite", "severity"), [(2, "error"), (3, "note")])
def test_a_loss_that_is_finite_again(finite: int, severity: str) -> None:
    """As where the script skips a batch; nan in the weights would last."""
    steps = [{"loss": 2.0}, {"loss": math.inf}, {"loss": math.nan}, *[{"loss": 2.0}] * finite]
    assert only(told(*steps), "nonfinite").severity == severity
    again = only(told(*steps, {"loss": math.nan}), "nonfinite")
    assert (again.severity, again.seen) == ("error", "loss is inf" if finite == 2 else "loss is nan")


@pytest.mark.parametrize(
    "name", ["eval_loss", "val/loss", "loss/validation", "grad_norm", "loss_scale", "aux_loss", "best_loss", "accuracy"]
)
def test_numbers_that_are_not_the_loss_of_the_training(name: str) -> None:
    verdict = told(*[{"loss": 2.0, name: math.nan}] * 3)
    assert not len(verdict)
    assert not lacks_a_loss(verdict)
    alone = told(*[{name: math.nan}] * 3)
    assert not len(alone)
    assert lacks_a_loss(alone)


def lacks_a_loss(verdict: Verdict) -> bool:
    return any(item.rule == "nonfinite" and "loss" in f"{item.why} {item.collect}" for item in verdict.not_checked)


def test_the_rule_book_is_complete() -> None:
    assert len(RULE_OF_ID) == len(RULES) <= 36
    assert len({row.title for row in ROWS}) == len(ROWS)
    assert all(row.id == rule.id for rule in RULES for row in rule.variants)
    for rule in ROWS:
        for name in ("title", "needs", "collect", "condition", "silent", "source", "why", "disproof", "remedy"):
            assert getattr(rule, name), f"{rule.id} has no {name}"


def test_a_rule_that_cannot_fire_yet_is_not_checked() -> None:
    delayed = facts(recipe="fp8_delayed_scaling")
    first = checked([ordinary()], delayed)
    assert {"nonfinite", "hole"} <= set(first.checked)
    waiting = {item[:3] for item in first.not_checked}
    for rule in ("overflow", "stale-scale", "sibling", "dead-gradient", "growth"):
        assert (rule, "not enough collection steps (1 of 3)", "") in waiting
    assert {"overflow", "stale-scale", "sibling", "dead-gradient", "growth"} <= set(
        checked([ordinary()] * 3, delayed).checked
    )
    stale: Numbers = {("h.0.fc1", "weight", "stale_codes%"): 0.0}
    assert "stale-weights" in [item.rule for item in checked([stale]).not_checked]
    assert "stale-weights" in checked([stale] * 2).checked


KEPT = {"reason": "SECTION", "reason_ref": "DisableFP8Layer in section 'keep' (config.yaml:3)"}


def test_what_is_not_quantized_loses_nothing() -> None:
    """A what-if statistic of a layer that is kept in high precision: the remedy itself."""
    lossy = ordinary(b3_fc1_activation_underflows=90.0, b3_fc1_activation_overflows=9.0)
    what_if = {
        (layer, tensor, f"fp8_current_scaling_{statistic}" if statistic == "underflows%" else statistic): value
        for (layer, tensor, statistic), value in lossy.items()
    }
    for step in (lossy, what_if):
        assert only(checked([step] * 4, facts()), "underflow").layers == ("h.3.fc1",)
        assert not len(checked([step] * 4, facts(changed={"h.3.fc1": KEPT})))
    delayed = "fp8_delayed_scaling"
    saturated = ordinary(b3_fc1_activation_overflows=9.0, b3_fc1_activation_scale_inv_max=1e-9)
    assert len(checked([saturated] * 4, facts(recipe=delayed))) >= 2
    assert not len(checked([saturated] * 4, facts(recipe=delayed, changed={"h.3.fc1": KEPT})))


def test_a_gradient_that_one_of_two_products_quantizes_is_checked() -> None:
    rows = [row("h.0.fc1", gemm, **(KEPT if gemm == "wgrad" else {})) for gemm in ("fprop", "dgrad", "wgrad")]
    step: Numbers = {("h.0.fc1", "gradient", "underflows%"): 90.0, ("h.0.fc1", "gradient", "underflow_norm%"): 1.0}
    assert only(checked([step] * 2, Facts.from_rows((), rows, ())), "underflow").tensor == "gradient"
    rows = [row("h.0.fc1", gemm, **(KEPT if gemm != "fprop" else {})) for gemm in ("fprop", "dgrad", "wgrad")]
    assert not len(checked([step] * 2, Facts.from_rows((), rows, ())))


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
def test_what_is_left_of_a_tensor_with_nan_is_not_checked(
    rule: str, recipe: str, tensor: str, numbers: dict[str, float]
) -> None:
    """Statistics leave out inf and nan, and the scale may follow an inf."""
    whole: Numbers = {**ordinary(), **{("h.4.fc1", tensor, name): value for name, value in numbers.items()}}
    lost: Numbers = {**whole, ("h.4.fc1", tensor, "nonfinite_num"): 3.0}
    begin: Sequence[Numbers] = [ordinary()] * 2
    assert rule in {finding.rule for finding in checked([*begin, *[whole] * 4], facts(recipe=recipe))}
    result = only(checked([*begin, *[lost] * 4], facts(recipe=recipe)), "nonfinite")
    assert (result.layers, result.tensor) == (("h.4.fc1",), tensor)


def test_what_does_not_apply_is_not_listed() -> None:
    """No layer runs in low precision, so nothing can be lost in it."""
    high = facts(recipe="none", reason="NO_AUTOCAST", reason_ref="runs outside of te.autocast")
    numbers = {key: value for key, value in ordinary().items() if not key[2].endswith("flows%")}
    assert not {item.rule for item in checked([numbers] * 3, high).not_checked} & {"underflow", "overflow"}
    assert {"underflow", "overflow"} <= {item.rule for item in checked([numbers] * 3, facts()).not_checked}


def test_a_sibling_that_comes_again_worse_is_one_finding() -> None:
    odd = ordinary(b4_fc1_activation_std=2.0**-14, b4_fc1_activation_cur_amax=2.0**-12)
    again = [ordinary(), *[odd] * 4, ordinary(), *[{**odd, ("h.4.fc1", "activation", "underflows%"): 9.0}] * 4]
    assert [finding.rule for finding in checked(again, CURRENT)].count("sibling") == 1


HEALTHY_GEMM = {
    "gemm_kernel_ratio": 0.4,
    "gemm_kernel_error": 0.002,
    "gemm_gain": 1.0,
    "gemm_wrong_rank": -1.0,
    "gemm_format_error": 0.04,
}
TILE = {"gemm_kernel_ratio": 9.0, "gemm_kernel_error": 0.03, "gemm_gain": 0.999}
HALF = {"gemm_kernel_ratio": 40.0, "gemm_kernel_error": 0.5, "gemm_gain": 0.5}


@pytest.mark.parametrize(
    ("changed", "seen", "remedy"),
    [
        ({}, "", ""),
        (TILE, "the GEMM dgrad is 3 % off the product of its operands", "Report the kernel"),
        (HALF, "the GEMM dgrad gives 0.5 times the product of its operands", "layout of its scales"),
        ({**HALF, "gemm_gain": 0.9}, "is 50 % off the product", "Report the kernel"),  # half of the rows are 0
        ({**TILE, "gemm_wrong_rank": 3.0}, "explains, only on rank 3", "dcgmi"),
        ({**HALF, "gemm_wrong_rank": 3.0}, "gives 0.5 times the product of its operands, only on rank 3", "dcgmi"),
    ],
)
def test_a_wrong_gemm(changed: dict[str, float], seen: str, remedy: str) -> None:
    def step(numbers: Mapping[str, float]) -> Numbers:
        return {("h.3.fc1", "dgrad", name): value for name, value in {**HEALTHY_GEMM, **numbers}.items()}

    known = facts(settings=Settings(ranks=8))
    verdict = checked([step({}), step(changed), step(changed)], known)
    results = [finding for finding in verdict.findings if finding.rule == "wrong-gemm"]
    assert len(results) == bool(changed)
    for finding in results:
        assert seen in finding.seen
        assert remedy in finding.remedy
        assert (finding.layers, finding.since, finding.severity) == (("h.3.fc1",), 10, "error")
    assert "wrong-gemm" in {*verdict.checked, *(finding.rule for finding in results)}
    assert "wrong-gemm" not in checked([ordinary()], known).checked


def test_the_number_of_a_finding_comes_with_its_step_and_layer() -> None:
    grown = [{"b3_fc1_weight_cur_amax": 0.08 * 2.0**times} for times in (0, 9, 10, 14)]
    grown[3]["b5_fc1_weight_cur_amax"] = 0.08 * 2.0**15
    grown.append({key: 2 * value for key, value in grown[3].items()})
    verdict = checked([ordinary(**changes) for changes in grown], facts())
    (results,) = (finding for finding in verdict if finding.rule == "growth")
    assert (results.layers, results.since, results.until) == (("h.3.fc1", "h.5.fc1"), 10, 40)
    assert (results.seen_at, results.as_json()["seen_at"]) == (20, 20)
    shown = "in h.3.fc1 at step 20, amax is 1,020 times"
    assert str(results).startswith(f"weight of h.{{3,5}}.fc1: {shown}")
    assert results.as_json()["seen_in_words"].startswith(shown)


def test_a_run_in_which_nothing_ran_is_not_checked() -> None:
    """A training of 0 steps has layers and settings, which nothing has used."""
    rows = [{"layer": layer, "class": "Linear", "weight_dtype": "bfloat16"} for layer in LAYERS]
    verdict = checked([], Facts.from_rows(rows, (), (), settings=Settings(ignored=[{}])))
    assert not verdict.checked
    assert not len(verdict)


CAUSES = {"stale-scale": ("growth",), "underflow": ("stale-scale",)}


def caused(rule: str, since: int | None, last_good: int | None = None, severity: Severity = "warning") -> Finding:
    return Finding(rule, severity, rule, (f"of {rule}",), "", "", since, since, last_good, None, "", "", "", "", "", "")


def order(*findings: Finding) -> list[tuple[str, str]]:
    return [(item.rule, item.caused_by) for item in root_causes_first(findings, CAUSES)]


def test_a_chain_of_causes_begins_with_its_root() -> None:
    assert order(caused("underflow", 8, 6), caused("stale-scale", 6, 4), caused("growth", 4, 2)) == [
        ("growth", ""),
        ("stale-scale", "growth of of growth"),
        ("underflow", "stale-scale of of stale-scale"),
    ]


@pytest.mark.parametrize(
    ("since", "last_good", "first"), [(5, 2, "diverging-loss"), (50, 20, "weight-jump"), (2, 1, "weight-jump")]
)
def test_a_jump_of_weights_and_a_loss_that_diverges(since: int, last_good: int, first: str) -> None:
    """Weights that a large learning rate changes jump after the loss; others before it, and may be seen later."""
    loss = caused("diverging-loss", 2 if since == 5 else since if since < 50 else 26, 1 if since < 50 else 25, "error")
    causes = {rule.id: rule.consequence_of for rule in RULES}  # the findings have ids as titles
    root, other = root_causes_first([caused("weight-jump", since, last_good), loss], causes)
    assert (root.rule, root.caused_by, bool(other.caused_by)) == (first, "", True)


@pytest.mark.parametrize(
    ("cause", "consequence"),
    [
        (("growth", 50, 20), ("diverging-loss", 36, 35)),  # of a weight
        (("evaluation-mode", 31, None), ("uncalled-layer", 31, 30)),
        (("evaluation-mode", 31, None), ("frozen-layer", 31, 30)),
    ],
)
def test_the_fact_that_explains_the_other_comes_first(cause: tuple[str, int, int], consequence: Any) -> None:
    causes = {rule.id: rule.consequence_of for rule in RULES}
    of_weight = dataclasses.replace(caused(*cause), tensor="weight")
    first, second = root_causes_first([caused(*consequence), of_weight], causes)
    assert (first.rule, first.caused_by) == (cause[0], "")
    assert (second.rule, second.caused_by) == (consequence[0], f"{cause[0]} of weight of of {cause[0]}")


def test_a_scale_that_stays_comes_before_the_gradients_that_it_rounds_to_zero() -> None:
    """The scale has a value since its second step, and had the initial one in the first."""
    first = ordinary(b4_fc1_gradient_cur_amax=0.0, b4_fc1_gradient_std=0.0)
    lost = {"b4_fc2_gradient_underflows": 100.0, "b4_fc2_gradient_underflow_norm": 100.0}
    later = [
        {
            **ordinary(b4_fc2_gradient_scale_inv_max=1.0, b4_fc2_gradient_cur_amax=1e-6 * (1 + step), **lost),
            **{key: 0.0 for key in first if key[:2] == ("h.4.fc1", "gradient")},
        }
        for step in range(3)
    ]
    verdict = checked([without(first, "h.4.fc2", "gradient"), *later], DELAYED)
    assert (verdict[0].rule, verdict[0].layers) == ("stale-scale", ("h.4.fc2",))
    caused_by = {finding.rule: finding.caused_by for finding in verdict}
    assert {caused_by["underflow"], caused_by["dead-gradient"]} == {"stale-scale of gradient of h.4.fc2"}


def test_a_cause_may_be_seen_a_collection_step_later() -> None:
    """It has begun after the last step without it."""
    assert order(caused("stale-scale", 8, 6), caused("growth", 10, 8))[0] == ("growth", "")
    assert order(caused("stale-scale", 8, 6), caused("growth", 12, 10)) == [("stale-scale", ""), ("growth", "")]


def test_the_gradient_of_an_earlier_step_that_all_ranks_share_later() -> None:
    """A hook on another rank has broken a gradient, after whose step the weights are nan."""
    diagnosis = Diagnosis()
    places = {"iteration": 26, "since": 0, "weights": 4, "before": ["0", "input"]}
    text = "weight of 0: the weights of 4 layers have inf or nan as step 26 begins"
    diagnosis.event(Event("first_nonfinite", text, 26, layer="0", tensor="weight", data=places))
    assert [(finding.layers, finding.since) for finding in diagnosis.verdict] == [((), 26)]
    broken = {"what": "nonfinite_gradient", "names": ["2.weight"], "since": 25, "number": 6.25}
    diagnosis.event(Event("parameters", "1 problem", 32, data={"checked": [], "problems": [broken]}))
    diagnosis.event(Event("last_nonfinite", "The last step with inf or nan is 59.", 59))
    (finding,) = diagnosis.verdict
    assert (finding.layers, finding.tensor, finding.since, finding.until) == (("2",), "gradient", 25, 59)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_a_forward_of_another_stage_comes_before_the_backward_that_it_spoils(ranks: tuple[int, int]) -> None:
    diagnosis = Diagnosis()
    places = {"iteration": 27, "since": 27, "weights": 1, "before": ["stage.1.0", "activation"]}
    of_rank = {
        0: Event(
            "first_nonfinite",
            "gradient of stage.0.1: nan.",
            27,
            "error",
            "backward",
            "stage.0.1",
            "gradient",
            data=places,
        ),
        1: Event(
            "first_nonfinite", "weight of stage.1.1: nan.", 27, "error", "forward", "stage.1.1", "weight", data=places
        ),
    }
    for rank in ranks:
        diagnosis.event(of_rank[rank], rank)
    (finding,) = diagnosis.verdict
    assert (finding.layers, finding.tensor, finding.ranks) == (("stage.1.1",), "weight", (1,))


def test_a_note_explains_no_warning_and_the_worst_group_comes_first() -> None:
    assert order(caused("growth", 1, severity="note"), caused("stale-scale", 4, 3), caused("hole", 9, 8, "error")) == [
        ("hole", ""),
        ("stale-scale", ""),
        ("growth", ""),
    ]
