"""Layers in CUDA graphs are observed by their original forward, in collection steps only.

A graph needs a GPU. Here forwards are replaced exactly as by ``_make_graphed_callables`` (TE 2.20.2), and a copy of the
module, which nothing observes, computes a replay's results.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from transformer_engine.pytorch import graph
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.session import InspectSession
from tests.combinations import half
from tests.conftest import Keeper, statistics, warnings_of
from tests.functions import Net

STEPS = 8
FREQ = 3
COLLECTED = [0, 3, 6]
RECIPES = {"current": Float8CurrentScaling, "delayed": DelayedScaling}


def replaying(module: torch.nn.Module) -> torch.nn.Module:
    """A module with all state of another one, and without its hooks."""
    copy = object.__new__(type(module))
    copy.__dict__ = {**module.__dict__, "is_debug_iter": lambda: False}
    return copy


def make_graphed(
    modules: Sequence[Any],
    recipe: Recipe | None,
    replays: list[int],
    *,
    caches: bool = False,
    need_bwd_dw: bool = False,
    returned: list[Any] | None = None,
) -> None:

    def backward_dw() -> None:
        assert not need_bwd_dw

    graph.set_capture_start()
    for number, module in enumerate(modules):
        with te.autocast(enabled=recipe is not None, recipe=recipe, _graph=True):
            first = {"is_first_microbatch": True} if caches else {}
            module(torch.zeros(32, 32, requires_grad=True), **first).sum().backward()
        module.zero_grad()
        copy: Any = replaying(module)

        def graphed(*inputs: Any, _copy: Any = copy, _number: int = number, **keywords: Any) -> Any:
            replays.append(_number)
            return type(_copy).forward(_copy, *inputs, **keywords)

        def make_graphed_forward(func: Any, graph_training_state: bool, graphed: Any, orig_fwd: Any) -> Any:
            def new_fwd(*user_args: Any, **user_kwargs: Any) -> Any:
                if func.training == graph_training_state:
                    return graphed(*user_args, **user_kwargs)
                return orig_fwd(*user_args, **user_kwargs)

            return new_fwd

        forward = make_graphed_forward(module, module.training, graphed, module.forward)
        forward.__module__ = graph.__name__
        if returned is None:
            module.forward = forward
            module.backward_dw = backward_dw
        else:  # with _order=
            returned.append(forward)
    graph.set_capture_end()


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(te.Linear(32, 32), te.LayerNormMLP(32, 64), torch.nn.Linear(32, 32))


def train(net: Any, recipe: Recipe | None, end_step: Callable[[int], object] = bool, steps: int = STEPS) -> list[Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = net(torch.randn(32, 32))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        end_step(step)
    return [weight.detach().clone() for weight in net.parameters()]


def rows(keeper: Keeper) -> list[Any]:
    return [(records.iteration, row) for records in keeper.steps for row in records]


def test_the_shape_of_a_graphed_forward() -> None:
    """The names that the bypass reads."""
    source = inspect.getsource(graph._make_graphed_callables)
    for text in (
        "def new_fwd(*user_args, **user_kwargs):",
        "return orig_fwd(*user_args, **user_kwargs)",
        "func.forward = forward",
        'setattr(ret[-1], "backward_dw", backward_dw_func)',
        "if need_bwd_dw:",
    ):
        assert text in source
    whole = inspect.getsource(graph.make_graphed_callables)
    calls = ("set_capture_start()", "_make_graphed_callables(", "set_capture_end()")
    assert sorted(map(whole.index, calls)) == list(map(whole.index, calls))
    of_torch = inspect.getsource(torch.cuda.make_graphed_callables)
    if "func_ref" not in of_torch:  # before torch 2.15
        assert "return orig_fwd(*user_args, **user_kwargs)" in of_torch
        return
    assert "func_ref = weakref.ref(func)" in of_torch
    assert 'orig_bound_to_func = getattr(orig_fwd, "__self__", None) is func' in of_torch
    assert "return orig_call(module, *user_args, **user_kwargs)" in of_torch
    assert "return orig_call(*user_args, **user_kwargs)" in of_torch


CASES = [
    (name, when)
    for name in RECIPES
    for when in ("before", "after", "in step 2")
    if name != "delayed" or when == "before"  # the warm-up here changes the scales, a real capture's restores them
]


@pytest.mark.few
@pytest.mark.parametrize(("case", "observe"), half(CASES, ["fused", "debug"]))
def test_it_is_as_in_an_eager_training(
    case: tuple[str, str], observe: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, when = case
    recipe, config = RECIPES[name](), statistics(tensors=["activation", "weight", "gradient"], freq=FREQ)
    eager, in_graph = Keeper(), Keeper()
    net = model()
    with InspectSession(config, model=net, log_dir=tmp_path / "eager", sinks=[eager], observe=observe) as session:
        if name == "delayed":
            make_graphed(net[:2], recipe, [])
            for module in net[:2]:
                del module.__dict__["forward"]
        expected = train(net, recipe, lambda step: session.step())
    coverage = session.coverage()
    FP8GlobalStateManager.reset()
    caplog.clear()

    net, replays = model(), list[int]()
    graphed = [net[0], net[1]]
    if when == "before":
        make_graphed(graphed, recipe, replays)
    with InspectSession(config, model=net, log_dir=tmp_path / "graph", sinks=[in_graph], observe=observe) as session:
        if when == "after":
            make_graphed(graphed, recipe, replays)

        def end_step(step: int) -> None:
            session.step()
            if when == "in step 2" and step == 1:
                make_graphed(graphed, recipe, replays)

        weights = train(net, recipe, end_step)
    assert all(map(torch.equal, expected, weights))
    assert len(replays) == 2 * len({4, 5, 7} if when == "in step 2" else {1, 2, 4, 5, 7})
    assert rows(in_graph) == rows(eager)
    assert in_graph.iterations == COLLECTED
    assert not warnings_of(caplog)
    assert session.coverage() == coverage
    assert not any(info.refused for info in session.layers)
    assert "not observed" not in diagnose(tmp_path / "graph").summary
    assert graphed[0].forward.__module__ == graph.__name__, "the graph is back"


def test_cached_weights_stay_where_the_graph_reads_them(tmp_path: Path) -> None:
    recipe, net, replays = Float8CurrentScaling(), te.Linear(32, 32), list[int]()
    make_graphed([net], recipe, replays, caches=True)
    cached = dict(net._fp8_workspaces)
    assert cached
    config = statistics(tensors=["weight"], freq=2)
    with InspectSession(config, model=net, log_dir=tmp_path, observe="debug") as session:
        for _ in range(4):
            with te.autocast(enabled=True, recipe=recipe):
                for first in (True, False):
                    net(torch.randn(32, 32), is_first_microbatch=first).sum().backward()
            session.step()
            kept = net._fp8_workspaces
            assert kept.keys() == cached.keys()
            assert all(kept[name] is cached[name] for name in cached)
    assert replays == [0] * 4


def test_evaluation_keeps_its_graph(tmp_path: Path, keeper: Keeper) -> None:
    net, replays = te.Linear(32, 32).eval(), list[int]()
    make_graphed([net], None, replays)
    net.train()
    make_graphed([net], None, replays)
    with InspectSession(statistics(freq=1), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        net(torch.randn(32, 32)).sum().backward()
        assert not replays
        with torch.no_grad():
            net.eval()(torch.randn(32, 32))
        assert replays == [0]
        session.step()
    assert keeper.iterations == [0]


@pytest.mark.parametrize("captured", [None, DelayedScaling()])
def test_another_recipe_than_at_the_capture(captured: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The original forward would train in the precision of the region around it, which the graph does not."""
    net, replays = te.Linear(32, 32), list[int]()
    make_graphed([net], captured, replays)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        train(net, Float8CurrentScaling(), lambda step: session.step(), steps=4)
    assert len(replays) == 4
    (text,) = [text for text in warnings_of(caplog) if "CUDA graph" in text]
    assert "te.autocast around the replay has another recipe than at the capture" in text
    for verdict in (session.findings, diagnose(tmp_path)):
        assert verdict.summary.startswith("Not enough checked: ")
        assert ": no layer was observed: CUDA graph: " in verdict.summary
        assert "not observed: 1 of 1 layer (CUDA graph)" in verdict.summary


def test_graphs_that_cannot_be_bypassed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, replays = model(), list[int]()
    make_graphed([net[0]], None, replays, need_bwd_dw=True)
    make_graphed([net[1]], None, replays)
    graphed = net[1].forward

    def wrapper(*arguments: Any) -> Any:
        return graphed(*arguments)

    wrapper.__wrapped__ = graphed  # type: ignore[attr-defined]
    net[1].forward = wrapper
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        train(net, None, lambda step: session.step(), steps=2)
    (text,) = warnings_of(caplog)
    assert text.startswith("These layers run in a CUDA graph that cannot be bypassed")
    assert "a second graph computes its weight gradients (delay_wgrad_compute)" in text
    assert "its forward was wrapped after its graph was made" in text
    assert "not observed: 3 of 4 layers (CUDA graph)" in diagnose(tmp_path).summary


def test_a_capture_that_raises(tmp_path: Path, keeper: Keeper) -> None:
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        graph.set_capture_start()
        session.step()
        train(net, None, lambda step: session.step(), steps=2)
    graph._IS_GRAPH_CAPTURING = False
    assert keeper.iterations == [1, 2]


class MegatronLayer(Net):
    """The calls of Megatron-LM's ``GraphableMegatronModule`` with graphs by Transformer Engine."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.training and self.cuda_graphs:
            return self.cuda_graphs[0](*arguments, **keywords)
        return super().__call__(*arguments, **keywords)


def megatron_layer() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        MegatronLayer(lambda net, inputs: net.linear(inputs), linear=te.Linear(32, 32), cuda_graphs=[])
    )


def test_layers_of_megatron(tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    expected = train(megatron_layer(), None)
    net, replays = megatron_layer(), list[int]()
    layer: Any = net[0]
    with InspectSession(statistics(freq=FREQ), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        graphs = list[Any]()
        make_graphed([layer.linear], None, replays, returned=graphs)
        layer.cuda_graphs = graphs
        weights = train(net, None, lambda step: session.step())
    assert all(map(torch.equal, expected, weights))
    assert layer.cuda_graphs is graphs
    # Megatron puts its graphs into the layer after Transformer Engine has ended the capture, so step 0 replays.
    assert keeper.iterations == [3, 6]
    assert [product.layer for product in session.coverage() if product.family == "te"], "counted in a later step"
    assert len(replays) == 4
    assert not warnings_of(caplog)


def test_a_capture_by_hand_is_named_in_the_verdict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = te.Linear(32, 32)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        with te.autocast(enabled=False, _graph=True):
            net(torch.randn(32, 32)).sum().backward()
        session.step()
        session.step()
    (text,) = [text for text in warnings_of(caplog) if "CUDA graph" in text]
    assert text.startswith("These layers run in a CUDA graph that cannot be bypassed")
    assert "not observed: 1 of 1 layer (CUDA graph)" in session.findings.summary


def test_the_scales_of_a_graph_that_cannot_be_bypassed(tmp_path: Path) -> None:
    """A replay updates the state of delayed scaling in place; here a copy that nothing observes does."""
    net = te.LayerNormMLP(32, 64)
    delayed = DelayedScaling(amax_history_len=4)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        with te.autocast(enabled=True, recipe=delayed, _graph=True):
            net(torch.randn(32, 32)).sum().backward()
        session.step()
        replayed = replaying(net)
        for step in (1, 2):
            with te.autocast(enabled=True, recipe=delayed):
                replayed(step * torch.randn(32, 32)).sum().backward()
            records = session.step()
    values = {(row.layer, row.tensor, row.statistic): row.value for row in records or ()}
    for number, layer in enumerate(("layernorm_mlp.fc1", "layernorm_mlp.fc2")):
        for direction, column, tensor in (
            ("scaling_fwd", 3 * number, "activation"),
            ("scaling_fwd", 3 * number + 1, "weight"),
            ("scaling_bwd", 2 * number, "gradient"),
        ):
            state = net.fp8_meta[direction]
            assert values.pop((layer, tensor, "scale_inv_max")) == 1 / state.scale[column]
            assert values.pop((layer, tensor, "cur_amax")) == state.amax_history[-1, column] > 0
    assert not values
    assert "not observed: 2 of 2 layers (CUDA graph)" in session.findings.summary
