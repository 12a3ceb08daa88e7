"""The rules on statistics, in real trainings of several models: planted defects, their remedies, and healthy twins."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from te_precision_callbacks.diagnosis import Finding, diagnose
from te_precision_callbacks.session import InspectSession
from tests.diagnosis import training

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "proof"))

from defects import Defect, planted  # type: ignore[import-not-found]
from healthy import Healthy, train_healthy  # type: ignore[import-not-found]
from running import with_statistics_every  # type: ignore[import-not-found]


def trained(defect: Defect, log_dir: Path, steps: int, *, healthy: bool = False) -> list[Finding]:
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


MODELS = [("bytes", 3), ("vit", 6), ("llama", 4)]


@pytest.mark.parametrize(("model", "count"), MODELS)
def test_a_weight_that_is_initialized_too_large(model: str, count: int, tmp_path: Path) -> None:
    large = defect("large-weight", model, "current", count, block=1)
    result = trained(large, tmp_path / "large", 3)
    assert [(finding.rule, finding.tensor) for finding in result[:1]] == [("sibling", "weight")]
    assert result[0].layers == (large.truth(large.build())["exact_layers"][0],)
    assert not trained(large, tmp_path / "healthy", 3, healthy=True)


@pytest.mark.parametrize("block", [0, 1])
def test_of_two_blocks_the_odd_one_is_named(block: int, tmp_path: Path) -> None:
    large = defect("large-weight", "bytes", "current", 2, block=block)
    (first, *_) = trained(large, tmp_path, 3)
    assert (first.rule, first.tensor) == ("sibling", "weight")
    assert list(first.layers) == large.truth(large.build())["exact_layers"]


@pytest.mark.parametrize(("model", "count"), [("gpt", 4), ("mixer", 2)])
def test_a_gradient_that_rounds_to_0_under_a_stale_scale(model: str, count: int, tmp_path: Path) -> None:
    squeezed = defect("squeezed-gradient", model, "delayed", count, block=1, start=3)
    results = {finding.rule: finding for finding in trained(squeezed, tmp_path / "squeezed", 6)}
    (mlp,) = squeezed.truth(squeezed.build())["exact_layers"]
    assert results["underflow"].tensor == "gradient"
    assert all(layer.startswith(mlp) for layer in results["underflow"].layers)
    assert not trained(squeezed, tmp_path / "healthy", 6, healthy=True)


def test_the_gradient_of_a_tied_head_loses_elements_but_nothing_of_its_norm(tmp_path: Path) -> None:
    """A head with the weight of the embedding: most of the probabilities are tiny."""
    torch.manual_seed(0)
    vocabulary, width = 1024, 32
    embedding = torch.nn.Embedding(vocabulary, width)
    head = te.Linear(width, vocabulary, bias=False)
    head.weight = embedding.weight
    torch.nn.init.normal_(embedding.weight)
    tokens = torch.arange(64)
    verdict = training.trained(
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
    verdict = training.trained(
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
    """Only the new rule fires for such a tensor, not stale-scale, whose remedies do not help."""
    detached = rules_of(tmp_path / "detached", count, stem="detached")
    cut = {("dead-gradient", "gradient"), ("missing-gradient", "")}
    assert detached == {("scale-never-updated", "gradient"), *cut}
    for how in ("inner", "nested"):  # inside of te.checkpoint, or of te.autocast(enabled=False)
        result = rules_of(tmp_path / how, count, blocks=how)
        assert result == {("scale-never-updated", "activation"), ("scale-never-updated", "weight")}, how


REMEDIES: dict[str, dict[str, Any]] = {
    "a frozen stem": {"stem": "frozen"},
    "a stem in high precision": {"stem": "high"},
    "autocast around the checkpoint": {"blocks": "outer"},
    "not reentrant": {"blocks": "inner, not reentrant"},
    "current scaling": {"stem": "detached", "recipe": Float8CurrentScaling()},
    "current scaling, inner": {"blocks": "inner", "recipe": Float8CurrentScaling()},
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_the_remedies_for_scales_that_are_never_updated(remedy: str, tmp_path: Path) -> None:
    result = rules_of(tmp_path, **REMEDIES[remedy])
    assert "scale-never-updated" not in {rule for rule, _ in result}
    assert "stale-scale" not in {rule for rule, _ in result}


def test_a_cut_graph_comes_before_the_scale_that_it_leaves_untouched(tmp_path: Path) -> None:
    cut = defect("unmoved-scales", "bytes", "delayed", 4, block=None, variant=1)
    results = {item.rule: item for item in trained(cut, tmp_path, 6)}
    assert next(iter(results)) in ("dead-gradient", "missing-gradient")
    assert results["scale-never-updated"].caused_by


def test_a_gradient_that_grows_comes_before_the_scale_that_follows_it(tmp_path: Path) -> None:
    large = defect("large-gradient", "mixer", "delayed", 6, block=5, start=8)
    first, *others = trained(large, tmp_path, 16)
    assert (first.rule, first.layers[0].startswith("blocks.5.mlp")) == ("growth", True)
    assert all(other.caused_by for other in others if other.rule == "stale-scale")


def test_lora_from_zero_outgrows_its_scales_without_a_finding(tmp_path: Path) -> None:
    """Its second matrix and the gradient of the first begin at 0, and delayed scaling follows them a step late."""
    train_healthy(Healthy("lora", "mixer", "delayed", "autocast", 13, seed=87, freq=2, count=4), tmp_path)
    assert not {"overflow", "stale-scale"} & {finding.rule for finding in diagnose(tmp_path).wrong}
