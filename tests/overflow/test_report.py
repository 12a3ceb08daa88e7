"""The report: its frames, their order and numbers, of a T5 in float16, of any tensors, and of Transformer Engine."""

import functools
import itertools
import logging
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import make_dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformers.modeling_outputs import BaseModelOutput

from te_precision_callbacks.overflow import (
    ActivationOverflowError,
    DebugActivationOverflow,
    DetectionFailedError,
    detect_overflow,
    detector,
)
from te_precision_callbacks.overflow.frames import measure, read
from tests.functions import Function
from tests.overflow.models import (
    WO,
    Line,
    hooks_on,
    lines_of,
    mini_t5,
    seen_by_plain_hooks,
    step,
    tokens,
    weights_stay,
)

# The second half of an encoder block, in the order of the page that describes the report: a module's inputs, its
# outputs; a container after its content.
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


@pytest.mark.few
@pytest.mark.parametrize(("batch", "most"), [(0, 40), (17, 40), (0, 1), (0, 7), (0, 10_000)])
def test_an_overflow(batch: int, most: int, caplog: pytest.LogCaptureFixture) -> None:
    model = mini_t5()
    detector = DebugActivationOverflow(model) if most == 40 else DebugActivationOverflow(model, most)
    train(model, steps=batch)
    torch.nn.init.constant_(model.get_parameter(f"{WO}.weight"), 6e4)
    with pytest.raises(ActivationOverflowError) as raised:
        train(model, first=batch, steps=1)
    error = raised.value
    detector.close()
    lines = lines_of(error.report)
    assert lines == expected(model, WO, batch)[-most:]
    shown = [(line.sign, line.path.removeprefix("encoder.block.2."), line.class_name, line.role) for line in lines]
    assert shown[-len(FEED_FORWARD) :] == FEED_FORWARD[-most:]
    assert error.report.startswith(f"< [{batch}] {WO}: Linear: output has infs\n\n\nlast {len(lines)} frames:\n")
    assert error.report.endswith(f"\nabs_max=      inf < [{batch}] {WO}: Linear: output")
    assert (error.path, error.class_name, error.role, error.batch, error.rank) == (WO, "Linear", "output", batch, 0)
    assert f"< [{batch}] {WO}: Linear: output has infs, in batch {batch}" in str(error)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(logging.ERROR, error.report)]


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

    # By hand, in float64: the gradient of the last output is 100 everywhere, third passes it on, tanh' is 1 at 0, and
    # second multiplies it by 8 * 300.
    assert torch.finfo(torch.float16).max < 100.0 * 8 * 300

    with (
        weights_stay(model),
        DebugActivationOverflow(model) as detector,
        pytest.raises(ActivationOverflowError) as raised,
    ):
        (model(torch.zeros(4, 8).half()) * 100).sum().backward()  # at 0, tanh is steep everywhere
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
    with pytest.raises(ActivationOverflowError, match=r"already have inf or nan: scale \(nans\)\."):
        with DebugActivationOverflow(model):
            model(torch.ones(1, 2))


# --------------------------------------------------------------------- what modules take and give besides plain tensors


INF = float("inf")


def report_of(model: torch.nn.Module, *inputs: Any, **keywords: Any) -> list[Line]:

    def then_bad(*inputs: Any, **keywords: Any) -> torch.Tensor:
        model(*inputs, **keywords)
        return torch.tensor(INF)

    outer = Function(then_bad, model=model)
    with pytest.raises(ActivationOverflowError, match="Function: output has infs") as raised:
        with DebugActivationOverflow(outer, 1000):
            outer(*inputs, **keywords)
    return [line for line in lines_of(raised.value.report) if line.path == "model"]


def shown(lines: list[Line]) -> list[tuple[str, str, str]]:
    return [(line.sign, line.role, line.abs_max.strip()) for line in lines]


Pair = namedtuple("Pair", "first second")
Fields = make_dataclass("Fields", ["number", "tensor", "more"])


@pytest.mark.parametrize(
    ("output", "role"),
    [
        (lambda x: x, "output"),
        (lambda x: (None, x), "output[1]"),
        (lambda x: [3, [x]], "output[1][0]"),
        (lambda x: {"loss": None, "logits": x}, "output[logits]"),
        (lambda x: OrderedDict(hidden=(x,)), "output[hidden][0]"),
        (lambda x: Pair(x, None), "output[0]"),
        (lambda x: Fields(3, torch.ones(1), {"inner": [x]}), "output[more][inner][0]"),
        (lambda x: BaseModelOutput(last_hidden_state=x), "output[last_hidden_state]"),
        (lambda x: BaseModelOutput(hidden_states=(torch.ones(1), x)), "output[hidden_states][1]"),
    ],
)
def test_nested_outputs(output: Callable[[torch.Tensor], Any], role: str) -> None:
    for bad, kind in ((INF, "infs"), (-INF, "infs"), (math.nan, "nans")):
        model = torch.nn.Sequential(OrderedDict(inner=Function(lambda x, bad=bad: output(x * bad))))
        with pytest.raises(ActivationOverflowError) as raised, DebugActivationOverflow(model):
            model(torch.ones(2))
        assert (raised.value.path, raised.value.class_name, raised.value.role) == ("inner", "Function", role)
        assert raised.value.report.startswith(f"< [0] inner: Function: {role} has {kind}\n")


def test_inputs_by_keyword_and_nested() -> None:
    model = Function(lambda *inputs, **keywords: None)
    ones = torch.ones(2)
    lines = report_of(model, ones, (2 * ones, [3 * ones]), None, 7, states={"a": -4 * ones}, mask=None, x=5 * ones)
    assert shown(lines) == [
        (">", "input[0]", "1.00e+00"),
        (">", "input[1][0]", "2.00e+00"),
        (">", "input[1][1][0]", "3.00e+00"),
        (">", "input[states][a]", "4.00e+00"),
        (">", "input[x]", "5.00e+00"),
    ]


@pytest.mark.parametrize(
    ("tensor", "abs_max"),
    [
        (torch.tensor([True, False]), "1.00e+00"),
        (torch.tensor([-7, 3]), "7.00e+00"),
        (torch.tensor([200], dtype=torch.uint8), "2.00e+02"),
        (torch.tensor([40_000], dtype=torch.int32).to(torch.uint16), "4.00e+04"),
        (torch.tensor([-(2**63), 5]), "9.22e+18"),
        (torch.tensor([1e300], dtype=torch.float64), "1.00e+300"),
        (torch.tensor([-2.5]).bfloat16(), "2.50e+00"),
        (torch.tensor([3 + 4j]), "5.00e+00"),
        (torch.empty(0, 3), "empty"),
        (torch.empty(0, dtype=torch.int64), "empty"),
        (torch.ones(3, device="meta"), "meta"),
        (torch.tensor(-3.0), "3.00e+00"),
        (torch.tensor([[0.0, -6.0]]).to_sparse(), "6.00e+00"),
        (torch.tensor([[0.0, -6.0]]).to_sparse_csr(), "6.00e+00"),
        (torch.zeros(2, 2).to_sparse(), "empty"),
        (torch.arange(6.0).view(2, 3).t(), "5.00e+00"),
        (torch.arange(6.0).view(2, 3)[:, :2], "4.00e+00"),
        (torch.arange(6.0).view(2, 3)[:, 1:].t(), "5.00e+00"),
        (torch.tensor([[-9.0]]).expand(100, 1000), "9.00e+00"),
        (torch.arange(12.0)[1:9].view(2, 4).flip(0)[..., None].expand(2, 4, 3), "8.00e+00"),
        (torch.quantize_per_tensor(torch.tensor([2.0]), 0.1, 0, torch.qint8), "2.00e+00"),
    ],
)
def test_any_tensor(tensor: torch.Tensor, abs_max: str) -> None:
    assert shown(report_of(Function(lambda x: None), tensor)) == [(">", "input[0]", abs_max)]


def test_inference_mode_and_vmap() -> None:
    model = torch.nn.Linear(2, 2)
    with DebugActivationOverflow(model) as detector:
        with torch.inference_mode():
            inside = model(torch.ones(3, 2))
        with torch.no_grad():
            model(inside)
        assert torch.func.vmap(model)(torch.ones(5, 3, 2)).shape == (5, 3, 2)
        model(torch.ones(3, 2)).sum().backward()
        detector.check()
    with torch.inference_mode():
        with DebugActivationOverflow(model), pytest.raises(ActivationOverflowError, match=r"input\[0\] has infs"):
            model(torch.full((1, 2), INF))


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes_of_every_size(dtype: torch.dtype) -> None:
    not_finite = ((), (INF,), (-INF,), (INF, -INF), (INF, math.nan))
    for numel, bad in itertools.product((1, 100, 2**13, 2**16 + 5), not_finite):
        for at in (0, numel // 2, numel - 1):
            values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
            for offset, number in enumerate(bad):
                values[at - offset] = number
            extremes = measure(values, abs_min=False)
            read([extremes])
            expected = (math.nan,) * 2 if values.isnan().any() else (min(values.tolist()), max(values.tolist()))
            measured = extremes.low, extremes.high
            assert measured == pytest.approx(expected, rel=0, abs=0, nan_ok=True), (numel, bad, at)
            assert extremes.kind == ("" if not bad else "nans" if values.isnan().any() else "infs"), (numel, bad, at)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_each_number_of_16_bits_has_its_place_among_the_others(dtype: torch.dtype) -> None:
    """Of all codes, in pieces: of one sign, of subnormal numbers, of nans of both signs."""
    codes = torch.arange(2**16, dtype=torch.int32)
    numbers = (codes << 16).view(dtype) if dtype is torch.float32 else codes.to(torch.int16).view(dtype)
    pieces = [numbers[start : start + 2**12] for start in range(0, 2**16, 2**12 // 2)]
    pieces += [piece[piece.isfinite()].repeat(2) for piece in pieces]
    measured = [measure(piece, abs_min=False) for piece in pieces]
    read(measured)
    for extremes, piece in zip(measured, pieces, strict=True):
        expected = tuple(extreme.item() for extreme in piece.double().aminmax())
        assert (extremes.low, extremes.high) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


# ---------------------------------------------------------------------------------------------------------------- masks


def attention() -> torch.nn.Module:
    qkv, softmax = torch.nn.Linear(8, 24), torch.nn.Softmax(dim=-1)

    def forward(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = qkv(x).chunk(3, dim=-1)
        return softmax(query @ key.mT + mask) @ value, mask

    return Function(forward, qkv=qkv, softmax=softmax)


@pytest.mark.parametrize("lowest", [-INF, torch.finfo(torch.float32).min, -1e4])
def test_masks_are_no_alarm(lowest: float, caplog: pytest.LogCaptureFixture) -> None:
    first, second = attention(), attention()

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden, mask = first(x, torch.full((x.shape[1], x.shape[1]), lowest).triu(1))
        return second(hidden, mask=mask)[0]  # type: ignore[no-any-return]

    model = Function(forward, first=first, second=second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DebugActivationOverflow(model):
        for _ in range(3):
            model(torch.randn(2, 5, 8)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.randn(2, 5, 8))
    assert not caplog.records


@pytest.mark.parametrize(
    ("allow_neg_inf", "values", "said"),
    [
        ([], [0.0], r"log: Function: output has infs"),
        (["log"], [0.0], None),  # nor are the values that the model around it passes on
        (["l*"], [0.0], None),
        (["?og"], [0.0], None),
        (["lo"], [0.0], "has infs"),
        (["*"], [-1.0], "has nans"),
        (["log"], [0.0, -1.0], r"< \[1\] log: Function: output has nans"),  # an excused value is not in the next batch
    ],
)
def test_neg_inf_that_a_module_makes(allow_neg_inf: list[str], values: list[float], said: str | None) -> None:
    log = Function(torch.log)
    model = Function(lambda x: log(x), log=log)
    with nullcontext() if said is None else pytest.raises(ActivationOverflowError, match=said):
        with DebugActivationOverflow(model, allow_neg_inf=allow_neg_inf):
            for value in values:
                model(torch.tensor([value]))


# ------------------------------------------------------------------------------------------------------ detect_overflow


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.tensor([1.0, INF]), "infs"),
        (torch.tensor([1.0, -INF]), "infs"),
        (torch.tensor([math.nan]), "nans"),
        (torch.tensor([math.nan]).half(), "nans"),
        (torch.tensor([1e38]), None),
        (torch.tensor([3]), None),
        (torch.tensor([True]), None),
        (torch.empty(0), None),
        (torch.ones(2, device="meta"), None),
        (torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn), "nans"),
    ],
)
def test_detect_overflow(tensor: torch.Tensor, kind: str | None, caplog: pytest.LogCaptureFixture) -> None:
    assert detect_overflow(tensor, "after layer_norm") is (kind is not None)
    assert [record.getMessage() for record in caplog.records] == ([f"after layer_norm has {kind}"] if kind else [])


def test_detect_overflow_adds_a_frame() -> None:
    norm, dense = torch.nn.Identity(), torch.nn.Identity()

    def forward(x: torch.Tensor) -> None:
        detect_overflow(norm(x), "after norm")
        detect_overflow(dense(x) * 1e30, "after the product")

    model = torch.nn.Sequential(Function(forward, norm=norm, dense=dense))
    with pytest.raises(ActivationOverflowError) as raised, DebugActivationOverflow(model):
        model(torch.full((2,), 3e10))
    assert raised.value.report.splitlines() == [
        "= [0] after the product has infs",
        "",
        "",
        "last 6 frames:",
        "abs_max= 3.00e+10 > [0] 0.norm: Identity: input[0]",
        "abs_max= 3.00e+10 < [0] 0.norm: Identity: output",
        "abs_max= 3.00e+10 = [0] after norm",
        "abs_max= 3.00e+10 > [0] 0.dense: Identity: input[0]",
        "abs_max= 3.00e+10 < [0] 0.dense: Identity: output",
        "abs_max=      inf = [0] after the product",
    ]
    assert (raised.value.path, raised.value.role) == ("", "after the product")


def test_a_failure_of_detect_overflow_is_not_told_as_no(caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.object(detector, "read", side_effect=LookupError("no slot")):
        for _ in range(2):
            with pytest.raises(DetectionFailedError, match="LookupError: no slot") as raised:
                detect_overflow(torch.tensor([INF]), "here")
            assert isinstance(raised.value.__cause__, LookupError)
    assert not caplog.records


# ---------------------------------------------------------------------------------------- modules of Transformer Engine


def test_a_transformer_layer_names_itself() -> None:
    model = te.TransformerLayer(32, 64, 4, device="cpu")
    watching = DebugActivationOverflow(model, 1000)
    model(torch.randn(4, 2, 32)).sum().backward()
    torch.nn.init.constant_(model.layernorm_mlp.fc2_weight, INF)
    with pytest.raises(ActivationOverflowError) as raised:
        model(torch.randn(4, 2, 32)).sum().backward()
        watching.check()
    assert (raised.value.path, raised.value.class_name) == ("transformer_layer.layernorm_mlp", "LayerNormMLP")
    assert "transformer_layer.self_attention.layernorm_qkv: LayerNormLinear: input[0]" in raised.value.report


def test_quantized_tensors() -> None:
    quantizer = te.Float8CurrentScalingQuantizer(fp8_dtype=te.DType.kFloat8E4M3, device="cpu")
    quantized = quantizer(torch.linspace(-6, 5, 256).view(16, 16))
    model = Function(lambda x, factor: x.dequantize() * factor)
    with pytest.raises(ActivationOverflowError) as raised, DebugActivationOverflow(model):
        model(quantized, INF)
    assert raised.value.report.splitlines()[4] == "abs_max= 6.00e+00 > [0] Function: input[0]"


@pytest.mark.usefixtures("backward_thread")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_its_own_checkpoint(use_reentrant: bool) -> None:
    first, second = te.Linear(16, 16, device="cpu"), te.Linear(16, 16, device="cpu")
    again = functools.partial(te.checkpoint, second, use_reentrant=use_reentrant)
    model = Function(lambda x: again(first(x)), first=first, second=second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watching = DebugActivationOverflow(model, 1000)
    for _ in range(2):
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            output = model(torch.ones(16, 16))
        output.sum().backward()
        optimizer.step()
    with pytest.raises(ActivationOverflowError) as raised:
        model(torch.ones(16, 16) * INF)
        watching.close()
    lines = [line[18:] for line in raised.value.report.splitlines() if "[1]" in line]
    assert [line for line in lines if "put" in line and "grad" not in line] == [
        "> [1] first: Linear: input[0]",
        "< [1] first: Linear: output",
        "> [1] second: Linear: input[0]",
        "< [1] second: Linear: output",
        "> [1] Function: input[0]",
        "< [1] Function: output",
    ]
    assert {line for line in lines if "grad_" in line} == {
        "> [1] Function: grad_output",
        "> [1] second: Linear: grad_output",
        "< [1] second: Linear: grad_input[0]",
        "> [1] first: Linear: grad_output",
    }
