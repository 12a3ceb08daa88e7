"""Write the stored results of ``benchmarks/figures`` into README.md and benchmarks/README.md.

    python benchmarks/stats.py --json > benchmarks/figures/stats.json
    python benchmarks/step.py --json > benchmarks/figures/step.json
    python benchmarks/step.py overflow --json > benchmarks/figures/overflow.json
    python benchmarks/figures.py

A page has a table between ``<!-- figures: NAME -->`` and ``<!-- figures: end -->``, where NAME is a key of ``TABLES``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import stats
import step
from measuring import Case, Interval, table, table_of_cases

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")

_MARKED = re.compile(r"(?P<begin><!-- figures: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- figures: end -->)", re.DOTALL)


def stored(name: str) -> list[Case]:
    """Return the stored cases of a benchmark, with their intervals."""
    text = Path(__file__).with_name("figures").joinpath(f"{name}.json").read_text(encoding="utf-8")

    def as_interval(data: dict[str, float]) -> Interval | dict[str, float]:
        return Interval(**data) if set(data) == {"value", "low", "high"} else data

    cases: list[Case] = json.loads(text, object_hook=as_interval)
    return cases


def _all_cases(name: str, columns: Mapping[str, str]) -> str:
    return table_of_cases(stored(name), columns)


def readme() -> str:
    """The cost of three kinds of debugging, for the README."""
    cases = {case["case"]: case for name in ("step", "overflow") for case in stored(name)}
    shown = {
        "fused, tensor and FP8 statistics": "tensor and FP8 statistics, fused path",
        "tensor and FP8 statistics": "tensor and FP8 statistics, debug path",
        "float32": "activation overflow detection, float32",
    }
    rows = []
    for name, title in shown.items():
        ours, upstream = cases[name]["ours_added_percent"], cases[name].get("upstream_added_percent")
        percent = f"{ours.value:.2g} % ({ours.low:.2g} to {ours.high:.2g})"
        rows.append((title, percent, "" if upstream is None else f"{upstream.value:.0f} %"))
    return table(("added to a step", "here", "the same in Transformer Engine 2.20 or transformers"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "stats": functools.partial(_all_cases, "stats", stats.COLUMNS),
    "step": functools.partial(_all_cases, "step", step.COLUMNS),
    "overflow": functools.partial(_all_cases, "overflow", step.COLUMNS),
}


def rendered(text: str) -> str:
    """Return a page with the tables of the stored figures.

    Raises:
        KeyError: a mark names no table.
    """
    return _MARKED.sub(lambda mark: f"{mark['begin']}{TABLES[mark['name']]()}\n{mark['end']}", text)


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
