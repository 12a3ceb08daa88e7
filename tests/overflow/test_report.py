"""The report on a T5 in float16: its frames, their order and their numbers."""

import copy
import logging

import pytest
import torch

from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow
from tests.functions import Function
from tests.overflow.models import (
    WO,
    Line,
    hooks_on,
    lines_of,
    mini_t5,
    overflow_at,
    seen_by_plain_hooks,
    step,
    tokens,
)

# The second half of an encoder block, in the order of the page that describes the report: a module's inputs, its
# outputs; a container after what is in it.
FEED_FORWARD = [
    ("<", "layer.1.layer_norm", "T5LayerNorm", "output"),
    (">", "layer.1.DenseReluDense.wi_0", "Linear", "input[0]"),
    ("<", "layer.1.DenseReluDense.wi_0", "Linear", "output"),
    (">", "layer.1.DenseReluDense.act", "NewGELUActivation", "input[0]"),
    ("<", "layer.1.DenseReluDense.act", "NewGELUActivation", "output"),
    (">", "layer.1.DenseReluDense.wi_1", "Linear", "input[0]"),
    ("<", "layer.1.DenseReluDense.wi_1", "Linear", "output"),
    (">", "layer.1.DenseReluDense.dropout", "Dropout", "input[0]"),
    ("<", "layer.1.DenseReluDense.dropout", "Dropout", "output"),
    (">", "layer.1.DenseReluDense.wo", "Linear", "input[0]"),
    ("<", "layer.1.DenseReluDense.wo", "Linear", "output"),
]


def train(model: torch.nn.Module, *, first: int = 0, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for batch in range(first, first + steps):
        model(input_ids=tokens(batch), labels=tokens(batch)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def expected(model: torch.nn.Module, culprit: str, batch: int) -> list[Line]:
    result = seen_by_plain_hooks(model, lambda: model(input_ids=tokens(batch), labels=tokens(batch)))
    last = next(i for i, line in enumerate(result) if (line.path, line.role) == (culprit, "output"))
    return [line._replace(batch=batch) for line in result[: last + 1]]


@pytest.mark.parametrize("batch", [0, 17])
def test_an_overflow(batch: int, caplog: pytest.LogCaptureFixture) -> None:
    model = mini_t5()
    detector = DebugActivationOverflow(model)
    train(model, steps=batch)
    overflow_at(model, WO)
    with pytest.raises(ActivationOverflowError) as raised:
        train(model, first=batch, steps=1)
    error = raised.value
    detector.close()
    lines = lines_of(error.report)
    assert lines == expected(model, WO, batch)[-40:]
    shown = [(line.sign, line.path.removeprefix("encoder.block.2."), line.class_name, line.role) for line in lines]
    assert shown[-len(FEED_FORWARD) :] == FEED_FORWARD
    assert error.report.startswith(f"< [{batch}] {WO}: Linear: output has infs\n\n\nlast 40 frames:\n")
    assert error.report.endswith(f"\nabs_max=      inf < [{batch}] {WO}: Linear: output")
    assert (error.path, error.class_name, error.role, error.batch, error.rank) == (WO, "Linear", "output", batch, 0)
    assert f"< [{batch}] {WO}: Linear: output has infs, in batch {batch}" in str(error)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(logging.ERROR, error.report)]


def test_how_many_frames() -> None:
    model = mini_t5()
    overflow_at(model, WO)
    for frames in (1, 7, 10_000):
        with pytest.raises(ActivationOverflowError) as raised, DebugActivationOverflow(model, frames):
            model(input_ids=tokens(), labels=tokens())
        assert lines_of(raised.value.report) == expected(model, WO, 0)[-frames:]


def test_frames_of_earlier_batches_come_first() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(ActivationOverflowError) as raised, DebugActivationOverflow(model, 20):
        for value in (1.0, 2.0, 3.0):
            step(model, optimizer, value)
        model(torch.tensor([[float("inf")] * 4]))
    lines = lines_of(raised.value.report)
    # Eight frames a batch: in and out of the Linear and the Sequential, and the gradients of both outputs, of the
    # weight and of the bias. The culprit is the first of batch 3.
    assert [line.batch for line in lines] == [*[0] * 3, *[1] * 8, *[2] * 8, 3]
    assert [(line.batch, line.abs_max.strip()) for line in lines if line.path == "0" and line.role == "input[0]"] == [
        (1, "2.00e+00"),
        (2, "3.00e+00"),
        (3, "inf"),
    ]
    assert lines[-1] == Line("      inf", ">", 3, "0", "Linear", "input[0]")


@pytest.mark.usefixtures("backward_thread")
def test_a_backward_that_overflows() -> None:
    """A gradient beyond float16, while all activations are small: found before the optimizer spreads it."""
    first, second, third = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.Tanh(), third).half()
    with torch.no_grad():
        second.weight.fill_(300.0)
        third.weight.copy_(torch.eye(8))
        first.bias.zero_()
        second.bias.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.zeros(4, 8).half()  # so that tanh is steep everywhere
    weights = copy.deepcopy(model.state_dict())

    # By hand, in float64: the gradient of the last output is 100 everywhere, third passes it on, tanh' is 1 at 0, and
    # second multiplies it by 8 * 300.
    assert torch.finfo(torch.float16).max < 100.0 * 8 * 300

    with DebugActivationOverflow(model) as detector, pytest.raises(ActivationOverflowError) as raised:
        (model(inputs) * 100).sum().backward()
        optimizer.step()
    error = raised.value
    assert (error.path, error.class_name, error.role, error.batch) == ("2", "Linear", "grad_input[0]", 0)
    assert error.report.startswith("< [0] 2: Linear: grad_input[0] has infs\n")
    backward = [line for line in lines_of(error.report) if line.role.startswith("grad_")]
    assert [(line.sign, line.path, line.role, line.abs_max.strip()) for line in backward] == [
        (">", "", "grad_output", "1.00e+02"),
        (">", "4", "grad_output", "1.00e+02"),
        ("<", "4", "grad_input[0]", "1.00e+02"),
        (">", "3", "grad_output", "1.00e+02"),
        ("<", "3", "grad_input[0]", "1.00e+02"),
        (">", "2", "grad_output", "1.00e+02"),
        ("<", "2", "grad_input[0]", "inf"),
    ]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert (detector.batch_number, hooks_on(model)) == (0, 0)


def test_the_gradients_of_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    inputs = torch.tensor([[1.0, 2.0]])
    with pytest.raises(ActivationOverflowError, match=r"< \[1\] 1: Linear: grad of weight has infs") as raised:
        with DebugActivationOverflow(model):
            model(inputs).sum().backward()
            gradients = {name: parameter.grad.abs().max().item() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
            model[1].weight.register_hook(lambda gradient: gradient * float("inf"))
            model(inputs).sum().backward()
            optimizer.step()
    shown = {f"{line.path}.{line.role}": line.abs_max for line in lines_of(raised.value.report) if line.batch == 0}
    for name, gradient in gradients.items():
        assert shown[name.replace(".", ".grad of ")] == f"{gradient:9.2e}"


def test_a_weight_that_is_broken_elsewhere() -> None:
    """Used by a function between modules, it is seen where its output enters the next one."""

    scale, linear = torch.nn.Parameter(torch.tensor(float("nan"))), torch.nn.Linear(2, 2)
    model = Function(lambda x: linear(x * scale), scale=scale, linear=linear)
    with pytest.raises(ActivationOverflowError, match=r"does not help: scale \(nans\)\."):
        with DebugActivationOverflow(model):
            model(torch.ones(1, 2))
