"""What planning a large model costs: seconds and memory of ``te-precision check`` on 20,000 layers.

    python benchmarks/plan.py [--json] [--layers 20000] [--recipe fp8_current_scaling]

  build       making the model on the meta device, which is the cost of its own code and of Transformer Engine's.
  check       planning the products, findings and features.
  rows        folding equal layers into rows, and printing them.
  speed       what --speed adds: expected times and advice, and printing them.
The memory is what the process has grown by in check and rows, behind the imports and the model.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import resource
import sys
import time
from typing import Any

import torch
from measuring import arguments, machine, progress, report

from te_precision_callbacks import reference

COLUMNS = ("layers", "build_s", "check_s", "rows_s", "speed_s", "added_mib", "lines")


def case_of(layers: int, recipe: str) -> dict[str, Any]:
    """The cost of each part, for a model of so many Linear layers, all of them watched."""
    import transformer_engine.pytorch as te

    from te_precision_callbacks import load_config
    from te_precision_callbacks.check import check_model
    from te_precision_callbacks.check.printing import show
    from te_precision_callbacks.speed import device_named
    from te_precision_callbacks.speed.estimate import Step, estimate_step
    from te_precision_callbacks.speed.printing import show_step

    times = [time.perf_counter()]
    with torch.device("meta"):
        model = torch.nn.ModuleList(te.Linear(1024, 1024, device="meta") for _ in range(layers))
    times.append(time.perf_counter())
    before = peak_mib()
    checked = check_model(model, load_config(None), recipe=recipe, tokens=4096)
    times.append(time.perf_counter())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show(checked, "benchmarks.plan:case_of", "meta")
    times.append(time.perf_counter())
    with contextlib.redirect_stdout(io.StringIO()):
        device = device_named("b300" if recipe in ("mxfp8", "nvfp4") else "h200")
        show_step(estimate_step(Step(checked.coverage, checked.recipe), device))
    times.append(time.perf_counter())
    build, check, rows, speed = (after - start for start, after in itertools.pairwise(times))
    return {
        "layers": layers,
        "build_s": build,
        "check_s": check,
        "rows_s": rows,
        "speed_s": speed,
        "added_mib": peak_mib() - before,
        "lines": len(printed.getvalue().splitlines()),
    }


def peak_mib() -> float:
    """The most memory that the process has had, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=20_000, help="the layers of the model (default: 20,000)")
    parser.add_argument("--recipe", default="fp8_current_scaling", help="as of te-precision check")
    options = parser.parse_args(given)
    reference.install_where_needed()
    described = machine(torch.device("cpu"))
    progress(described) if options.json else print(described, end="\n\n")
    cases = [{"case": options.recipe, **case_of(options.layers, options.recipe), "machine": described}]
    report(cases, COLUMNS, "Seconds; added_mib: memory behind the imports and the model.", as_json=options.json)


if __name__ == "__main__":
    main()
