"""Plant defects at random, which the diagnosis must name.

    python benchmarks/proof/contest.py [--kinds spike nan] [--blocks 2 24] [--draws 20] [--folder FOLDER]

Each draw has a model, a recipe, a random place and a random start. A defect is found if the first finding is an error
or a warning of a rule that is right for its kind, and the finding's first layer is in the right block. Every other draw
has statistics in every second step; the rest have the default config.

``--folder`` keeps the recorded trainings; a further call checks them without training. ``--page`` writes the tables
into benchmarks/proof/README.md.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checking import check_defect, contest_table, write_into_page
from defects import CALIBRATION, JUDGED, KINDS, TABLE, Defect, train_with_defect
from models import BLOCK_COUNTS, MODELS
from running import proof_parser, record


def main() -> None:
    parser = proof_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--blocks", nargs="+", type=int, default=BLOCK_COUNTS, metavar="COUNT", help="of the models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--calibration", action="store_true", help="the seeds that thresholds may be chosen by")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object a training")
    options = parser.parse_args()
    first = CALIBRATION if options.calibration else JUDGED
    drawn = [
        Defect.drawn(kind, first + number, freq=2 if number % 2 else None, counts=options.blocks, among=options.models)
        for kind in KINDS
        for number in range(options.draws if kind in options.kinds else 0)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        truths = record(train_with_defect, drawn, folder, processes=options.processes)
        rows = [check_defect(folder / name, truth) for name, truth in truths.items()]
    by_blocks = contest_table(sorted(rows, key=lambda row: row["blocks"]), "blocks", "blocks")
    misses = [
        "- {name} ({model} of {blocks} blocks, {recipe}): {truth}; first: {first}".format_map(row)
        for row in rows
        if not row["right"]
    ]
    text = "\n\n".join([contest_table(rows, "kind", "defect"), by_blocks, "\n".join(misses)])
    print(json.dumps(rows, indent=1) if options.json else text)
    if options.page:
        kinds = [f"| {kind} | {TABLE[kind].about} | {', '.join(sorted(TABLE[kind].rules))} |" for kind in KINDS]
        write_into_page("defects", "\n".join(["| defect | what is planted | right rules |", "|---|---|---|", *kinds]))
        write_into_page("contest", text)


if __name__ == "__main__":
    main()
