"""Measure from which factor on a wrong gradient is found: the curve of detection against the factor.

    python benchmarks/proof/factors.py [--models gpt moe] [--powers 4 8 12] [--page]

In a block of six, the gradient of the MLP is 2^power times as large, or as small, from step 0 on. Each training has
seven steps, all with statistics. It is found if an error or a warning names a layer of the block first. ``--page``
writes the table into benchmarks/proof/README.md. It takes a few minutes on a free core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from checking import write_into_page
from defects import scale_gradient
from healthy import Healthy, Shape, shaped
from models import MODELS, ModelName, RecipeName
from running import start_process, with_statistics_every

from te_precision_callbacks.session import InspectSession

FAMILIES: Sequence[str] = (*MODELS, "lora", "moe")
POWERS = (4, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20)
BLOCKS, BLOCK, STEPS = 6, 2, 7
RECIPES: Sequence[RecipeName] = ("delayed", "current", "blocks")


def is_found(family: str, power: int, seed: int, folder: Path) -> bool:
    """Train with a gradient that is 2^power times as large; return whether a problem begins in the right block."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    shape = cast(Shape, "plain" if family in MODELS else family)
    model: ModelName = family if family in MODELS else "bytes"
    built = shaped(Healthy(shape, model, RECIPES[seed % len(RECIPES)], "float32", STEPS, seed, 1, BLOCKS))
    scale_gradient(built, BLOCK, 2.0**power)
    config = with_statistics_every(1)
    with InspectSession(config, model=built.model, log_dir=folder, statistics_log="off") as session:
        for _ in range(STEPS):
            session.log({"loss": built.train_step()})
            session.step()
    FP8GlobalStateManager.reset()
    layers = [layer for finding in session.findings if finding.severity != "note" for layer in finding.layers[:1]]
    return any(layer.startswith(f"{built.blocks[BLOCK].path}.") for layer in layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="NAME")
    parser.add_argument("--powers", nargs="+", type=int, default=POWERS, metavar="POWER")
    parser.add_argument("--page", action="store_true", help="write the table into benchmarks/proof/README.md")
    options = parser.parse_args()
    start_process((9, 0))
    columns = [sign * power for power in options.powers for sign in (1, -1)]
    counts = dict.fromkeys(columns, 0)
    lines = [f"| family | {' | '.join(f'2^{power}' for power in columns)} |", f"|---|{'---|' * len(columns)}"]
    with tempfile.TemporaryDirectory() as folder:
        for seed, family in enumerate(options.models):
            cells = []
            for power in columns:
                found = is_found(family, power, seed, Path(folder) / f"{family}{power}")
                counts[power] += found
                cells.append("yes" if found else "-")
            lines.append(f"| {family} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    lines.append(f"| found, of {len(options.models)} | {' | '.join(map(str, counts.values()))} |")
    text = "\n".join(lines)
    print(text)
    if options.page:
        write_into_page("factors", text)


if __name__ == "__main__":
    main()
