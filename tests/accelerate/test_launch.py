"""`accelerate launch` with two processes on the CPU: one set of statistics, and an end if one process fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.accelerate.loops import Plain
from tests.forked import executable
from tests.lightning.models import batch_of, board_scalars, log_of, logged_lines
from tests.reference import processes


class InOneProcess:
    """The same training in float64 and plain torch, in one process, over the batches of both."""

    def __init__(self) -> None:
        model = Plain()
        parameters = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
        self.parameters = {name: parameter.clone().requires_grad_() for name, parameter in parameters.items()}
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.01)
        self.seen: dict[str, list[torch.Tensor]] = {}

    def see(self, layer: str, inputs: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        self.seen.setdefault(f"{layer}_activation", []).append(inputs.detach())
        output.register_hook(lambda gradient: self.seen.setdefault(f"{layer}_gradient", []).append(gradient))
        return output

    def step(self, batches: list[torch.Tensor]) -> dict[str, tuple[float, float]]:
        """One optimizer step over the micro-batches of all ranks; tensor -> its largest value and its l1 norm."""
        p = self.parameters
        self.seen.clear()
        for batch in batches:
            inputs = batch.double()
            hidden = self.see("fc1", inputs, torch.nn.functional.linear(inputs, p["fc1.weight"], p["fc1.bias"]))
            normed = torch.nn.functional.layer_norm(hidden, (32,), p["fc2.layer_norm_weight"], p["fc2.layer_norm_bias"])
            output = self.see("fc2", normed, torch.nn.functional.linear(normed, p["fc2.weight"], p["fc2.bias"]))
            # Accelerate divides by the two micro-batches of an accumulation, and DDP by the two ranks.
            (output.pow(2).mean() / 2).backward()
        for parameter in p.values():
            assert parameter.grad is not None
            parameter.grad /= 2
        self.optimizer.step()
        self.optimizer.zero_grad()
        together = {name: torch.cat(tensors) for name, tensors in self.seen.items()}
        return {name: (tensor.max().item(), tensor.abs().sum().item()) for name, tensor in together.items()}


@pytest.mark.processes
def test_two_processes_log_one_set_of_numbers(tmp_path: Path) -> None:
    # With --multi_gpu the launcher starts torchrun, whatever the device is.
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = [executable(whole=True), "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
    result = processes.run([*command, str(Path(__file__).with_name("launch_script.py")), str(tmp_path)])
    assert result.returncode == 0, result.stderr
    first, second = (logged_lines(tmp_path / part) for part in ("first", "second"))
    for part in ("first", "second"):
        assert not log_of(tmp_path / part, 1).exists(), "the statistics are reduced, and rank 0 writes them"
    lines = {**first, **second}
    assert {step for _, step in second} == {3, 4, 5}, "both ranks went on where the checkpoint was saved"
    board = board_scalars(tmp_path / "board")
    alone = InOneProcess()
    for step in range(6):
        first = 4 * (step % 3)  # a loader gives a batch to each rank in turn; the second epoch is the first again
        expected = alone.step([batch_of(index) for index in range(first, first + 4)])
        assert set(expected) == {"fc1_activation", "fc1_gradient", "fc2_activation", "fc2_gradient"}
        for name, (largest, l1_norm) in expected.items():
            metric = f"te.{name.replace('_', '/')}"
            assert lines[f"{name}_max", step] == pytest.approx(largest, rel=1e-4)
            assert lines[f"{name}_l1_norm", step] == pytest.approx(l1_norm, rel=1e-4)
            assert board[f"{metric}/max"][step + 1] == pytest.approx(largest, rel=1e-4)
    assert sorted(board["te.fc1/gradient/l1_norm"]) == sorted(board["loss"]) == [1, 2, 3, 4, 5, 6]
