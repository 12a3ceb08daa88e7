"""Models under ``torch.compile``: a session leaves the graphs as they are, and sees the layers in them.

With torch 2.14 a ``te.Linear`` is one operator of the graph (Transformer Engine 2.20.2, ``pytorch/dynamo``). Other
modules, and recipes with delayed scaling, run between graphs. The same model without ``torch.compile`` gives
the expected results.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import utils
from transformer_engine.pytorch.module import linear

from te_precision_callbacks.session import InspectSession
from tests.capability import stand_for
from tests.conftest import Keeper, feature, statistics

WIDTH = 32
RECIPES = {
    "BF16": None,
    "delayed scaling": recipes.DelayedScaling(),
    "current scaling": recipes.Float8CurrentScaling(),
    "MXFP8": recipes.MXFP8BlockScaling(),
    "block scaling": recipes.Float8BlockScaling(),
}
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(WIDTH, WIDTH),
    "LayerNormLinear": lambda: te.LayerNormLinear(WIDTH, WIDTH),
    "LayerNormMLP": lambda: te.LayerNormMLP(WIDTH, 2 * WIDTH),
    "TransformerLayer": lambda: te.TransformerLayer(WIDTH, 2 * WIDTH, 2, hidden_dropout=0.0, attention_dropout=0.0),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("any_gpu"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Dynamo and of Transformer Engine, about graph breaks
    pytest.mark.skipif(
        linear._linear_op is None,
        reason=f"torch {torch.__version__} has no compiled te.Linear: {utils._compile_disabled_reason}",
    ),
]


class Block(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = module
        self.down = te.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@dataclass
class Trained:
    losses: list[float]
    weights: list[torch.Tensor]
    graphs: list[list[str]]
    """The operators of each graph that torch compiled."""
    session: Any
    values: dict[Any, float]


def trained(
    folder: Path,
    recipe: Any,
    config: Any = None,
    *,
    module: str = "Linear",
    compiles: bool = True,
    observed: bool = True,
    quantized_weights: bool = False,
    unobserved_steps: int = 0,
    **options: Any,
) -> Trained:
    stand_for((10, 0) if recipe is not None and recipe.mxfp8() else (9, 0))
    torch._dynamo.reset()
    torch.manual_seed(0)
    graphs: list[list[str]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    with te.quantized_model_init(enabled=quantized_weights, recipe=recipe):
        net = torch.nn.Sequential(Block(MODULES[module]()), torch.nn.Linear(WIDTH, 8))
    called: Any = torch.compile(net, backend=compiler) if compiles else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    keeper, losses = Keeper(), list[float]()

    def step() -> None:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = called(torch.randn(32, 2, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for _ in range(unobserved_steps):
        step()
    around = InspectSession(config, model=called, log_dir=folder, sinks=[keeper], **options) if observed else None
    with around or nullcontext() as session:
        for _ in range(4):
            step()
            if session is not None:
                session.step()
    values = {
        (records.iteration, row.layer, row.tensor, row.statistic): row.value
        for records in keeper.steps
        for row in records
    }
    return Trained(losses, [weight.detach().clone() for weight in net.parameters()], graphs, session, values)


def assert_same_training(first: Trained, second: Trained) -> None:
    assert first.losses == second.losses
    assert all(map(torch.equal, first.weights, second.weights))


def products(run: Trained) -> dict[tuple[str, str], int]:
    """Products in a graph belong to the module that Python runs it in: attention is one of its layer's."""
    coverage = run.session.coverage()
    return {(product.layer.removesuffix(".core_attention"), product.gemm): product.macs for product in coverage}


def assert_sees_the_same(compiled: Trained, eager: Trained) -> None:
    assert compiled.values == eager.values != {}
    assert compiled.session.precision == eager.session.precision
    assert products(compiled) == products(eager)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_session_changes_no_graph_and_sees_what_it_sees_without_compiling(tmp_path: Path, recipe: str) -> None:
    alone = trained(tmp_path, RECIPES[recipe], observed=False)
    compiled = trained(tmp_path / "compiled", RECIPES[recipe])
    assert_same_training(compiled, alone)
    assert {tuple(graph) for graph in compiled.graphs} == {tuple(graph) for graph in alone.graphs}
    operators = [name for graph in alone.graphs for name in graph if "transformer_engine_compile" in name]
    assert bool(operators) == (recipe != "delayed scaling"), "this tests te.Linear in a graph"
    assert_sees_the_same(compiled, trained(tmp_path / "eager", RECIPES[recipe], compiles=False))


@pytest.mark.parametrize("recipe", ["current scaling", "MXFP8"])
def test_quantized_weights(tmp_path: Path, recipe: str) -> None:
    compiled = trained(tmp_path / "compiled", RECIPES[recipe], quantized_weights=True)
    assert_same_training(compiled, trained(tmp_path, RECIPES[recipe], quantized_weights=True, observed=False))
    eager = trained(tmp_path / "eager", RECIPES[recipe], quantized_weights=True, compiles=False)
    assert_sees_the_same(compiled, eager)


@pytest.mark.parametrize(
    "options",
    [
        *({"module": module} for module in ("LayerNormLinear", "LayerNormMLP", "TransformerLayer")),
        {"unobserved_steps": 2},
    ],
    ids=str,
)
def test_beside_modules_that_run_between_graphs_and_compiled_before_the_session(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    recipe = RECIPES["current scaling"]
    compiled = trained(tmp_path / "compiled", recipe, **options)
    assert_same_training(compiled, trained(tmp_path, recipe, **options, observed=False))
    assert_sees_the_same(compiled, trained(tmp_path / "eager", recipe, **options, compiles=False))


@pytest.mark.parametrize("recipe", ["current scaling", "delayed scaling"])
def test_a_feature_that_changes_precision_acts_outside_of_the_graph(tmp_path: Path, recipe: str) -> None:
    config = {"s": feature("DisableFP8GEMM", ["0.up"], gemms=["fprop", "dgrad"])}
    compiled = trained(tmp_path / "compiled", RECIPES[recipe], config)
    eager = trained(tmp_path / "eager", RECIPES[recipe], config, compiles=False)
    assert_same_training(compiled, eager)
    assert compiled.session.precision == eager.session.precision
    formats = {
        (row.layer, row.gemm): row.operands["weight"] for row in compiled.session.precision if row.gemm != "wgrad"
    }
    assert formats["0.up", "fprop"] == "FP32"
    assert formats["0.down", "fprop"] == "FP8 E4M3"


def test_steps_without_statistics_do_not_compile_again_and_again(tmp_path: Path) -> None:
    recipe = RECIPES["current scaling"]
    alone = trained(tmp_path, recipe, observed=False)
    compiled = trained(tmp_path / "compiled", recipe, statistics(freq=2))
    assert_same_training(compiled, alone)
    assert len(compiled.graphs) <= len(alone.graphs) + 1, "once for steps in which nothing is observed"


def test_the_overflow_detector_changes_no_graph(tmp_path: Path) -> None:
    recipe = RECIPES["current scaling"]
    compiled = trained(tmp_path / "compiled", recipe, debug="activation_overflow")
    assert_same_training(compiled, trained(tmp_path, recipe, observed=False))


def test_a_feature_is_refused_where_torch_skips_the_guards_of_a_graph(tmp_path: Path) -> None:
    """It cannot leave the graph then."""
    net = te.Linear(WIDTH, WIDTH)
    torch._dynamo.reset()
    compiled: Any = torch.compile(net, backend="aot_eager")

    def step() -> None:
        with te.autocast(recipe=RECIPES["current scaling"]):
            compiled(torch.randn(32, WIDTH)).sum().backward()

    for _ in range(2):
        step()
    config = {"s": feature("DisableFP8GEMM", ["all"], gemms=["fprop"])}
    with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        with InspectSession(config, model=compiled, log_dir=tmp_path) as session:
            step()
            session.step()
    assert session.layers[0].refused.startswith("torch.compile: te.Linear is one operator of the compiled graph")
    assert {row.operands["weight"] for row in session.precision if row.gemm == "fprop"} == {"FP8 E4M3"}
