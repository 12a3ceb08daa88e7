"""Rules on sudden changes, on curves that are made and in trainings: what is found, and what healthy runs keep."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.diagnosis import Finding, Verdict, diagnose
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import Facts, Settings
from te_precision_callbacks.session import InspectSession, running_session
from tests.diagnosis.planted import Block
from tests.diagnosis.test_rules import judged, told
from tests.diagnosis.training import trained

Found = list[tuple[str, str, int | None]]


def found(verdict: Verdict) -> Found:
    return [(finding.rule, finding.severity, finding.since) for finding in verdict]


def logged(values: Sequence[float], name: str = "loss") -> Verdict:
    return told(*({name: value} for value in values), settings=Settings())


def falling(steps: int, start: float = 4.2, end: float = 2.0, noise: float = 0.05, seed: int = 0) -> list[float]:
    draws = np.random.default_rng(seed).standard_normal(steps)
    return [
        end + (start - end) * math.exp(-step / 40) * (1 + noise * draw) + noise * draw
        for step, draw in enumerate(draws.tolist())
    ]


def test_a_loss_that_explodes_is_an_error_after_three_steps() -> None:
    verdict = logged([4.3, 311, 33])
    assert found(verdict) == [("diverging-loss", "error", 1)]
    assert verdict[0].seen == "loss has risen from 4.3 to 172"
    assert found(logged([4.3, 311])) == []


@pytest.mark.parametrize(
    ("later", "severity"),
    [([4.2] * 8, "warning"), ([9.0, 12.0, 10.0, 9.5, 11.0, 9.0], "error"), ([30.0, 31.0, 29.0], "error")],
    ids=["back at the start", "above it", "far above it"],
)
def test_a_loss_that_leaves_its_level(later: list[float], severity: str) -> None:
    verdict = logged([*falling(100), *later, *later])
    assert found(verdict) == [("diverging-loss", severity, 100)]
    assert verdict[0].until == 99 + 2 * len(later), "it lasts"


def heavy(steps: int) -> list[float]:
    """The loss of single samples with wrong labels: mostly near 0, and large now and then."""
    draws = np.random.default_rng(3).random(steps)
    return [6.0 if draw < 0.15 else 0.02 * (1 + draw) for draw in draws.tolist()]


@pytest.mark.parametrize(
    "losses",
    [
        falling(600, noise=0.3),
        [*falling(100), 60.0, *falling(100, 2.3)],
        [*falling(100), *([2.0, 2.6] * 40)],
        [*falling(100), *(2.0 + 0.3 * math.exp(-step / 10) for step in range(60))],
        heavy(800),
        [0.0, 1e-5, 3e-4, 0.02, -0.01, 0.1, 0.3, 0.2, 0.4, 0.5, *([0.4, -0.2, 0.9] * 60)],
        [-1e-5 + 1e-5 * step for step in range(40)] + [1e-3 * step for step in range(40)],
        (np.random.default_rng(5).chisquare(16, 800) / 16).tolist(),
        [2.0],
        [],
    ],
    ids=[
        "noise",
        "one spike",
        "a coarser curve",
        "a restart",
        "single samples",
        "rewards",
        "a critic, from 0 on",
        "regression",
        "one",
        "none",
    ],
)
def test_losses_that_do_not_diverge(losses: list[float]) -> None:
    assert found(logged(losses)) == []


@pytest.mark.parametrize("name", ["val_loss", "eval_loss", "loss/discriminator", "g_loss", "reward", "aux_loss"])
def test_other_numbers_may_rise(name: str) -> None:
    assert found(logged([4.3, 311, 33, 400, 500, 600] * 6, name)) == []


def test_losses_of_several_names_have_a_curve_each() -> None:
    """The Hugging Face Trainer logs means of several steps, and in the end the mean of the training."""
    losses = [
        {"loss_step": loss, **({"loss": loss} if iteration % 10 == 0 else {})}
        for iteration, loss in enumerate(falling(100, 40.0))
    ]
    assert found(told(*losses, {"train_loss": 15.0})) == []


NORMS = [1 + 0.3 * math.sin(7.7 * step * step) for step in range(60)]


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([*NORMS, 40.0, 1.1, 0.9], [("gradient-jump", "note", 60)]),
        ([*NORMS, 40.0, 50.0, 45.0], [("gradient-jump", "warning", 60)]),
        ([*NORMS, 9000.0, 1.0], [("gradient-jump", "warning", 60)]),
        ([*NORMS, 4.0, 4.0, 4.0, 4.0], []),
        ([9.0, 3.0, *NORMS], []),
        ([100.0 * 0.9**step for step in range(100)], []),
        (NORMS[:10], []),
        ([1.0, math.nan, 1.0], [("nonfinite-gradient-norm", "error", 1)]),
    ],
    ids=["one", "several", "5,000 times", "noise", "the start", "falling", "few", "nan"],
)
def test_gradient_norms(norms: list[float], expected: Found) -> None:
    assert found(logged(norms, "grad_norm")) == expected


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_gradient_norm_of_inf_where_a_scaler_skips_the_step(is_scaled: bool) -> None:
    """The first steps of a GradScaler overflow. That it scales is known after the first step."""
    diagnosis = Diagnosis()
    diagnosis.scalars(0, {"grad_norm": math.inf})
    assert found(diagnosis.verdict) == []
    diagnosis.know(Facts(settings=Settings(loss_is_scaled=is_scaled)), 0)
    diagnosis.scalars(1, {"grad_norm": math.inf})
    assert found(diagnosis.verdict) == ([] if is_scaled else [("nonfinite-gradient-norm", "error", 0)])


def weights(steps: Sequence[Mapping[str, float]]) -> list[Finding]:
    verdict = judged([{(layer, "weight", "cur_amax"): value for layer, value in step.items()} for step in steps])
    return [finding for finding in verdict if finding.rule == "weight-jump"]


def alike(amax: float, layers: int = 6) -> dict[str, float]:
    return {f"h.{block}": amax for block in range(layers)}


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([alike(0.1), alike(0.11), alike(2.0)], 6),
        ([alike(0.1), alike(0.11), alike(0.0)], 6),
        ([alike(0.1), alike(0.11), {**alike(0.11), "h.0": 3.0, "h.1": 3.0, "h.2": 3.0}], 3),
        ([alike(0.1), alike(0.11), {**alike(0.11), "h.0": 3.0, "h.1": 3.0}], 0),
        ([alike(0.1), alike(0.11), alike(1.0)], 0),
        ([alike(0.0), alike(0.001), alike(0.02), alike(0.1)], 0),
        ([alike(0.1), alike(2.0), alike(50.0)], 0),
        ([alike(0.1, 1), alike(0.1, 1), alike(9.0, 1)], 0),
        ([alike(0.1), alike(math.nan), alike(9.0)], 0),
    ],
    ids=["up", "to 0", "half", "two of six", "little", "from 0", "from the start", "one layer", "nan"],
)
def test_weights_that_change_at_once(steps: list[dict[str, float]], count: int) -> None:
    assert [(len(finding.layers), finding.since) for finding in weights(steps)] == [(count, 20)] * bool(count)


def classified(
    folder: Path,
    blocks: int,
    lr: float = 3e-3,
    steps: int = 26,
    act: Callable[[torch.nn.Module], object] = lambda net: None,
) -> Verdict:
    torch.manual_seed(blocks)
    net = torch.nn.Sequential(torch.nn.Embedding(64, 32), *(Block() for _ in range(blocks)), torch.nn.Linear(32, 64))
    optimizer = torch.optim.AdamW(net.parameters(), lr)

    def loss(step: int) -> torch.Tensor:
        if step == 12:
            act(net)
        tokens = torch.randint(64, (64,))
        return torch.nn.functional.cross_entropy(net(tokens), (5 * tokens + 3) % 64)

    def clip(*_: object) -> None:
        running_session().log({"grad_norm": torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)})

    optimizer.register_step_pre_hook(clip)
    return trained(folder, net, optimizer, steps=steps, loss=loss)


@torch.no_grad()
def overwrite(net: torch.nn.Module) -> None:
    """Multiply all weights, as a wrong scale in a restored checkpoint does."""
    for parameter in net.parameters():
        if parameter.dim() > 1:
            parameter.mul_(32)


@pytest.mark.parametrize("blocks", [4, 8])
def test_a_training_that_diverges_and_its_remedy(tmp_path: Path, blocks: int) -> None:
    first = classified(tmp_path / "diverges", blocks, lr=1.0, steps=12)[0]
    assert (first.rule, first.severity, first.layers) == ("diverging-loss", "error", ())
    assert first.since in (1, 2)
    remedied = classified(tmp_path / "lower rate", blocks)
    assert found(remedied) == []
    assert {"diverging-loss", "gradient-jump", "nonfinite-gradient-norm", "weight-jump"} <= set(remedied.judged)


def test_weights_that_are_overwritten(tmp_path: Path) -> None:
    rules = {finding.rule: finding for finding in classified(tmp_path, 4, act=overwrite)}
    jump = rules["weight-jump"]
    assert (jump.since, len(jump.layers)) == (20, 4), "the next collection step"
    assert rules["diverging-loss"].since == 12


@pytest.mark.parametrize(("after", "expected"), [(10.0, [("diverging-loss", "error", 24)]), (0.32, [])])
@pytest.mark.parametrize("folder", ["run", "other"])
def test_a_loss_that_jumps_at_a_resume(tmp_path: Path, folder: str, after: float, expected: Found) -> None:
    """NVIDIA/Megatron-LM#1842: 0.3 before the resume, 10 after it."""
    net, state = te.Linear(32, 32), dict[str, object]()
    noise = falling(30, 0.0, 0.0, 0.02)
    for name, loss in (("run", 0.3), (folder, after)):
        with InspectSession(model=net, log_dir=tmp_path / name) as session:
            session.load_state_dict(state)
            for step in range(6 if state else 24):
                net(torch.randn(16, 32)).sum().backward()
                session.log({"loss": torch.tensor(loss + noise[step])})
                session.step()
            state = session.state_dict()
    assert [item for item in found(session.findings) if "loss" in item[0]] == expected
    assert [item for item in found(diagnose(tmp_path / folder)) if "loss" in item[0]] == expected


def test_a_loss_that_was_negative_and_explodes() -> None:
    losses = [-1.0 - 0.01 * step for step in range(30)]
    assert found(logged([*losses, *(-(10.0 ** (step + 2)) for step in range(6))])) == [
        ("diverging-loss", "warning", 30)
    ]
    assert found(logged([*losses, *(4.0 for _ in range(30))])) == []
