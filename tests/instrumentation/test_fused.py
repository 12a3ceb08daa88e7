"""``observe="fused"``: features look at tensors on the layers' own path, by the names of parameters."""

import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.module import linear
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_precision_callbacks import ConfigError
from te_precision_callbacks.dumps import load
from te_precision_callbacks.instrumentation import tap_parts
from te_precision_callbacks.reference.extension import activation
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.te import modules as te_modules
from tests.capability import stand_for
from tests.conftest import Keeper, feature, statistics
from tests.instrumentation.gemm_spy import BLACKWELL, MODULES, RECIPES, ROWS, can_run
from tests.instrumentation.steps import stepped

pytestmark = pytest.mark.usefixtures("any_gpu")

BF16 = torch.bfloat16
EVERY = ["activation", "weight", "gradient", "output", "wgrad", "dgrad"]
OF_TENSOR = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "dynamic_range", "cur_amax"]
OF_QUANTIZED = ["underflows%", "overflows%", "mse", "scale_inv_min", "scale_inv_max"]

RECIPES_OF = {
    "TransformerLayer": ("none", "delayed", "nvfp4"),
    "GroupedLinear": (*list(RECIPES)[:5], "custom current", "mxfp8", "nvfp4", "mxfp8 fwd, high bwd"),
}
"""Modules with fewer recipes than the others: a TransformerLayer, whose parts are the others, with what differs in its
own code, which is no recipe, a state, and blocks; a GroupedLinear, which has the quantizers of a Linear, with each
format once."""

PAIRS = [
    (module, recipe)
    for module, recipe in itertools.product(MODULES, RECIPES)
    if can_run(module, recipe, "none") and recipe in RECIPES_OF.get(module, RECIPES)
]


def logging_of(has: Mapping[str, list[str]], stats: list[str], name: str, **options: Any) -> dict[str, Any]:
    return {
        f"{name} {number}": {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": f"(^|\\.){layer}$"},
            "transformer_engine": {name: {"enabled": True, "tensors": tensors, "stats": stats, **options}},
        }
        for number, (layer, tensors) in enumerate(has.items())
    }


def tensors_of(module: str) -> dict[str, list[str]]:
    """The end of a layer's name -> the tensors that its fused path has in high precision."""
    ends = {
        "Linear": ["linear"],
        "LayerNormLinear": ["layernorm_linear"],
        "LayerNormMLP": ["fc1", "fc2"],
        "GroupedLinear": ["gemm_."],
    }
    if module == "TransformerLayer":
        qkv = te_modules.MODULES["LayerNormLinear"].high_precision[0]
        proj = te_modules.MODULES["Linear"].high_precision[0]
        return {"layernorm_qkv": sorted(qkv), "proj": sorted(proj), **tensors_of("LayerNormMLP")}
    has = te_modules.MODULES[module].high_precision
    return {end: sorted(tensors) for end, tensors in zip(ends[module], has, strict=True)}


def config_for(module: str, *, quantized: bool) -> dict[str, Any]:
    has = tensors_of(module)
    config = logging_of(has, OF_TENSOR, "LogTensorStats")
    if quantized:
        operands = {end: [t for t in tensors if t in EVERY[:3]] for end, tensors in has.items()}
        config |= logging_of(operands, OF_QUANTIZED, "LogFp8TensorStats")
    return config


def run(
    module: str,
    recipe: str,
    steps: int,
    *,
    observe: str | None,
    micro_batches: int = 1,
    folder: Path | None = None,
    config: Any = None,
) -> tuple[list[Any], list[Any]]:
    """A training. Its outputs, gradients and weights, and the session's records."""
    stand_for((10, 0) if recipe in BLACKWELL else (9, 0))
    torch.manual_seed(0)
    FP8GlobalStateManager.reset()
    net, made, keeper = MODULES[module][0](), RECIPES[recipe](), Keeper()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept: list[torch.Tensor] = []
    session = None
    if observe is not None:
        options: dict[str, Any] = {"sinks": [keeper], "observe": observe, "strict": True, "records": "off"}
        session = InspectSession(config, model=net, log_dir=folder, **options)
        session.start()
    try:
        for _ in range(steps):
            for _ in range(micro_batches):
                shape = (ROWS, 2, 32) if module == "TransformerLayer" else (ROWS, 32)
                x = torch.randn(shape, dtype=BF16, requires_grad=True)
                with te.autocast(enabled=made is not None, recipe=made):
                    out = net(x)
                out.float().pow(2).mean().backward()
                kept += [out.detach().clone(), x.grad.clone()]
            kept += [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                session.step()
        kept += [parameter.detach().clone() for parameter in net.parameters()]
    finally:
        if session is not None:
            session.stop()
    return kept, keeper.steps


@cache
def alone(module: str, recipe: str) -> list[Any]:
    return run(module, recipe, 3, observe=None)[0]


@pytest.mark.few
@pytest.mark.parametrize(("module", "recipe"), PAIRS[::2])
def test_training_is_the_same_to_the_last_bit(module: str, recipe: str, tmp_path: Path) -> None:
    quantized = RECIPES[recipe]() is not None and "high" not in recipe
    config, without = config_for(module, quantized=quantized), alone(module, recipe)
    observed, records = run(module, recipe, 3, observe="fused", folder=tmp_path, config=config)
    assert all(torch.equal(first, other) for first, other in zip(without, observed, strict=True))
    assert [step.iteration for step in records] == list(range(3))


NORMED = ["LayerNormLinear", "LayerNormMLP"]
"""Modules with tensors that a fused kernel writes in low precision alone."""


@pytest.mark.few
@pytest.mark.parametrize(("module", "recipe"), [pair for pair in PAIRS if pair[0] in NORMED][::2])
def test_the_default_config_leaves_training_the_same_to_the_last_bit(
    module: str, recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without = alone(module, recipe)
    with caplog.at_level(logging.INFO, logger="te_precision_callbacks"):
        observed, records = run(module, recipe, 3, observe="auto", folder=tmp_path, config=None)
    assert all(torch.equal(first, other) for first, other in zip(without, observed, strict=True))
    assert "keep their fused path." in caplog.text
    assert "debug path" not in caplog.text
    for step in records:
        operands = {(row.layer, row.tensor) for row in step if row.tensor in EVERY[:3]}
        assert operands == set(itertools.product({layer for layer, _ in operands if layer}, EVERY[:3]))


EXACT = ["Linear", "GroupedLinear"]
"""Modules whose debug path computes with the same tensors: their statistics must be those of the debug path."""


@pytest.mark.few
@pytest.mark.parametrize(("module", "recipe"), [pair for pair in PAIRS if pair[0] in EXACT][::2])
def test_statistics_are_those_of_the_debug_path(module: str, recipe: str, tmp_path: Path) -> None:
    overrides = recipe.endswith(("high_precision", "dequantized"))
    config = config_for(module, quantized=RECIPES[recipe]() is not None and "high" not in recipe)
    _, fused = run(module, recipe, 2, observe="fused", micro_batches=2, folder=tmp_path / "fused", config=config)
    if overrides:  # of the backward the debug path sees nothing
        has = {end: ["activation", "weight", "output"] for end in tensors_of(module)}
        config = logging_of(has, OF_TENSOR, "LogTensorStats")
    _, debug = run(module, recipe, 2, observe="debug", micro_batches=2, folder=tmp_path / "debug", config=config)
    assert len(fused) == len(debug) == 2
    for ours, theirs in zip(fused, debug, strict=True):
        results = {row[:4]: row.value for row in ours}
        expected = {row[:4]: row.value for row in theirs}
        assert expected
        assert overrides or results.keys() == expected.keys()
        assert {key: results[key] for key in expected} == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.few
@pytest.mark.parametrize(("module", "recipe"), [pair for pair in PAIRS if pair[0] in NORMED][1::3])
def test_what_the_reference_backend_leaves_is_what_a_gpu_computes_again(
    module: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(module, quantized=RECIPES[recipe]() is not None and "high" not in recipe)
    left = run(module, recipe, 3, observe="fused", folder=tmp_path / "left", config=config)
    monkeypatch.setattr(tap_parts, "unquantized", SimpleNamespace(result=None))  # the backend leaves nothing
    again = run(module, recipe, 3, observe="fused", folder=tmp_path / "again", config=config)
    assert all(map(torch.equal, left[0], again[0]))
    for first, other in zip(left[1], again[1], strict=True):
        assert repr([row[:5] for row in first]) == repr([row[:5] for row in other])  # nan equals nan


def test_an_activation_function_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return counted

    own = activation.GELU
    for name in ("value", "gradient"):
        monkeypatch.setitem(own.__dict__, name, counting(name, getattr(own, name)))
    run(
        "LayerNormMLP",
        "delayed",
        3,
        observe="fused",
        folder=tmp_path,
        config=config_for("LayerNormMLP", quantized=True),
    )
    assert calls == {"value": 3, "gradient": 3}


OF_FP8 = ["underflows%", "scale_inv_max"]


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_what_a_fused_kernel_never_writes_is_what_the_debug_path_has(recipe: str, tmp_path: Path) -> None:
    """The norm of the first step is the same to the last bit. What follows it has gone through another rounding."""
    of_mlp = {"fc1": ["activation", "gradient"], "fc2": ["activation"]}
    results: dict[str, dict[Any, float]] = {}
    for observe in ("fused", "debug"):
        for module, has in (("LayerNormLinear", {"layernorm_linear": ["activation"]}), ("LayerNormMLP", of_mlp)):
            config = logging_of(has, ["max", "std", "cur_amax"], "LogTensorStats") | logging_of(
                has, OF_FP8, "LogFp8TensorStats"
            )
            folder = tmp_path / observe / module
            _, steps = run(module, recipe, 1, observe=observe, micro_batches=2, folder=folder, config=config)
            results.setdefault(observe, {}).update({row[:4]: row.value for row in steps[0]})
    of_norms = [key for key in results["debug"] if key[1] == "activation" and not key[0].endswith("fc2")]
    assert results["fused"] == pytest.approx(results["debug"], rel=0.02, abs=0.5)
    for key in of_norms:
        assert key[2] == "underflows%" or results["fused"][key] == results["debug"][key]


REFUSED = [
    (
        lambda: te.LayerNormMLP(32, 64),
        statistics(tensors=["output"]),
        "fc1: LogTensorStats: output of LayerNormMLP never exists .* 'max' needs",
    ),
    (lambda: te.Linear(32, 32), {"s": feature("DisableFP8Layer", ["all"])}, "DisableFP8Layer changes precision"),
    (
        lambda: te.LayerNormMLP(32, 64),
        {"s": feature("DumpTensors", ["all"], tensors=["dgrad"], high_precision_tensor=True)},
        "fc2: DumpTensors: dgrad of LayerNormMLP never exists",
    ),
    (
        lambda: te.Linear(32, 32, fuse_wgrad_accumulation=True),
        statistics(tensors=["wgrad"]),
        "fuse_wgrad_accumulation=True its wgrad exists only as part of a sum",
    ),
]


@pytest.mark.parametrize(("build", "config", "why"), REFUSED)
def test_what_the_fused_path_never_has_is_refused(build: Any, config: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        InspectSession(config, model=build(), log_dir=tmp_path, observe="fused").start()
    assert 'observe="auto"' in str(error.value)


class Mine:
    def inspect_tensor(self, config: Any, layer_name: str, tensor_name: str, **_: Any) -> None:
        pass


def test_auto_takes_the_fused_path_where_it_can(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    net = torch.nn.Sequential(te.LayerNormMLP(32, 64, params_dtype=BF16), te.Linear(32, 32, params_dtype=BF16))
    caplog.set_level(logging.INFO, logger="te_precision_callbacks")
    options: dict[str, Any] = {
        "inputs": lambda: torch.randn(ROWS, 32, dtype=BF16),
        "sinks": [keeper],
        "observe": "auto",
    }
    stepped(net, tmp_path, [Float8CurrentScaling()], statistics(tensors=["output"]), **options)
    assert {row.layer for row in keeper.steps[0]} == {"0.fc1", "0.fc2", "1"}
    (text,) = [record.getMessage() for record in caplog.records if "observe=" in record.getMessage()]
    assert text.startswith('observe="auto": 1 of 2 modules with features keep their fused path.')
    assert "0: LogTensorStats: output of LayerNormMLP never exists" in text
    options = {"log_dir": tmp_path, "features": [Mine], "observe": "fused"}
    with pytest.raises(ConfigError, match="your own feature Mine"):
        InspectSession({"s": feature("Mine", ["all"])}, model=net, **options).start()


def test_dumps_are_those_of_the_debug_path(tmp_path: Path) -> None:
    config = {
        "s": feature(
            "DumpTensors",
            ["all"],
            tensors=["activation", "weight", "gradient"],
            high_precision_tensor=True,
            quantized_tensor=True,
        )
    }
    results: dict[str, Any] = {}
    for observe in ("debug", "fused"):
        run("Linear", "current", 1, observe=observe, micro_batches=2, folder=tmp_path / observe, config=config)
        paths = sorted((tmp_path / observe).rglob("*.safetensors"))
        results[observe] = {path.name: load(path) for path in paths}
    assert results["debug"].keys() == results["fused"].keys()
    assert len(results["debug"]) == 5, "a weight is dumped once"
    for name, dump in results["debug"].items():
        ours = results["fused"][name].tensors
        assert ours.keys() == dump.tensors.keys()
        for key, tensor in dump.tensors.items():
            assert torch.equal(tensor.view(torch.uint8), ours[key].view(torch.uint8)), f"{name} {key}"


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    rows = [
        (kind if len(row.high_precision) == 1 else f"{kind}, fc{number + 1}", part)
        for kind, row in te_modules.MODULES.items()
        for number, part in enumerate(row.high_precision)
    ]
    lines = [f"| {name} | {', '.join(tensor for tensor in EVERY if tensor in part)} |" for name, part in rows]
    assert all(f"\n{line}\n" in page for line in lines)
    table = page.split("| layer | tensors before quantization |")[1].partition("\n\n")[0]
    assert len(table.strip().splitlines()) == len(lines) + 1


Upstream: Any = linear._Linear


class WithOneInFront(Upstream):  # type: ignore[misc]
    """The Function with a further parameter in front, as Transformer Engine 2.21 has it."""

    @staticmethod
    def forward(ctx: Any, quantized_tensor: Any, weight: Any, inp: Any, bias: Any, fwd_args: Any) -> Any:
        return Upstream.forward(ctx, weight, inp, bias, fwd_args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *Upstream.backward(ctx, *gradients)

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        return super().apply(None, *arguments)


class WithAnotherName(Upstream):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, parameter: Any, inp: Any, bias: Any, fwd_args: Any) -> Any:
        return Upstream.forward(ctx, parameter, inp, bias, fwd_args)


def elements(folder: Path) -> dict[str, float]:
    keeper, config = Keeper(), statistics(tensors=["weight", "activation"], stats=["numel"])
    options: dict[str, Any] = {"inputs": lambda: torch.randn(16, 64), "sinks": [keeper], "observe": "fused"}
    stepped(te.Linear(64, 32), folder, [Float8CurrentScaling()], config, **options)
    return {row.tensor: row.value for step in keeper.steps for row in step if row.statistic == "numel"}


def test_a_parameter_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_Linear", WithOneInFront)
    assert elements(tmp_path) == {"weight": 64 * 32, "activation": 16 * 64}


def test_a_parameter_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linear, "_Linear", WithAnotherName)
    with caplog.at_level(logging.WARNING):
        assert elements(tmp_path) == {}, "its quantized operands would be taken for what they were made of"
    stated = [record.getMessage() for record in caplog.records if "has no parameter weight" in record.getMessage()]
    assert len(stated) == 1, stated
