"""Real trainings in FP8 and their verdicts: healthy ones must have no finding, and planted defects must be found.

The models, the defects and the judgment are those of the proof (``benchmarks/proof``), on the kernels of this GPU. Of
the defects, those of all kinds with a recipe that the GPU has.
"""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
import warnings
from pathlib import Path

from defects import KINDS, Defect, Kind
from judging import row_of
from models import MODELS, ModelName, RecipeName, build
from planting import train_with_defect
from running import TRUTH

from gpu_parts.rows import Rows, Settings, run_part
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.session import InspectSession

RECIPES: tuple[RecipeName, ...] = ("delayed", "current", "blocks")
BLOCKS: tuple[int, ...] = (6, 24)
STEPS = 31


def _healthy(model: ModelName, recipe: RecipeName, count: int, settings: Settings, rows: Rows, folder: Path) -> None:
    name = f"healthy {model}, {recipe}, {count} blocks"
    with rows.of(name):
        built = build(model, recipe, "autocast", seed=count, count=count, device=settings.device.type)
        with InspectSession(model=built.model, log_dir=folder, statistics_log="off", quiet=True) as session:
            for _ in range(STEPS):
                session.log({"loss": built.train_step()})
                session.step()
        verdict = diagnose(folder)
        lacks = [f"{each.rule}: {each.why}" for each in verdict.not_judged if each.essential]
        said = "; ".join([*map(str, verdict.findings), *lacks])
        rows.add(name, verdict.state, expected="no problems found", ok=verdict.healthy, note=said[:400])


def _drawn(kind: Kind, blocks: int) -> Defect:
    """With a recipe that a Hopper GPU has."""
    draws = (Defect.drawn(kind, seed, freq=2, counts=(blocks,)) for seed in itertools.count())
    return next(draw for draw in draws if draw.recipe in RECIPES)


def _planted(defect: Defect, settings: Settings, rows: Rows, folder: Path) -> None:
    name = f"{defect.kind} in {defect.model}, {defect.recipe}, {defect.count} blocks"
    with rows.of(name):
        truth = train_with_defect(defect, folder, settings.device.type)
        (folder / TRUTH).write_text(json.dumps(truth))
        row = row_of(folder)
        found = "first finding" if row.right else "found" if row.anywhere else "missed"
        rows.add(name, found, expected="found", ok=row.anywhere, note=f"{row.first}; planted: {row.truth}"[:400])


def check(settings: Settings, rows: Rows) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("te_precision_callbacks").setLevel(logging.ERROR)
    settings.transformer_engine()
    blocks, models, recipes, kinds = BLOCKS, MODELS, RECIPES, KINDS
    if settings.small:
        blocks, models, recipes, kinds = (2,), models[:1], recipes[:1], kinds[:1]
    with tempfile.TemporaryDirectory() as folder:
        counts = itertools.cycle(blocks)
        for recipe in recipes:
            for model in models:
                _healthy(model, recipe, next(counts), settings, rows, Path(folder, f"{model}-{recipe}"))
        for kind in kinds:
            _planted(_drawn(kind, next(counts)), settings, rows, Path(folder, kind))


if __name__ == "__main__":
    run_part("verdicts", check)
