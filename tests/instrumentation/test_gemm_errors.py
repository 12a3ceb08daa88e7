"""LogGemmError in a session, against whole products in float64 of the extension's operands."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks import ConfigError
from te_precision_callbacks.config import load_config
from te_precision_callbacks.config.keys import PROBES
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.reference.extension.operands import operand
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.statistics.table import GEMM_STATISTICS
from tests.capability import stand_for
from tests.combinations import half
from tests.conftest import Keeper, feature
from tests.functions import Net
from tests.instrumentation.gemm_spy import GEMM_OF, at_the_entries
from tests.instrumentation.steps import stepped

pytestmark = pytest.mark.usefixtures("any_gpu")

BF16 = torch.bfloat16
RESULT = {"fprop": "output", "dgrad": "dgrad", "wgrad": "wgrad"}
RECIPES: Mapping[str, Callable[[], Any]] = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "nvfp4 without": lambda: recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}
ROWS, INPUTS, OUTPUTS = 128, 192, 256


@contextmanager
def gemms() -> Iterator[list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """The GEMMs that the extension was handed: the GEMM, decoded operands [n, k] and [m, k] and the result, float64."""
    results: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def decoded(tensor: Any, *, rowwise: bool) -> torch.Tensor:
        read = operand(tensor, rowwise=rowwise, name="A")
        whole = read.values.double()
        if read.part is not None:
            factors = read.part.factors() if read.part.amax is not None else None
            if factors is not None:
                whole = read.part.matrix().double()
                whole = whole.t() if read.part.transposed else whole
            elif read.scale_inv is not None:
                whole = whole * read.scale_inv
        return whole if rowwise else whole.t()

    def note(a: Any, transa: bool, b: Any, transb: bool, out: torch.Tensor) -> None:
        left, right = decoded(b, rowwise=not transb), decoded(a, rowwise=transa)
        results.append((GEMM_OF[transa, transb], left, right, out.double().reshape(left.shape[0], -1)))

    with at_the_entries(note):
        yield results


def config(**options: Any) -> dict[str, Any]:
    return {"s": feature("LogGemmError", ["all"], **{"gemms": ["fprop", "dgrad", "wgrad"], "freq": 1, **options})}


def inputs() -> torch.Tensor:
    return torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(7)).to(BF16).requires_grad_()


def measured(
    net: torch.nn.Module,
    folder: Path,
    keeper: Keeper,
    *,
    observe: Any = "fused",
    recipe: Any = None,
    x: torch.Tensor | None = None,
    micro_batches: int = 1,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda out: out.float().square().mean(),
    **options: Any,
) -> InspectSession:
    """A step of micro-batches, all forwards before all backwards; by default with current scaling."""
    keywords: dict[str, Any] = {"sinks": [keeper], "observe": observe, "strict": True}
    with InspectSession(config(**options), model=net, log_dir=folder, **keywords) as running:
        outs = []
        for _ in range(micro_batches):
            with te.autocast(
                enabled=recipe != "none", recipe=None if recipe == "none" else recipe or recipes.Float8CurrentScaling()
            ):
                outs.append(net(inputs() if x is None else x))
        for out in outs:
            loss(out).backward()
        running.step()
    return running


HEALTHY: dict[str, Any] = {
    "gemm_kernel_ratio": pytest.approx(0, abs=0.4),
    "gemm_gain": pytest.approx(1, abs=2e-3),
    "gemm_wrong_rank": -1,
}
"""Statistics of a GEMM whose kernel is right, except the sizes of its errors."""


@pytest.mark.parametrize("observe", ["fused", "debug"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_both_errors_against_whole_products(recipe: str, observe: str, tmp_path: Path, keeper: Keeper) -> None:
    stand_for((9, 0) if recipe in ("delayed", "current", "block") else (10, 0))
    net = te.Linear(INPUTS, OUTPUTS, params_dtype=BF16, bias=False)
    grad = torch.randn(ROWS, OUTPUTS, generator=torch.Generator().manual_seed(1)).to(BF16)
    with gemms() as seen:
        measured(net, tmp_path, keeper, observe=observe, recipe=RECIPES[recipe](), loss=lambda out: (out * grad).sum())
    weight, x, grad = net.weight.detach().double(), inputs().detach().double(), grad.double()
    high = {"fprop": (x, weight), "dgrad": (grad, weight.t()), "wgrad": (grad.t(), x.t())}
    assert [gemm for gemm, *_ in seen] == ["fprop", "dgrad", "wgrad"]
    for gemm, left, right, out in seen:
        value = {row.statistic: row.value for row in keeper.steps[0] if row.tensor == RESULT[gemm]}
        decoded, exact = left @ right.t(), high[gemm][0] @ high[gemm][1].t()
        errors = {
            "gemm_kernel_error": (out - decoded).norm() / decoded.norm(),
            "gemm_format_error": (decoded - exact).norm() / exact.norm(),
        }
        expected = {name: pytest.approx(error.item(), rel=0.15) for name, error in errors.items()} | HEALTHY
        assert expected.keys() == set(GEMM_STATISTICS), "each statistic has an expected value"
        assert value == expected


def values(keeper: Keeper, layer: str, gemm: str, step: int = 0) -> dict[str, float]:
    rows = (row for row in keeper.steps[step] if (row.layer, row.tensor) == (layer, RESULT[gemm]))
    return {row.statistic: row.value for row in rows}


def grouped(**options: Any) -> Net:
    experts = te.GroupedLinear(2, INPUTS, OUTPUTS, params_dtype=BF16, **options)
    return Net(lambda net, x: net.grouped(x, [32, ROWS - 32]), grouped=experts)


def recomputed(*, reentrant: bool) -> Net:
    return Net(
        lambda net, x: te.checkpoint(net.linear, x, use_reentrant=reentrant),
        linear=te.Linear(INPUTS, OUTPUTS, params_dtype=BF16),
    )


NETS: Mapping[str, tuple[Callable[[], torch.nn.Module], tuple[str, ...]]] = {
    "Linear with bias": (lambda: te.Linear(INPUTS, OUTPUTS, params_dtype=BF16), ("linear",)),
    "LayerNormLinear": (lambda: te.LayerNormLinear(INPUTS, OUTPUTS, params_dtype=BF16), ("layernorm_linear",)),
    "LayerNormMLP": (
        lambda: te.LayerNormMLP(INPUTS, OUTPUTS, params_dtype=BF16),
        ("layernorm_mlp.fc1", "layernorm_mlp.fc2"),
    ),
    "GroupedLinear": (grouped, ("grouped.gemm_0", "grouped.gemm_1")),
    "recomputed, reentrant": (lambda: recomputed(reentrant=True), ("linear",)),
    "recomputed": (lambda: recomputed(reentrant=False), ("linear",)),
}
"""Module -> its layers."""


@pytest.mark.usefixtures("second_thread")
@pytest.mark.parametrize(("module", "observe"), half(NETS, ["fused", "debug"]))
def test_each_module(module: str, observe: str, tmp_path: Path, keeper: Keeper) -> None:
    """Of two pending micro-batches."""
    build, layers = NETS[module]
    net = build()
    for parameter in net.parameters():
        if parameter.ndim == 1:  # biases are 0 at first
            torch.nn.init.normal_(parameter, 1.0)
    measured(net, tmp_path, keeper, observe=observe, micro_batches=2)
    for layer in layers:
        for gemm in RESULT:
            value = values(keeper, layer, gemm)
            assert value["gemm_kernel_ratio"] < 0.7, (layer, gemm)
            assert value["gemm_gain"] == pytest.approx(1, abs=3e-3)
            assert 0.005 < value["gemm_format_error"] < 0.2, (layer, gemm)


@pytest.mark.parametrize(
    ("make", "layer"),
    [(functools.partial(te.Linear, INPUTS, OUTPUTS, params_dtype=BF16), "linear"), (grouped, "grouped.gemm_1")],
)
def test_a_wgrad_that_is_added_to_main_grad(make: Any, layer: str, tmp_path: Path, keeper: Keeper) -> None:
    """The second micro-batch adds to the sum of the first one, which is not its error."""
    net = make(fuse_wgrad_accumulation=True, bias=False)
    for parameter in net.parameters():
        parameter.main_grad = torch.randn(parameter.shape)
    measured(net, tmp_path, keeper, micro_batches=2)
    value = values(keeper, layer, "wgrad")
    assert value["gemm_kernel_ratio"] < 0.7
    assert value["gemm_kernel_error"] < 1e-2
    assert value["gemm_gain"] == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (lambda out: out[64:80, 32:64].zero_(), "off the product of its operands"),
        (lambda out: out.mul_(0.5), "gives 0.5 times the product"),
    ],
)
def test_the_finding_names_the_kind_of_error(
    fault: Callable[[torch.Tensor], Any], seen: str, tmp_path: Path, keeper: Keeper
) -> None:
    def spoil(a: Any, transa: bool, b: Any, transb: bool, out: torch.Tensor) -> None:
        if GEMM_OF[transa, transb] == "fprop":
            fault(out)

    with at_the_entries(spoil):
        running = measured(te.Linear(INPUTS, OUTPUTS, params_dtype=BF16), tmp_path, keeper)
    (finding,) = (finding for finding in running.findings if finding.rule == "wrong-gemm")
    assert (finding.severity, finding.layers, finding.tensor) == ("error", ("linear",), "output")
    assert seen in finding.seen
    assert values(keeper, "linear", "fprop")["gemm_wrong_rank"] == 0


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_inf_and_nan_are_no_wrong_kernel(value: float, tmp_path: Path, keeper: Keeper) -> None:
    for number, recipe in enumerate(("current", "block", "mxfp8", "nvfp4")):
        stand_for((9, 0) if number < 2 else (10, 0))
        torch.manual_seed(0)
        x = inputs().detach()
        x[3, 3] = value
        net = te.Linear(INPUTS, OUTPUTS, params_dtype=BF16)
        running = measured(net, tmp_path / recipe, keeper, recipe=RECIPES[recipe](), x=x.requires_grad_())
        assert "wrong-gemm" not in {finding.rule for finding in running.findings}, recipe


def test_the_number_of_probes_is_that_of_the_config(tmp_path: Path, keeper: Keeper) -> None:
    net = te.Linear(INPUTS, OUTPUTS, params_dtype=BF16)
    for number, options in enumerate(({}, {"probes": PROBES}, {"probes": PROBES + 1})):
        measured(net, tmp_path / str(number), keeper, **options)
    default, same, more = (values(keeper, "linear", "fprop", step)["gemm_format_error"] for step in range(3))
    assert default == same != more


@pytest.mark.parametrize("observe", ["fused", "debug"])
def test_training_does_not_notice(observe: str, tmp_path: Path, keeper: Keeper) -> None:
    def run(folder: Path, config: Any) -> list[torch.Tensor]:
        stand_for((10, 0))
        torch.manual_seed(0)
        net, x = te.Linear(INPUTS, OUTPUTS, params_dtype=BF16), inputs()
        results: list[torch.Tensor] = []
        net.register_forward_hook(lambda module, given, out: results.append(out.detach().clone()))
        recipe = recipes.NVFP4BlockScaling()
        options: dict[str, Any] = {"inputs": lambda: torch.nn.functional.dropout(x), "sinks": [keeper]}
        stepped(net, folder, [recipe] * 3, config, observe=observe, **options)
        return [*results, x.grad, net.weight.grad, torch.get_rng_state()]  # type: ignore[list-item]

    without = run(tmp_path / "without", {"s": feature("LogTensorStats", ["all"], **NEVER)})
    assert all(map(torch.equal, without, run(tmp_path / "with", config(freq=2))))
    assert sorted({records.iteration for records in keeper.steps if len(records)}) == [0, 2]


NEVER = {"tensors": ["activation"], "stats": ["max"], "start_step": 1000}


@pytest.mark.parametrize("observe", ["fused", "debug"])
def test_under_torchs_autocast(observe: str, tmp_path: Path, keeper: Keeper) -> None:
    """Operands in float32 are quantized as they are, and thin products are not rounded to bfloat16."""
    net, x = te.Linear(INPUTS, OUTPUTS), inputs().detach().float() * 1.001
    with torch.autocast("cpu", BF16):
        measured(net, tmp_path, keeper, observe=observe, x=x.requires_grad_())
    for gemm in RESULT:
        value = values(keeper, "linear", gemm)
        assert value["gemm_kernel_ratio"] < 0.7
        assert value["gemm_format_error"] < 0.06


def test_what_is_not_measured_is_said(tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "te_precision_callbacks")
    running = measured(te.Linear(INPUTS, OUTPUTS, params_dtype=BF16), tmp_path, keeper, recipe="none")
    assert not [row for records in keeper.steps for row in records if row.statistic.startswith("gemm_")]
    (said,) = [text for text in caplog.messages if "LogGemmError does not measure linear fprop" in text]
    assert "it runs in high precision" in said
    (unchecked,) = (item.why for item in running.findings.not_checked if item.rule == "wrong-gemm")
    assert unchecked == "LogGemmError has measured nothing: it runs in high precision"
    assert diagnose(tmp_path) == running.findings


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"probes": 0}, "probes"),
        ({"gemms": []}, "gemms"),
        ({"gemms": ["fprop", "bprop"]}, "bprop"),
        ({"start_end_list": [[5, 2]]}, "start_end_list"),
        ({"max_memory": "-1"}, "max_memory"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(config(**options))
