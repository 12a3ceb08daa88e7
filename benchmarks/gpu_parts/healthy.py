"""Healthy trainings in FP8 on the GPU's own kernels: the verdict must be "no problems found".

The models come from the proof (``benchmarks/proof``).
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from models import MODELS, RecipeName, build

from gpu_parts.rows import Rows, Settings
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.session import InspectSession

RECIPES: tuple[RecipeName, ...] = ("delayed", "current", "blocks")  # those of a Hopper GPU

BLOCKS, STEPS = (6, 12), 31


def sizes(settings: Settings, smallest: int) -> tuple[Iterator[int], int | None]:
    """The blocks of each training in turn, and how many recipes, models or kinds there are."""
    settings.transformer_engine()
    return (itertools.cycle(BLOCKS), None) if settings.on_gpu else (itertools.cycle([smallest]), 1)


def check(settings: Settings, rows: Rows) -> None:
    counts, most = sizes(settings, smallest=2)
    for recipe, model in itertools.product(RECIPES[:most], MODELS[:most]):
        count = next(counts)
        name = f"{model}, {recipe}, {count} blocks"
        with rows.of(name), tempfile.TemporaryDirectory() as folder:
            built = build(model, recipe, "autocast", seed=count, count=count, device=settings.device.type)
            with InspectSession(model=built.model, log_dir=Path(folder), statistics_log="off", quiet=True) as session:
                for _ in range(STEPS):
                    session.log({"loss": built.train_step()})
                    session.step()
            verdict = diagnose(folder)
            lacks = [f"{rule.rule}: {rule.why}" for rule in verdict.not_checked if rule.essential]
            said = "; ".join([*map(str, verdict.findings), *lacks])
            rows.add(name, verdict.state, expected="no problems found", ok=verdict.healthy, note=said)
