"""DumpTensors: four tensors of a layer in each of some steps, read back and compared with the tensors themselves.

And how long training stops in the first dump, in which torch allocates page-locked memory, and in the others.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_parts.rows import Rows, Settings, run_part
from gpu_parts.waits import HostWaits
from te_precision_callbacks import dumps
from te_precision_callbacks.dumps.budget import Limits
from te_precision_callbacks.dumps.contents import dump_of
from te_precision_callbacks.dumps.recording import Recorder, Wanted
from te_precision_callbacks.layers.watched import Watched
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.statistics.schedule import Schedule

TENSORS = ("activation", "weight", "gradient", "output")
CONFIG: dict[str, Any] = {
    "dumps": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "transformer_engine": {
            "DumpTensors": {
                "enabled": True,
                "tensors": list(TENSORS),
                "high_precision_tensor": True,
                "quantized_tensor": True,
            }
        },
    }
}
QUANTIZED = ("activation", "weight", "gradient")
_STEPS = 3
_FP8_ROUNDING = 2.0**-3
"""Of the largest magnitude: rounding to E5M2, the coarser format, is at most this wrong. In its first step delayed
scaling has no scale yet, but these numbers, gradients too, are within both formats."""


@contextmanager
def _kept(layer: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Copies of the four tensors of the last step, as torch's own hooks see them."""
    kept: dict[str, torch.Tensor] = {}

    def before(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        kept["activation"] = inputs[0].detach().clone()
        kept["weight"] = module.weight.detach().clone()

    def keep_gradient(gradient: torch.Tensor) -> None:
        kept["gradient"] = gradient.detach().clone()

    def after(module: Any, inputs: Any, output: torch.Tensor) -> None:
        kept["output"] = output.detach().clone()
        output.register_hook(keep_gradient)  # type: ignore[no-untyped-call]

    handles = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _train(settings: Settings, folder: str) -> list[dict[str, torch.Tensor]]:
    """Some steps with dumps: the tensors of each."""
    te = settings.transformer_engine()
    from transformer_engine.common.recipe import DelayedScaling

    size = 64 if settings.small else 2048
    layer = te.Linear(size, 2 * size, bias=False, params_dtype=torch.bfloat16, device=settings.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    seen = []
    with (
        InspectSession(CONFIG, model=torch.nn.Sequential(layer), log_dir=folder) as session,
        _kept(layer) as kept,
    ):
        for _ in range(_STEPS):
            inputs = torch.randn(size, size, device=settings.device, dtype=torch.bfloat16)
            with te.autocast(enabled=True, recipe=DelayedScaling()):
                output = layer(inputs)
            output.float().square().sum().backward()
            seen.append(dict(kept))
            inputs.zero_()  # as the next batch would: the files must have what was there before
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    return [{name: tensor.cpu() for name, tensor in step.items()} for step in seen]


def _read_back(settings: Settings, rows: Rows) -> None:
    with tempfile.TemporaryDirectory() as folder:
        seen = _train(settings, folder)
        listing = dumps.list(Path(folder) / "tensor_dumps")
        rows.equal("files", len(listing), _STEPS * len(TENSORS))
        rows.equal("files that are no dumps", len(listing.foreign), 0)
        equal, rounded, worst = 0, 0, 0.0
        for entry in listing:
            header = entry.header
            if header.iteration is None:
                continue
            found = dumps.load(entry.path)
            expected = seen[header.iteration][header.tensor]
            values = found.tensors["high_precision"].reshape(expected.shape)
            equal += values.dtype == expected.dtype and torch.equal(
                values.view(torch.int16), expected.view(torch.int16)
            )
            if header.quantized is not None:
                rounded += 1
                error = (dumps.dequantize(found).reshape(expected.shape) - expected.float()).abs().max()
                worst = max(worst, float(error / expected.float().abs().max()))
        rows.equal("tensors equal to those of the step, bit for bit", equal, _STEPS * len(TENSORS))
        rows.equal("quantized tensors", rounded, _STEPS * len(QUANTIZED))
        rows.at_most("quantized tensors, error in the largest magnitude", worst, _FP8_ROUNDING)
        size = sum(entry.size for entry in listing)
        rows.measured("bytes a step", size // _STEPS, "bytes")


def _snapshot(settings: Settings, rows: Rows) -> None:
    """A snapshot waits for nothing, lies in page-locked memory, and does not see what training does next."""
    if not settings.on_gpu:
        rows.left_out("a snapshot in page-locked memory", "needs a GPU")
        return
    values = torch.randn(4096, 4096, device=settings.device, dtype=torch.bfloat16)
    expected = values.cpu()
    dump = dump_of(values, None, tensor="activation")
    with HostWaits(settings.device) as waits:
        snapshot = dump.copied()
        values.zero_()
    rows.equal("host waits for a snapshot", waits.total, 0, note=waits.where)
    snapshot.wait()
    pinned = all(tensor.is_pinned() for tensor in snapshot.tensors.values())
    rows.equal("a snapshot in page-locked memory", pinned, True)
    rows.equal("events that a snapshot is waited for with", len(snapshot.events), 1)
    same = torch.equal(snapshot.tensors["high_precision"], expected)
    rows.equal("a snapshot has what was there before", same, True)


def _latency(settings: Settings, rows: Rows) -> None:
    """How long noting a tensor takes the host, in the recorder that a session has."""
    size = 64 if settings.small else 4096
    values = torch.randn(size, size, device=settings.device, dtype=torch.bfloat16)
    limits = Limits(max_bytes=1 << 33, max_files=1000, max_memory=1 << (26 if settings.small else 30))
    wanted = Wanted(
        Schedule.of(1, 0, -1, None),
        high_precision=True,
        quantized=False,
        internals=False,
        conditions=(),
        limits=limits,
    )
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder))
        times = []
        for iteration in range(8):
            settings.synchronize()
            start = time.perf_counter()
            recorder.note(Watched("layer", "activation", iteration, values), wanted, dict)
            times.append(1e3 * (time.perf_counter() - start))
            recorder.end_step()
        recorder.flush()
        listing = dumps.list(Path(folder) / "tensor_dumps")
        recorder.close()
    rows.equal("the recorder's files", len(listing), len(times))
    note = f"a tensor of {size} x {size} in bfloat16"
    rows.measured("the host in the first dump", times[0], "ms", note)
    rows.measured("the host in the second dump", times[1], "ms", note)
    rows.measured("the host in a later dump, median", statistics.median(times[2:]), "ms", note)


def check(settings: Settings, rows: Rows) -> None:
    for name, part in {"files": _read_back, "a snapshot": _snapshot, "the first dump": _latency}.items():
        with rows.of(name):
            part(settings, rows)


if __name__ == "__main__":
    run_part("dumps", check)
