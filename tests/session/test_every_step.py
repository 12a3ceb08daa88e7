"""The watch of every step: where inf and nan begin, and what changes between two steps."""

import contextlib
import importlib
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.module import grouped_linear
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.diagnosis.engine import PrecisionFindingError
from te_precision_callbacks.diagnosis.rules import ROWS
from te_precision_callbacks.flight.changes import Change
from te_precision_callbacks.flight.rows import StepRow, TensorSlot
from te_precision_callbacks.flight.steps import LastSteps
from te_precision_callbacks.instrumentation.every_step import EveryStep
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import InspectSession, running_session
from te_precision_callbacks.sinks.step_records import Event
from tests import training
from tests.capability import stand_for
from tests.combinations import half
from tests.conftest import feature
from tests.functions import Net
from tests.instrumentation.gemm_spy import BLACKWELL, RECIPES
from tests.training import observed

pytestmark = pytest.mark.usefixtures("any_gpu")

Hook = Callable[[str, torch.Tensor], torch.Tensor]
"""Gets the name of a place of the model, and the tensor there; returns the tensor to go on with."""


class Blocks(torch.nn.Module):
    """Three kinds of TE modules; each gets the sum of the input and the output of the module before."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        if recipe in BLACKWELL:
            stand_for((10, 0))
        torch.manual_seed(1)
        self.mlp = te.LayerNormMLP(64, 128)
        self.linear = te.Linear(64, 64)
        self.head = te.LayerNormLinear(64, 64)
        self.recipe = RECIPES[recipe]()
        self.at: Hook = lambda place, x: x

    def forward(self, x: torch.Tensor, *, enabled: bool = True, skips: bool = False) -> torch.Tensor:
        with te.autocast(enabled=enabled, recipe=self.recipe):
            x = self.at("input", x)
            x = self.at("between", x + self.mlp(x))
            if not skips:
                x = x + self.at("output", self.linear(x))
            return self.head(x)


def train(
    model: Blocks,
    steps: int,
    log_dir: Path | None,
    at: Callable[[int, int, Blocks], Hook | None] = lambda step, batch, model: None,
    after: Callable[[int, Blocks], object] = lambda step, model: None,
    *,
    calls: Callable[[int], dict[str, Any]] = lambda step: {},
    rate: Callable[[int], float] = lambda step: 1e-3,
    batches: int = 1,
    **options: Any,
) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(2)
    session = None if log_dir is None else InspectSession(log_dir=log_dir, model=model, **options).start()
    try:
        for step in range(steps):
            for batch in range(batches):
                model.at = at(step, batch, model) or (lambda place, x: x)
                model(torch.randn(32, 64, generator=draws), **calls(step)).square().mean().backward()
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                after(step, model)
            if session is not None:
                session.step()
    finally:
        if session is not None:
            session.stop()
    return session


def only(session: InspectSession, rule: str) -> Any:
    (finding,) = (finding for finding in session.findings if finding.rule == rule)
    return finding


At = Callable[[int, int, Blocks], Hook | None]


def changed(place: str, step: int | range, change: Callable[[torch.Tensor], torch.Tensor], batch: int = 0) -> At:
    """Change the tensor at a place in one micro-batch of these steps."""
    steps = range(step, step + 1) if isinstance(step, int) else step

    def choose(now: int, of_batch: int, model: Blocks) -> Hook | None:
        if now not in steps or of_batch != batch:
            return None
        return lambda where, x: change(x) if where == place else x

    return choose


def with_nan(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[3, 5] = math.nan
    return x


def nan_at(place: str, step: int, batch: int) -> At:
    return changed(place, step, with_nan, batch)


FIRST_OF = {"input": ("mlp.fc1", "input"), "between": ("linear", "activation"), "output": ("head", "input")}
BEFORE = {"input": "the batch", "between": "the GEMM of mlp.fc2", "output": "the GEMM of linear"}


@pytest.mark.few
@pytest.mark.parametrize(
    ("recipe", "place", "step", "batch"),
    [
        ("nvfp4", "output", 4, 1),
        ("delayed", "between", 3, 0),
        ("none", "input", 3, 1),
        ("block", "between", 3, 0),
        ("mxfp8", "input", 3, 1),
        ("current", "output", 4, 1),
    ],
)
def test_the_first_tensor_with_nan(recipe: str, place: str, step: int, batch: int, tmp_path: Path) -> None:
    """In steps without collection."""
    session = train(Blocks(recipe), step + 2, tmp_path, nan_at(place, step, batch), batches=2)
    finding = only(session, "nonfinite")
    layer, tensor = FIRST_OF[place]
    assert (finding.layers, finding.tensor) == ((layer,), tensor)
    assert (finding.since, finding.severity) == (step, "error")
    assert f"in micro-batch {batch} of step {step}" in finding.seen
    assert BEFORE[place] in finding.remedy
    assert finding.until == step + 1, "the weights are nan from then on"
    recorded = [(found.seen, found.until) for found in diagnose(tmp_path) if found.rule == "nonfinite"]
    assert recorded == [(finding.seen, finding.until)]


def chosen(net: Net, x: torch.Tensor, names: str, broken: str) -> torch.Tensor:
    """Each call runs the layers that it names, in this order."""
    for name in names:
        x = getattr(net, name)(x * torch.nan if name == broken else x)
    return x


def two_layers() -> Net:
    return Net(chosen, a=te.Linear(64, 64), b=te.Linear(64, 64))


@pytest.mark.parametrize(
    ("calls", "broken", "batch", "by_model"),
    [
        (["b", "ab", "ab"], "a", 2, True),
        (["b", "b", "ab"], "a", 2, True),
        (["aab", "aab"], "a", 1, True),
        (["aab", "aab"], "b", 1, False),
        (["aab", "ab", "ab"], "a", 1, True),
        (["aab"], "a", None, True),
    ],
)
def test_a_micro_batch_is_a_call_of_the_model(
    tmp_path: Path, calls: list[str], broken: str, batch: int | None, by_model: bool
) -> None:
    """Not a call of the layer; it is not named where the script does not call the model."""
    model = two_layers()
    call = model if by_model else model.forward

    def loss(number: int) -> torch.Tensor:
        spoils = number == 5 * len(calls) + (batch or 0)
        return call(torch.randn(32, 64), calls[number % len(calls)], broken if spoils else "").square().mean()

    session = observed(tmp_path, net=model, steps=7, micro_batches=len(calls), loss=loss)
    where = f"in micro-batch {batch} of step 5" if by_model and batch is not None else "in step 5"
    assert f"inf or nan appear {where}," in only(session, "nonfinite").seen


@pytest.mark.parametrize("checkpoint", [None, False, True])
def test_a_gradient_has_the_micro_batch_of_its_forward(tmp_path: Path, checkpoint: bool | None) -> None:
    """As in a pipeline, where backwards are late. A reentrant checkpoint observes the forwards that run in them."""
    model = two_layers()
    if checkpoint is not None:
        b = model.b.forward
        model.b.forward = lambda x: torch.utils.checkpoint.checkpoint(b, x, use_reentrant=checkpoint)  # type: ignore[method-assign]
    with InspectSession(log_dir=tmp_path, model=model) as session:
        for step in range(7):
            results = [model(torch.randn(32, 64, requires_grad=True), "ab", "") for _ in range(3)]
            for number, result in enumerate(results):
                (result.square().mean() * (torch.nan if (step, number) == (5, 1) else 1.0)).backward()
            session.step()
    where = "step 5," if checkpoint else "micro-batch 1 of step 5,"
    assert f"inf or nan appear in {where}" in only(session, "nonfinite").seen


@pytest.mark.few
@pytest.mark.parametrize(
    ("recipe", "steps", "breaks", "severity"),
    [
        ("current", 11, "", "note"),
        ("current", 10, "", "error"),
        ("delayed", 13, "gradient", "error"),
        ("current", 13, "later", "error"),
        ("delayed", 15, "again", "note"),
    ],
)
def test_a_batch_with_nan_that_the_script_skips(
    recipe: str, steps: int, breaks: str, severity: str, tmp_path: Path
) -> None:
    """In step 7, and perhaps in step 11 again; or its nan stays in a gradient, or comes to a weight in step 11."""
    model = Blocks(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with InspectSession(log_dir=tmp_path, model=model) as session:
        for step in range(steps):
            batch = torch.randn(32, 64)
            if step == 7 or (step == 11 and breaks == "again"):
                batch[3, 5] = math.nan
            loss = model(batch).square().mean()
            if loss.isfinite() or breaks == "gradient":
                loss.backward()
            if loss.isfinite():
                optimizer.step()
                optimizer.zero_grad()
            if step == 11 and breaks == "later":
                model.linear.bias.data[2] = math.nan
            session.log({"loss": loss})
            session.step()
    findings = [finding for finding in session.findings if finding.title == "inf or nan in a tensor"]
    assert (findings[0].severity, findings[-1].since) == (severity, 7), str(findings)
    assert len(findings) == 1 + (breaks == "later")
    rows = [row for row in open_run(tmp_path).events.to_pylist() if row["kind"] == "finding"]
    reported = [row for row in rows if json.loads(row["data"])["title"] == "inf or nan in a tensor"]
    assert len(reported) == len(findings), "each once, also if it comes again"
    assert ("skips such a step" in findings[0].remedy, "Resume" in findings[0].remedy) == (
        severity == "note",
        severity == "error",
    )
    assert diagnose(tmp_path) == session.findings


@pytest.mark.parametrize(("steps_with_it", "severity"), [(True, "warning"), (False, "note")])
def test_an_inf_that_a_cast_makes_finite(steps_with_it: bool, severity: str, tmp_path: Path) -> None:
    """Delayed scaling clips it, so the gradients are finite, and only the optimizer shows that the step was skipped."""
    model = torch.nn.Sequential(te.Linear(32, 64), torch.nn.GELU(), te.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with InspectSession(model=model, log_dir=tmp_path) as session:
        for step in range(26):
            batch = torch.randn(32, 32)
            if step == 18:
                batch[3, 4] = -math.inf
            with te.autocast(enabled=True):
                loss = model(batch).square().mean()
            loss.backward()
            if step != 18 or steps_with_it:
                optimizer.step()
            optimizer.zero_grad()
            session.step()
    finding = only(session, "nonfinite")
    assert (finding.severity, finding.since) == (severity, 18)
    assert ("An optimizer stepped" in finding.seen) == steps_with_it
    assert diagnose(tmp_path) == session.findings


@pytest.mark.parametrize(
    ("how", "severity"),
    [
        ("skipped", "note"),
        ("kept", "error"),
        ("cleared", "note"),
        *(pytest.param(*case, marks=pytest.mark.extended) for case in (("dropped", "note"), ("stepped", "error"))),
    ],
)
def test_a_nan_norm_of_gradients(how: str, severity: str, tmp_path: Path) -> None:
    """In step 7: the script skips the optimizer's step, also step(), or neither, or steps without gradients; or it adds
    the next gradients.
    """
    model = Blocks("current")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with InspectSession(log_dir=tmp_path, model=model) as session:
        for number in range(13):
            batch = torch.randn(32, 64)
            if number == 7:
                batch[3, 5] = math.nan
            model(batch).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if how == "cleared" and not norm.isfinite():
                optimizer.zero_grad()
            if norm.isfinite() or how in ("stepped", "cleared") or number > 7:
                optimizer.step()
            if number != 7 or how != "kept":
                optimizer.zero_grad()
            if number != 7 or how in ("skipped", "stepped", "cleared"):
                session.step()
    severities = [(finding.rule, finding.severity) for finding in session.findings]
    assert severities == [("nonfinite", severity)] * 2, str(session.findings)  # of a tensor, and of the norm
    assert diagnose(tmp_path) == session.findings


def test_an_exception_after_the_step_of_the_optimizer_hides_no_place(tmp_path: Path) -> None:
    def after(step: int, model: Blocks) -> None:
        if step == 6:
            raise RuntimeError("before the end of the iteration")

    with pytest.raises(RuntimeError, match="the iteration"):
        train(Blocks("current"), 10, tmp_path, nan_at("between", 6, 0), after)
    (finding,) = (finding for finding in diagnose(tmp_path) if finding.rule == "nonfinite")
    assert (finding.layers, finding.tensor, finding.since, finding.last_good) == (("linear",), "activation", 6, 5)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_first_step_is_one_that_a_scaler_skips(recipe: str, tmp_path: Path) -> None:
    """As usual: the scaler begins with too large a scale. The step ends before its facts are known."""
    model = Blocks(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    options: dict[str, Any] = {"steps": 4, "around": lambda _: torch.autocast("cpu", torch.float16), "after": step}
    options["loss"] = lambda _: scaler.scale(model(torch.randn(32, 64)).float().square().mean())
    session = observed(tmp_path, net=model, on_finding={"nonfinite": "stop"}, **options)
    assert scaler.get_scale() < 2.0**30
    severities = [finding.severity for finding in session.findings if finding.rule == "nonfinite"]
    assert set(severities) == {"note"}
    assert diagnose(tmp_path) == session.findings


@pytest.mark.parametrize("tensor", ["activation", "gradient"])
def test_a_stop_for_inf_and_nan_comes_before_the_step_of_the_optimizer(tensor: str, tmp_path: Path) -> None:
    """Also where a GEMM does not see it, as in the gradient of a bias."""
    model, plain = Blocks("delayed"), Blocks("delayed")
    train(plain, 3, None)
    if tensor == "gradient":
        factors = iter([1.0, 1.0, 1.0, math.nan])
        model.head.bias.register_hook(lambda gradient: gradient * next(factors))
    with pytest.raises(PrecisionFindingError) as caught:
        train(
            model, 9, tmp_path, nan_at("between", 3 if tensor == "activation" else 99, 0), on_finding="stop: nonfinite"
        )
    (finding,) = caught.value.findings
    layer = "linear" if tensor == "activation" else "head"
    assert (finding.layers, finding.tensor, finding.since) == ((layer,), tensor, 3)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert [str(recorded) for recorded in diagnose(tmp_path).wrong] == [str(finding)]


@pytest.mark.parametrize(("last_bad", "last"), [(9, 20), (99, 10)])
def test_a_script_that_drops_bad_batches_goes_on_unless_it_drops_all(last_bad: int, last: int, tmp_path: Path) -> None:
    """Batches 7 to ``last_bad`` have nan."""
    model = Blocks("current")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    with (
        contextlib.suppress(PrecisionFindingError),
        InspectSession(log_dir=tmp_path, model=model, on_finding="stop") as session,
    ):
        for step in range(21):
            batch = torch.randn(32, 64)
            if 7 <= step <= last_bad:
                batch[3, 5] = math.nan
            loss = model(batch).square().mean()
            session.log({"loss": loss})
            loss.backward()
            if loss.isfinite():
                optimizer.step()
            optimizer.zero_grad()
            session.step()
    assert step == last
    assert [finding.severity for finding in diagnose(tmp_path).findings] == ["note" if last == 20 else "error"] * 2


@pytest.mark.parametrize("recipe", ["delayed", "current", "nvfp4"])
def test_training_has_the_same_bits(recipe: str, tmp_path: Path) -> None:
    watched, without = Blocks(recipe), Blocks(recipe)
    torch.manual_seed(3)
    train(watched, 6, tmp_path, batches=2)
    torch.manual_seed(3)
    train(without, 6, None, batches=2)
    for mine, others in zip(watched.parameters(), without.parameters(), strict=True):
        assert torch.equal(mine, others)


def in_step(step: int, change: Callable[[Blocks], object]) -> Callable[[int, Blocks], object]:
    """Change the model after the optimizer's step."""
    return lambda now, model: now == step and change(model)


def factors(by_step: dict[int, float]) -> Callable[[int, Blocks], object]:
    return lambda step, model: model.linear.weight.mul_(by_step.get(step, 1.0))


def without_norm(model: Blocks) -> None:
    """A norm would make nan of an inf."""
    model.head = te.Linear(64, 64)


def zeroed_gradient(is_zero: Callable[[int], bool]) -> Callable[[Blocks], object]:
    def prepare(model: Blocks) -> None:
        steps = itertools.count()
        model.linear.weight.register_hook(lambda gradient: gradient * (not is_zero(next(steps))))

    return prepare


def with_nan_in_weight(model: Blocks) -> None:
    model.linear.weight.data[2, 2] = math.nan


def column(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.index_fill(1, torch.tensor([7]), number)


def is_gone(step: int) -> bool:
    """A layer that is missed, and is back; then it is missed only after twice as long, and not yet."""
    return 20 <= step < 30 or 46 <= step < 58


WEIGHTS = feature("LogTensorStats", ["mlp", "linear", "head"], tensors=["weight"], stats=["cur_amax"], freq=4)
IN_A_SAMPLE = r"changed by \d+% of its norm, in a sample, and by at most \d\.\d+% in each of the 16 updates before"
RATE = "after the learning rate rose from 0.001 to 5 in step 22"
LINEAR = ("linear",)
ALL = ("mlp.fc1", "mlp.fc2", "linear", "head")
BACK = "in the steps 20 to 29, and again after them"


@dataclass(frozen=True)
class Planted:
    """A training with a defect.

    Attributes:
        options: of :func:`train`.
        rule, finding: the finding's rule, and its attributes.
        seen, remedy: patterns in these texts of the finding.
        prepare: changes the model before the training.
    """

    options: dict[str, Any]
    rule: str
    finding: dict[str, Any]
    seen: str = ""
    remedy: str = ""
    recipe: str = "current"
    steps: int = 26
    prepare: Callable[[Blocks], object] = lambda model: None


PLANTED = {
    "an inf in a weight, which the cast hides": Planted(
        {"after": in_step(6, lambda model: model.linear.weight[2, 2].fill_(math.inf))},
        "nonfinite",
        {"layers": LINEAR, "since": 6},
        seen=r"after the update of step 6, first linear\.weight",
        remedy="the optimizer's step and state",
        recipe="delayed",
        steps=10,
    ),
    "a weight has nan before the first step": Planted(
        {},
        "nonfinite",
        {"layers": LINEAR, "tensor": "weight", "since": 0},
        remedy="^Start again, and look at the initialization",  # there is no checkpoint, and no update
        steps=3,
        prepare=with_nan_in_weight,
    ),
    "a weight has nan before the first step, and no step is watched": Planted(
        {"every_step": False},
        "nonfinite",
        {"layers": LINEAR, "tensor": "weight", "since": 0},
        remedy="^Start again, and look at the initialization",
        steps=3,
        prepare=with_nan_in_weight,
    ),
    "nan in a layer on the debug path": Planted(
        {"at": nan_at("between", 7, 0), "config": {"s": feature("DisableFP8GEMM", ["linear"], gemms=["fprop"])}},
        "nonfinite",
        {"layers": LINEAR, "tensor": "activation", "since": 7},
        steps=10,
    ),
    "a weight is multiplied, and restored": Planted(
        {"after": factors({22: 8, 24: 1 / 8})},
        "weight-jump",
        {"layers": LINEAR, "tensor": "weight", "severity": "warning", "last_good": 21, "since": 22},
        seen=IN_A_SAMPLE,
        steps=30,
    ),
    "a weight is zeroed": Planted(
        {"after": factors({22: 0.0})},
        "weight-jump",
        {"layers": LINEAR, "tensor": "weight", "severity": "warning", "last_good": 21, "since": 22},
        seen=IN_A_SAMPLE,
        steps=30,
    ),
    "a weight gets other values of the same size, which raises no version": Planted(
        {
            "after": in_step(22, lambda model: setattr(model.linear.weight, "data", model.linear.weight.flip(0))),
            "calls": lambda step: {"skips": step == 0},  # its layer does not run in the first step
        },
        "weight-jump",
        {"layers": LINEAR, "tensor": "weight", "since": 22},
    ),
    "all weights change at once": Planted(
        {"after": in_step(22, lambda model: [weight.data.mul_(0.8) for weight in model.parameters()])},
        "weight-jump",
        {"severity": "note", "since": 22},
    ),
    "weights jump by a learning rate": Planted(
        {"rate": lambda step: 5.0 if step == 22 else 1e-3},
        "weight-jump",
        {"since": 22, "severity": "warning", "last_good": 21},
        seen=RATE,
        remedy="learning rate",
        steps=30,
    ),
    "weights jump by a learning rate, in the statistics of a config": Planted(
        {"rate": lambda step: 5.0 if step == 22 else 1e-3, "every_step": False, "config": {"s": WEIGHTS}},
        "weight-jump",
        {"since": 22, "severity": "warning"},
        seen=RATE,
        remedy="learning rate",
        steps=30,
    ),
    "a batch is far larger than the others": Planted(
        {"at": changed("input", 22, lambda x: x * 1000)},
        "growth",
        {"layers": ("mlp.fc1", "head"), "tensor": "input", "since": 22, "severity": "note"},
        seen="the largest RMS of a token of the input",
    ),
    "what a block gets is far larger from a step on": Planted(
        {"at": changed("input", range(22, 99), lambda x: x * 24)},  # a jump of 16 is the least
        "growth",
        {"layers": ("mlp.fc1", "head"), "tensor": "input", "last_good": 21, "since": 22, "severity": "warning"},
        seen="the largest RMS of a token of the input .*, and has stayed so in the 8 steps after it",
        remedy="Look for what changed in that step before mlp.fc1",
        steps=32,
    ),
    "delayed scaling clips a large number": Planted(
        {"at": changed("between", 22, column(2.0**12), 1), "batches": 2},
        "growth",
        {"layers": ("linear", "head"), "tensor": "activation", "since": 22},
        seen="is 4,100",
        recipe="delayed",
        prepare=without_norm,
    ),
    "delayed scaling clips an inf": Planted(
        {"at": changed("between", 22, column(math.inf), 1), "batches": 2},
        "nonfinite",
        {"layers": LINEAR, "tensor": "activation", "since": 22},
        seen="micro-batch 1",
        recipe="delayed",
        prepare=without_norm,
    ),
    "current scaling hides an inf": Planted(
        {"at": changed("between", 22, column(math.inf))},
        "growth",
        {"layers": ("linear", "head"), "tensor": "activation", "since": 22, "severity": "warning"},
        seen="to which the cast turns an inf",
        remedy=r"^((?!clip).)*$",
        prepare=without_norm,
    ),
    "a large number in MXFP8, which has an inf in its scales": Planted(
        {"at": changed("between", 22, column(448.0))},
        "growth",
        {"layers": ("linear", "head"), "tensor": "activation", "since": 22, "severity": "note"},
        seen=r"is 448((?!inf).)*$",
        recipe="mxfp8",
        prepare=without_norm,
    ),
    "a step without low precision": Planted(
        {"calls": lambda step: {"enabled": step != 22}},
        "hole",
        {"layers": ALL, "since": 22, "severity": "warning"},
        seen="in step 22 alone",
    ),
    "every tenth step is without low precision": Planted(
        {"calls": lambda step: {"enabled": step % 10 != 0 or step == 0}},
        "hole",
        {"layers": ALL, "since": 20, "severity": "warning"},
        steps=32,
    ),
    "a layer does not run any more": Planted(
        {"calls": lambda step: {"skips": step >= 20}},
        "uncalled-layer",
        {"layers": LINEAR, "since": 20, "severity": "warning"},
        steps=32,
    ),
    "a layer is frozen": Planted(
        {"after": in_step(19, lambda model: model.linear.requires_grad_(False))},
        "frozen-layer",
        {"layers": LINEAR, "since": 20, "severity": "warning"},
        steps=32,
    ),
    "a layer's output is detached": Planted(
        {"at": changed("output", range(20, 99), torch.Tensor.detach)},
        "frozen-layer",
        {"layers": LINEAR, "since": 20, "severity": "warning"},
        steps=32,
    ),
    "a layer's output is multiplied by 0": Planted(
        {"at": changed("output", range(20, 99), lambda x: x * 0)},
        "frozen-layer",
        {"layers": LINEAR, "since": 20, "severity": "warning"},
        steps=32,
    ),
    "a gradient is 0 only at the optimizer's step": Planted(
        {},
        "frozen-layer",
        {"layers": LINEAR, "last_good": 19, "since": 20},
        seen="got a gradient in each step, and none or only 0 since step 20",
        steps=32,
        prepare=zeroed_gradient(lambda step: step >= 20),
    ),
    "a layer is skipped, and back": Planted(
        {"calls": lambda step: {"skips": is_gone(step)}},
        "uncalled-layer",
        {"layers": LINEAR, "severity": "note", "since": 20, "until": 29},
        seen=BACK,
        steps=64,
    ),
    "a layer's gradient is 0, and back": Planted(
        {},
        "frozen-layer",
        {"layers": LINEAR, "severity": "note", "since": 20, "until": 29},
        seen=BACK,
        steps=64,
        prepare=zeroed_gradient(is_gone),
    ),
    "a layer is frozen, and back": Planted(
        {"at": lambda step, batch, model: model.linear.requires_grad_(not is_gone(step)) and None},
        "frozen-layer",
        {"layers": LINEAR, "severity": "note", "since": 20, "until": 29},
        seen=BACK,
        steps=64,
    ),
    "a layer's output is 0, and back": Planted(
        {"at": lambda step, batch, model: lambda where, x: x * (where != "output" or not is_gone(step))},
        "frozen-layer",
        {"layers": LINEAR, "severity": "note", "since": 20, "until": 29},
        seen=BACK,
        steps=64,
    ),
}
FURTHER = {
    "a layer's output is multiplied by 0",
    "a layer is skipped, and back",
    "a weight is zeroed",
    "delayed scaling clips an inf",
    "every tenth step is without low precision",
    "a layer's output is detached",
    "a gradient is 0 only at the optimizer's step",
    "a layer is frozen, and back",
    "a layer's output is 0, and back",
}


@pytest.mark.few
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended if name in FURTHER else ()) for name in PLANTED]
)
def test_a_change_and_its_finding(name: str, tmp_path: Path) -> None:
    row = PLANTED[name]
    stand_for((10, 0) if row.recipe in BLACKWELL else (9, 0))
    model = Blocks(row.recipe)
    row.prepare(model)
    session = train(model, row.steps, tmp_path, **row.options)
    finding = only(session, row.rule)
    assert {attribute: getattr(finding, attribute) for attribute in row.finding} == row.finding
    assert re.search(row.seen, finding.seen)
    assert re.search(row.remedy, finding.remedy)
    assert [recorded for recorded in diagnose(tmp_path) if recorded.rule == row.rule] == [finding]


@pytest.mark.few
@pytest.mark.parametrize(
    ("rule", "steps", "options"),
    [
        ("weight-jump", 66, {"rate": lambda step: 1e-2 * math.cos(step % 32 / 32 * math.pi / 2)}),
        ("hole", 50, {"calls": lambda step: {"enabled": step % 4 != 0}}),
        pytest.param("hole", 34, {"calls": lambda step: {"enabled": step < 20}}, marks=pytest.mark.extended),
        ("frozen-layer", 40, {"at": lambda step, _, model: model.linear.requires_grad_(step % 3 != 1) and None}),
        ("uncalled-layer", 40, {"calls": lambda step: {"skips": step % 3 == 0 or step > 30}}),
    ],
    ids=["learning rate", "precision in turn", "precision for good", "trained in turn", "left out in turn"],
)
def test_what_a_schedule_changes_is_no_finding(rule: str, steps: int, options: dict[str, Any], tmp_path: Path) -> None:
    session = train(Blocks("current"), steps, tmp_path, **options)
    assert rule in session.findings.checked
    assert rule not in [finding.rule for finding in session.findings]
    data = json.loads(show(tmp_path, "--last-steps", "--json"))
    assert data["text"] == f"The last {min(steps, 64)} steps before: the end of the run."
    assert data["iterations"] == list(range(max(0, steps - 64), steps))
    assert data["first"] is None


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_a_weight_that_exists_only_quantized_is_read_from_its_codes(recipe: str, tmp_path: Path) -> None:
    """The quantizer of delayed scaling has the amax of the last copy into the weight."""
    sizes = []
    with te.quantized_model_init(recipe=RECIPES[recipe]()):
        model = Blocks(recipe)

    def calls(step: int) -> dict[str, Any]:
        sizes.append(float(model.linear.weight.dequantize().abs().max()))
        return {}

    def zero(model: Blocks) -> None:
        codes = model.linear.weight
        (codes._data if recipe != "block" else codes._rowwise_data).zero_()

    train(model, 6, tmp_path, after=in_step(3, zero), calls=calls)
    numbers = last_magnitudes(json.loads(show(tmp_path, "--last-steps", "--json")))
    assert sizes[4] == 0
    assert numbers["linear", "weight"] == pytest.approx(sizes, rel=5e-3)


def test_the_share_of_a_weight_that_a_step_changes(tmp_path: Path) -> None:
    """The sample's share is near that of all elements, in float64."""
    shares = []
    last = {}

    def after(step: int, model: Blocks) -> None:
        now = model.linear.weight.detach().double()
        if step:
            shares.append(float((now - last["weight"]).norm() / last["weight"].norm()))
        last["weight"] = now.clone()

    train(Blocks("current"), 8, tmp_path, after=after, rate=lambda step: 1e-3 * (step + 1))
    numbers = last_magnitudes(json.loads(show(tmp_path, "--last-steps", "--json")))
    first, *others = numbers["linear", "update"]
    assert first is None
    assert others == pytest.approx(shares, rel=0.3)
    assert others != pytest.approx([shares[0]] * 7, rel=0.3)


@pytest.mark.parametrize(
    ("how", "flipped"),
    [
        ("optimizers in turn", 49),
        pytest.param("every micro-batch", 81, marks=pytest.mark.extended),
        ("new parameters", 49),
    ],
)
def test_a_weight_whose_sign_is_flipped(how: str, flipped: int, tmp_path: Path) -> None:
    model = Blocks("current")
    others = te.Linear(64, 64)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (model, others)]
    with InspectSession(log_dir=tmp_path, model=torch.nn.ModuleList([model, others])) as session:
        for step in range(flipped + 9):
            if how == "new parameters" and step == 20:
                state = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(state, assign=True)
                optimizers[0] = torch.optim.AdamW(model.parameters(), lr=1e-3)
            others(model(torch.randn(32, 64))).square().mean().backward()
            if how == "optimizers in turn":
                optimizers[step % 2].step()
            elif how == "new parameters" or step % 4 == 3:
                for optimizer in optimizers:
                    optimizer.step()
            if step % 4 == 3:
                model.zero_grad()
                others.zero_grad()
            session.step()
            if step == flipped:
                model.linear.weight.data.neg_()
    assert only(session, "weight-jump").layers == ("0.linear",)
    assert only(session, "weight-jump").since in range(flipped + 1, flipped + 3)


def test_the_first_tokens_of_an_expert_are_no_jump(tmp_path: Path) -> None:
    model = experts()
    for weight in model.experts.parameters():
        weight.data *= 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(step: int) -> torch.Tensor:
        model.rows = [16, 16, 16] if step > 30 else [32, 0, 16]
        return model(torch.randn(48, 64), lambda place, x: x).square().mean()

    options: dict[str, Any] = {"loss": loss, "recipe": RECIPES["current"]()}
    session = observed(tmp_path, net=model, steps=40, optimizers=optimizer, **options)
    assert not [finding for finding in session.findings if finding.rule == "weight-jump"]


@pytest.mark.parametrize("left", [0.0, 0.01])
def test_the_gradient_of_an_expert_without_tokens_is_zero(
    left: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel may have written its buffer."""
    model = experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gemm = grouped_linear.general_grouped_gemm

    def leaving(a: Any, b: Any, out: Any, *arguments: Any, **keywords: Any) -> Any:
        result = gemm(a, b, out, *arguments, **keywords)
        for tokens, wgrad in zip(b, out, strict=False) if keywords.get("layout") == "NT" else ():
            if not tokens.size(0):
                wgrad.fill_(left)
        return result

    monkeypatch.setattr(grouped_linear, "general_grouped_gemm", leaving)
    with InspectSession(log_dir=tmp_path, model=model) as session:
        for step in range(24):
            model.rows = [16, 0, 32] if step % 2 and step > 6 else [16, 16, 16]
            model(torch.randn(48, 64), lambda place, x: x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    findings = [finding for finding in session.findings if finding.rule == "wrong-gemm"]
    assert [(found.layers, found.since, found.severity) for found in findings] == [
        (("experts.gemm_1",), 7, "error")
    ] * bool(left)
    assert findings == [finding for finding in diagnose(tmp_path) if finding.rule == "wrong-gemm"]


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("nvfp4", marks=pytest.mark.extended)])
def test_a_wrong_element_of_a_result_that_a_norm_hides(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemms = importlib.import_module("transformer_engine.pytorch.module.linear")
    general_gemm = gemms.general_gemm
    model = Blocks(recipe)
    step = 0

    def wrong(a: Any, b: Any, *arguments: Any, **keywords: Any) -> Any:
        result = general_gemm(a, b, *arguments, **keywords)
        if step == 22 and not keywords.get("grad"):
            result[0][3, 5] = 2.0**12 * result[0].abs().max()
        return result

    def at(now: int, batch: int, model: Blocks) -> None:
        nonlocal step
        step = now

    monkeypatch.setattr(gemms, "general_gemm", wrong)
    finding = only(train(model, 26, tmp_path, at), "growth")
    assert (finding.layers, finding.tensor, finding.since) == (("head",), "input", 22)


def test_a_spike_names_the_layers_with_its_first_tensor() -> None:
    change = Change("spike", (TensorSlot("b", "activation"), TensorSlot("a", "gradient")), 5, None, 1.0, 100.0)
    rule = next(row for row in ROWS if row.title.startswith("a tensor's largest magnitude"))
    (sighting,) = rule.check().event(Event("changed", str(change), 5, data=change.as_json()))
    assert (sighting.layers, sighting.tensor) == (("b",), "activation")


def test_an_inf_that_fp8_in_blocks_hides(tmp_path: Path) -> None:
    """Its block has the scale 1, as a block of zeros has; the input of the next norm is a note."""

    class Plain(Blocks):
        def forward(self, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
            with te.autocast(recipe=self.recipe):
                return self.head(self.linear(self.at("between", x)))

    session = train(Plain("block"), 26, tmp_path, changed("between", 22, column(math.inf)))
    assert [(found.rule, found.layers, found.tensor) for found in session.findings if found.since == 22] == [
        ("growth", ("head",), "input")
    ]


@pytest.mark.parametrize(
    ("steps", "severity"), [(36, "warning"), (64, "note"), pytest.param(130, "warning", marks=pytest.mark.extended)]
)
def test_layers_that_run_in_phases(steps: int, severity: str, tmp_path: Path) -> None:
    """Two layers in turn, 18 steps each; from step 72 on, only one."""
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(step: int) -> torch.Tensor:
        return model(torch.randn(32, 64), "ab"[step // 18 % 2 if step < 72 else 1], "").square().mean()

    session = observed(tmp_path, net=model, steps=steps, optimizers=optimizer, loss=loss)
    finding = only(session, "uncalled-layer")
    layers, seen = {
        36: (("a",), "1 layer had a GEMM in each step, and none since step 18"),
        64: (("a", "b"), "2 layers had a GEMM in each step, none in some of the steps 18 to 53, and again after them"),
        130: (("a", "b"), "2 layers had a GEMM in each step, and none since step 36 or later; 1 layer came back"),
    }[steps]
    assert (finding.layers, finding.severity, finding.since, finding.seen) == (layers, severity, 18, seen)
    assert diagnose(tmp_path) == session.findings


def test_switched_off(tmp_path: Path) -> None:
    session = train(Blocks("current"), 20, tmp_path, nan_at("between", 18, 0), every_step=False)
    assert "spike" not in [*session.findings.checked, *(rule.rule for rule in session.findings.not_checked)]
    assert not [row for row in open_run(tmp_path).events.to_pylist() if row["kind"] == "first_nonfinite"]
    with pytest.raises(Exception, match="has recorded no last steps"):
        show(tmp_path, "--last-steps")


def test_a_watch_that_fails_is_reported_once_and_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fails(*_: Any) -> Any:
        calls.append(1)
        raise ValueError("not as in 2.20")

    monkeypatch.setattr(EveryStep, "_parts", fails)
    session = train(Blocks("block"), 4, tmp_path)
    assert len(calls) == 1
    assert sum("watching the GEMMs of mlp.fc1: ValueError" in record.getMessage() for record in caplog.records) == 1
    assert not session.healthy


# --- the last steps ---------------------------------------------------------------------------------------------------


def show(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, ["show", *map(str, arguments)], catch_exceptions=False)
    return result.output


def last_magnitudes(data: dict[str, Any]) -> dict[tuple[str, str], list[Any]]:
    """Of ``show --last-steps --json``: layer and tensor -> a number for each step."""
    return dict(zip(map(tuple, data["tensors"]), data["magnitudes"], strict=True))


def test_the_last_steps_before_an_error(tmp_path: Path) -> None:
    def log(step: int, model: Blocks) -> None:
        running_session().log({"loss": math.nan if step >= 9 else 1.0})

    train(Blocks("current"), 12, tmp_path, nan_at("between", 9, 0), log)
    data = json.loads(show(tmp_path, "--last-steps", "--json"))
    assert data["text"].startswith("The last 10 steps before: nonfinite (activation of linear")
    assert data["iterations"] == list(range(10))
    assert data["tensors"][data["first"][0]] == ["linear", "activation"]
    assert data["first"][1] == 9
    magnitudes = last_magnitudes(data)
    assert magnitudes["linear", "activation"][-1] == "nan"
    assert all(isinstance(number, float) for number in magnitudes["linear", "activation"][:-1])
    text = show(tmp_path, "--last-steps", "--most", 3)
    assert "First inf or nan: the activation of linear, in step 9." in text
    drawn = [line for line in text.splitlines() if line.startswith(("mlp", "linear", "head"))]
    assert len(drawn) == 3
    assert "! nan" in next(line for line in drawn if line.startswith("linear activation"))


@pytest.mark.parametrize(
    ("error", "name"), [(RuntimeError("the script's own"), "RuntimeError"), (KeyboardInterrupt(), "Ctrl-C")]
)
def test_the_last_steps_before_an_exception(tmp_path: Path, error: BaseException, name: str) -> None:
    model = Blocks("none")
    with pytest.raises(type(error)), InspectSession(log_dir=tmp_path, model=model) as session:
        training.train(session, model, 5, x=torch.randn(16, 64))
        raise error
    assert f"the run was ended by {name}." in show(tmp_path, "--last-steps")


def test_blocks_of_zeros_do_not_count(tmp_path: Path) -> None:
    """Their scale is 1, and 448 is the largest code."""
    model = Blocks("block")
    with InspectSession(log_dir=tmp_path, model=model) as session:
        run: Any = session._run
        x = torch.randn(256, 64)
        x[:128] = 0
        training.train(session, model.linear, 2, x=x, recipe=model.recipe)
        ring = run.hooks.every_step.ring
        row = run._every_step.steps.rows[-1]
        magnitudes = dict(zip(ring.slots, row.magnitudes.tolist(), strict=True))
        largest = float(x.abs().max())
        assert largest <= magnitudes[TensorSlot("linear", "activation")] <= 2 * largest


def test_every_tensor_is_watched_in_every_step(tmp_path: Path) -> None:
    with InspectSession(log_dir=tmp_path, model=(model := Blocks("delayed"))) as session:
        run: Any = session._run
        training.train(session, model, 4, x=torch.randn(32, 64))
        layers = ("mlp.fc1", "mlp.fc2", "linear", "head")
        tensors = ("weight", "activation", "gradient", "wgrad")
        of_gemms = {TensorSlot(layer, tensor) for layer in layers for tensor in tensors}
        of_norms = {TensorSlot(layer, "input") for layer in ("mlp.fc1", "head")}
        assert set(run.hooks.every_step.ring.slots) == of_gemms | of_norms
        for row in run._every_step.steps.rows:
            assert len(row.magnitudes) == 18
            assert (row.magnitudes > 0).all()


@pytest.mark.few
@pytest.mark.parametrize(("what", "steps"), [("gradient", 2), ("weight", 1), ("weight", 2), ("weight", 4)])
def test_an_iteration_with_several_steps_of_the_optimizer(what: str, steps: int, tmp_path: Path) -> None:
    """As of a GAN, or of the epochs on a rollout: nan is written before, or after, the first of them."""
    model = Blocks("current")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with InspectSession(log_dir=tmp_path, model=model) as session:
        for iteration in range(5):
            for step in range(steps):
                optimizer.zero_grad()
                model(torch.randn(32, 64)).square().mean().backward()
                is_planted = (iteration, step) == (3, 0)
                assert model.linear.weight.grad is not None
                if is_planted and what == "gradient":
                    model.linear.weight.grad[0, 0] = math.nan
                optimizer.step()
                if is_planted and what == "weight":
                    torch.nn.init.constant_(model.linear.weight[0], math.nan)
            session.step()
    finding = only(session, "nonfinite")
    assert finding.since == 3
    if what == "gradient":
        assert str(finding).startswith("gradient of linear: the gradient of linear.weight has inf or nan")
    elif steps == 1:
        assert "1 parameter has inf or nan after the update of step 3, first linear.weight" in finding.seen
    elif steps == 2:
        assert (finding.layers, finding.tensor) == (("linear",), "weight")
        assert "what wrote the weights" in finding.remedy
    else:
        assert finding.seen.endswith("layers have inf or nan after a step of an optimizer in step 3")
    assert [found.seen for found in diagnose(tmp_path) if found.rule == "nonfinite"] == [finding.seen]


@pytest.mark.parametrize(
    ("recipe", "way"),
    half(["none", "delayed", "mxfp8"], ["with wgrad", "one frozen", "all frozen", "float16", "late wgrad"]),
)
def test_gradients_are_read_once_whichever_gemm_reads_them(recipe: str, way: str, tmp_path: Path) -> None:
    """And in the order of the backward."""
    stand_for((10, 0) if recipe in BLACKWELL else (9, 0))
    dtype = torch.float16 if way == "float16" else torch.float32
    first = te.LayerNormMLP(64, 64, params_dtype=dtype)
    second = te.Linear(64, 64, bias=False, params_dtype=dtype, delay_wgrad_compute=way == "late wgrad")
    first.fc2_weight.requires_grad_(way not in ("one frozen", "all frozen"))
    first.fc1_weight.requires_grad_(way != "all frozen")
    gradients: list[float] = []
    with InspectSession(log_dir=tmp_path, model=torch.nn.Sequential(first, second)) as session:
        run: Any = session._run
        for _ in range(3):
            gradients.clear()
            with te.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]()):
                x = first(torch.randn(32, 64, dtype=dtype, requires_grad=True))
                y = second(x)
            for output in (y, x):
                output.register_hook(lambda gradient: gradients.append(float(gradient.abs().max())))
            y.float().square().sum().backward()
            if way == "late wgrad":
                second.backward_dw()
            session.step()
        ring = run.hooks.every_step.ring
        row = run._every_step.steps.rows[-1]
    order = [ring.slots[slot] for slot in row.order]
    read = [slot for slot in order if slot.tensor == "gradient"]
    assert [slot.layer for slot in read] == ["1", "0.fc2", "0.fc1"]
    results = [order.index(TensorSlot(slot.layer, "dgrad")) for slot in read if way == "float16"]
    assert all(order.index(slot) < result for slot, result in zip(read, results, strict=False))
    assert not row.unwatched
    magnitudes = dict(zip(ring.slots, row.magnitudes.tolist(), strict=True))
    for slot, largest in zip(read, gradients, strict=False):
        assert magnitudes[slot] == pytest.approx(largest, rel=2**-3) or (
            recipe == "mxfp8" and magnitudes[slot] > largest
        )


def experts() -> Net:
    """Experts; the middle one gets tokens in the first steps only."""
    parts = {"first": te.Linear(64, 64), "experts": te.GroupedLinear(3, 64, 64), "rows": [16, 16, 16]}
    return Net(lambda net, x, put: net.experts(put("between", net.first(x)), net.rows), **parts)


def operations() -> Net:
    first = te.ops.Sequential(te.ops.Linear(64, 64), te.ops.GELU())
    second = te.ops.Sequential(te.ops.Linear(64, 64))
    return Net(lambda net, x, put: net.second(put("between", net.first(x))), first=first, second=second)


def compiled() -> Net:
    """Its hook changes a factor, outside of the graph."""
    first, second = te.Linear(64, 64), te.Linear(64, 64)
    layers = torch.compile(lambda x, factor: second(first(x) * factor), backend="eager", dynamic=False)
    return Net(lambda _, x, put: layers(x, put("between", torch.ones(x.shape))), first=first, second=second)


OTHER_MODELS = {
    experts: "experts.gemm_0",
    operations: "second.0",
    compiled: "second",
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_experts_operations_and_compiled_layers(kind: Callable[[], Any], tmp_path: Path) -> None:
    model = kind()
    steps = 30 if kind is experts else 10
    put = nan_at("between", steps - 2, 0)

    def loss(step: int) -> torch.Tensor:
        if kind is experts and step > 16:
            model.rows = [16, 0, 32]
        return model(torch.randn(48, 64), put(step, 0, model) or (lambda place, x: x)).sum()

    with InspectSession(log_dir=tmp_path, model=model) as session:
        run: Any = session._run
        training.train(session, model, steps, recipe=RECIPES["current"](), loss=loss)
        watched = run.hooks.every_step
    layers = {slot.layer for slot in watched.ring.slots}
    assert watched.ring.slots == list(dict.fromkeys(watched.ring.slots))
    expected = {
        TensorSlot(layer, tensor) for layer in layers for tensor in ("weight", "activation", "gradient", "wgrad")
    }
    if kind is experts:
        numbers = last_magnitudes(json.loads(show(tmp_path, "--last-steps", "--json")))
        for expert, (before, after) in enumerate([(16, 16), (16, 0), (16, 32)]):
            expected.add(TensorSlot(f"experts.gemm_{expert}", "tokens"))
            assert numbers[f"experts.gemm_{expert}", "tokens"] == [before] * 17 + [after] * (steps - 18)
    assert expected == set(watched.ring.slots)
    assert not any(row.unwatched for row in run._every_step.steps.rows)
    finding = only(session, "nonfinite")
    assert (finding.layers, finding.tensor, finding.since) == ((OTHER_MODELS[kind],), "activation", steps - 2)
    assert "between the activation of first" in finding.remedy
    assert [found.rule for found in session.findings if found.rule == "uncalled-layer"] == []


def test_what_is_not_watched_is_said() -> None:
    steps = LastSteps([TensorSlot("a", "activation"), TensorSlot("b", "activation")])
    row = StepRow(3, [0, 1], unwatched={"GEMMs of grouped tensors": 2})
    bits = np.array([1.0, math.nan], np.float32).view(np.int32)
    row.add(np.stack([bits, np.full(2, -1, np.int32), np.array([2**31 - 1, 1], np.int32)], axis=1))
    origin = steps.add(row)
    assert origin is not None
    assert (origin.layer, origin.unwatched) == ("b", ("GEMMs of grouped tensors",))
    assert "all that the watched GEMMs before it read is finite" in str(origin)
    assert str(origin).endswith("they may have begun earlier, in what is not watched: GEMMs of grouped tensors")


def test_a_recomputed_forward_is_not_read_again(tmp_path: Path) -> None:
    """Nor in a collection step, where GEMMs follow plans."""
    model = te.LayerNormLinear(64, 64)
    with InspectSession(log_dir=tmp_path, model=model) as session:
        run: Any = session._run
        x = torch.randn(32, 64, requires_grad=True)
        training.train(session, model, 7, around=lambda _: te.autocast(), loss=lambda _: te.checkpoint(model, x).sum())
        place = run.hooks.every_step.ring.places[session.layers[0].name, "activation"]
        counts = [list(row.order).count(place) for row in run._every_step.steps.rows]
    assert counts == [1] * 7


def test_a_layer_that_a_config_runs_in_high_precision_for_some_steps(tmp_path: Path) -> None:
    """It has no gap, and is as before when the steps are over."""
    model = Blocks("current")
    config = {"high": feature("DisableFP8Layer", ["linear"], start_step=7, end_step=9)}
    session = observed(tmp_path, config, net=model, steps=30, loss=lambda _: model(torch.randn(32, 64)).square().mean())
    assert not [finding for finding in session.findings if finding.rule in ("hole", "uncalled-layer")]
    rows = [row for row in open_run(tmp_path).gemms.to_pylist() if row["layer"] == "linear"]
    assert {row["precision"] for row in rows} == {"fp8", "fp32"}
    assert "linear" not in str(session.coverage()), "it ends in low precision"
