"""How much of real traces the tables of names know: a line for each trace of torch.profiler in a folder.

    python benchmarks/traces.py FOLDER [--page docs/speed-traces.md]

FOLDER has files .json and .json.gz, such as test traces of other projects; docs/speed-traces.md names those that were
measured. With --page the table replaces the one in the page.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from te_precision_callbacks.speed.trace import MeasuredStep, TraceError, measure, read_trace

BEGIN, END = "<!-- begin: benchmarks/traces.py -->\n", "<!-- end: benchmarks/traces.py -->\n"

HEAD = (
    "| trace | device | kernels, ms | GEMM, formats | largest other kinds | unknown | read, s |",
    "|---|---|---:|---|---|---:|---:|",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    paths = sorted(path for path in options.folder.rglob("*") if path.name.endswith((".json", ".json.gz")))
    lines = [*HEAD, *rows(options.folder, paths)]
    print("\n".join(lines))
    if options.page is not None:
        text = options.page.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        options.page.write_text(
            f"{before}{BEGIN}\n{chr(10).join(lines)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8"
        )


def rows(folder: Path, paths: Iterable[Path]) -> Iterator[str]:
    """A row for each trace."""
    for path in paths:
        name = str(path.relative_to(folder)).removesuffix(".gz").removesuffix(".json")
        started = time.perf_counter()
        try:
            trace = read_trace(path)
            step = measure(trace)
        except TraceError as error:
            yield f"| {name} | | | {str(error).replace(str(path), 'the file').replace('|', '/')} | | | |"
            continue
        seconds = time.perf_counter() - started
        if not step.on_device:
            yield f"| {name} | CPU alone | | | | | {seconds:.1f} |"
            continue
        count = max(1, len(step.iterations))
        formats = sorted({row.format or "not said" for row in step.products if row.kind == "gemm"})
        gemm = f"{share(step, ['gemm'])}: {', '.join(formats)}" if formats else ""
        named = [kind for kind in dict.fromkeys(kind for kind, _ in step.by_kind()) if kind not in ("gemm", "unknown")]
        others = ", ".join(f"{kind} {share(step, [kind])}" for kind in named[:3])
        unknown = f"{100 * step.unassigned_share:.2f} %"
        device = trace.device or "not said"
        yield f"| {name} | {device} | {step.work_ms * count:.2f} | {gemm} | {others} | {unknown} | {seconds:.1f} |"


def share(step: MeasuredStep, kinds: list[str]) -> str:
    """The share of kinds in the time of all kernels."""
    ms = sum(row.ms for row in step.products if row.kind in kinds)
    return f"{100 * ms / step.work_ms:.0f} %" if step.work_ms else "unknown"


if __name__ == "__main__":
    main()
