"""What dumping four tensors in every step adds to a training step: this project's DumpTensors beside upstream's.

    python benchmarks/dumps.py [--json] [--layers 2 --hidden 256 --sequence 256 --batch 8] [--seconds 240]

The model of examples/byte_lm.py trains in FP8, and of its first layer the activation, the weight, the gradient and the
output are dumped in every step, in high precision and, where they are quantized, quantized. What is counted:
  none  the step without debugging.
  ours  the step in an InspectSession, to the end of session.step(): safetensors, decoded internals, written beside.
  te    the step with Transformer Engine's DumpTensors under plain nvidia-dlfw-inspect, to the end of debug_api.step():
        a pickle, written within the step.
  *_added_ms  what that is above a step of `none` beside it: one process and one model, a step of each after one that
              warms up. The median of such pairs with its interval, see in_turn.py.
  ours_left_ms  what is left to write after these two steps, for each of them: the time until it is on the disk. Where
                training is faster than the disk for longer, a step waits for it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from measuring import report
from step import EndOfStep, Run, Training, measure, of_training, with_upstream

TENSORS = ["activation", "weight", "gradient", "output"]
COLUMNS = ("case", "none_ms", "ours_added_ms", "te_added_ms", "ratio", "ours_left_ms", "bytes_per_step")

_STEPS = 2
"""Steps in a session: one that warms up, and one that is timed."""


def config(layer: str) -> dict[str, Any]:
    """Four tensors of one layer in every step."""
    options = {"enabled": True, "tensors": TENSORS, "high_precision_tensor": True, "quantized_tensor": True}
    return {
        "dumps": {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": f"^{layer}$".replace(".", r"\.")},
            "transformer_engine": {"DumpTensors": options},
        }
    }


class Ours:
    """A session of this project, and what it leaves to be written.

    Attributes:
        left: milliseconds from the last step of each session until everything is on the disk, for each of its steps.
        written: bytes on the disk for each step.
    """

    def __init__(self, model: torch.nn.Module, path: Path) -> None:
        self._model = model
        self._path = path
        self.left: list[float] = []
        self.written = 0.0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[EndOfStep]:
        from te_precision_callbacks.session import InspectSession

        with tempfile.TemporaryDirectory() as folder:
            with InspectSession(self._path, model=self._model, log_dir=folder) as session:
                yield session.step
                start = time.perf_counter()
                if session._run is not None:
                    session._run.observation.recorder.flush()
                self.left.append(1e3 * (time.perf_counter() - start) / _STEPS)
            sizes = [file.stat().st_size for file in Path(folder).rglob("*.safetensors")]
            self.written = sum(sizes) / _STEPS


def run_all(training: Training, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The one case."""
    from te_precision_callbacks.layers.naming import named_te_modules

    model = training.model
    path = folder / "dumps.yaml"
    path.write_text(yaml.safe_dump(config(named_te_modules(model)[0].layers[0].name)))
    ours = Ours(model, path)
    runs: dict[str, Run] = {"ours": ours, "te": lambda: with_upstream(model, path, "eager")}
    found = measure(training, runs, options.seconds, options.least)
    added = {name: pairs.added() for name, pairs in found.items()}
    return [
        {
            "case": "four tensors, every step",
            "none_ms": found["ours"].base(),
            **{f"{name}_added_ms": value for name, value in added.items()},
            "ratio": added["te"].value / added["ours"].value,
            "ours_left_ms": statistics.median(ours.left),
            "bytes_per_step": round(ours.written),
            "pairs": len(found["ours"].ways),
        }
    ]


def main(given: list[str] | None = None) -> None:
    cases, as_json = of_training(given, __doc__, run_all, layers=2, seconds=240)
    notes = "Added: medians of pairs of steps, with their 95 % intervals. ratio: te's to ours."
    report(cases, COLUMNS, notes, as_json=as_json)


if __name__ == "__main__":
    main()
