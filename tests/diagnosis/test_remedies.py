"""Remedies, each applied to its planted defect in one family of models: the finding goes, the loss recovers.

benchmarks/proof/remedies.py has every remedy in every family.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformer_engine.pytorch as te
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from te_precision_callbacks.diagnosis import Finding, Verdict
from te_precision_callbacks.session import running_session
from tests.combinations import diagonal
from tests.diagnosis.planted import outside, trained
from tests.functions import Net
from tests.training import observed

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "proof"))

from running import with_statistics_every  # type: ignore[import-not-found]

CLASSES, STEPS = 16, 24


FAMILIES: Mapping[str, Callable[[], torch.nn.Module]] = {
    "gpt": lambda: Net(
        lambda net, labels: net.head(net.layer(net.embedding(labels).view(8, -1, 32))).flatten(0, 1),
        embedding=torch.nn.Embedding(CLASSES, 32),
        layer=te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0),
        head=torch.nn.Linear(32, CLASSES),
    ),
    "mlp": lambda: Net(
        lambda net, labels: net.layers(net.patterns[labels]),
        patterns=torch.randn(CLASSES, 32),
        layers=torch.nn.Sequential(te.Linear(32, 32), residual(te.LayerNormMLP(32, 64)), te.Linear(32, CLASSES)),
    ),
    # Convolutions of torch, and layers of Transformer Engine behind them.
    "conv": lambda: Net(
        lambda net, labels: net.fc2(torch.relu(net.fc1(net.conv(net.patterns[labels]).flatten(1)))),
        patterns=torch.randn(CLASSES, 1, 8, 8),
        conv=torch.nn.Conv2d(1, 4, 3, padding=1, stride=2),
        fc1=te.LayerNormLinear(64, 32),
        fc2=te.Linear(32, CLASSES),
    ),
}


def residual(part: torch.nn.Module) -> Net:
    return Net(lambda net, x: x + net.part(x), part=part)


class Training(NamedTuple):
    """A training. ``auxiliary``: how a second loss, of other labels, is reduced; empty without one."""

    rate: float = 3e-3
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    factor: float = 1.0
    auxiliary: str = ""
    clips: bool = False
    schedule: int = 0
    poisoned: int = -1

    def run(self, family: str, folder: Path) -> tuple[Verdict, float]:
        """Return the verdict, and the median of the last losses."""
        torch.manual_seed(0)
        model = FAMILIES[family]()
        optimizer = self.optimizer(model.parameters(), lr=self.rate)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.schedule or STEPS)
        losses: list[float] = []

        def loss(step: int) -> torch.Tensor:
            labels = torch.randint(CLASSES, (32,), generator=torch.Generator().manual_seed(step))
            logits = model(labels)
            own = cross_entropy(logits, (3 * labels + 1) % CLASSES)
            losses.append(own.item())
            if not self.auxiliary:
                return own * self.factor
            others = cross_entropy(logits, (5 * labels + 2) % CLASSES, reduction=self.auxiliary)
            return own * self.factor + (20 if self.auxiliary == "sum" else 0.1) * others

        def before() -> None:
            if len(losses) == self.poisoned + 1:
                model.get_parameter(POISONED[family]).grad.view(-1)[3] = torch.nan  # type: ignore[union-attr]
            if self.clips:
                clip_grad_norm_(model.parameters(), 1.0)

        def after() -> None:
            if self.schedule:
                rates.step()
            running_session().log({"loss": losses[-1]})

        options = {"steps": STEPS, "loss": loss, "before": before, "after": after, "logs": False}
        verdict = trained(folder, model, optimizer, config=with_statistics_every(4), **options)
        return verdict, sorted(losses[-5:])[2]


POISONED = {"gpt": "layer.layernorm_mlp.fc1_weight", "mlp": "layers.1.part.fc2_weight", "conv": "conv.weight"}


class Case(NamedTuple):
    rule: str
    severity: str
    broken: Training
    remedied: Training
    remedy: str  # a part of it
    seen: str = ""
    recovers: bool = True  # whether the remedy lowers the loss


CASES: Mapping[str, Case] = {
    "a loss times 0": Case(
        "dead-gradient", "warning", Training(factor=0.0), Training(), "Look at the loss first",
        seen="from the loss or the last layers on",
    ),
    "an auxiliary loss that is a sum": Case(
        "gradient-norm",
        "note",
        Training(auxiliary="sum", clips=True),
        Training(auxiliary="mean", clips=True),
        "a sum instead of a mean",
        seen="times the limit of clipping (1)",
    ),
    "a schedule of half the steps": Case(
        "learning-rate", "warning", Training(schedule=STEPS // 2), Training(schedule=STEPS), "make the schedule as",
        seen="the learning rate fell to 0 in step 12",
        recovers=False,
    ),
    "nan in one element of a gradient": Case(
        "nonfinite", "error", Training(poisoned=13, clips=True), Training(clips=True), "code that writes .grad",
    ),
}  # fmt: skip


def of_rule(verdict: Verdict, rule: str) -> list[Finding]:
    return [finding for finding in verdict if finding.rule == rule]


@pytest.mark.few
@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), diagonal(CASES, FAMILIES))
def test_the_remedy_helps(name: str, family: str, tmp_path: Path) -> None:
    case = CASES[name]
    verdict, loss = case.broken.run(family, tmp_path / "broken")
    (finding, *_) = of_rule(verdict, case.rule)
    assert (finding.severity, finding.caused_by) == (case.severity, ""), str(verdict)
    assert case.seen in finding.seen
    assert case.remedy in finding.remedy
    assert verdict[0] == finding, str(verdict)
    if case.rule == "nonfinite":
        assert POISONED[family] in finding.seen
        assert finding.since == case.broken.poisoned
    remedied, recovered = case.remedied.run(family, tmp_path / "remedied")
    assert not remedied.wrong, str(remedied)
    assert not of_rule(remedied, case.rule)
    if case.recovers:
        assert not recovered > 0.75 * loss


SCHEDULES: Mapping[str, tuple[Callable[[torch.optim.Optimizer], Any], bool]] = {
    "warm restarts": (lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 8), False),
    "one cycle": (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-3, total_steps=60), False),
    "warmup from 0": (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(step / 30, 1.0)), False),
    "twice in a step": (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 25), True),
    "half the steps, by hand": (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda at: abs(1 - at / 30)), True),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_wrong_learning_rate_schedules_are_found(name: str, tmp_path: Path) -> None:
    make, is_wrong = SCHEDULES[name]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = observed(
        tmp_path, net=model, steps=48, optimizers=optimizer, x=torch.ones(4, 8), after=make(optimizer).step
    )
    verdict = session.findings
    assert bool(of_rule(verdict, "learning-rate")) == is_wrong, str(verdict)
    assert "learning-rate" in verdict.checked


CLIPPING: Mapping[str, tuple[Callable[[list[torch.Tensor]], object], bool]] = {
    "by name": (lambda weights: clip_grad_norm_(weights, 1e-3), True),
    "in two calls": (
        lambda weights: clip_grads_of(weights, 1e-3, torch.nn.utils.get_total_norm([w.grad for w in weights])),
        True,
    ),
    "measured alone": (lambda weights: clip_grad_norm_(weights, float("inf")), False),
    "rarely": (lambda weights: clip_grad_norm_(weights, 1.0), False),
}


def clip_grads_of(*arguments: Any) -> None:
    torch.nn.utils.clip_grads_with_norm_(*arguments)


@pytest.mark.parametrize("name", CLIPPING)
def test_gradients_that_are_clipped_far(name: str, tmp_path: Path) -> None:
    clip, is_found = CLIPPING[name]
    own = torch.nn.utils.clip_grad._clip_grads_with_norm_
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    clipping = functools.partial(clip, list(model.parameters()))
    options: dict[str, Any] = {"loss": lambda _: model(torch.ones(4, 8)).mean(), "before": clipping}
    session = observed(tmp_path, net=model, steps=21, optimizers=optimizer, **options)
    assert [finding.severity for finding in of_rule(session.findings, "gradient-norm")] == ["note"] * is_found
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is torch.nn.utils.clip_grads_with_norm_ is own


@pytest.mark.parametrize(("reduction", "is_found"), [("sum", True), ("mean", False)])
def test_a_first_loss_of_all_micro_batches(reduction: str, is_found: bool, tmp_path: Path) -> None:
    model = torch.nn.Sequential(te.Linear(16, 16), te.Linear(16, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses: list[torch.Tensor] = []

    def loss(step: int) -> torch.Tensor:
        of_batch = cross_entropy(model(torch.randn(16, 16)), torch.randint(32, (16,)))
        losses.append(of_batch if reduction == "sum" else of_batch / 4)
        return losses[-1]

    def log() -> None:
        running_session().log({"loss": sum(losses[-4:])})

    options: dict[str, Any] = {"steps": 2, "micro_batches": 4, "around": outside, "after": log, "logs": False}
    verdict = trained(tmp_path, model, optimizer, loss=loss, **options)
    assert bool(of_rule(verdict, "gradient-norm")) == is_found
