"""Plant defects at random, which the diagnosis must name.

    python benchmarks/proof/contest.py [--kinds spike nan] [--blocks 2 24] [--draws 20]
        [--only-record FOLDER | --replay FOLDER]

Each draw has a model, a recipe, a random place and a random start. A defect is found if the first finding is an error
or a warning of a rule that is right for its kind, and the finding's first layer is in the right block. Every other draw
has statistics in every second step; the rest have the default config.

``--only-record`` keeps the recorded trainings, and ``--replay`` judges them again without training. ``--page`` writes
the table into docs/proof.md.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from defects import CALIBRATION, JUDGED, KINDS, TABLE, Defect
from judging import as_json, contest_table, misses, row_of, write_into_page
from models import BLOCK_COUNTS, MODELS
from running import Job, is_trained, parser_of, record


def main(arguments: list[str] | None = None) -> int:
    """Gives the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--draws", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--blocks", nargs="+", type=int, default=BLOCK_COUNTS, metavar="COUNT", help="of the models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--calibration", action="store_true", help="the seeds that thresholds may be chosen by")
    parser.add_argument("--freq", type=int, help="statistics in every so many steps, in all draws")
    options = parser.parse_args(arguments)
    first = CALIBRATION if options.calibration else JUDGED
    drawn = {
        f"{kind}-{number}": Defect.drawn(
            kind,
            first + number,
            freq=options.freq or (2 if number % 2 else None),
            counts=options.blocks,
            among=options.models,
        )
        for number in range(options.draws)
        for kind in options.kinds
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.only_record or options.replay or Path(temporary)
        if options.replay is None:
            jobs = [
                Job("defect", name, dataclasses.asdict(each), each.recipe in ("mxfp8", "nvfp4"))
                for name, each in drawn.items()
            ]
            record(jobs, folder, processes=options.processes)
        if options.only_record:
            return 0
        rows = [row_of(folder / name) for name in drawn if is_trained(folder / name)]
    rows.sort(key=lambda row: KINDS.index(row.kind))
    table = "\n\n".join(contest_table(rows, by) for by in ("kind", "blocks"))
    missed = misses(rows)
    other = [row.name for row in rows if row.as_live is False]
    if other:
        print(f"The session had other findings than the replay: {', '.join(other)}", file=sys.stderr)
    if options.json:
        print(json.dumps(as_json(rows), indent=1))
    else:
        print(table, "\n".join(missed), sep="\n\n")
    if options.page:
        write_into_page("defects", _about())
        write_into_page("contest", "\n\n".join([table, "\n".join(f"- {line}" for line in missed)]))
    return 0


def _about() -> str:
    """Return a Markdown table of the planted defects."""
    lines = [f"| {kind} | {TABLE[kind].about} | {', '.join(sorted(TABLE[kind].rules))} |" for kind in KINDS]
    return "\n".join(["| defect | what is planted | right rules |", "|---|---|---|", *lines])


if __name__ == "__main__":
    sys.exit(main())
