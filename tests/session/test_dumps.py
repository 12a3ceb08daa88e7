"""DumpTensors in a session: the files after a run, and that the run is none the worse for it."""

import contextlib
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

from te_precision_callbacks import dumps
from te_precision_callbacks.config import ConfigError
from te_precision_callbacks.dumps import Dump, Header, recording
from te_precision_callbacks.session import InspectSession, ObservationError
from tests import forked, training
from tests.capability import stand_for
from tests.conftest import feature, warnings_of
from tests.full_disk import files_up_to
from tests.training import wait_until

TENSORS = ["activation", "weight", "gradient", "output", "wgrad", "dgrad"]
SCRIPT = Path(__file__).with_name("dumps_script.py")


def config(*, layers: str = "all", stats: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    dumped = feature("DumpTensors", [layers], **{"tensors": ["activation"], "high_precision_tensor": True, **options})
    for name, keys in (stats or {}).items():
        dumped["transformer_engine"][name] = {"enabled": True, **keys}
    return {"dumped": dumped}


def files(folder: Path) -> dict[str, Path]:
    root = folder / "tensor_dumps" / "rank_0"
    return {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}


def only(folder: Path) -> Dump:
    (path,) = files(folder).values()
    return dumps.load(path)


def step(session: InspectSession, net: torch.nn.Module, *batches: torch.Tensor, recipe: Any = None) -> None:
    for batch in batches:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            output = net(batch)
        output.sum().backward()
    session.step()


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (16, 32)), generator=torch.Generator().manual_seed(seed))


def test_what_is_in_the_files(tmp_path: Path) -> None:
    net = te.Linear(32, 32, bias=False)
    x, weight = random(0).requires_grad_(), net.weight.detach().clone()
    with InspectSession(config(tensors=TENSORS, quantized_tensor=True), model=net, log_dir=tmp_path) as session:
        step(session, net, x, recipe=Float8CurrentScaling())
    loaded = {name.split(".")[1]: dumps.load(path) for name, path in files(tmp_path).items()}
    assert set(files(tmp_path)) == {f"iter_000000/linear.{tensor}.safetensors" for tensor in TENSORS}
    assert torch.equal(loaded["gradient"].tensors["high_precision"], torch.ones(16, 32))
    # Current scaling, from its definition: E4M3 in the forward, the scale from the tensor's own amax.
    for tensor, values in (("activation", x.detach()), ("weight", weight)):
        tensors = loaded[tensor].tensors
        assert torch.equal(tensors["high_precision"], values)
        assert tensors["scale_inv"].item() == pytest.approx(values.abs().max().item() / 448, rel=1e-6)
        codes = (values * (1 / tensors["scale_inv"].float())).to(torch.float8_e4m3fn)
        assert torch.equal(tensors["data"].view(torch.uint8), codes.view(torch.uint8))
    for tensor in ("output", "wgrad", "dgrad"):
        assert list(loaded[tensor].tensors) == ["high_precision"], "they are not quantized"
    header = loaded["activation"].header
    assert (header.layer, header.tensor, header.iteration, header.rank) == ("linear", "activation", 0, 0)
    assert header.recipe == "fp8_current_scaling"
    assert set(header.versions) == {"torch", "transformer_engine", "te_precision_callbacks"}


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.parametrize("internals", [True, False])
def test_decoded_internals_are_in_the_files_unless_they_are_left_out(tmp_path: Path, internals: bool) -> None:
    stand_for((10, 0))
    net = te.Linear(32, 32, bias=False)
    options = {"quantized_tensor": True, "dump_quantized_internals": internals}
    with InspectSession(config(**options), model=net, log_dir=tmp_path) as session:
        step(session, net, random(0, 32, 32), recipe=MXFP8BlockScaling())
    tensors = only(tmp_path).tensors
    assert ("rowwise_block_scale_inv_values" in tensors) == internals
    if internals:  # E8M0: the exponent, biased by 127
        codes = tensors["rowwise_block_scale_inv"].view(torch.uint8)
        assert torch.equal(tensors["rowwise_block_scale_inv_values"], 2.0 ** (codes.float() - 127))


def test_micro_batches_evaluations_and_recomputations(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    batches = [random(seed).requires_grad_() for seed in range(3)]
    with InspectSession(config(tensors=["activation", "weight"]), model=net, log_dir=tmp_path) as session:
        step(session, net, *batches[:2])
        with torch.no_grad():
            net(random(7))
        net.eval()
        net(random(8))
        net.train()
        te.checkpoint(net, batches[2]).sum().backward()
        session.step()
        torch.utils.checkpoint.checkpoint(net, batches[1], use_reentrant=False).sum().backward()
        session.step()
    result = files(tmp_path)
    assert set(result) == {
        "iter_000000/linear.activation.safetensors",
        "iter_000000/linear.activation.mb1.safetensors",
        "iter_000000/linear.weight.safetensors",
        *(f"iter_00000{i}/linear.{tensor}.safetensors" for i in (1, 2) for tensor in ("activation", "weight")),
    }
    places = (("0/linear.activation", 0), ("0/linear.activation.mb1", 1), ("1/linear.activation", 0))
    for (name, micro_batch), batch in zip(places, batches, strict=True):
        dump = dumps.load(result[f"iter_00000{name}.safetensors"])
        assert torch.equal(dump.tensors["high_precision"], batch.detach())
        assert dump.header.micro_batch == micro_batch


def train(net: torch.nn.Module, session: InspectSession, steps: int) -> list[torch.Tensor]:
    losses = []

    def loss(number: int) -> torch.Tensor:
        losses.append(net(random(number, 128, 256).requires_grad_()).square().mean())
        return losses[-1]

    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    training.train(session, net, steps, optimizer, recipe=DelayedScaling(), loss=loss)
    return [tensor.detach().clone() for tensor in (*losses, *net.parameters())]


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(te.Linear(256, 256), te.Linear(256, 256))


@pytest.mark.slow
def test_training_is_bit_equal(tmp_path: Path) -> None:
    """The other run watches the same tensors, without writing any."""
    trained = {}
    for name, start in (("dumped", 0), ("not", 10**9)):
        net, asked = model(), config(tensors=TENSORS, quantized_tensor=True, start_step=start)
        with InspectSession(asked, model=net, log_dir=tmp_path / name) as session:
            trained[name] = train(net, session, 3)
    assert all(map(torch.equal, trained["dumped"], trained["not"]))
    assert not files(tmp_path / "not")
    assert all(dumps.load(path).tensors for path in files(tmp_path / "dumped").values())


REFUSED = [
    ({"when": "nonfinite"}, "has no key 'when'.* Its keys are: dump_quantized_internals, enabled, end_step"),
    ({"max_memory": "1GiB"}, "has no key 'max_memory'.* is a key of LogGemmError"),
]


def test_what_cannot_work_is_refused_before_the_run() -> None:
    for options, message in REFUSED:
        with pytest.raises(ConfigError, match=message) as raised:
            InspectSession(config(**options))
        assert "section 'dumped'" in str(raised.value)


# --- the disk --------------------------------------------------------------------------------------------------------


def test_training_waits_where_the_disk_is_slow_and_memory_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """350 bytes may wait, which three dumps have, and a larger one alone."""
    go, written, pending = threading.Event(), [], []

    def slow(dump: Dump, folder: Path) -> int:
        go.wait(10)
        written.append(dump.header.iteration)
        return 0

    def train() -> None:
        for number in range(21):
            tensors = {"high_precision": torch.zeros(1000 if number == 20 else 100, dtype=torch.uint8)}
            held.put(Dump(Header(iteration=number), tensors))
            pending.append(held.thread.queued)

    monkeypatch.setattr(recording, "write_new", slow)
    monkeypatch.setattr(recording, "MOST_QUEUED", 350)
    held, training = recording.Recorder(tmp_path), threading.Thread(target=train)
    training.start()
    wait_until(lambda: len(pending) == 3)
    training.join(0.1)
    assert (len(pending), written) == (3, [])
    go.set()
    training.join(10)
    held.drain()
    assert written == list(range(21)), "in order, and all"
    assert max(pending[:20]) <= 350
    assert pending[20] <= 1000
    assert held.thread.queued == 0
    held.thread.finish()


@pytest.mark.parametrize("strict", [False, True])
def test_a_file_that_cannot_be_written(tmp_path: Path, strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The second step's files are too large. They leave nothing behind, and the first step's are whole."""
    net, steps = te.Linear(32, 32), 0
    error = pytest.raises(ObservationError, match=r"cannot be written.*No more tensors are dumped")
    with error if strict else contextlib.nullcontext():
        with InspectSession(config(), model=net, log_dir=tmp_path, strict=strict) as session, files_up_to(1 << 19):
            for size in (16, 1 << 14, 16, 16):
                step(session, net, random(0, size, 32))
                session._run.observation.recorder.drain()
                steps += 1
    if strict:
        assert steps in (1, 2), "it is told at the end of the step, or of the next one"
    else:
        assert steps == 4
        (message,) = warnings_of(caplog, "cannot be written")
        assert re.search(
            "Precision debugging failed on rank 0: dumping tensors to.*No more tensors are dumped", message
        )
    assert torch.equal(only(tmp_path).tensors["high_precision"], random(0))


@pytest.mark.processes
@pytest.mark.extended
def test_a_disk_is_never_filled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        net = model()
        with InspectSession(config(tensors=TENSORS), model=net, log_dir=disk) as session:
            train(net, session, 4)
        (message,) = warnings_of(caplog, "DumpTensors")
        assert "little space is left on the disk" in message
        usage = os.statvfs(disk)
        assert usage.f_bavail * usage.f_frsize >= (4 << 20) // 20
        assert all(dumps.load(path).tensors for path in files(disk).values())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.processes
@pytest.mark.extended
def test_a_killed_process_leaves_whole_files_only(tmp_path: Path) -> None:
    ended = forked.Running(SCRIPT, ["killed", str(tmp_path)]).end()
    assert ended.returncode == -9, ended.stderr
    results = [path for path in files(tmp_path).values() if not path.name.startswith(".")]  # hidden: incomplete
    assert results
    for dump in map(dumps.load, results):
        assert torch.equal(dump.tensors["high_precision"], torch.full((1 << 14, 64), float(dump.header.iteration)))


@pytest.mark.processes
def test_a_script_that_stops_nothing_and_one_that_forks_have_all_files(tmp_path: Path) -> None:
    for ended in forked.ranks(SCRIPT, [[case, str(tmp_path / case)] for case in ("not stopped", "forked")]):
        assert ended.returncode == 0, ended.stderr
    assert len(files(tmp_path / "not stopped")) == 6, "also of the last step, which has not ended"
    results = map(dumps.load, files(tmp_path / "forked").values())
    by_process = sorted(dump.tensors["high_precision"][0, 0].item() for dump in results)
    assert by_process == [1.0, 3.0], "the parent's before and after the fork; a child writes into no log of its parent"
