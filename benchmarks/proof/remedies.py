"""Apply each remedy to its planted defect, in three families of models: does the loss recover, and is the finding gone?

    python benchmarks/proof/remedies.py [--names PART ...] [--folder FOLDER]

Each training has the same data and the same seed without the defect, with it, and with it and the remedy. Where the
remedy is to take the defect out, the remedied training is the healthy one.

``--folder`` keeps the recorded trainings; a further call checks them without training. ``--page`` writes the table
into benchmarks/proof/README.md.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from checking import write_into_page
from models import ModelName, RecipeName, build
from remedied import CASES, FREQ, RATE, SEED, STEPS, TAKEN_OUT, Case, Change
from running import proof_parser, record, with_statistics_every

from te_precision_callbacks.session import InspectSession

FAMILIES: Mapping[ModelName, str] = {"bytes": "language model", "gpt": "GPT", "vit": "vision transformer"}
LASTS = 4
"""The last losses, whose mean is compared."""

NEAR = 0.1
"""A loss is near the healthy one if it is at most this share of the healthy training's progress above it."""

ALL = {
    case.healthy: Case("", "", lambda _: None, {}, case.recipe, case.precision, case.count) for case in CASES.values()
}
ALL |= CASES


@dataclass(frozen=True)
class Training:
    case: str
    model: ModelName

    @property
    def name(self) -> str:
        return f"{self.case}-{self.model}"

    @property
    def recipe(self) -> RecipeName:
        return ALL[self.case].recipe


def train(training: Training, log_dir: Path) -> dict[str, Any]:
    """Train with the defect, and with it and each remedy; or healthy."""
    case = ALL[training.case]
    changes = [None, *(change for change in case.remedies.values() if change is not TAKEN_OUT)]
    return {"done": [_run(case, training.model, change, log_dir / str(at)) for at, change in enumerate(changes)]}


def _run(case: Case, model: ModelName, remedy: Change | None, log_dir: Path) -> dict[str, Any]:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    built = build(model, case.recipe, case.precision, SEED, rate=RATE, count=case.count)
    inside = case.plant(built)
    config = with_statistics_every(FREQ, gemms=case.gemms) or {}
    section = None if remedy is None else remedy(built)
    config |= section if isinstance(section, dict) else {}
    gc.collect()  # an optimizer that was replaced
    losses: list[float] = []
    options: Any = {"log_dir": log_dir, "statistics_log": "off"}
    context = inside if isinstance(inside, contextlib.AbstractContextManager) else contextlib.nullcontext()
    with context, InspectSession(config, model=built.model, **options) as session:
        while built.step < STEPS:
            losses.append(built.train_step())
            session.log({"loss": losses[-1], "lr": built.optimizer.param_groups[0]["lr"]})
            session.step()
    FP8GlobalStateManager.reset()
    return {"first": losses[0], "last": mean(losses[-LASTS:]), "rules": [finding.rule for finding in session.findings]}


Row = dict[str, Any]
"""A remedy in a family: ``healthy``, ``broken`` and ``remedied`` are last losses; ``found`` and ``gone`` tell of the
rule's finding; ``hurts`` and ``holds`` compare the losses with the healthy one."""


def check(name: str, model: ModelName, truths: Mapping[str, Any]) -> Sequence[Row]:
    """A row for each remedy; none if a training is missing."""
    case = CASES[name]
    names = f"{case.healthy}-{model}", f"{name}-{model}"
    if not truths.keys() >= {*names}:  # one has failed
        return []
    (healthy,), (broken, *remedied) = (truths[trained]["done"] for trained in names)
    most = healthy["last"] + NEAR * (healthy["first"] - healthy["last"])
    rows = []
    for about, change in case.remedies.items():
        done = healthy if change is TAKEN_OUT else remedied.pop(0)
        row = {"case": name, "remedy": about, "model": model, "first": healthy["first"]}
        row |= {"healthy": healthy["last"], "broken": broken["last"], "remedied": done["last"]}
        row |= {"hurts": not broken["last"] <= most, "holds": done["last"] <= most}
        rows.append({**row, "found": case.rule in broken["rules"], "gone": case.rule not in done["rules"]})
    return rows


def table(rows: Sequence[Row]) -> str:
    """A line for each remedy, in Markdown; rule and defect are in the first line of each defect."""
    families = [FAMILIES[model] for model in dict.fromkeys(row["model"] for row in rows)]
    heads = ["rule", "what is planted", "remedy", *families, "loss", "finding"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    last = ""
    for case, remedy in dict.fromkeys((row["case"], row["remedy"]) for row in rows):
        planted = ["", ""] if case == last else [CASES[case].rule, CASES[case].about]
        last = case
        group = [row for row in rows if (row["case"], row["remedy"]) == (case, remedy)]
        losses = ["{healthy:.2f} / {broken:.2f} / {remedied:.2f}".format_map(row) for row in group]
        hurt, held = ([row["model"] for row in group if row[key]] for key in ("hurts", "holds"))
        loss = f"recovers in {len({*hurt} & {*held})} of {len(hurt)}" if hurt else "is not hurt"
        loss += f"; **worse** in {harmed}" if (harmed := len(group) - len({*hurt} | {*held})) else ""
        found = sum(row["found"] for row in group)
        gone = sum(row["found"] and row["gone"] for row in group)
        cells = [*planted, remedy, *losses, loss, f"gone in {gone} of {found}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = proof_parser(__doc__)
    parser.add_argument("--names", nargs="+", default=[""], help="only defects whose name contains one of these")
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object a remedy and family")
    options = parser.parse_args()
    names = [name for name in CASES if any(part in name for part in options.names)]
    needed = dict.fromkeys([*(CASES[name].healthy for name in names), *names])
    trainings = [Training(name, model) for name in needed for model in options.models]
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        truths = record(train, trainings, folder, processes=options.processes)
        rows = [row for name in names for model in options.models for row in check(name, model, truths)]
    text = table(rows)
    print(json.dumps(rows, indent=1) if options.json else text)
    if options.page:
        write_into_page("remedies", text)


if __name__ == "__main__":
    main()
