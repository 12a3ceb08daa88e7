"""The products that a session counts in a step on the GPU, against those on the CPU, with each kind of checkpoint.

On a GPU the backward runs in a thread of its own, and other kernels run, but the products and their sizes are the same.
On a CPU two processes are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_parts.coverage_rows import all_counted
from gpu_parts.rows import Rows, Settings, run_part
from te_precision_callbacks.reference.inherited import ENVIRONMENT_VARIABLE


def _both(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is counted here, and at the same time in a process that sees no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [sys.executable, "-m", "gpu_parts.coverage_rows", str(path), "--device=cpu", "--backend=reference"]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            here = all_counted(settings)
        finally:
            _, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"on the CPU: {(errors.strip().splitlines() or ['?'])[-1]}")
        return here, json.loads(path.read_text(encoding="utf-8"))


def check(settings: Settings, rows: Rows) -> None:
    with rows.of("the products on the CPU"):
        here, expected = _both(settings)
        for name, found in here.items():
            right = expected[name]
            if isinstance(found, str) or isinstance(right, str):
                note = f"here: {found}; CPU: {right}" if isinstance(right, str) else str(found)
                rows.add(name, "failed", expected="ran", ok=False, note=note[:300])
                continue
            wrong = [one for one in found if one not in right] + [one for one in right if one not in found]
            note = "; ".join(map(str, wrong[:4]))
            rows.add(
                f"{name}: products that are not those of the CPU", len(wrong), f"of {len(right)}", 0, not wrong, note
            )
            rows.measured(f"{name}: multiply-adds", sum(one[8] for one in found))


if __name__ == "__main__":
    run_part("coverage", check)
