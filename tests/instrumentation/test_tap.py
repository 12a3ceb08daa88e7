"""Events of GEMMs, against the operands at the entries of the extension; and wgrads that are added to ``main_grad``."""

import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.cpp_extensions import gemm as gemm_module
from transformer_engine.pytorch.module import layernorm_linear as layernorm_module
from transformer_engine.pytorch.module import linear as linear_module

from te_precision_callbacks.instrumentation import tap as tap_module
from te_precision_callbacks.layers.gemm_events import GemmEvent
from te_precision_callbacks.session import InspectSession, ObservationError
from tests.conftest import Keeper, feature, statistics
from tests.functions import Net
from tests.instrumentation.gemm_spy import (
    CHECKPOINTS,
    HOPPER,
    INSIDE,
    MODULES,
    RECIPES,
    ROWS,
    assert_alike,
    can_run,
    installed,
    layers_of,
    products_of,
    spied,
    tapped,
)
from tests.instrumentation.steps import stepped
from tests.instrumentation.test_idle import calls

BF16 = torch.bfloat16


def inputs() -> torch.Tensor:
    return torch.randn(ROWS, 32, dtype=BF16, requires_grad=True)


def train(net: torch.nn.Module, recipe: Any, checkpoint: str = "none", *, sequences: bool = False) -> None:
    x = torch.randn((ROWS, 2, 32) if sequences else (ROWS, 32), dtype=BF16, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = CHECKPOINTS[checkpoint](net, x)
        if checkpoint in INSIDE:
            out.float().sum().backward()
    if checkpoint not in INSIDE:
        out.float().sum().backward()


ORDERS = {
    "Linear": ["linear fprop", "linear dgrad", "linear wgrad"],
    "LayerNormLinear": [f"layernorm_linear {gemm}" for gemm in ("fprop", "dgrad", "wgrad")],
    "LayerNormMLP": [
        *("layernorm_mlp.fc1 fprop", "layernorm_mlp.fc2 fprop"),
        *("layernorm_mlp.fc2 dgrad", "layernorm_mlp.fc2 wgrad", "layernorm_mlp.fc1 dgrad", "layernorm_mlp.fc1 wgrad"),
    ],
    "GroupedLinear": [f"grouped.gemm_{expert} {gemm}" for gemm in ("fprop", "dgrad", "wgrad") for expert in (0, 1)],
}


def forward_and_backward(module: str) -> tuple[list[str], list[str]]:
    count = sum("fprop" in text for text in ORDERS[module])
    return ORDERS[module][:count], ORDERS[module][count:]


PAIRS = [pair for pair in itertools.product(MODULES, HOPPER) if can_run(*pair, "none")]


@pytest.mark.few
@pytest.mark.parametrize(("module", "recipe"), PAIRS)
def test_every_operand_in_its_order(module: str, recipe: str) -> None:
    net, made = MODULES[module][0](), RECIPES[recipe]()
    shape = (ROWS, 2, 32) if module == "TransformerLayer" else (ROWS, 32)
    with spied() as calls, tapped(net) as events:
        outs = []
        for _ in range(2):
            with te.autocast(enabled=made is not None, recipe=made):
                outs.append(net(torch.randn(shape, dtype=BF16, requires_grad=True)))
        for out in outs:
            out.float().sum().backward()
    assert_alike(events, calls)
    if module in ORDERS:
        forward, backward = forward_and_backward(module)
        assert layers_of(events) == [*forward * 2, *backward * 2]
    else:
        assert [event.layer.removeprefix("transformer_layer.") for event in events[:4]] == [
            "self_attention.layernorm_qkv",
            "self_attention.proj",
            "layernorm_mlp.fc1",
            "layernorm_mlp.fc2",
        ]
    assert {event.recipe for event in events} == {RECIPE_NAMES[recipe]}


RECIPE_NAMES = {
    "none": "",
    "delayed": "fp8_delayed_scaling",
    "current": "fp8_current_scaling",
    "block": "fp8_block_scaling",
    "current high_precision": "fp8_current_scaling",
    "current dequantized": "fp8_current_scaling",
    "custom current": "CustomRecipe",
    "custom high precision": "CustomRecipe",
}


@pytest.mark.usefixtures("second_thread")
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("module", ["LayerNormMLP", "LayerNormLinear"])
def test_recomputed_forwards(module: str, checkpoint: str) -> None:
    net = MODULES[module][0]()
    with spied() as calls, tapped(net) as events:
        train(net, Float8CurrentScaling() if checkpoint != "reentrant, outside" else None, checkpoint)
    assert_alike(events, calls)
    forward, backward = forward_and_backward(module)
    assert layers_of(events) == [*forward, *([] if checkpoint == "none" else forward), *backward]


@pytest.mark.usefixtures("backward_thread")
@pytest.mark.parametrize("make", [te.Linear, te.LayerNormMLP, functools.partial(te.GroupedLinear, 2)])
def test_a_wgrad_that_runs_later(make: Any) -> None:
    net = make(32, 64, params_dtype=BF16, delay_wgrad_compute=True)
    splits = [[16, 16]] if isinstance(net, te.GroupedLinear) else []
    with spied() as calls, tapped(net) as events:
        x = torch.randn(ROWS, 32, dtype=BF16, requires_grad=True)
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            out = net(x, *splits)
        out.float().sum().backward()
        assert "wgrad" not in {event.gemm for event in events}
        net.backward_dw()
    assert_alike(events, calls)
    assert {event.layer for event in events if event.gemm == "wgrad"} == {
        event.layer for event in events if event.gemm == "fprop"
    }


@pytest.mark.usefixtures("second_thread")
@pytest.mark.parametrize("recipe", [None, DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()])
def test_te_ops(recipe: Any) -> None:
    net = torch.nn.Sequential(
        te.ops.Sequential(te.ops.Linear(32, 64, dtype=BF16), te.ops.GELU(), te.ops.BasicLinear(64, 32, dtype=BF16)),
        te.ops.Linear(32, 32, bias=False, dtype=BF16),
    )
    with spied() as calls, installed(net) as table:
        train(net, recipe)
    products = products_of(table)
    assert [f"{product.layer} {product.gemm}" for product in products] == [
        *("0.0 fprop", "0.2 fprop", "1 fprop"),
        *(f"{layer} {gemm}" for layer in ("1", "0.2", "0.0") for gemm in ("dgrad", "wgrad")),
    ]
    for product, call in zip(products, calls, strict=True):
        assert (product.n, product.m, product.k) == (call.n, call.m, call.k)
        assert product.family == "te_ops"
        assert product.is_low == (recipe is not None)


def test_wgrad_that_is_added_to_main_grad() -> None:
    net = te.Linear(32, 64, params_dtype=BF16, fuse_wgrad_accumulation=True, bias=False)
    net.weight.main_grad = torch.zeros(64, 32)
    with spied() as calls, tapped(net) as events:
        for _ in range(2):
            train(net, Float8CurrentScaling())
    assert_alike(events, calls)
    wgrads = [event for event in events if event.gemm == "wgrad"]
    assert [event.arguments["accumulate"] for event in wgrads] == [True, True]
    assert wgrads[0].out.data_ptr() == net.weight.main_grad.data_ptr()


class OfTheUser(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, x)
        return gemm_module.general_gemm(weight, x)[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _, x = ctx.saved_tensors
        return gemm_module.general_gemm(x, gradient, layout="NT", grad=True)[0], None


def test_a_gemm_of_the_users_own_is_of_no_layer() -> None:
    net, weight = te.Linear(32, 32, params_dtype=BF16), torch.randn(32, 32, dtype=BF16, requires_grad=True)
    with spied() as calls, tapped(net) as events:
        net(OfTheUser.apply(weight, net(torch.randn(ROWS, 32, dtype=BF16)))).float().sum().backward()
    of_user = [call for call in calls if call.a is weight or call.gemm == "wgrad"][:2]
    assert {event.layer for event in events} == {"linear"}
    assert len(events) == len(calls) - 2
    assert [call.gemm for call in of_user] == ["fprop", "wgrad"]


def test_a_wrapper_of_the_users_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def theirs(*operands: Any, **keywords: Any) -> Any:
        called.append(keywords.get("layout", "TN"))
        return gemm_module.general_gemm(*operands, **keywords)

    monkeypatch.setattr(linear_module, "general_gemm", theirs)
    net = te.Linear(32, 64, params_dtype=BF16)
    with spied() as calls, tapped(net) as events:
        train(net, None)
    assert called == ["TN", "NN", "NT"]
    assert_alike(events, calls)
    assert linear_module.general_gemm is theirs

    with tapped(net) as events:
        ours = linear_module.general_gemm

        def later(*operands: Any, **keywords: Any) -> Any:
            called.append("later")
            return ours(*operands, **keywords)

        monkeypatch.setattr(linear_module, "general_gemm", later)
        train(net, None)
    assert linear_module.general_gemm is later
    train(net, None)
    assert (called.count("later"), len(events)) == (6, 3)


def test_an_extension_that_raises_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net = te.Linear(32, 64, params_dtype=BF16)
    own = tex.generic_gemm

    def raises(*arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError("cuBLAS")

    with tapped(net) as events:
        x = torch.randn(ROWS, 32, dtype=BF16, requires_grad=True)
        monkeypatch.setattr(tex, "generic_gemm", raises)
        with pytest.raises(RuntimeError, match="cuBLAS"):
            net(x)
        assert events == []
        kept = weakref.ref(x)
        del x
        gc.collect()
        assert kept() is None
        monkeypatch.setattr(tex, "generic_gemm", own)
        train(net, None)
        assert layers_of(events) == ORDERS["Linear"]


def test_nothing_of_transformer_engine_stays_replaced() -> None:
    net = te.Linear(32, 64, params_dtype=BF16)
    owners = [gemm_module, linear_module, te.module.base.TransformerEngineBaseModule, linear_module._Linear]
    owners += [te.ops.BasicLinear, te.ops.fused.ForwardLinearBiasActivation, te.module._common.WeightGradStore]
    before = [dict(vars(owner)) for owner in owners]
    with tapped(net):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


def test_a_listener_that_raises_is_reported_and_training_goes_on() -> None:
    net, reported = te.Linear(32, 64, params_dtype=BF16), list[str]()

    def listener(event: GemmEvent) -> None:
        raise ValueError(event.gemm)

    with tapped(net, listener, report=lambda doing, what, error: reported.append(f"{what} {error}")):
        train(net, None)
    assert reported == ["linear fprop", "linear dgrad", "linear wgrad"]


@pytest.mark.parametrize("what", ["Forward", "gradients"])
def test_what_goes_wrong_in_the_tap_is_reported_and_training_goes_on(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("not as in 2.20")

    monkeypatch.setattr(tap_module, what, fails)
    net = te.Linear(32, 64, params_dtype=BF16)
    for strict in (False, True):
        with InspectSession(
            statistics(tensors=["gradient"]), model=net, log_dir=tmp_path / str(strict), observe="fused", strict=strict
        ) as session:
            if strict:
                with pytest.raises(ObservationError, match=r"not as in 2\.20"):
                    train(net, None)
                continue
            for _ in range(2):
                train(net, None)
                session.step()
            assert sum("not as in 2.20" in record.getMessage() for record in caplog.records) == 1


def test_the_order_of_execution_is_that_of_the_first_step(tmp_path: Path) -> None:
    layers = {name: te.Linear(32, 32, params_dtype=BF16) for name in ("last", "first", "never")}
    net = Net(lambda net, x: net.last(net.first(x)), **layers)
    for config in (statistics(layers=["nowhere"]), statistics()):
        session = stepped(net, tmp_path, [None] * 2, config, inputs=inputs, allow_unmatched=True)
        assert {info.name: (info.exec_fwd, info.exec_bwd) for info in session.layers} == {
            "last": (1, 0),
            "first": (0, 1),
            "never": (None, None),
        }


def test_the_precision_of_te_ops(tmp_path: Path) -> None:
    net = torch.nn.Sequential(te.ops.Linear(32, 32, dtype=BF16), te.Linear(32, 32, params_dtype=BF16))
    config = {"s": feature("DisableFP8Layer", ["nowhere"])}
    recipes = [None, None, *[Float8CurrentScaling()] * 3]
    session = stepped(net, tmp_path, recipes, config, inputs=inputs, allow_unmatched=True)
    of_ops = {at: {e.gemm: e for e in session.precision(at=at) if e.layer == "0"} for at in range(5)}
    assert of_ops[0]["dgrad"].operands == {"gradient": "BF16", "weight": "BF16"}
    assert of_ops[4]["dgrad"].operands == {"gradient": "FP8 E5M2", "weight": "FP8 E4M3"}
    assert (of_ops[4]["fprop"].since, of_ops[4]["fprop"].recipe) == (2, "fp8_current_scaling")
    assert all(entry.seen for at in of_ops.values() for entry in at.values())


def test_threads_of_their_own_have_layers_of_their_own() -> None:
    nets = torch.nn.ModuleList(te.Linear(32, 32, params_dtype=BF16) for _ in range(2))
    with tapped(nets) as events:
        threads = [threading.Thread(target=train, args=(net, None)) for net in nets for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {key: len(list(group)) for key, group in itertools.groupby(sorted(layers_of(events)))} == {
        f"{layer} {gemm}": 3 for layer in "01" for gemm in ("fprop", "dgrad", "wgrad")
    }


MICRO_BATCHES = 3
WITH_MAIN_GRAD: dict[str, Callable[..., torch.nn.Module]] = {
    "linear": lambda **keywords: te.Linear(32, 48, **keywords),
    "layernorm_linear": lambda **keywords: te.LayerNormLinear(32, 48, **keywords),
    "layernorm_mlp": lambda **keywords: te.LayerNormMLP(32, 48, **keywords),
    "grouped_linear": lambda **keywords: te.GroupedLinear(2, 32, 48, **keywords),
}


def micro_batches(
    name: str, log_dir: Path, *, fused: bool, config: Any, fp8: bool = False
) -> tuple[Keeper, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    te.quantization.FP8GlobalStateManager.reset()
    net, keeper = WITH_MAIN_GRAD[name](fuse_wgrad_accumulation=fused), Keeper()
    weights = {key: weight for key, weight in net.named_parameters() if weight.dim() == 2}
    for weight in weights.values():
        weight.main_grad = torch.zeros_like(weight)
    with InspectSession(config, model=net, log_dir=log_dir, sinks=[keeper], observe="debug") as session:
        for _ in range(MICRO_BATCHES):
            x = torch.randn(32, 32, requires_grad=True)
            with te.autocast(enabled=fp8):
                out = net(x, [16, 16]) if name == "grouped_linear" else net(x)
            out.pow(2).sum().backward()
        session.step()
    return keeper, {key: weight.main_grad if fused else weight.grad for key, weight in weights.items()}


@pytest.mark.few
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", WITH_MAIN_GRAD)
def test_the_wgrad_of_each_micro_batch_is_measured(tmp_path: Path, name: str, fp8: bool) -> None:
    config = statistics(tensors=["wgrad"], stats=["l1_norm", "max", "numel"])
    plain, gradients = micro_batches(name, tmp_path / "plain", fused=False, config=config, fp8=fp8)
    fused, sums = micro_batches(name, tmp_path / "fused", fused=True, config=config, fp8=fp8)
    assert {(row.layer, row.statistic): row.value for row in fused.steps[0]} == {
        (row.layer, row.statistic): row.value for row in plain.steps[0]
    }
    for key, gradient in gradients.items():
        torch.testing.assert_close(sums[key], gradient)


@pytest.mark.parametrize("name", WITH_MAIN_GRAD)
def test_measuring_does_not_change_main_grad(tmp_path: Path, name: str) -> None:
    watched = micro_batches(name, tmp_path / "a", fused=True, config=statistics(tensors=["wgrad"]))[1]
    # The gradient is watched, so that both take Transformer Engine's debug path.
    alone = micro_batches(name, tmp_path / "b", fused=True, config=statistics(tensors=["gradient"]))[1]
    assert all(torch.equal(total, alone[key]) for key, total in watched.items())


def test_the_gemms_are_transformer_engines_own_where_nothing_is_due(tmp_path: Path) -> None:
    own = layernorm_module.general_gemm
    net = te.LayerNormLinear(32, 48, fuse_wgrad_accumulation=True)
    net.weight.main_grad = torch.zeros_like(net.weight)
    replaced = []
    config = statistics(tensors=["wgrad"], freq=2)
    with InspectSession(config, model=net, log_dir=tmp_path, every_step=False) as session:
        for _ in range(4):
            replaced.append(layernorm_module.general_gemm is not own)
            with calls() as counted:
                net(torch.randn(16, 32)).sum().backward()
            for hook in ("note_forward", "note_gradient"):  # once: a fused wgrad leaves no gradient to be seen
                counted.pop(f"_watch_gap.<locals>.{hook}", None)
            assert bool(counted) is replaced[-1], counted
            session.step()
    assert replaced == [True, False, True, False]
    assert layernorm_module.general_gemm is own
