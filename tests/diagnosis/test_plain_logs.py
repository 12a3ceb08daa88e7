"""Logs that Transformer Engine's own features have written, without a session."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

from te_precision_callbacks.diagnosis import Verdict, diagnose
from tests.features.plain import THEIRS, plain

USUAL = ("underflows%", "mse", "scale_inv_min", "scale_inv_max")
TENSORS = ["activation", "gradient", "weight"]


def verdict(
    folder: Path,
    recipe: Any,
    stats: tuple[str, ...] = USUAL,
    *,
    count: int = 4,
    odd: float = 1.0,
    detached: bool = False,
) -> Verdict:
    """The verdict on a log of three steps.

    Args:
        odd: a factor on a channel of the input of the layer 2.
        detached: whether no gradient reaches the first layer.
    """
    features: dict[str, Any] = {
        "LogTensorStats": {"enabled": True, "tensors": TENSORS, "stats": ["min", "max"]},
        "LogFp8TensorStats": {"enabled": True, "tensors": TENSORS, "stats": list(stats)},
    }
    torch.manual_seed(0)
    with plain(
        features if stats is USUAL else {"LogFp8TensorStats": features["LogFp8TensorStats"]}, folder, folders=(THEIRS,)
    ) as logged:
        import nvdlfw_inspect.api as debug_api

        layers = [te.Linear(64, 64, name=f"h.{place}.linear") for place in range(count)]
        optimizer = torch.optim.SGD((parameter for layer in layers for parameter in layer.parameters()), lr=0.1)
        factor = torch.ones(64)
        factor[5] = odd
        for _ in range(4):
            x = torch.randn(64, 64)
            with te.autocast(recipe=recipe):
                for place, layer in enumerate(layers):
                    x = x + layer(x * factor if place == 2 else x)
                    x = x.detach() if detached and place == 0 else torch.nn.functional.layer_norm(x, (64,))
            (x - 1).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            debug_api.step()
    logs = folder / "nvdlfw_inspect_statistics_logs"
    logs.mkdir(exist_ok=True)
    lines = [
        f"2026-03-01 09:30:00,718 - INFO - {name} \t\t\t\t iteration={step:06d} \t\t\t\t value={value:.4f}"
        for name, row in logged.rows.items()
        for step, value in row.items()
    ]
    (logs / "nvdlfw_inspect_globalrank-0.log").write_text("\n".join(lines) + "\n")
    return diagnose(folder)


RECIPES = {"delayed": DelayedScaling(), "current": Float8CurrentScaling(), "blocks": Float8BlockScaling()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_rules_with_equivalents_are_checked(recipe: str, tmp_path: Path) -> None:
    result = verdict(tmp_path, RECIPES[recipe])
    assert not result.findings, str(result)
    assert {"nonfinite", "underflow", "sibling", "dead-gradient", "growth"} <= set(result.judged)
    assert ({"stale-scale", "scale-never-updated"} <= set(result.judged)) == (recipe == "delayed")


def test_one_of_27_alike_layers_loses_far_more(tmp_path: Path) -> None:
    """As in the log of a published training of 7B: 18.6 %, and less than 1 % in the others."""
    result = verdict(tmp_path, Float8CurrentScaling(), ("underflows%",), count=27, odd=2.0**14.7)
    assert [(finding.rule, finding.severity, finding.layers) for finding in result] == [
        ("sibling", "warning", ("h.2.linear",))
    ]
    assert "% of the elements round to 0, 0 % in alike layers" in result[0].seen


def test_a_scale_that_is_never_updated(tmp_path: Path) -> None:
    result = verdict(tmp_path, DelayedScaling(), detached=True)
    assert ("scale-never-updated", "gradient") in {(finding.rule, finding.tensor) for finding in result}
    assert "stale-scale" not in {finding.rule for finding in result}
