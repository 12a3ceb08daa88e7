"""Train healthy models of all shapes: the diagnosis must find no problem.

    python benchmarks/proof/silence.py [--names PART ...] [--blocks 2 24] [--folder FOLDER]

Each warning and each error is a false alarm; notes are counted. ``--folder`` keeps the recorded trainings; a further
call checks them without training. ``--page`` writes the table into benchmarks/proof/README.md. The exit code is 1 if
there is a false alarm.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from checking import write_into_page
from healthy import all_healthy, train_healthy
from models import BLOCK_COUNTS
from running import proof_parser, record

from te_precision_callbacks.diagnosis import diagnose


def main() -> int:
    parser = proof_parser(__doc__)
    parser.add_argument("--names", nargs="+", default=[""], help="only trainings whose name contains one of these")
    parser.add_argument("--blocks", nargs="+", type=int, default=BLOCK_COUNTS, metavar="COUNT", help="of the models")
    options = parser.parse_args()
    trainings = [
        training
        for training in all_healthy()
        if any(part in training.name for part in options.names) and training.count in options.blocks
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        truths = record(train_healthy, trainings, folder, processes=options.processes)
        verdicts = {name: diagnose(folder / name) for name in truths}
    lines = ["| training | runs | with a false alarm | notes |", "|---|---|---|---|"]
    for shape in [*dict.fromkeys(truth["shape"] for truth in truths.values()), "all"]:
        group = [verdicts[name] for name, truth in truths.items() if shape in ("all", truth["shape"])]
        alarms = sum(bool(verdict.wrong) for verdict in group)
        notes = sum(len(verdict.findings) - len(verdict.wrong) for verdict in group)
        lines.append(f"| {shape} | {len(group)} | {alarms} | {notes} |")
    false_alarms = [
        f"- {name}: {finding.severity} {finding}" for name, verdict in verdicts.items() for finding in verdict.wrong
    ]
    text = "\n".join([*lines, "", *(false_alarms or ["There are no false alarms."])])
    print(text)
    if options.page:
        write_into_page("silence", text)
    return 1 if false_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
