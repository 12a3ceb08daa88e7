"""`accelerate launch` with two processes on the CPU: one set of statistics, and an end if one process fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import layer_norm, linear

from tests.accelerate.loops import Plain
from tests.forked import executable
from tests.lightning.models import batch_of, board_scalars, log_of, logged_lines
from tests.reference import processes


def in_one_process() -> Iterator[dict[str, tuple[float, float]]]:
    """The same training in float64 and plain torch, over the batches of both ranks: in each step tensor -> its largest
    value and its l1 norm."""
    p = {name: parameter.detach().double().requires_grad_() for name, parameter in Plain().named_parameters()}
    optimizer = torch.optim.SGD(p.values(), lr=0.01)
    for step in range(6):
        # A loader gives a batch to each rank in turn, and a step has two of each; the second epoch is the first again.
        batches = torch.cat([batch_of(4 * (step % 3) + index) for index in range(4)]).double()
        hidden = linear(batches, p["fc1.weight"], p["fc1.bias"])
        normed = layer_norm(hidden, (32,), p["fc2.layer_norm_weight"], p["fc2.layer_norm_bias"])
        output = linear(normed, p["fc2.weight"], p["fc2.bias"])
        hidden.retain_grad()
        output.retain_grad()
        optimizer.zero_grad()
        output.pow(2).mean().backward()
        optimizer.step()
        # Of the four batches' mean, Accelerate divides by the two of an accumulation before the layers see a gradient,
        # and DDP by the two ranks after it.
        of_hidden, of_output = (2 * tensor.grad for tensor in (hidden, output))
        tensors = {
            "fc1_activation": batches,
            "fc1_gradient": of_hidden,
            "fc2_activation": normed,
            "fc2_gradient": of_output,
        }
        yield {name: (tensor.max().item(), tensor.abs().sum().item()) for name, tensor in tensors.items()}


@pytest.mark.processes
def test_two_processes_log_one_set_of_numbers(tmp_path: Path) -> None:
    # With --multi_gpu the launcher starts torchrun, whatever the device is.
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = [executable(whole=True), "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
    result = processes.run([*command, str(Path(__file__).with_name("launch_script.py")), str(tmp_path)])
    assert result.returncode == 0, result.stderr
    first, second = (logged_lines(tmp_path / part) for part in ("first", "second"))
    assert not log_of(tmp_path / "first", 1).exists(), "the statistics are reduced, and rank 0 writes them"
    lines = {**first, **second}
    assert {step for _, step in second} == {3, 4, 5}, "both ranks went on where the checkpoint was saved"
    board = board_scalars(tmp_path / "board")
    for step, expected in enumerate(in_one_process()):
        for name, (largest, l1_norm) in expected.items():
            metric = f"te.{name.replace('_', '/')}"
            assert lines[f"{name}_max", step] == pytest.approx(largest, rel=1e-4)
            assert lines[f"{name}_l1_norm", step] == pytest.approx(l1_norm, rel=1e-4)
            assert board[f"{metric}/max"][step + 1] == pytest.approx(largest, rel=1e-4)
    assert sorted(board["te.fc1/gradient/l1_norm"]) == sorted(board["loss"]) == [1, 2, 3, 4, 5, 6]
