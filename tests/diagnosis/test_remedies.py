"""Remedies, each applied to its planted defect in one family of models: the finding goes, the loss recovers.

benchmarks/proof/remedies.py has every remedy in every family.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformer_engine.pytorch as te
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks.diagnosis import Finding, Verdict, diagnose
from te_precision_callbacks.session import InspectSession
from tests.combinations import diagonal

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "proof"))

from running import with_statistics_every  # type: ignore[import-not-found]

CLASSES, STEPS = 16, 24


class Gpt(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(CLASSES, 32)
        self.layer = te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0)
        self.head = torch.nn.Linear(32, CLASSES)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(labels).view(8, -1, 32))).flatten(0, 1)


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("patterns", torch.randn(CLASSES, 32))
        self.stem = te.Linear(32, 32)
        self.mlp = te.LayerNormMLP(32, 64)
        self.head = te.Linear(32, CLASSES)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.patterns[labels])
        return self.head(x + self.mlp(x))


class Conv(torch.nn.Module):
    """Convolutions of torch, and layers of Transformer Engine behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("patterns", torch.randn(CLASSES, 1, 8, 8))
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1, stride=2)
        self.fc1 = te.LayerNormLinear(64, 32)
        self.fc2 = te.Linear(32, CLASSES)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(self.conv(self.patterns[labels]).flatten(1))))


FAMILIES: Mapping[str, Callable[[], torch.nn.Module]] = {"gpt": Gpt, "mlp": Mlp, "conv": Conv}


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
        losses = []
        with InspectSession(with_statistics_every(4), model=model, log_dir=folder) as session:
            for step in range(STEPS):
                labels = torch.randint(CLASSES, (32,), generator=torch.Generator().manual_seed(step))
                with te.autocast(recipe=Float8CurrentScaling()):
                    logits = model(labels)
                loss = cross_entropy(logits, (3 * labels + 1) % CLASSES)
                total = loss * self.factor
                if self.auxiliary:
                    others = cross_entropy(logits, (5 * labels + 2) % CLASSES, reduction=self.auxiliary)
                    total = total + (20 if self.auxiliary == "sum" else 0.1) * others
                total.backward()
                if step == self.poisoned:
                    weight = next(parameter for name, parameter in model.named_parameters() if name == POISONED[family])
                    weight.grad.view(-1)[3] = torch.nan
                if self.clips:
                    clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if self.schedule:
                    rates.step()
                losses.append(loss.item())
                session.log({"loss": losses[-1]})
                session.step()
        assert list(diagnose(folder)) == list(session.findings), "live and replayed"
        return session.findings, sorted(losses[-5:])[2]


POISONED = {"gpt": "layer.layernorm_mlp.fc1_weight", "mlp": "mlp.fc2_weight", "conv": "conv.weight"}


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
    schedule = make(optimizer)
    with InspectSession(model=model, log_dir=tmp_path) as session:
        for _ in range(48):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            session.step()
    assert bool(of_rule(session.findings, "learning-rate")) == is_wrong, str(session.findings)
    assert "learning-rate" in session.findings.checked


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
    with InspectSession(model=model, log_dir=tmp_path) as session:
        for _ in range(21):
            model(torch.ones(4, 8)).mean().backward()
            clip(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    assert [finding.severity for finding in of_rule(session.findings, "gradient-norm")] == ["note"] * is_found
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is torch.nn.utils.clip_grads_with_norm_ is own


@pytest.mark.parametrize(("reduction", "is_found"), [("sum", True), ("mean", False)])
def test_a_first_loss_of_all_micro_batches(reduction: str, is_found: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.Linear(16, 16), te.Linear(16, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with InspectSession(model=model, log_dir=tmp_path) as session:
        for _ in range(2):
            total = torch.zeros(())
            for _ in range(4):
                loss = cross_entropy(model(torch.randn(16, 16)), torch.randint(32, (16,)))
                loss = loss if reduction == "sum" else loss / 4
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            session.log({"loss": total})
            session.step()
    assert bool(of_rule(session.findings, "gradient-norm")) == is_found
    assert list(diagnose(tmp_path)) == list(session.findings)
