"""Rules on statistics and on sudden changes, in trainings and on curves: defects, remedies, healthy twins."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from te_precision_callbacks.diagnosis import Finding, Verdict, diagnose
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import Facts, Settings
from te_precision_callbacks.session import InspectSession, running_session
from te_precision_callbacks.sinks.step_records import end_of
from te_precision_callbacks.statistics.names import CLIPPED_NORM
from tests.diagnosis.planted import Block, trained
from tests.diagnosis.test_rules import checked, told

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "proof"))

from defects import Defect, planted  # type: ignore[import-not-found]
from healthy import Healthy, train_healthy  # type: ignore[import-not-found]
from running import with_statistics_every  # type: ignore[import-not-found]


def trained_defect(defect: Defect, log_dir: Path, steps: int, *, healthy: bool = False) -> list[Finding]:
    built = defect.build()
    with (
        nullcontext() if healthy else planted(defect, built),
        InspectSession(with_statistics_every(1), model=built.model, log_dir=log_dir, quiet=True) as session,
    ):
        for _ in range(steps):
            session.log({"loss": built.train_step()})
            session.step()
    assert list(session.findings) == list(diagnose(log_dir))
    return list(session.findings.wrong)


def defect(
    kind: Any, model: Any, recipe: Any, count: int, *, block: int | None, start: int = 0, variant: int = 0
) -> Defect:
    return Defect(kind, 1, model, recipe, "float32", count, block, start, variant, 1)


def test_a_weight_that_is_initialized_too_large(tmp_path: Path) -> None:
    large = defect("large-weight", "bytes", "current", 3, block=1)
    result = trained_defect(large, tmp_path / "large", 3)
    assert [(finding.rule, finding.tensor) for finding in result[:1]] == [("sibling", "weight")]
    assert result[0].layers == (large.truth(large.build())["exact_layers"][0],)
    assert not trained_defect(large, tmp_path / "healthy", 3, healthy=True)


def test_a_gradient_that_rounds_to_0_under_a_stale_scale(tmp_path: Path) -> None:
    squeezed = defect("squeezed-gradient", "mixer", "delayed", 2, block=1, start=3)
    results = {finding.rule: finding for finding in trained_defect(squeezed, tmp_path / "squeezed", 6)}
    (mlp,) = squeezed.truth(squeezed.build())["exact_layers"]
    assert results["underflow"].tensor == "gradient"
    assert all(layer.startswith(mlp) for layer in results["underflow"].layers)
    assert not trained_defect(squeezed, tmp_path / "healthy", 6, healthy=True)


def test_the_gradient_of_a_tied_head_loses_elements_but_nothing_of_its_norm(tmp_path: Path) -> None:
    """A head with the weight of the embedding: most of the probabilities are tiny."""
    vocabulary, width = 1024, 32
    embedding = torch.nn.Embedding(vocabulary, width)
    head = te.Linear(width, vocabulary, bias=False)
    head.weight = embedding.weight
    torch.nn.init.normal_(embedding.weight)
    tokens = torch.arange(64)
    verdict = trained(
        tmp_path,
        torch.nn.ModuleList([embedding, head]),
        steps=4,
        loss=lambda step: torch.nn.functional.cross_entropy(head(2 * embedding(tokens)), tokens),
        after=embedding.zero_grad,
        logs=False,
        config=with_statistics_every(1),
    )
    assert not verdict.wrong, str(verdict)
    (note,) = (finding for finding in verdict if finding.rule == "underflow")
    assert (note.severity, note.tensor) == ("note", "gradient")


class Net(torch.nn.Module):
    def __init__(self, count: int, recipe: Any, stem: str, blocks: str) -> None:
        super().__init__()
        self.stem = te.Linear(32, 32).requires_grad_(stem != "frozen")
        self.blocks = torch.nn.ModuleList(te.LayerNormMLP(32, 64) for _ in range(count))
        self.recipe, self.on_stem, self.on_blocks = recipe, stem, blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.on_blocks.startswith("inner")
        with nullcontext() if inner else te.autocast(enabled=self.on_blocks != "nested", recipe=self.recipe):
            with te.autocast(enabled=False) if self.on_stem == "high" else nullcontext():
                x = self.stem(x)
            x = x if self.on_stem == "attached" else x.detach()
            for block in self.blocks:
                part = self._inside(block) if inner or self.on_blocks == "nested" else block
                if self.on_blocks in ("plain", "nested"):
                    x = x + part(x)
                else:
                    x = x + te.checkpoint(part, x, use_reentrant=not self.on_blocks.endswith("not reentrant"))
        return x

    def _inside(self, block: torch.nn.Module) -> Callable[[torch.Tensor], Any]:
        def part(x: torch.Tensor) -> Any:
            with te.autocast(recipe=self.recipe):
                return block(x)

        return part


def rules_of(
    log_dir: Path, count: int = 2, recipe: Any = None, *, stem: str = "attached", blocks: str = "plain"
) -> Any:
    torch.manual_seed(0)
    net = Net(count, DelayedScaling(amax_history_len=16) if recipe is None else recipe, stem, blocks)
    optimizer = torch.optim.AdamW([parameter for parameter in net.parameters() if parameter.requires_grad], lr=1e-3)
    verdict = trained(
        log_dir,
        net,
        optimizer,
        steps=6,
        loss=lambda step: (net(torch.randn(64, 32)) - 1).square().mean(),
        around=lambda step: nullcontext(),
        logs=False,
        config=with_statistics_every(1),
    )
    return {(finding.rule, finding.tensor) for finding in verdict.wrong}


@pytest.mark.parametrize("count", [2, 4])
def test_scales_that_are_never_updated(count: int, tmp_path: Path) -> None:
    """Only the new rule fires for such a tensor, not stale-scale: its remedies do not help."""
    cut = {("stale-scale", "gradient"), ("missing-gradient", "")}
    assert rules_of(tmp_path / "detached", count, stem="detached") == cut
    for how in ("inner", "nested"):  # inside of te.checkpoint, or of te.autocast(enabled=False)
        result = rules_of(tmp_path / how, count, blocks=how)
        assert result == {("stale-scale", "activation"), ("stale-scale", "weight")}, how


REMEDIES: dict[str, dict[str, Any]] = {
    "a frozen stem": {"stem": "frozen"},
    "a stem in high precision": {"stem": "high"},
    "autocast around the checkpoint": {"blocks": "outer"},
    "not reentrant": {"blocks": "inner, not reentrant"},
    "current scaling": {"stem": "detached", "recipe": Float8CurrentScaling()},
    "current scaling, inner": {"blocks": "inner", "recipe": Float8CurrentScaling()},
}


@pytest.mark.few
@pytest.mark.parametrize("remedy", REMEDIES)
def test_the_remedies_for_scales_that_are_never_updated(remedy: str, tmp_path: Path) -> None:
    assert "stale-scale" not in {rule for rule, _ in rules_of(tmp_path, **REMEDIES[remedy])}


def test_a_cut_graph_comes_before_the_scale_that_it_leaves_untouched(tmp_path: Path) -> None:
    cut = defect("unmoved-scales", "bytes", "delayed", 4, block=None, variant=1)
    results = {item.rule: item for item in trained_defect(cut, tmp_path, 6)}
    assert next(iter(results)) in ("dead-gradient", "missing-gradient")
    assert results["stale-scale"].caused_by


def test_a_gradient_that_grows_comes_before_the_scale_that_follows_it(tmp_path: Path) -> None:
    large = defect("large-gradient", "mixer", "delayed", 6, block=5, start=8)
    first, *others = trained_defect(large, tmp_path, 16)
    assert (first.rule, first.layers[0].startswith("blocks.5.mlp")) == ("growth", True)
    assert all(other.caused_by for other in others if other.rule == "stale-scale")


@pytest.mark.extended
def test_lora_from_zero_outgrows_its_scales_without_a_finding(tmp_path: Path) -> None:
    """Its second matrix and the gradient of the first begin at 0, and delayed scaling follows them a step late."""
    train_healthy(Healthy("lora", "mixer", "delayed", "autocast", 13, seed=87, freq=2, count=4), tmp_path)
    assert not {"overflow", "stale-scale"} & {finding.rule for finding in diagnose(tmp_path).wrong}


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


@pytest.mark.parametrize("zeros", [(), (40,), (40, 70)], ids=str)
def test_a_loss_that_was_exactly_0_in_a_few_batches_and_diverges(zeros: tuple[int, ...]) -> None:
    """As of a batch without labels."""
    losses = [0.0 if step in zeros else loss for step, loss in enumerate(falling(100))]
    assert found(logged([*losses, *(5.0 * 1.5**step for step in range(20))]))[0] == ("diverging-loss", "error", 100)
    assert not found(ended(losses))


OFTEN_0 = [
    0.0 if step % 3 else 1e-4 * 10 ** abs(draw)
    for step, draw in enumerate(np.random.default_rng(0).standard_normal(120).tolist())
]
"""As in reinforcement learning, before its first update and in groups of equal rewards: not compared by ratios."""


FROM_THE_START = [2.82, 7.28, 19.88, 20.65, 18.97, 19.69, 9.68, 7.69, 10.28, 29.28, 11.55, 9.02, 18.7, 11.17, 10.02]


@pytest.mark.parametrize("factor", [1.0, 0.01])
@pytest.mark.parametrize(
    "later", [[], [8.34, 7.16, 6.05, 16.51, 10.4, 18.38, 11.59, 9.14, 5.77, 10.9, 16.34, 3.12, 5.62]]
)
def test_a_loss_that_blows_up_in_its_first_steps(factor: float, later: list[float]) -> None:
    """A vision transformer that diverged: the rise is in the losses that a level would be made of."""
    losses = [factor * loss for loss in (*FROM_THE_START, *later)]
    assert found(ended(losses)) == [("diverging-loss", "error", 1)]


def ended(losses: Sequence[float]) -> Verdict:
    diagnosis = Diagnosis()
    diagnosis.set_facts(Facts(settings=Settings()), 0)
    diagnosis.has_run = True
    for iteration, loss in enumerate(losses):
        diagnosis.scalars(iteration, {"loss": loss})
    diagnosis.event(end_of(None, len(losses) - 1, len(losses)))
    return diagnosis.verdict


@pytest.mark.parametrize("start", [4.2, 0.6])
@pytest.mark.parametrize("peak", [9.0, 3.0])
def test_a_loss_that_rises_and_falls_again_is_a_note_in_the_end(start: float, peak: float) -> None:
    """The data change after 100 steps, and once more after 160."""
    level = start / 20
    change = [level + (peak - level) * math.exp(-step / 8) for step in range(60)]
    losses = [*falling(100, start, level, 0.02), *change, *change]
    assert found(logged(losses))[0][1] != "note", "as long as the training runs"
    verdict = ended(losses)
    assert found(verdict) == [("diverging-loss", "note", 100)]
    assert f" to {peak:.3g}, and has fallen to " in verdict[0].seen
    assert found(ended(losses[:105]))[0][1] != "note", "it has not fallen"


@pytest.mark.parametrize(("level", "finds"), [(2.9, True), (1.3, False)])
def test_a_loss_that_jumps_far_above_its_largest_change_and_stays(level: float, finds: bool) -> None:
    """Weights that are overwritten through .data have no new version; the loss then begins again below its start."""
    smooth = [1.0 + 2.0 * 0.97**step for step in range(40)]
    after = [level - 0.01 * step for step in range(8)]
    verdict = logged([*smooth, *after])
    assert [finding for finding in found(verdict) if finding[2] == 40] == [("diverging-loss", "warning", 40)] * finds
    assert not len(logged([*smooth, level, *smooth[-8:]])), "a spike"


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
        OFTEN_0,
        [0.0, *OFTEN_0],
        [*(-1.0 - 0.01 * step for step in range(30)), *(4.0 for _ in range(30))],
        [*(2.3 * 0.5**step for step in range(42)), *(2e-7 for _ in range(20))],
        [*falling(100, 2.3, 0.0, 1e-4), *(0.01 for _ in range(20))],
        [0.3, *np.exp(0.7 * np.random.default_rng(2).standard_normal(200)).tolist()],
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
        "often 0",
        "often 0, and first",
        "negative before",
        "2e-7 after 4e-13",
        "1 % of the start",
        "an easy first sample",
    ],
)
def test_losses_that_do_not_diverge(losses: list[float]) -> None:
    assert found(logged(losses)) == found(ended(losses)) == []


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
        ([*NORMS, 40.0, 1.1, 0.9], [("gradient-norm", "note", 60)]),
        ([*NORMS, 40.0, 50.0, 45.0], [("gradient-norm", "warning", 60)]),
        ([*NORMS, 9000.0, 1.0], [("gradient-norm", "warning", 60)]),
        ([*NORMS, 4.0, 4.0, 4.0, 4.0], []),
        ([9.0, 3.0, *NORMS], []),
        ([100.0 * 0.9**step for step in range(100)], []),
        (NORMS[:10], []),
        ([1.0, math.nan, 1.0, 1.0], [("nonfinite", "error", 1)]),
        ([1.0, math.nan, 1.0, 1.0, 1.0], [("nonfinite", "note", 1)]),
        ([1.0, math.nan, 1.0, 1.0, 1.0, math.inf], [("nonfinite", "error", 1)]),
    ],
    ids=["one", "several", "5,000 times", "noise", "the start", "falling", "few", "nan", "skipped", "again"],
)
def test_gradient_norms(norms: list[float], expected: Found) -> None:
    assert found(logged(norms, "grad_norm")) == expected


@pytest.mark.parametrize("norm", [9000.0, math.nan])
@pytest.mark.parametrize(("every", "is_found"), [(1, False), (3, True), (100, True)])
def test_the_norm_of_clipping_counts_unless_most_steps_log_one(every: int, is_found: bool, norm: float) -> None:
    """A script that skips a step may leave out its norm; some trainers log every 500th."""
    steps: list[dict[str, float]] = [
        {CLIPPED_NORM: size, "loss": 2.0, **({"grad_norm": size} if step % every == 0 else {})}
        for step, size in enumerate(NORMS)
    ]
    findings = told(*steps, {CLIPPED_NORM: norm}, settings=Settings()).findings
    assert [finding.seen.split(" is ")[0] for finding in findings] == [CLIPPED_NORM] * is_found


@pytest.mark.parametrize("logs", [True, False])
def test_the_norm_of_a_batch_that_is_dropped(logs: bool, tmp_path: Path) -> None:
    """The script clips it, and neither steps with it nor logs its norm."""
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with InspectSession(model=model, log_dir=tmp_path) as session:
        for step in range(32):
            model(torch.randn(16, 16) * (1000 if step == 26 else 1)).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step != 26:
                optimizer.step()
                session.log({"grad_norm": norm} if logs else {})
                session.step()
            optimizer.zero_grad()
    assert ["gradient-norm" in [finding.rule for finding in of] for of in (session.findings, diagnose(tmp_path))] == [
        not logs
    ] * 2


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_gradient_norm_of_inf_where_a_scaler_skips_the_step(is_scaled: bool) -> None:
    """The first steps of a GradScaler overflow. That it scales is known after the first step."""
    diagnosis = Diagnosis()
    diagnosis.scalars(0, {"grad_norm": math.inf})
    assert found(diagnosis.verdict) == []
    diagnosis.set_facts(Facts(settings=Settings(loss_is_scaled=is_scaled)), 0)
    diagnosis.scalars(1, {"grad_norm": math.inf})
    assert found(diagnosis.verdict) == ([] if is_scaled else [("nonfinite", "error", 0)])


def weights(steps: Sequence[Mapping[str, float]]) -> list[Finding]:
    verdict = checked([{(layer, "weight", "cur_amax"): value for layer, value in step.items()} for step in steps])
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
    folder: Path, lr: float = 3e-3, steps: int = 26, act: Callable[[torch.nn.Module], object] = lambda net: None
) -> Verdict:
    torch.manual_seed(4)
    net = torch.nn.Sequential(torch.nn.Embedding(64, 32), *(Block() for _ in range(4)), torch.nn.Linear(32, 64))
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


def test_a_training_that_diverges_and_its_remedy(tmp_path: Path) -> None:
    first, *_ = classified(tmp_path / "diverges", lr=1.0, steps=12)
    assert (first.rule, first.severity, first.layers) == ("diverging-loss", "error", ())
    assert first.since in (1, 2)
    remedied = classified(tmp_path / "lower rate")
    assert found(remedied) == []
    assert {"diverging-loss", "gradient-norm", "nonfinite", "weight-jump"} <= set(remedied.checked)


def test_weights_that_are_overwritten(tmp_path: Path) -> None:
    rules = {finding.rule: finding for finding in classified(tmp_path, act=overwrite)}
    jump = rules["weight-jump"]
    assert jump.since in (12, 20), "by its version, or in the next collection step"
    assert rules["diverging-loss"].since == 12


@pytest.mark.few
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


@pytest.mark.parametrize(("alone", "severity"), [(True, "warning"), (False, "error")])
def test_a_loss_that_rises_while_optimizers_step_in_turn(alone: bool, severity: str, tmp_path: Path) -> None:
    """As in a GAN; not if one backward serves all of them, as with one optimizer for matrices and one for the rest."""
    nets = torch.nn.ModuleList([te.Linear(32, 32), te.Linear(32, 32)])
    optimizers = [torch.optim.SGD(net.parameters(), 1e-4) for net in nets]
    with InspectSession(model=nets, log_dir=tmp_path) as session:
        for step in range(20):
            losses = [net(torch.randn(16, 32)).square().mean() for net in nets]
            for loss, optimizer in zip(losses if alone else [sum(losses), None], optimizers, strict=True):
                if isinstance(loss, torch.Tensor):
                    loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            nets.zero_grad()
            session.log({"loss": 100.0 if step > 12 else 2.0})
            session.step()
    assert found(session.findings) == found(diagnose(tmp_path))
    assert found(session.findings)[0] == ("diverging-loss", severity, 13)
    assert ("optimizers step in turn" in session.findings[0].seen) == alone


def test_a_loss_that_was_negative_and_explodes() -> None:
    losses = [-1.0 - 0.01 * step for step in range(30)]
    assert found(logged([*losses, *(-(10.0 ** (step + 2)) for step in range(6))])) == [
        ("diverging-loss", "warning", 30)
    ]
