"""Measure the figures of README and docs, store them in ``benchmarks/figures``, and write them into the pages.

    python benchmarks/figures.py                  # measures all, about an hour on an idle machine, and writes the pages
    python benchmarks/figures.py step overflow    # these alone
    python benchmarks/figures.py --write          # only write the pages from the stored results

Each benchmark runs in its own process with its defaults, and its file is written when it is done, with the machine
and the commit. A page has a table between ``<!-- figures: NAME -->`` and ``<!-- figures: end -->``, where NAME is a
function of ``TABLES``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from in_turn import Interval
from measuring import progress

ROOT = Path(__file__).parent.parent
KEPT = Path(__file__).parent / "figures"
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")

_MARKED = re.compile(r"(?P<begin><!-- figures: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- figures: end -->)", re.DOTALL)

Case = Mapping[str, Any]


BENCHMARKS = ("stats", "step", "overflow")
"""They run with the default policy of threads: where threads wait passively, each operation of torch wakes them up."""


@dataclass(frozen=True)
class Figures:
    """Results of a benchmark.

    Attributes:
        cases: as its ``--json`` prints them; intervals are :class:`Interval`.
        commit: of this repository, with ``, changed`` if files of it had been.
    """

    cases: Sequence[Case]
    commit: str

    @property
    def where(self) -> str:
        """The machine and the commit, for below a table."""
        return f"{self.cases[0]['machine']}; commit {self.commit}"

    def case(self, name: str) -> Case:
        """A case by its name."""
        return next(case for case in self.cases if case["case"] == name)


def measured(name: str) -> None:
    """Run a benchmark and store its output."""
    progress(name)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(f"{name}.py")), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{name}.py failed with exit code {done.returncode}: see above. {name}.json is as before.")
    KEPT.mkdir(exist_ok=True)
    found = {"commit": _commit(), "cases": json.loads(done.stdout)}
    (KEPT / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _commit() -> str:
    commit, changed = (
        subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout.strip()
        for arguments in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", "te_precision_callbacks"))
    )
    return f"{commit}, changed" if changed else commit


def kept(name: str) -> Figures:
    """Return the stored results of a benchmark."""
    found = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))
    return Figures([{key: _read(value) for key, value in case.items()} for case in found["cases"]], found["commit"])


def _read(value: Any) -> Any:
    return Interval(**value) if isinstance(value, dict) and set(value) == {"value", "low", "high"} else value


# --- tables -----------------------------------------------------------------------------------------------------------


def readme() -> str:
    """Table of the README: the cost of three kinds of debugging."""
    step, overflow = kept("step"), kept("overflow")
    both = step.case("tensor and FP8 statistics")
    fused = step.case("fused, tensor and FP8 statistics")
    found = overflow.case("float32")
    rows = [
        (
            "tensor and FP8 statistics, fused path",
            _percent(fused["ours_added_percent"]),
            "",
        ),
        (
            "tensor and FP8 statistics, debug path",
            _percent(both["ours_added_percent"]),
            f"{both['te_added_percent'].value:.0f} %",
        ),
        (
            "activation overflow detection, float32",
            _percent(found["ours_added_percent"]),
            f"{found['upstream_added_percent'].value:.0f} %",
        ),
    ]
    header = ("added to a step", "here", "the same in Transformer Engine 2.20 or transformers")
    return _table(header, rows)


def stats() -> str:
    """Statistics of a tensor, in reads of it."""
    measured_last = kept("stats")
    rows = [
        (
            case["case"],
            case["ours_ms"],
            case["ours_reads"],
            case["claim"],
            case["te_ms"],
            f"{case['ratio']:.0f}",
        )
        for case in measured_last.cases
    ]
    size = " x ".join(map(str, measured_last.cases[0]["shape"]))
    header = (
        f"statistics of a {size} tensor",
        "here, ms",
        "in reads of the tensor",
        "at most",
        "Transformer Engine, ms",
        "ratio",
    )
    return _table(header, rows) + _below(measured_last)


def step() -> str:
    """Table of the cost of debugging in a step."""
    columns = {
        "every step": "case",
        "without, ms": "none_ms",
        "here, % of the step": "ours_added_percent",
        "% of its processor time": "ours_processor_percent",
        "at most": "claim",
        "Transformer Engine, %": "te_added_percent",
        "here, ns an element": "ours_ns_per_element",
        "Transformer Engine": "te_ns_per_element",
    }
    return _cases(kept("step"), columns)


def overflow() -> str:
    """Table of the cost of activation overflow detection."""
    columns = {
        "dtype": "case",
        "none, ms": "none_ms",
        "here, %": "ours_added_percent",
        "% of processor time": "ours_processor_percent",
        "at most": "claim",
        "transformers, %": "upstream_added_percent",
        "host waits here": "ours_host_waits",
        "transformers": "upstream_host_waits",
    }
    return _cases(kept("overflow"), columns)


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "stats": stats,
    "step": step,
    "overflow": overflow,
}


def _percent(interval: Interval) -> str:
    return f"{interval.value:.2g} % ({interval.low:.2g} to {interval.high:.2g})"


def _cases(found: Figures, columns: Mapping[str, str]) -> str:
    """A row for each case.

    Args:
        found: the figures.
        columns: what stands above a number -> its name in the case; some cases may lack it.

    Raises:
        KeyError: all cases lack a number.
    """
    unknown = [column for column in columns.values() if not any(column in case for case in found.cases)]
    if unknown:
        raise KeyError(f"no case has {', '.join(unknown)}; the cases are of {found.where}")
    rows = ([case.get(column) for column in columns.values()] for case in found.cases)
    return _table(tuple(columns), rows) + _below(found)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *([_cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)


def _below(figures: Figures) -> str:
    return f"\n{figures.where}.\n"


def rendered(text: str) -> str:
    """Return a page with the tables of the stored figures.

    Raises:
        KeyError: a mark names no table.
    """
    return _MARKED.sub(lambda mark: mark["begin"] + TABLES[mark["name"]]() + mark["end"], text)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to measure, of {', '.join(BENCHMARKS)}")
    parser.add_argument("--write", action="store_true", help="measure nothing")
    options = parser.parse_args(given)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"There is no benchmark {unknown[0]!r} with figures. There are {', '.join(BENCHMARKS)}.")
    for name in () if options.write else options.names or BENCHMARKS:
        measured(name)
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
