"""Rebuild the mechanisms of published bugs, each with a healthy twin: the diagnosis must name the bug alone.

    python benchmarks/proof/external.py [--names PART ...] [--folder FOLDER]

Each mechanism trains in FP8 and in BF16, under a session and under a watch, as ``te-precision run --watch`` begins it.
It is found if a finding, or a note, of a right rule begins in a right layer. The twin must have no warning, no error,
and no note of these rules.

``--folder`` keeps the recorded trainings; a further call checks them without training. ``--page`` writes the table
into benchmarks/proof/README.md.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checking import has_layer, write_into_page
from mechanisms import MECHANISMS, Mechanism, save_checkpoint, train
from models import RecipeName
from running import proof_parser, record

from te_precision_callbacks.diagnosis import Finding, diagnose

MODES = ("session", "watch")
SECONDS = 900
"""A training that takes longer has failed."""


@dataclass(frozen=True)
class Rebuilt:
    """A training with a mechanism, or its healthy twin.

    Attributes:
        mode: what observes it.
    """

    mechanism: str
    recipe: RecipeName
    mode: str
    broken: bool

    @property
    def name(self) -> str:
        return f"{self.mechanism}-{self.recipe}-{self.mode}-{'broken' if self.broken else 'healthy'}"


def all_rebuilt() -> Sequence[Rebuilt]:
    return [
        Rebuilt(name, recipe, mode, broken)
        for name, mechanism in MECHANISMS.items()
        for mode in MODES
        for recipe in mechanism.recipes
        for broken in (True, False)
    ]


def train_rebuilt(training: Rebuilt, log_dir: Path) -> dict[str, Any]:
    """Train in forked processes: a watch ends with its process, and imports take longer than a training."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    ranks = range(MECHANISMS[training.mechanism].ranks)
    rounds = [[context.Process(target=_train_rank, args=(training, log_dir, rank, port)) for rank in ranks]]
    if training.mechanism == "resume-without-scales":
        rounds.insert(0, [context.Process(target=_save, args=(training, log_dir))])
    for processes in rounds:
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        if any(codes):
            raise RuntimeError(f"exit codes: {codes}")
    return dataclasses.asdict(training)


def _save(training: Rebuilt, log_dir: Path) -> None:
    os.chdir(log_dir)
    save_checkpoint(training.recipe)


def _train_rank(training: Rebuilt, log_dir: Path, rank: int, port: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(MECHANISMS[training.mechanism].ranks),
        "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1",
        "TE_PRECISION_QUIET": "1",
    }
    os.chdir(log_dir)
    if training.mode == "watch":
        from te_precision_callbacks.watch import ScriptWatch

        ScriptWatch({"log_dir": str(log_dir)}).begin()
    session = log_dir if training.mode == "session" else None
    train(training.mechanism, training.recipe, broken=training.broken, session=session)


Row = dict[str, Any]
"""A checked training: ``found`` is the severity of the right finding, with its place if it is not the first, or empty;
``first`` the first finding, as text; ``silent`` whether a healthy twin is.
"""


def check(log_dir: Path, truth: Mapping[str, Any]) -> Row:
    mechanism = MECHANISMS[truth["mechanism"]]
    verdict = diagnose(log_dir)
    known = ("note", "no-low-precision") if truth["recipe"] == "none" else None  # true of each training in BF16
    findings = [finding for finding in verdict.findings if (finding.severity, finding.rule) != known]
    right = [at for at, finding in enumerate(findings) if _is_right(finding, mechanism)]
    place = f", {right[0] + 1} of {len(findings)}" if right and right[0] else ""
    return {
        **truth,
        "name": log_dir.name,
        "found": f"{findings[right[0]].severity}{place}" if right else "",
        "first": f"{findings[0].severity} {findings[0].rule}" if findings else "nothing",
        "silent": not verdict.wrong and not right,
    }


def _is_right(finding: Finding, mechanism: Mechanism) -> bool:
    return finding.rule in mechanism.rules and has_layer(finding, mechanism.layers or None)


def table(rows: Sequence[Row]) -> str:
    """A line for each mechanism, in Markdown, and a list of what is wrong."""
    lines = [
        "| what is broken | reports | session, FP8 | session, BF16 | watch, FP8 | watch, BF16 | first finding | twin |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["mechanism"] for row in rows):
        mechanism = MECHANISMS[name]
        broken = [row for row in rows if row["mechanism"] == name and row["broken"]]
        twins = [row["silent"] for row in rows if row["mechanism"] == name and not row["broken"]]
        found = {(row["mode"], row["recipe"] != "none"): row["found"] or "**no**" for row in broken}
        trained = {recipe != "none" for recipe in mechanism.recipes}
        missing = {is_fp8: "not trained" if is_fp8 in trained else "" for is_fp8 in (True, False)}
        cells = [found.get((mode, is_fp8), missing[is_fp8]) for mode in MODES for is_fp8 in (True, False)]
        reports = ", ".join(map(_link, mechanism.sources))
        first = broken[0]["first"].replace("|", "/") if broken else ""
        silent = f"{sum(twins)} of {len(twins)} silent"
        lines.append(f"| {mechanism.about} | {reports} | {' | '.join(cells)} | {first} | {silent} |")
    missed = [
        f"- {row['name']}: first finding: {row['first']}"
        for row in rows
        if (not row["found"] if row["broken"] else not row["silent"])
    ]
    return "\n".join([*lines, "", *(missed or ["All mechanisms are found, and all twins are silent."])])


def _link(source: str) -> str:
    if source.startswith("https:"):
        return f"[{source.removeprefix('https://')}]({source})"
    repository, _, number = source.partition("#")
    return f"[{source.partition('/')[2]}](https://github.com/{repository}/issues/{number})"


def main() -> None:
    parser = proof_parser(__doc__)
    parser.add_argument("--names", nargs="+", default=[""], help="only trainings whose name contains one of these")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object a training")
    options = parser.parse_args()
    trainings = [training for training in all_rebuilt() if any(part in training.name for part in options.names)]
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = (options.folder or Path(temporary)).absolute()
        truths = record(train_rebuilt, trainings, folder, processes=options.processes)
        rows = [check(folder / name, truth) for name, truth in truths.items()]
    text = table(rows)
    print(json.dumps(rows, indent=1) if options.json else text)
    if options.page:
        write_into_page("external", text)


if __name__ == "__main__":
    main()
