"""Watched modules, and that nothing stays behind."""

import contextlib
import copy
import functools
import gc
import io
import logging
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.debug_utils import DebugUnderflowOverflow

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.overflow import (
    AbortAfterBatch,
    ActivationOverflowError,
    DebugActivationOverflow,
    OverflowDetectorError,
    OverflowOptionError,
)
from tests.functions import Function
from tests.overflow.models import Line, hooks_on, lines_of

INF = float("inf")


class Scale(torch.nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def frames(model: torch.nn.Module, run: Callable[[], object], detector: DebugActivationOverflow) -> list[Line]:
    run()
    with pytest.raises(ActivationOverflowError) as raised:
        model(torch.tensor([INF]))
        detector.close()
    return lines_of(raised.value.report)[:-1]


def roles(lines: list[Line]) -> list[tuple[str, str, str, str]]:
    return [(line.sign, line.path, line.role, line.abs_max.strip()) for line in lines]


def calls_a_module_twice() -> torch.nn.Module:
    scale = Scale(2.0)
    return Function(lambda x: scale(scale(x)), scale=scale, same=scale)


def calls_itself() -> torch.nn.Module:
    """As Lightning's strategies do: the model's call runs training_step, which calls the model."""
    scale = Scale(2.0)
    model = Function(lambda x, outer=True: model(x, outer=False) * 3 if outer else scale(x), scale=scale)
    return model


FRAMES: dict[str, tuple[Callable[[], torch.nn.Module], list[float], Callable[[Line], bool], list[Any]]] = {
    # An input is measured before the module changes it, and its gradient belongs to its old values.
    "in place": (
        lambda: torch.nn.Sequential(
            Scale(-3.0), torch.nn.ReLU(inplace=True), Scale(5.0), torch.nn.Hardtanh(inplace=True)
        ),
        [2.0, -1.0],
        lambda line: "grad of" not in line.role,
        [
            (">", "0", "input[0]", "2.00e+00"),
            ("<", "0", "output", "6.00e+00"),
            (">", "1", "input[0]", "6.00e+00"),
            ("<", "1", "output", "3.00e+00"),
            (">", "2", "input[0]", "3.00e+00"),
            ("<", "2", "output", "1.50e+01"),
            (">", "3", "input[0]", "1.50e+01"),
            ("<", "3", "output", "1.00e+00"),
            (">", "", "input[0]", "2.00e+00"),
            ("<", "", "output", "1.00e+00"),
            (">", "", "grad_output", "1.00e+00"),
            (">", "3", "grad_output", "1.00e+00"),
            ("<", "3", "grad_input[0]", "1.00e+00"),
            (">", "2", "grad_output", "1.00e+00"),
            ("<", "2", "grad_input[0]", "5.00e+00"),
            (">", "1", "grad_output", "5.00e+00"),
            ("<", "1", "grad_input[0]", "0.00e+00"),
            (">", "0", "grad_output", "0.00e+00"),
        ],
    ),
    "a module that is called twice, and a shared one": (
        calls_a_module_twice,
        [1.0],
        lambda line: line.path == "scale",
        [
            (">", "scale", "input[0]", "1.00e+00"),
            ("<", "scale", "output", "2.00e+00"),
            (">", "scale", "input[0]", "2.00e+00"),
            ("<", "scale", "output", "4.00e+00"),
            (">", "scale", "grad_output", "1.00e+00"),
            ("<", "scale", "grad_input[0]", "2.00e+00"),
            (">", "scale", "grad_output", "2.00e+00"),
            ("<", "scale", "grad of factor", "4.00e+00"),
        ],
    ),
    "a tensor that a module passes on": (
        lambda: torch.nn.Sequential(Scale(2.0), torch.nn.Identity(), Scale(3.0)),
        [1.0],
        lambda line: "grad_" in line.role,
        [
            (">", "", "grad_output", "1.00e+00"),
            (">", "2", "grad_output", "1.00e+00"),
            ("<", "2", "grad_input[0]", "3.00e+00"),
            (">", "1", "grad_output", "3.00e+00"),
            ("<", "1", "grad_input[0]", "3.00e+00"),
            (">", "0", "grad_output", "3.00e+00"),
        ],
    ),
    "a model that calls itself": (
        calls_itself,
        [1.0],
        lambda line: "grad" not in line.role,
        [
            (">", "scale", "input[0]", "1.00e+00"),
            ("<", "scale", "output", "2.00e+00"),
            (">", "", "input[0]", "1.00e+00"),
            ("<", "", "output", "2.00e+00"),
            (">", "", "input[0]", "1.00e+00"),
            ("<", "", "output", "6.00e+00"),
        ],
    ),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_and_their_order(name: str) -> None:
    make, inputs, is_chosen, expected = FRAMES[name]
    model = make()
    lines = frames(model, lambda: model(torch.tensor(inputs)).sum().backward(), DebugActivationOverflow(model))
    assert roles([line for line in lines if line.batch == 0 and is_chosen(line)]) == expected


def test_layers_and_parameters_that_are_replaced_later() -> None:
    """As Accelerate does it between the construction and the first step."""
    model = torch.nn.Sequential(Scale(), Scale())
    first = model[0]
    with DebugActivationOverflow(model) as watching:
        assert hooks_on(first) > 0
        model[0] = torch.nn.Sequential(Scale(), Scale(INF))
        model[1].factor = torch.nn.Parameter(torch.tensor(2.0))
        model(torch.ones(1))
        with pytest.raises(ActivationOverflowError, match=r"0\.1: Scale: output has infs"):
            watching.check()
        assert hooks_on(first) == 0
        assert all(hooks_on(scale) > 0 for scale in (model[0][0], model[0][1], model[1]))
        assert len(model[1].factor._post_accumulate_grad_hooks) == 1  # type: ignore[arg-type, union-attr]
    assert hooks_on(model) == 0


@pytest.mark.usefixtures("backward_thread")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_is_not_reported_twice(reentrant: bool) -> None:
    """Frames of the first forward alone, and each gradient once."""

    def made(*, recomputes: bool) -> torch.nn.Module:
        embed, block = Scale(3.0), torch.nn.Sequential(Scale(2.0), Scale(5.0))
        again = functools.partial(checkpoint, block, use_reentrant=reentrant) if recomputes else block
        return Function(lambda x: again(embed(x)), embed=embed, block=block)

    def run(*, recomputes: bool) -> list[tuple[str, str, str, str]]:
        model = made(recomputes=recomputes)
        detector = DebugActivationOverflow(model, 100)
        lines = frames(model, lambda: model(torch.tensor([1.0])).sum().backward(), detector)
        assert (detector.batch_number, hooks_on(model)) == (1, 0)
        return roles([line for line in lines if line.batch == 0])

    with_recompute, without = run(recomputes=True), run(recomputes=False)
    forward = [[line for line in lines if "grad" not in line[2]] for lines in (with_recompute, without)]
    assert forward[0] == forward[1]
    # Both copies of a reentrant checkpoint's tensors see a gradient, in turn.
    assert sorted(set(with_recompute)) == sorted(set(without))
    if not reentrant:
        assert with_recompute == without
    with pytest.raises(ActivationOverflowError, match=r"block\.1: Scale: grad_input\[0\] has infs"):
        model = made(recomputes=True)
        torch.nn.init.constant_(model.block[1].factor, 1e30)
        with DebugActivationOverflow(model):
            (model(torch.tensor([1e-35])) * 1e30).sum().backward()


def test_wrappers_and_chunks_do_not_show_in_paths() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = torch.nn.Sequential(checkpoint_wrapper(Scale()), Scale(INF))  # type: ignore[no-untyped-call]
    with pytest.raises(ActivationOverflowError, match=r"< \[0\] chunk1\.1: Scale: output") as raised:
        with DebugActivationOverflow([Scale(), inner]):
            inner(torch.ones(1))
    assert [(line.path, line.class_name) for line in lines_of(raised.value.report)[:2]] == [("chunk1.0", "Scale")] * 2


def test_copies_are_not_watched() -> None:
    model = torch.nn.Sequential(Scale())
    with DebugActivationOverflow(model) as detector:
        model(torch.ones(1))
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(torch.tensor([INF]))
            copied(torch.tensor([1.0])).sum().backward()
            DebugActivationOverflow(copied).close()
        detector.check()
    assert not detector.reports


def test_after_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """It logs what the loop's own exception hides, watches no more, and lets the model go."""
    model = Scale(INF)
    with pytest.raises(KeyError, match="mine"), DebugActivationOverflow(model) as detector:
        output = model(torch.ones(1))
        raise KeyError("mine")
    (record,) = caplog.records
    assert record.getMessage().startswith("< [0] Scale: output has infs\n")
    detector.close()
    output.sum().backward()
    detector.check()
    detector.begin_batch()
    model(torch.tensor([INF]))
    assert hooks_on(model) == 0
    gone = weakref.ref(model)
    DebugActivationOverflow(model)
    del model, output, detector, record
    caplog.clear()
    gc.collect()
    assert gone() is None


def test_a_second_detector_takes_the_place_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(Scale(), torch.nn.Sequential(Scale()))
    first = DebugActivationOverflow(model[1])
    model[1](torch.tensor([INF]))
    with DebugActivationOverflow(model) as second:
        takes_over, report = (record.getMessage() for record in caplog.records)
        assert "replaces another one" in takes_over
        assert report.startswith("> [0] 0: Scale: input[0] has infs"), "what the first had not told yet"
        model(torch.ones(1)).sum().backward()
        hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
        assert len({id(hook._call.func.__self__) for hook in hooks}) == 1
        first.close()
        assert second.batch_number == 0
        assert hooks_on(model) > 0
    assert hooks_on(model) == 0


def test_it_goes_on_watching_after_a_find() -> None:
    """For a loop that catches it, and for the cell of a notebook that is run again."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Scale())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DebugActivationOverflow(model):
        for value in (1.0, INF, 1.0, INF, math.nan, 1.0):
            with contextlib.nullcontext() if math.isfinite(value) else pytest.raises(ActivationOverflowError):
                model(torch.full((1, 2), value)).sum().backward()
                optimizer.step()
            optimizer.zero_grad()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert hooks_on(model) == 0


@pytest.mark.parametrize("given", [False, True], ids=["counted", "begin_batch"])
def test_evaluation_batches_are_counted_apart(given: bool) -> None:
    model = torch.nn.Sequential(Scale(), Scale())

    def evaluate(*values: float) -> None:
        with torch.no_grad():
            for value in values:
                model(torch.tensor([value]))

    with DebugActivationOverflow(model) as detector:
        evaluate(1.0, 1.0)  # a sanity check
        for step in range(4):
            if given:
                detector.begin_batch()
            model(torch.ones(1)).sum().backward()
            with torch.no_grad():
                model[0](torch.ones(1))  # a teacher, or a user's own
            detector.check()
            assert detector.batch_number == step
            if step == 2:
                match = r"> \[1\] 0: Scale: input\[0\] has infs, in evaluation batch 1\."
                with pytest.raises(ActivationOverflowError, match=match) as raised:
                    evaluate(1.0, INF)
                assert (raised.value.evaluation, raised.value.batch) == (True, 1)
            else:
                evaluate(1.0, 1.0, 1.0)


def test_a_forward_that_raises() -> None:
    scale = Scale()

    def moody(x: torch.Tensor) -> torch.Tensor:
        scale(x)
        raise ValueError("not today")

    model = torch.nn.Sequential(Function(moody, scale=scale), Scale(INF))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        detector = DebugActivationOverflow(model)
        for _ in range(2):
            with pytest.raises(ValueError, match="not today"):
                model(torch.ones(1))
        model[0].function = lambda x: scale(x)
        with pytest.raises(ActivationOverflowError, match=r"< \[0\] 1: Scale: output") as raised, torch.no_grad():
            model(torch.ones(1))
    assert (detector.batch_number, raised.value.evaluation) == (1, True)
    assert [line.path for line in lines_of(raised.value.report)] == ["0.scale", "0.scale", "0", "0", "1", "1"]


@pytest.mark.few
@pytest.mark.parametrize("how", ["function", "method", "inside", "graph"])
def test_an_overflow_of_a_compiled_model_is_found(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A compiled model is watched from outside, which is logged once; a compiled function runs the hooks in between."""
    torch._dynamo.reset()
    model: torch.nn.Module = torch.nn.Sequential(Scale(2.0), torch.nn.Sequential(Scale(1e30), Scale(1e30)))
    whole: Any = model
    paths = [""]
    if how == "function":
        whole = model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif how == "method":
        model.compile(backend="eager")
    elif how == "inside":
        model[1] = torch.compile(model[1], backend="eager")  # type: ignore[operator, index]
        paths = ["0", "1"]
    else:
        whole = torch.compile(lambda x: model(x), backend="eager")
        paths = ["0", "1.0", "1.1"]
    with pytest.raises(ActivationOverflowError) as raised, DebugActivationOverflow(model):
        whole(torch.tensor([1.0])).sum().backward()
    assert list(dict.fromkeys(line.path for line in lines_of(raised.value.report))) == paths
    assert raised.value.class_name == ("Scale" if how == "graph" else "Sequential")
    assert caplog.text.count("is compiled") == (how != "graph")
    assert hooks_on(model) == 0


def test_scripted_and_traced(caplog: pytest.LogCaptureFixture) -> None:
    """TorchScript refuses hooks: what goes in and comes out is seen around it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(Scale(INF))
        traced = torch.jit.trace(Scale(INF), torch.ones(1))
    for module in (scripted, traced):
        model = torch.nn.Sequential(module, Scale())
        with pytest.raises(ActivationOverflowError, match=r"> \[0\] 1: Scale: input\[0\] has infs"):
            with DebugActivationOverflow(model):
                model(torch.ones(1))
        with DebugActivationOverflow(module):
            module(torch.ones(1))
    assert caplog.text.count("is compiled, so the modules inside are not watched") == 4


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"max_frames": 0}, r"max_frames= has the value 0. It must be greater than or equal to 1\."),
        ({"max_frames": 2.5}, r"max_frames="),
        ({"trace_batches": 3}, r"trace_batches= has the value 3. It must be a list\."),
        ({"trace_batches": [-1]}, r"trace_batches= has the value -1. It must be greater than or equal to 0\."),
        ({"abort_after_batch": True}, r"abort_after_batch="),
        ({"allow_neg_inf": "encoder"}, r"allow_neg_inf= has the value 'encoder'. It must be a list\."),
        ({"allow_neg_inf": [3]}, r"allow_neg_inf= has the value 3. It must be a valid string\."),
        ({"process_group": "world"}, r"process_group= has the value 'world'. It must be an instance of ProcessGroup"),
    ],
)
def test_bad_options(keywords: dict[str, Any], text: str) -> None:
    model = Scale()
    with pytest.raises(OverflowOptionError, match=text) as raised:
        DebugActivationOverflow(model, **keywords)
    assert isinstance(raised.value, OptionError)
    assert hooks_on(model) == 0


@pytest.mark.parametrize("model", [None, [], [3], torch.ones(2), "model"])
def test_no_model(model: Any) -> None:
    with pytest.raises(OverflowDetectorError, match=r"The model must be a torch\.nn\.Module, or a list or mapping"):
        DebugActivationOverflow(model)


# --------------------------------------------------------------------------------- methods of the newer class upstream


def test_parameters_and_abs_min() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.5, -4.0]]))
        model[0].bias.fill_(float("nan"))
    with pytest.raises(ActivationOverflowError, match=r"= \[0\] 0: Linear: bias has nans") as raised:
        with DebugActivationOverflow(model, parameters=True, abs_min=True):
            model(torch.ones(1, 2))
    assert raised.value.report.splitlines()[4:] == [
        "abs_min= 5.00e-01 abs_max= 4.00e+00 = [0] 0: Linear: weight",
        "abs_min=      nan abs_max=      nan = [0] 0: Linear: bias",
    ]


def test_tracing_of_batches(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(Scale(2.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with DebugActivationOverflow(model, trace_batches=[1, 2]):
        for value in (1.0, 2.0, INF, 4.0):
            model(torch.tensor([value])).sum().backward()
            model.zero_grad()
            optimizer.step()
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    traced = "\n".join(record.getMessage() for record in caplog.records).splitlines()
    assert [line for line in traced if "grad" not in line] == [
        "*** batch 1 ***",
        "abs_max= 2.00e+00 > [1] 0: Scale: input[0]",
        "abs_max= 4.00e+00 < [1] 0: Scale: output",
        "abs_max= 2.00e+00 > [1] Sequential: input[0]",
        "abs_max= 4.00e+00 < [1] Sequential: output",
        "*** batch 2 ***",
        "abs_max=      inf > [2] 0: Scale: input[0]",
        "abs_max=      inf < [2] 0: Scale: output",
        "abs_max=      inf > [2] Sequential: input[0]",
        "abs_max=      inf < [2] Sequential: output",
    ]


def test_the_names_of_transformers(caplog: pytest.LogCaptureFixture) -> None:
    def ended_after(make: Callable[..., Any], error: type[Exception]) -> int:
        model = Scale()
        detector = make(model, 21, trace_batch_nums=[1], abort_after_batch_num=1)
        done = 0
        with pytest.raises(error):
            for _ in range(5):
                model(torch.ones(1)).sum().backward()
                getattr(detector, "check", lambda: None)()
                done += 1
        return done

    with contextlib.redirect_stdout(io.StringIO()):
        theirs = ended_after(DebugUnderflowOverflow, ValueError)
    assert ended_after(DebugActivationOverflow, AbortAfterBatch) == theirs == 1
    assert "*** batch 1 ***" in caplog.text


@pytest.mark.parametrize("steps", [True, False])
def test_abort_after_a_batch(steps: bool) -> None:
    model = Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    DebugActivationOverflow(model, abort_after_batch=2)
    done = 0
    with pytest.raises(AbortAfterBatch, match=r"after batch 2, as set by abort_after_batch=2") as raised:
        for _ in range(10):
            model(torch.ones(1)).sum().backward()
            if steps:
                optimizer.step()
            done += 1
    assert isinstance(raised.value, ValueError)
    assert done == (2 if steps else 3)
    assert hooks_on(model) == 0


def test_an_interrupt_inside_of_a_forward() -> None:
    """The interrupted call ends with the next check."""

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise KeyboardInterrupt
        return x

    model = torch.nn.Sequential(Scale(), Function(interrupted), Scale(1e30))
    with DebugActivationOverflow(model) as watching:
        with pytest.raises(KeyboardInterrupt):
            model(torch.tensor([-1.0]))
        model(torch.tensor([1.0]))
        watching.check()
        with torch.no_grad(), pytest.raises(ActivationOverflowError, match=r"< \[0\] 2: Scale: output has infs"):
            model(torch.tensor([1e30]))
