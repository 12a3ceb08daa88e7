"""Planted defects in trainings in FP8 on the GPU's own kernels: the diagnosis must find them.

Models, defects and result come from the proof (``benchmarks/proof``), with one defect of each kind.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from checking import check_defect
from defects import KINDS, Defect, train_with_defect

from gpu_parts.healthy import RECIPES, sizes
from gpu_parts.rows import Rows, Settings


def check(settings: Settings, rows: Rows) -> None:
    counts, most = sizes(settings, smallest=4)
    for kind in KINDS[:most]:
        block_counts = (next(counts),)
        draws = (Defect.drawn(kind, seed, freq=2, counts=block_counts) for seed in itertools.count())
        defect = next(draw for draw in draws if draw.recipe in RECIPES)
        name = f"{kind} in {defect.model}, {defect.recipe}, {defect.count} blocks"
        with rows.of(name), tempfile.TemporaryDirectory() as folder:
            truth = train_with_defect(defect, Path(folder), settings.device.type)
            row = check_defect(Path(folder), truth)
            outcome = "first finding" if row["right"] else "found" if row["anywhere"] else "missed"
            note = "{first}; planted: {truth}".format_map(row)
            rows.add(name, outcome, expected="found", ok=row["anywhere"], note=note)
