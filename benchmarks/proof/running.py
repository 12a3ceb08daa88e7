"""Record trainings in processes, some at once.

    record(train_healthy, all_healthy(), folder, processes=2)

Each training records itself into a folder of its name, and what it returns is stored there as ``truth.json``. Recorded
trainings are not repeated, and interrupted ones begin again.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

TRUTH = "truth.json"


def proof_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all parts take, so that ``make proof`` passes one set of options to each."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep trainings here; those that are there are not repeated")
    parser.add_argument("--processes", type=int, default=2, help="trainings at once (default: 2)")
    parser.add_argument("--page", action="store_true", help="write the table into benchmarks/proof/README.md")
    parser.add_argument("--draws", type=int, default=20, help="of each defect, in contest.py only (default: 20)")
    return parser


def with_statistics_every(freq: int | None, *, gemms: bool = False) -> dict[str, Any] | None:
    """The default config, with another number of steps between the statistics; None as it is.

    Args:
        freq: the number of steps; None for the default.
        gemms: whether GEMMs are measured too.
    """
    if freq is None and not gemms:
        return None
    from te_precision_callbacks.config.loading import DEFAULT_CONFIG

    config = copy.deepcopy(DEFAULT_CONFIG)
    for section in config.values():
        if gemms:
            section["transformer_engine"]["LogGemmError"] = {
                "enabled": True,
                "gemms": ["fprop", "dgrad", "wgrad"],
                "freq": 10,
            }
        for options in section["transformer_engine"].values():
            options["freq"] = options["freq"] if freq is None else freq
    return config


def record(
    train: Callable[[Any, Path], dict[str, Any]], trainings: Sequence[Any], folder: Path, *, processes: int
) -> dict[str, dict[str, Any]]:
    """Train all, and return the truth of each recorded training by its name. A failure is printed.

    Args:
        train: a training and its log folder -> the truth about it.
        trainings: with a ``name`` and a ``recipe``.
        folder: of the log folders.
        processes: trainings at once.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    context = multiprocessing.get_context("spawn")
    for capability in ((9, 0), (10, 0)):
        left = [
            training
            for training in trainings
            if capability_of(training.recipe) == capability and not (folder / training.name / TRUTH).exists()
        ]
        # A process has one GPU that the reference backend emulates.
        with ProcessPoolExecutor(processes, context, initializer=start_process, initargs=(capability,)) as pool:
            futures = {}
            for training in left:
                shutil.rmtree(folder / training.name, ignore_errors=True)  # of a training that was interrupted
                (folder / training.name).mkdir(parents=True)
                futures[pool.submit(train, training, folder / training.name)] = training.name
            for future in as_completed(futures):
                error = future.exception()
                print(f"{futures[future]}: {error or 'recorded'}", file=sys.stderr, flush=True)
                if error is None:
                    (folder / futures[future] / TRUTH).write_text(json.dumps(future.result(), indent=1))
    paths = {training.name: folder / training.name / TRUTH for training in trainings}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def capability_of(recipe: str) -> tuple[int, int]:
    return (10, 0) if recipe in ("mxfp8", "nvfp4") else (9, 0)


def start_process(capability: tuple[int, int]) -> None:
    import torch

    from te_precision_callbacks import reference

    torch.set_num_threads(1)
    reference.install(capability=capability)
