"""Experts under a session: their GEMMs in grouped tensors, their tokens, and the rows that pad them."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.instrumentation.debug_path import stale_shares
from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.conftest import feature, statistics
from tests.functions import Net
from tests.grouped_gemms import provide_grouped_tensors
from tests.instrumentation.gemm_spy import GEMM_OF, installed, layers_of, products_of, tapped
from tests.instrumentation.steps import stepped

BF16 = torch.bfloat16
ROWS = [128, 0, 256]
HOPPER, BLACKWELL = (9, 0), (10, 0)
CASES = {
    "none": (HOPPER, lambda: None),
    "current": (HOPPER, recipes.Float8CurrentScaling),
    "block": (HOPPER, recipes.Float8BlockScaling),
    "current, Blackwell": (BLACKWELL, recipes.Float8CurrentScaling),
    "MXFP8": (BLACKWELL, recipes.MXFP8BlockScaling),
    "NVFP4": (BLACKWELL, lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)),
}


@pytest.fixture(params=CASES)
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    capability, make = CASES[request.param]
    provide_grouped_tensors(monkeypatch)
    with any_capability():
        stand_for(capability)
        yield make()


@contextmanager
def spied() -> Iterator[list[tuple[str, list[Any], list[Any], list[Any]]]]:
    """The GEMMs that the entries for grouped tensors are handed, with the data of A, B and result of each expert."""
    calls: list[Any] = []

    def noted(entry: Any, a: Any, transa: bool, b: Any, transb: bool, out: Any, *more: Any) -> Any:
        result = entry(a, transa, b, transb, out, *more)
        calls.append((GEMM_OF[transa, transb], *(list(map(plain, members(item))) for item in (a, b, out))))
        return result

    with pytest.MonkeyPatch.context() as patch:
        for which in ("discrete_in", "discrete_out", "grouped_tensor"):
            name = f"te_general_grouped_gemm_for_{which}"
            patch.setattr(tex, name, functools.partial(noted, getattr(tex, name)))
        yield calls


def members(operand: Any) -> list[Any]:
    return list(operand) if isinstance(operand, list) else operand.copy().split_into_quantized_tensors()


def plain(tensor: Any) -> torch.Tensor:
    buffers = [getattr(tensor, name, None) for name in ("_rowwise_data", "_columnwise_data", "_data", "_transpose")]
    result = [buffer for buffer in buffers if isinstance(buffer, torch.Tensor)] or [tensor.detach()]
    return torch.cat([buffer.reshape(-1) for buffer in result])


def inputs() -> torch.Tensor:
    return torch.randn(sum(ROWS), 128, dtype=BF16, requires_grad=True)


def trained(recipe: Any, *, grouped: bool, **keywords: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = te.GroupedLinear(len(ROWS), 128, 256, params_dtype=BF16, use_grouped_tensor=grouped, **keywords)
    if keywords.get("fuse_wgrad_accumulation"):
        for weight in (parameter for name, parameter in net.named_parameters() if name.startswith("weight")):
            weight.main_grad = torch.ones(weight.shape)
    x = inputs()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = net(x, torch.tensor(ROWS))
    out.float().pow(2).sum().backward()
    gradients = [getattr(parameter, "main_grad", parameter.grad) for parameter in net.parameters()]
    return [out, *(gradient for gradient in (x.grad, *gradients) if gradient is not None)]


@pytest.mark.parametrize(
    "keywords",
    [{}, {"bias": False}, {"fuse_wgrad_accumulation": True}, {"save_original_input": True}],
    ids=["plain", "no bias", "fused wgrad", "saves its input"],
)
def test_experts_in_one_tensor_give_the_bits_that_they_give_alone(recipe: Any, keywords: dict[str, bool]) -> None:
    with spied() as calls:
        together = trained(recipe, grouped=True, **keywords)
    assert [gemm for gemm, *_ in calls] == ["fprop", "dgrad", "wgrad"]
    alone = trained(recipe, grouped=False, **keywords)
    assert all(torch.equal(first, other) for first, other in zip(together, alone, strict=True))


def test_events_are_what_the_entries_are_handed(recipe: Any) -> None:
    net = te.GroupedLinear(len(ROWS), 128, 256, params_dtype=BF16, use_grouped_tensor=True)
    seen: list[list[torch.Tensor]] = []
    with (
        spied() as calls,
        tapped(
            net, lambda event: seen.append([plain(part) for part in (event.a.data, event.b.data, event.out)])
        ) as got,
    ):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = net(inputs(), torch.tensor(ROWS))
        out.float().pow(2).sum().backward()
    assert layers_of(got) == [
        f"grouped_linear.gemm_{expert} {gemm}" for gemm in ("fprop", "dgrad", "wgrad") for expert in range(3)
    ]
    assert [event.expert for event in got] == [0, 1, 2] * 3
    handed = [parts for _, *operands in calls for parts in zip(*operands, strict=True)]
    for parts, tensors in zip(seen, handed, strict=True):
        for part, tensor in zip(parts, tensors, strict=True):
            assert torch.equal(part, tensor)
    rows = [rows for rows in ROWS if rows]
    for gemm, size in (("fprop", ("n", 256, 128)), ("dgrad", ("n", 128, 256)), ("wgrad", (256, 128, "n"))):
        assert [event.sizes for event in got if event.gemm == gemm and ROWS[event.expert or 0]] == [
            tuple(count if item == "n" else item for item in size) for count in rows
        ]


def observed(recipe: Any, folder: Path, *, grouped: bool) -> InspectSession:
    torch.manual_seed(0)
    experts = te.GroupedLinear(len(ROWS), 128, 256, params_dtype=BF16, use_grouped_tensor=grouped)
    net = Net(lambda net, x: net.grouped_linear(x, torch.tensor(ROWS)), grouped_linear=experts)
    config = {"nothing": feature("LogTensorStats", ["all"], tensors=["weight"], stats=["max"]) | {"enabled": False}}
    return stepped(net, folder, [recipe] * 2, config, inputs=inputs)


def test_precision_and_coverage_are_those_of_experts_alone(recipe: Any, tmp_path: Path) -> None:
    with spied() as calls:
        together = observed(recipe, tmp_path / "together", grouped=True)
    assert calls
    alone = observed(recipe, tmp_path / "alone", grouped=False)
    assert together.precision
    assert list(together.precision) == list(alone.precision)
    assert all(entry.seen for entry in together.precision)
    assert list(together.coverage()) == list(alone.coverage())


def test_grouped_te_ops_have_products_of_each_expert(recipe: Any) -> None:
    """te.ops takes grouped tensors wherever it can."""
    net = te.ops.Sequential(te.ops.GroupedLinear(len(ROWS), 128, 256, dtype=BF16))
    with spied() as calls, installed(net) as table:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = net(inputs(), torch.tensor(ROWS))
        out.float().sum().backward()
    assert [gemm for gemm, *_ in calls] == ["fprop", "dgrad", "wgrad"]
    assert {(product.layer, product.gemm): product.macs for product in products_of(table)} == {
        (f"sequential.0.gemm_{expert}", gemm): rows * 128 * 256
        for gemm in ("fprop", "dgrad", "wgrad")
        for expert, rows in enumerate(ROWS)
    }


def test_tokens_of_experts(tmp_path: Path) -> None:
    parts = {"padding": te.Fp8Padding(3), "fc": te.GroupedLinear(3, 64, 64, bias=False)}  # as Megatron Core has them
    model = Net(lambda net, tokens, splits: net.fc(*net.padding(tokens, splits)), **parts)
    config = statistics(stats=["numel"], freq=2)
    with te.autocast(), InspectSession(config, model=model, log_dir=tmp_path) as session:
        for step in range(3):
            for splits in ([30, 0, 15], [16, 0, 29]):  # of a multiple of 16: 32, 0, 16 and 16, 0, 32
                model(torch.randn(45, 64), splits).sum().backward()
            with torch.no_grad():
                model(torch.randn(45, 64), [1, 1, 43])  # an evaluation, which does not count
            records = session.step()
            values = {f"{row.layer} {row.statistic}": row.value for row in records or ()}
            if step % 2:
                assert not values
            else:
                assert values == {"fc.gemm_0 numel": 48 * 64, "fc.gemm_1 numel": 0, "fc.gemm_2 numel": 48 * 64}


def test_cached_weights_are_stale_in_their_own_expert() -> None:
    module = te.GroupedLinear(2, 32, 32, params_dtype=BF16)
    with te.autocast(recipe=recipes.Float8CurrentScaling()):
        module(torch.randn(32, 32, dtype=BF16), [16, 16], is_first_microbatch=True)
    with torch.no_grad():
        module.weight1 *= 4
    frame = SimpleNamespace(f_locals={"is_first_microbatch": False})
    shares = stale_shares(module, ("moe.gemm_0", "moe.gemm_1"), frame)
    assert [(name, float(share)) for name, share in shares] == [
        ("moe.gemm_0_weight_stale_codes%", 0.0),
        ("moe.gemm_1_weight_stale_codes%", pytest.approx(100, abs=1)),
    ]
