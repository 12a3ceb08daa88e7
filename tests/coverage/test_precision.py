"""The precision that each GEMM really ran in."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.session import GemmPrecision, InspectSession, running_session
from tests.conftest import feature, statistics
from tests.instrumentation.steps import stepped

FP8 = DelayedScaling()


def inputs() -> torch.Tensor:
    return torch.randn(16, 32)


def audit(config: Any, log_dir: Path, recipe: Any = None, **options: Any) -> dict[str, str]:
    """GEMM -> formats of its operands, of one linear layer."""
    session = stepped(te.Linear(32, 32), log_dir, [recipe] * 2, config, **options)
    assert all(entry.layer == "linear" for entry in session.precision)
    return {entry.gemm: " ".join(entry.operands.values()) for entry in session.precision}


def test_a_feature_that_modifies_tensors_is_told_by_what_it_gave(tmp_path: Path) -> None:
    """A plan of "modify_tensor()" says nothing: FakeQuant gives plain tensors, PerTensorScaling FP8 ones."""
    fake = {"s": feature("FakeQuant", ["linear"], gemms=["fprop"], tensors=["weight"], quant_format="FP8E4M3")}
    assert audit(fake, tmp_path, FP8)["fprop"] == "FP32 FP32 (modified)"
    scaled = {"s": feature("PerTensorScaling", ["linear"], gemms=["fprop"], tensors=["weight", "activation"])}
    assert audit(scaled, tmp_path, FP8)["fprop"] == "FP8 E4M3 (modified) FP8 E4M3 (modified)"


def toggled(folder: Path, regions: str, *, says_when: bool, config: Any = None) -> InspectSession:
    """Train with a region a step: of FP8 (8), in enabled=False (0), or none (-); beside a layer in enabled=False."""
    net = torch.nn.ModuleList([te.Linear(32, 32), te.Linear(32, 32)])
    session = InspectSession(config, model=net, log_dir=folder, allow_unmatched=True)
    session.start(eval_mode_counts=not says_when)
    for region in regions:
        with nullcontext() if region == "-" else te.autocast(enabled=region == "8"):
            out = net[0](torch.randn(16, 32, requires_grad=True))
        with te.autocast(enabled=False):
            net[1](out).sum().backward()
        session.step()
    session.stop()
    return session


@pytest.mark.parametrize("says_when", [True, False], ids=["integration", "loop"])
@pytest.mark.parametrize("regions", ["000000", "808088", "888---", "88--88"])
def test_a_region_that_excludes_a_layer_is_told_from_no_region(regions: str, says_when: bool, tmp_path: Path) -> None:
    session = toggled(tmp_path, regions, says_when=says_when, config=statistics(layers=["nowhere"]))
    stated = {"0": "runs inside te.autocast(enabled=False)", "-": "runs outside of te.autocast", "8": ""}
    assert [{product.why for product in session.coverage(at=step) if product.layer == "0"} for step in range(6)] == [
        {stated[region]} for region in regions
    ]
    assert {product.why for product in session.coverage() if product.layer == "1"} == {stated["0"]}


def events(log_dir: Path) -> list[str]:
    log = log_dir / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log"
    return [line.partition("Tensor: ")[2] for line in log.read_text().splitlines() if "Tensor: " in line]


def test_the_log_of_events_has_the_plans_of_training(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path, observe="debug") as session:
        for fp8 in (True, True, False, False):
            net.eval()
            with torch.no_grad():
                net(torch.randn(16, 32))
            net.train()
            with te.autocast(enabled=fp8):
                net(torch.randn(16, 32)).sum().backward()
            session.step()
            assert session.flush(60.0)
            if fp8:
                assert not any(line.endswith(" - High Precision") for line in events(tmp_path))
    for plan in ("Quantize", "High Precision"):
        assert len([line for line in events(tmp_path) if line.endswith(f" - {plan}")]) == 6


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_in_high_precision_is_told_and_what_is_missing_is_said(
    tmp_path: Path, override: str, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = Float8CurrentScaling(backward_override=override)
    config = statistics(tensors=["activation", "gradient", "dgrad", "wgrad"])
    fp8, high = "FP8 E4M3 FP8 E4M3", "FP32 FP32"
    assert audit(config, tmp_path, recipe, observe="debug") == {"fprop": fp8, "dgrad": high, "wgrad": high}
    assert "What features do with dgrad, wgrad, gradient of linear cannot be observed" in caplog.text
    assert f"backward_override='{override}'" in caplog.text
    assert "Tensor: gradient, gemm wgrad - High Precision" in " ".join(f"Tensor: {line}" for line in events(tmp_path))


def test_what_is_missing_of_a_backward_raises_if_strict(tmp_path: Path) -> None:
    recipe = Float8CurrentScaling(backward_override="dequantized")
    with pytest.raises(ObservationError, match="backward_override"):
        audit(statistics(tensors=["gradient"]), tmp_path, recipe, strict=True, observe="debug")
    audit(statistics(), tmp_path, recipe, strict=True)


def not_run(precision: Iterable[GemmPrecision]) -> dict[str, str]:
    return {f"{entry.layer} {entry.gemm}": entry.not_run for entry in precision if entry.not_run}


@pytest.mark.parametrize("layers", [["all"], ["nowhere"]])
def test_a_gemm_that_a_backward_leaves_out_is_told_as_not_run(tmp_path: Path, layers: list[str]) -> None:
    net = torch.nn.Sequential(te.Linear(32, 32), te.LayerNormMLP(32, 64))
    net[1].fc2_weight.requires_grad_(False)
    config = statistics(tensors=["activation", "gradient"], layers=layers)
    session = stepped(net, tmp_path, [FP8], config, inputs=inputs, allow_unmatched=True)
    assert not_run(session.precision) == {"0 dgrad": "input needs no gradient", "1.fc2 wgrad": "frozen weight"}
    stated = {f"{entry.layer} {entry.gemm}": entry.operands for entry in session.precision}
    assert stated["0 dgrad"] == {}
    assert stated["1.fc2 dgrad"] == {"gradient": "FP8 E5M2", "weight": "FP8 E4M3"}
    assert all(entry.seen or entry.not_run for entry in session.precision)


def test_a_layer_that_no_backward_reaches_has_run_its_fprop_only(tmp_path: Path) -> None:
    net = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    net[1].register_forward_pre_hook(
        lambda _, given: (given[0].detach(),) if running_session().iteration == 0 else None
    )
    shown: list[dict[str, str]] = []
    stepped(net, tmp_path, [None] * 2, statistics(), after=lambda session: shown.append(not_run(session.precision)))
    unreached = dict.fromkeys(["0 dgrad", "0 wgrad"], "no backward has reached it")
    assert shown == [{**unreached, "1 dgrad": "input needs no gradient"}, {}]


@pytest.mark.parametrize("layers", [["all"], ["nowhere"]])
def test_what_is_unfrozen_later_is_told_from_then_on(tmp_path: Path, layers: list[str]) -> None:
    """As by a callback for finetuning: in steps in which nothing is due, too."""
    net = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    shown: list[dict[str, str]] = []
    stepped(
        net,
        tmp_path,
        [None] * 5,
        statistics(freq=100, layers=layers),
        inputs=inputs,
        before=lambda step: net[0].requires_grad_(step >= 2),
        after=lambda session: shown.append(not_run(session.precision)),
        allow_unmatched=True,
    )
    frozen = "neither input nor parameters need a gradient"
    assert shown[1] == {"0 dgrad": frozen, "0 wgrad": frozen, "1 dgrad": "input needs no gradient"}
    assert shown[4] == {"0 dgrad": "input needs no gradient"}


def test_a_change_in_steps_in_which_nothing_is_due_is_noticed(tmp_path: Path) -> None:
    """Every tenth step is due here. A step in high precision alone is told, and not as seen."""
    shown: list[tuple[str, bool]] = []

    def show(session: InspectSession) -> None:
        shown.append((session.precision[0].operands["weight"], session.precision[0].seen))

    for recipes in ([FP8, FP8, None, FP8, FP8], [None, None, FP8, None, None]):
        stepped(te.Linear(32, 32), tmp_path, recipes, inputs=inputs, after=show, early_steps=False)
    assert shown[:5] == [("FP8 E4M3", True)] * 2 + [("FP8 E4M3 -> FP32", False)] * 3
    assert shown[9] == ("FP32 -> FP8 E4M3", False)
