"""An assertion in a kernel of the training itself: its error reaches training as it is, and nobody blames the session.

The GPU can run nothing any more in a process in which that has happened, so each way to meet the error is a process.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from gpu_parts.rows import CannotRunHereError, Rows, Settings, brief, run_part
from te_precision_callbacks.session import InspectSession

WAYS = ("a session", "a session and overflow detection")
_BLAME = ("Precision debugging failed", "Triton kernel cannot be used", "detection failed", "DetectionFailedError")


class Model(torch.nn.Module):
    """An embedding, whose kernel asserts that the indices are words."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        te = settings.transformer_engine()
        self.words = torch.nn.Embedding(16, 64, device=settings.device, dtype=torch.bfloat16)
        self.layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device=settings.device)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.words(indices))
        return result


def meet(settings: Settings, way: str) -> dict[str, str]:
    """The exception that training gets, and what was logged."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("te_precision_callbacks").addHandler(handler)
    model = Model(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raised = "nothing"
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.ExitStack() as stack,
        ):
            keywords = {"debug": "activation_overflow"} if "overflow" in way else {}
            session = stack.enter_context(InspectSession(model=model, log_dir=folder, **keywords))  # type: ignore[arg-type]
            for number in range(3):
                words = torch.full((32,), 99 if number == 1 else 3, device=settings.device)
                model(words).float().square().mean().backward()
                optimizer.step()
                session.step()
            torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc()
        raised = f"{type(error).__module__}.{type(error).__name__}: {brief(str(error))}"
    return {"raised": raised, "logged": stream.getvalue()}


def check(settings: Settings, rows: Rows) -> None:
    if not settings.on_gpu:
        raise CannotRunHereError("needs a GPU")
    for way in WAYS:
        with rows.of(way), tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "found.json")
            command = [sys.executable, "-m", "gpu_parts.lost_gpu", "--way", way, str(path), settings.backend]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not path.exists():
                lines = done.stderr.strip().splitlines() or ["it said nothing"]
                raise RuntimeError(f"status {done.returncode}: {lines[-1]}")
            found = json.loads(path.read_text(encoding="utf-8"))
            its_own = found["raised"].startswith("torch.") or found["raised"].startswith("builtins.RuntimeError")
            rows.add(
                f"{way}: what training gets",
                found["raised"][:120],
                expected="torch's own: device-side assert",
                ok=its_own and "assert" in found["raised"],
            )
            blamed = [text for text in _BLAME if text in found["logged"]]
            rows.equal(f"{way}: messages that blame the session", len(blamed), 0, note=", ".join(blamed))


def _in_a_process_of_its_own() -> None:
    way, path, backend = sys.argv[2:5]
    settings = Settings(torch.device("cuda"), small=True, backend=backend)  # type: ignore[arg-type]
    Path(path).write_text(json.dumps(meet(settings, way)), encoding="utf-8")
    os._exit(0)  # what ends with the process would meet the error again


if __name__ == "__main__":
    if sys.argv[1:2] == ["--way"]:
        _in_a_process_of_its_own()
    else:
        run_part("lost_gpu", check)
