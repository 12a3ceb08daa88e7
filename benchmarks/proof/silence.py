"""Train healthy models of all shapes: the diagnosis must find no problem.

    python benchmarks/proof/silence.py [--only-record FOLDER | --replay FOLDER] [--names PART ...] [--blocks 2 24]

Each warning and each error is a false alarm; notes are counted. ``--only-record`` keeps the recorded trainings, and
``--replay`` judges them again without training. ``--page`` writes the table into docs/proof.md. The exit code is 1 if
there is a false alarm.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from healthy import all_healthy
from judging import as_json, silence_of, silence_table, write_into_page
from models import BLOCK_COUNTS
from running import Job, is_trained, parser_of, record


def main(arguments: list[str] | None = None) -> int:
    """Gives the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--names", nargs="+", default=[""], help="only trainings whose name contains one of these")
    parser.add_argument("--blocks", nargs="+", type=int, default=BLOCK_COUNTS, metavar="COUNT", help="of the models")
    options = parser.parse_args(arguments)
    trainings = [
        each
        for each in all_healthy()
        if any(part in each.name for part in options.names) and each.count in options.blocks
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.only_record or options.replay or Path(temporary)
        if options.replay is None:
            jobs = [
                Job("healthy", each.name, dataclasses.asdict(each), each.recipe in ("mxfp8", "nvfp4"))
                for each in trainings
            ]
            record(jobs, folder, processes=options.processes)
        if options.only_record:
            return 0
        found = [silence_of(folder / each.name) for each in trainings if is_trained(folder / each.name)]
    alarms = [f"{each.name}: {alarm}" for each in found for alarm in each.alarms]
    table = silence_table(found)
    lines = "\n".join(f"- {alarm}" for alarm in alarms) or "There are no false alarms."
    if options.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        print(table, lines, sep="\n\n")
    if options.page:
        write_into_page("silence", f"{table}\n\n{lines}")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
