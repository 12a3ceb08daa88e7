"""What modules take and give besides plain tensors: nesting, keywords, other dtypes and layouts, masks."""

import itertools
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import make_dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from te_precision_callbacks.overflow import (
    ActivationOverflowError,
    DebugActivationOverflow,
    DetectionFailedError,
    detect_overflow,
)
from te_precision_callbacks.overflow.extreme_slots import Slots
from tests.functions import Function
from tests.overflow.models import Line, lines_of

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
    with pytest.raises(ActivationOverflowError, match=r"> \[0\] Function: input\[states\]\[a\] has nans"):
        with DebugActivationOverflow(model):
            model(ones, states={"a": ones * math.nan})


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
        detector.look()
    with torch.inference_mode():
        with DebugActivationOverflow(model), pytest.raises(ActivationOverflowError, match=r"input\[0\] has infs"):
            model(torch.full((1, 2), INF))


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


SIZES = (1, 100, 2**13, 2**16 + 5)
BAD: tuple[tuple[float, ...], ...] = ((), (INF,), (-INF,), (INF, -INF), (INF, math.nan))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes_of_every_size(dtype: torch.dtype) -> None:
    for numel, bad in itertools.product(SIZES, BAD):
        for at in (0, numel // 2, numel - 1):
            values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
            for offset, number in enumerate(bad):
                values[at - offset] = number
            slots = Slots(abs_min=False)
            slot = slots.measure(values)
            measured = slots.read()
            expected = (math.nan,) * 2 if values.isnan().any() else (min(values.tolist()), max(values.tolist()))
            assert measured.extremes(slot) == pytest.approx(expected, rel=0, abs=0, nan_ok=True), (numel, bad, at)
            assert measured.not_finite() == ({slot} if bad else set()), (numel, bad, at)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_each_number_of_16_bits_has_its_place_among_the_others(dtype: torch.dtype) -> None:
    """Of all codes, in pieces: of one sign, of subnormal numbers, of nans of both signs."""
    codes = torch.arange(2**16, dtype=torch.int32)
    numbers = (codes << 16).view(dtype) if dtype is torch.float32 else codes.to(torch.int16).view(dtype)
    slots = Slots(abs_min=False)
    pieces = [numbers[start : start + 2**12] for start in range(0, 2**16, 2**12 // 2)]
    pieces += [piece[piece.isfinite()].repeat(2) for piece in pieces]
    taken = [slots.measure(piece) for piece in pieces]
    result = slots.read()
    for slot, piece in zip(taken, pieces, strict=True):
        expected = [extreme.item() for extreme in piece.double().aminmax()]
        assert result.extremes(slot) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


# ---------------------------------------------------------------------------------------------------------------- masks


def attention() -> torch.nn.Module:
    qkv, softmax = torch.nn.Linear(8, 24), torch.nn.Softmax(dim=-1)

    def forward(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = qkv(x).chunk(3, dim=-1)
        return softmax(query @ key.mT + mask) @ value, mask

    return Function(forward, qkv=qkv, softmax=softmax)


@pytest.mark.parametrize("lowest", [-INF, torch.finfo(torch.float32).min, -1e4])
def test_masks_are_no_alarm(lowest: float, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
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
        (["log"], [0.0], None),  # nor is what the model around it passes on
        (["l*"], [0.0], None),
        (["?og"], [0.0], None),
        (["lo"], [0.0], "has infs"),
        (["*"], [-1.0], "has nans"),
        (["log"], [0.0, -1.0], r"< \[1\] log: Function: output has nans"),  # what was excused is not in the next batch
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
    with mock.patch.object(Slots, "read", side_effect=LookupError("no slot")):
        for _ in range(2):
            with pytest.raises(DetectionFailedError, match="LookupError: no slot") as raised:
                detect_overflow(torch.tensor([INF]), "here")
            assert isinstance(raised.value.__cause__, LookupError)
    assert not caplog.records
