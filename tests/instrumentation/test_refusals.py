"""Refusals of Transformer Engine's debug path, and arguments of recipes that have no effect."""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine
import transformer_engine.debug.features
import transformer_engine.pytorch as te
import transformer_engine.pytorch.ops as te_ops
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_precision_callbacks.instrumentation.recipe_arguments import (
    IGNORED,
    amax_reductions,
    ignored_arguments,
    recipes_of,
)
from te_precision_callbacks.instrumentation.refusals import COMPILED, CUDA_GRAPH, REFUSALS, DebugRefusal
from te_precision_callbacks.instrumentation.upstream import isolate_upstream
from te_precision_callbacks.layers.naming import named_operations, named_te_modules
from te_precision_callbacks.session import InspectSession, ObservationError
from tests.capability import stand_for
from tests.conftest import Keeper, statistics, warnings_of
from tests.functions import Net

PAGE = Path(__file__).parents[2] / "docs" / "observing.md"
STATISTICS = {"LogTensorStats": {"enabled": True, "tensors": ["activation", "gradient"], "stats": ["max"], "freq": 1}}
HIGH_PRECISION = {"DisableFP8GEMM": {"enabled": True, "gemms": ["fprop"]}}
FAKE_QUANT = {
    "FakeQuant": {"enabled": True, "gemms": ["fprop"], "tensors": ["activation"], "quant_format": "FP8E4M3"},
}


def linear(first: torch.nn.Module | None = None, **keywords: Any) -> Net:
    layers = {"first": first or torch.nn.Identity(), "second": te.Linear(32, 32, **keywords)}
    return Net(lambda net, x, **options: net.second(net.first(x), **options), **layers)


def quantized() -> torch.nn.Module:
    with te.quantized_model_init(enabled=True):
        return linear()


def train(net: Any, *, fp8: bool = True, calibrating: bool = False, **keywords: Any) -> Any:
    with te.autocast(enabled=fp8, calibrating=calibrating):
        out = net(torch.randn(32, 32, requires_grad=True), **keywords)
    # A QuantizedTensor is a torch.Tensor; its sum is the sum of its decoded values.
    out.sum().backward()
    return out


def train_delayed(net: Any) -> Any:
    out = train(net)
    net.second.backward_dw()
    return out


def train_with_quantized_input(net: Any) -> Any:
    with te.autocast(enabled=True):
        out = net.second(net.first(torch.randn(32, 32, requires_grad=True), fp8_output=True))
    out.sum().backward()
    return out


def train_in_capture(net: Any) -> Any:
    """As in the warm-up of ``make_graphed_callables`` (TE 2.20.2, graph.py); the capture itself needs a GPU."""
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
    for _ in range(2):
        with te.autocast(enabled=True, _graph=True):
            out = net(torch.randn(32, 32, requires_grad=True), is_first_microbatch=True)
        out.sum().backward()
    return out


def train_offloaded(net: Any) -> Any:
    offloaded, synchronize = te.get_cpu_offload_context(
        enabled=True, num_layers=1, model_layers=3, offload_activations=True
    )
    with te.autocast(enabled=True), offloaded:
        out = net(torch.randn(32, 32, requires_grad=True))
    synchronize(out).sum().backward()
    return out


class Case(NamedTuple):
    """A script that Transformer Engine refuses in debug mode.

    Attributes:
        make: gives its model; its layer ``second`` is refused.
        step: a step of it.
        features: the config's features on ``second``.
        text: of Transformer Engine's exception; None: the table's.
        is_known_before: whether the refusal is known of the model, before the first step.
    """

    make: Callable[[], torch.nn.Module] = linear
    step: Callable[[Any], Any] = train
    features: dict[str, Any] = STATISTICS
    text: str | None = None
    is_known_before: bool = False


CASES = {
    "delay_wgrad_compute": Case(lambda: linear(delay_wgrad_compute=True), train_delayed, is_known_before=True),
    "CUDA graph": Case(step=train_in_capture),
    "quantized_model_init": Case(quantized, features=HIGH_PRECISION, is_known_before=True),
    "quantized_model_init, FakeQuant": Case(quantized, features=FAKE_QUANT, is_known_before=True),
    "fp8_output or fp8_grad": Case(step=lambda net: train(net, fp8_output=True)),
    "fp8_output or fp8_grad, fp8_grad": Case(step=lambda net: train(net, fp8_grad=True)),
    "quantized input": Case(
        lambda: linear(te.Linear(32, 32)), train_with_quantized_input, HIGH_PRECISION, text="GEMM operands"
    ),
    "autocast with calibrating=True": Case(step=lambda net: train(net, fp8=False, calibrating=True)),
    "get_cpu_offload_context": Case(step=train_offloaded),
}


def config(features: dict[str, Any]) -> dict[str, Any]:
    return {
        "s": {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": ".*second"},
            "transformer_engine": features,
        }
    }


@contextmanager
def plain_debugging(net: torch.nn.Module, features: dict[str, Any]) -> Iterator[None]:
    isolated = isolate_upstream()
    try:
        folder = str(Path(transformer_engine.debug.features.__path__[0]))
        debug_api.initialize(config(features), feature_dirs=[folder], log_dir="")
        TEDebugState.debug_enabled = True
        debug_api.infer_and_assign_layer_names(net)
        yield
    finally:
        debug_api.end_debug()
        isolated.close()


def row_of(name: str) -> Any:
    return next(row for row in REFUSALS if row.what == name.partition(",")[0])


SOURCES = {
    "delay_wgrad_compute": (
        "pytorch.module.base:TransformerEngineBaseModule.is_debug_iter",
        "Delayed wgrad compute is not supported in debug mode.",
    ),
    "single_grouped_weight or single_grouped_bias": (
        "pytorch.module.grouped_linear:GroupedLinear.forward",
        "TE debug features do not support single grouped parameters.",
    ),
    "CUDA graph": (
        "debug.pytorch.debug_quantization:DebugQuantizedTensor.quantize_",
        "CUDA Graphs are not supported with debug=True!",
    ),
    "quantized_model_init": (
        "debug.pytorch.debug_quantization:DebugQuantizer.wrap_quantized_tensor",
        "Weight tensor with fp8 model parameters enabled cannot be",
    ),
    "fp8_output or fp8_grad": (
        "debug.pytorch.debug_quantization:DebugQuantizer.process_gemm_output",
        "Quantized output is not supported for debug=True.",
    ),
    "quantized input": (
        "pytorch.module.linear:_linear_forward_impl",
        "            if isinstance(inputmat, QuantizedTensorStorage):\n"
        "                inputmat.update_usage(rowwise_usage=True)\n"
        "            else:",
    ),
    "autocast with calibrating=True": (
        "debug.pytorch.debug_quantization:DebugQuantizer.calibrate",
        "Calibration with debug is not supported",
    ),
    "get_cpu_offload_context": (
        "pytorch.cpu_offload:get_cpu_offload_context",
        "CPU offload is not supported in debug mode.",
    ),
    "torch.compile": (
        "pytorch.module.linear:Linear._compile_eager_fallback_reason",
        'return "debug instrumentation (nvidia-dlfw-inspect)"',
    ),
    "margin": ("pytorch.quantization:MXFP8BlockScalingRecipeState.make_quantizers", "MXFP8Quantizer(self.dtype)"),
    "use_power_2_scales": (
        "pytorch.module.linear:Linear._customize_quantizers_float8_current_scaling",
        "force_pow_2_scales = recipe.fp8_quant_fwd_inp.power_2_scale",
    ),
    "use_f32_scales": (
        "pytorch.quantization:Float8BlockScalingRecipeState.make_quantizers",
        "force_pow_2_scales=qparams.power_2_scale",
    ),
}
"""Refused option or ignored argument -> place in ``transformer_engine``, and a text in its source."""


def test_each_row_has_a_source() -> None:
    assert SOURCES.keys() == {*(row.what for row in (*REFUSALS, COMPILED)), *(row.argument for row in IGNORED)}


@pytest.mark.parametrize("name", SOURCES)
def test_the_table_is_that_of_the_transformer_engine_that_is_installed(name: str) -> None:
    where, source = SOURCES[name]
    module, _, path = where.partition(":")
    place: Any = importlib.import_module(f"transformer_engine.{module}")
    for part in path.split("."):
        place = getattr(place, part)
    assert source in inspect.getsource(place)


def test_the_page_has_the_table() -> None:
    rows = ""
    for row in REFUSALS:
        default = DebugRefusal(row.what, row.why)
        is_known = (row.applies_to_module, row.applies_to_effects) != (
            default.applies_to_module,
            default.applies_to_effects,
        )
        known = "before the first step" if is_known else "in the first affected forward"
        rows += f"| {row.what} | {row.why} | {known} |\n"
    assert f"|---|---|---|\n{rows}\n" in PAGE.read_text()


def test_each_row_has_a_script_that_is_refused() -> None:
    """Single grouped parameters train on a GPU only."""
    assert {row.what for row in REFUSALS} == {
        "single_grouped_weight or single_grouped_bias",
        *(name.partition(",")[0] for name in CASES),
    }


@pytest.mark.parametrize("name", CASES)
def test_transformer_engine_refuses_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    net = case.make()
    with (
        plain_debugging(net, case.features),
        pytest.raises(Exception, match=case.text or SOURCES[row_of(name).what][1]),
    ):
        case.step(net)


def trained(case: Case, net: Any, end_step: Callable[[], object]) -> list[torch.Tensor]:
    results = []
    for step in range(2):
        torch.manual_seed(step)
        results.append(case.step(net).detach())
        end_step()
    return [*results, *(weight.grad for weight in net.parameters() if weight.grad is not None)]


def as_alone(case: Case, folder: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[Any, Any, list[str]]:
    """Run the case in a session, with the same results as alone; return records of ``second``, and warnings until the
    first step."""
    torch.manual_seed(0)
    alone = trained(case, case.make(), lambda: None)
    FP8GlobalStateManager.reset()
    torch.manual_seed(0)
    net = case.make()
    with InspectSession(config(case.features), model=net, log_dir=folder, **options) as session:
        said_before = warnings_of(caplog)
        observed = trained(case, net, session.step)
    assert len(alone) == len(observed) > 2
    assert all(map(torch.equal, alone, observed))
    (info,) = (info for info in session.layers if info.name == "second")
    return session, info, said_before


@pytest.mark.parametrize("name", CASES)
def test_it_is_left_as_it_is(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, keeper: Keeper) -> None:
    case, row = CASES[name], row_of(name)
    session, info, said_before = as_alone(case, tmp_path, caplog, observe="debug", sinks=[keeper])
    (text,) = warnings_of(caplog)
    assert f"second ({row.what}: {row.why})" in text
    assert bool(said_before) is case.is_known_before
    assert info.refused == str(row)
    assert bool(info.features) is not case.is_known_before
    assert keeper.runs[0].layers == session.layers
    assert {row.statistic for records in keeper.steps for row in records} == (
        {"scale_inv_max", "cur_amax"} if name == "CUDA graph" else set()
    )
    assert str(row) in (tmp_path / "nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-0.log").read_text()
    if name != "autocast with calibrating=True":
        stated = {entry.gemm: entry.operands["weight"] for entry in session.precision if "weight" in entry.operands}
        assert stated["fprop"] == "FP8 E4M3", "the precision of such a layer is known too"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.features is STATISTICS])
def test_the_fused_path_takes_it(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, keeper: Keeper) -> None:
    """Except in a CUDA graph: its replay runs no Python on any path."""
    _, info, _ = as_alone(CASES[name], tmp_path, caplog, observe="fused", sinks=[keeper])
    refused = name == "CUDA graph"
    assert info.refused == (str(CUDA_GRAPH) if refused else "")
    assert len(warnings_of(caplog)) == refused
    assert list(keeper.values("max", layer="second")) == ([] if refused else [0, 1])


def stepped(
    net: Any, sections: Any, folder: Path, step: Callable[[Any], object] = train, **options: Any
) -> InspectSession:
    with InspectSession(sections, model=net, log_dir=folder, **options) as session:
        step(net)
        session.step()
    return session


@pytest.mark.parametrize(("tensor", "keyword"), [("output", "fp8_output"), ("dgrad", "fp8_grad")])
def test_a_result_that_exists_quantized_only(
    tensor: str, keyword: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, keeper: Keeper
) -> None:
    features = {"LogTensorStats": {"enabled": True, "tensors": [tensor, "weight"], "stats": ["max"]}}
    step = functools.partial(train, **{keyword: True})
    stepped(linear(), config(features), tmp_path, step, sinks=[keeper], observe="fused")
    (text,) = warnings_of(caplog)
    assert f"second {tensor}" in text
    assert "its GEMM writes it quantized" in text
    assert list(keeper.values("max", tensor="weight")) == [0]


@pytest.mark.parametrize("name", CASES)
def test_strict_raises(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    net = case.make()
    session = InspectSession(config(case.features), model=net, log_dir=tmp_path, observe="debug", strict=True)
    with pytest.raises(ObservationError, match=f"does not support layers .*: second.*{row_of(name).what}"):
        with session:
            assert not case.is_known_before
            case.step(net)
    assert not session.running
    case.step(net)


def test_one_part_of_a_module_is_refused_and_the_other_is_observed(tmp_path: Path, keeper: Keeper) -> None:
    with te.quantized_model_init(enabled=True):
        net = te.LayerNormMLP(32, 64)
    sections = config(HIGH_PRECISION) | statistics(layers=["fc1"])
    sections["s"]["layers"] = {"layer_types": ["fc2"]}
    session = stepped(net, sections, tmp_path, observe="debug", sinks=[keeper])
    assert {info.name: bool(info.refused) for info in session.layers} == {
        "layernorm_mlp.fc1": False,
        "layernorm_mlp.fc2": True,
    }
    assert {row.layer for row in keeper.steps[0]} == {"layernorm_mlp.fc1"}


def test_features_that_do_not_touch_quantized_weights_act(tmp_path: Path, keeper: Keeper) -> None:
    sections = config(STATISTICS | {"DisableFP8GEMM": {"enabled": True, "gemms": ["wgrad"]}})
    session = stepped(quantized(), sections, tmp_path, observe="debug", sinks=[keeper], strict=True)
    formats = {entry.gemm: set(entry.operands.values()) for entry in session.precision}
    assert (formats["fprop"], formats["wgrad"]) == ({"FP8 E4M3"}, {"FP32"})
    assert keeper.values("max")


def test_fp8_attention(tmp_path: Path) -> None:
    """It requests a quantized output of the layer before it, and a quantized gradient of the layer after it."""
    net = te.MultiheadAttention(256, 2, attention_dropout=0.0, params_dtype=torch.bfloat16)
    with InspectSession(statistics(), model=net, log_dir=tmp_path, observe="debug") as session:
        with te.autocast(enabled=True, recipe=DelayedScaling(fp8_dpa=True, fp8_mha=True)):
            output = net(torch.randn(32, 2, 256, dtype=torch.bfloat16, requires_grad=True))
        output.sum().backward()
        session.step()
    assert {info.name.rpartition(".")[2]: bool(info.refused) for info in session.layers} == {"qkv": True, "proj": True}


# ------------------------------------------------------------------ CUDA graphs, which need a GPU to be made


def graphed(module: torch.nn.Module, maker: str) -> None:
    """Give a module the kind of ``forward`` that ``make_graphed_callables`` puts into it."""

    def new_fwd(*arguments: Any, **keywords: Any) -> Any:
        return type(module).forward(module, *arguments, **keywords)

    new_fwd.__module__ = maker
    module.forward = new_fwd


@pytest.mark.parametrize("maker", ["transformer_engine.pytorch.graph", "torch.cuda.graphs"])
def test_layers_of_a_graph_that_was_made_before(tmp_path: Path, caplog: pytest.LogCaptureFixture, maker: str) -> None:
    assert "func.forward = " in inspect.getsource(importlib.import_module(maker))
    net = linear()
    graphed(net, maker)
    session = stepped(net, config(STATISTICS), tmp_path, observe="debug")
    (text,) = warnings_of(caplog)
    assert f"second ({CUDA_GRAPH}; the original forward cannot be found)" in text
    assert {row.statistic for row in session.last_statistics} == {"scale_inv_max", "cur_amax"}


def test_a_capture_meets_layers_that_rest(tmp_path: Path) -> None:
    """Later their forward is not called any more, so that nothing would be reported."""
    net = linear()
    own = torch.cuda.CUDAGraph.capture_begin
    sections = config({"LogTensorStats": STATISTICS["LogTensorStats"] | {"freq": 10}})
    with InspectSession(sections, model=net, log_dir=tmp_path, observe="debug") as session:
        for _ in range(2):
            train(net)
            session.step()
        train_in_capture(net)
        session.step()
        assert not session.layers[0].refused, "the layer was not asked"
        with pytest.raises(AttributeError):  # there is no graph without a GPU
            torch.cuda.CUDAGraph.capture_begin(None)  # type: ignore[arg-type]
        train_in_capture(net)
        session.step()
        assert session.layers[0].refused == str(CUDA_GRAPH)
    assert torch.cuda.CUDAGraph.capture_begin is own


# ------------------------------------------------------------------ weights that is_first_microbatch caches


def test_a_cached_weight_follows_the_features_of_the_iteration(tmp_path: Path, keeper: Keeper) -> None:
    """Transformer Engine updates it by the quantizer of the iteration that cached it."""
    features = STATISTICS | {
        "LogFp8TensorStats": {"enabled": True, "tensors": ["weight"], "stats": ["underflows%"], "start_step": 1}
    }
    net = linear()
    with InspectSession(config(features), model=net, log_dir=tmp_path, observe="debug", sinks=[keeper]) as session:
        for _ in range(3):
            for first in (True, False):
                train(net, is_first_microbatch=first)
            session.step()
    assert list(keeper.values("underflows%", tensor="weight")) == [1, 2]


PACKAGE = Path(inspect.getfile(transformer_engine)).parent


@pytest.mark.parametrize(
    ("pattern", "readers"),
    [
        (r"[( ]recipe\.margin", {"pytorch/quantization.py"}),
        (r"recipe\.use_power_2_scales", {"pytorch/quantization.py"}),
        (r"\.use_f32_scales", set()),
    ],
)
def test_nothing_else_reads_an_argument(pattern: str, readers: set[str]) -> None:
    """Of attributes that nothing reads, no place can be named."""
    paths = [path for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text())]
    results = {str(path.relative_to(PACKAGE)) for path in paths}
    assert {path for path in results if "custom_recipes" not in path and "jax" not in path} == readers


def quantizing(recipe: Any, **options: Any) -> Any:
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, QParams(**options))
    return recipe


def nvfp4(**options: Any) -> NVFP4BlockScaling:
    return NVFP4BlockScaling(disable_stochastic_rounding=True, **options)


def of_three_steps(recipe: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = te.Linear(64, 64, params_dtype=torch.bfloat16)
    results = []
    for step in range(3):
        given = (torch.randn(64, 64) * 3**step).to(torch.bfloat16).requires_grad_()
        with te.autocast(recipe=recipe):
            out = model(given)
        out.float().pow(2).sum().backward()
        results += [out.detach(), given.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    FP8GlobalStateManager.reset()
    return results


WITHOUT_EFFECT = [
    ("Float8CurrentScaling.use_power_2_scales", lambda: Float8CurrentScaling(use_power_2_scales=True)),
    ("Float8BlockScaling.use_f32_scales", lambda: Float8BlockScaling(use_f32_scales=True)),
    ("MXFP8BlockScaling.margin", lambda: MXFP8BlockScaling(margin=4)),
]
"""Recipe and argument, and a recipe in which it has no effect."""

PLAIN_RECIPES: dict[str, Callable[[], Any]] = {
    "Float8CurrentScaling": Float8CurrentScaling,
    "Float8BlockScaling": Float8BlockScaling,
    "MXFP8BlockScaling": MXFP8BlockScaling,
    "NVFP4BlockScaling": nvfp4,
}


def named(recipe: Any) -> list[str]:
    return [f"{row['recipe']}.{row['argument']}" for row in ignored_arguments([recipe])]


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.parametrize(("name", "make"), WITHOUT_EFFECT, ids=[name for name, _ in WITHOUT_EFFECT])
def test_an_ignored_argument_changes_no_bit(name: str, make: Callable[[], Any]) -> None:
    if name.startswith(("MXFP8", "NVFP4")):
        stand_for((10, 0))
    assert named(make()) == [name]
    assert all(map(torch.equal, of_three_steps(make()), of_three_steps(PLAIN_RECIPES[name.partition(".")[0]]())))


@pytest.mark.parametrize(
    "make",
    [
        *PLAIN_RECIPES.values(),
        lambda: DelayedScaling(margin=2, amax_history_len=16, reduce_amax=False),
        lambda: quantizing(Float8CurrentScaling(), power_2_scale=True),
        lambda: quantizing(Float8CurrentScaling(use_power_2_scales=True), power_2_scale=True),
        lambda: quantizing(Float8BlockScaling(), power_2_scale=False),
        lambda: nvfp4(disable_rht=True, disable_2d_quantization=True),
        lambda: nvfp4(nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE", disable_rht=True),
    ],
)
def test_arguments_that_have_an_effect(make: Callable[[], Any]) -> None:
    assert not named(make())


def test_what_a_model_keeps() -> None:
    delayed, current = DelayedScaling(), Float8CurrentScaling()
    net = torch.nn.Sequential(
        te.Linear(64, 64), te_ops.Sequential(te_ops.Linear(64, 64)), te.Linear(64, 64), te.Linear(64, 64)
    )
    result = (*named_te_modules(net), *named_operations(net))
    assert recipes_of(result) == []
    tensor = torch.randn(64, 64)
    for place, recipe in ((0, delayed), (1, delayed), (2, current)):
        with te.autocast(recipe=recipe):
            tensor = net[place](tensor)
    assert recipes_of(result) == [delayed, current]
    (row,) = amax_reductions(result)
    assert row == {"reduced": True, "ranks": 1, "tensor_parallel": 1, "outside": 0, "layers": ["0", "1.0"]}
