"""Run recorded trainings, in one process for each GPU that the reference backend emulates.

    record([Job("defect", "spike-3", {...}), ...], folder, processes=2)

A job is a training, given as plain data. Each records itself into a folder of its name, and writes the truth
about itself there as ``truth.json``. Recorded trainings are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

TRUTH = "truth.json"


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        kind: what trains it.
        name: of its folder.
        about: all that makes it, for JSON.
        blackwell: whether it needs a GPU of compute capability 10.0.
    """

    kind: Literal["defect", "healthy"]
    name: str
    about: Mapping[str, Any]
    blackwell: bool


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of both proofs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    folders = parser.add_mutually_exclusive_group()
    folders.add_argument("--only-record", type=Path, metavar="FOLDER", help="train, and judge nothing")
    folders.add_argument("--replay", type=Path, metavar="FOLDER", help="judge what was recorded there")
    parser.add_argument("--processes", type=int, default=2, help="trainings at once (default: 2)")
    parser.add_argument("--page", action="store_true", help="write the table into docs/proof.md")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object a training")
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


def record(jobs: Sequence[Job], folder: Path, *, processes: int) -> None:
    """All jobs, in that many processes at once."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [job for job in jobs if not is_trained(folder / job.name)]
    shares: list[list[Job]] = []
    for blackwell in (False, True):
        alike = [job for job in left if job.blackwell == blackwell]
        count = min(processes, len(alike))
        shares.extend(alike[at::count] for at in range(count))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    running: list[subprocess.Popen[bytes]] = []
    for share in shares:
        while len(running) >= processes:
            running = [each for each in running if each.poll() is None]
            time.sleep(0.2)
        given = json.dumps([asdict(job) for job in share]).encode()
        child = subprocess.Popen([sys.executable, __file__, str(folder)], stdin=subprocess.PIPE, env=environment)
        with cast(IO[bytes], child.stdin) as stdin:
            stdin.write(given)
        running.append(child)
    for child in running:
        child.wait()


def is_trained(log_dir: Path) -> bool:
    """Return whether a training was recorded to its end; print a failure."""
    if not (log_dir / TRUTH).exists():
        return False
    failed = truth_of(log_dir).get("failed")
    if failed:
        print(f"{log_dir.name} could not be trained: {failed}", file=sys.stderr)
    return not failed


def truth_of(log_dir: Path) -> dict[str, Any]:
    """Return the truth about a recorded training."""
    found: dict[str, Any] = json.loads((log_dir / TRUTH).read_text())
    return found


def _train(job: Job, log_dir: Path) -> dict[str, Any]:
    if job.kind == "defect":
        from defects import Defect
        from planting import train_with_defect

        return train_with_defect(Defect(**job.about), log_dir)
    from healthy import Healthy, train_healthy

    return train_healthy(Healthy(**job.about), log_dir)


def main() -> None:
    """Trains the jobs that stand on the standard input, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    jobs = [Job(**row) for row in json.loads(sys.stdin.read())]
    import torch

    from te_precision_callbacks import reference

    torch.set_num_threads(1)
    reference.install(capability=(10, 0) if jobs[0].blackwell else (9, 0))
    for job in jobs:
        log_dir = folder / job.name
        log_dir.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        try:
            truth = _train(job, log_dir)
        except Exception:
            traceback.print_exc()
            truth = {"failed": traceback.format_exc(limit=-3)}
        (log_dir / TRUTH).write_text(json.dumps({**truth, "seconds": round(time.monotonic() - began, 2)}, indent=1))
        print(f"{job.name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
