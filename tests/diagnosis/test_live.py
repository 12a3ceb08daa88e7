"""Findings of a session while it runs: reported once, and acted on; a replay of its records has the same."""

import dataclasses
import itertools
import logging
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.amp.grad_scaler import GradScaler
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.diagnosis import Finding, PrecisionFindingError, Verdict, diagnose
from te_precision_callbacks.diagnosis.engine import read_on_finding
from te_precision_callbacks.diagnosis.rules import RULE_OF_ID
from te_precision_callbacks.overflow.errors import ActivationOverflowError
from te_precision_callbacks.runs import list_runs, open_run
from te_precision_callbacks.runs.summary import outcome_notes
from te_precision_callbacks.session import InspectSession, running_session
from te_precision_callbacks.session.endings import closing_lines
from tests.capability import stand_for
from tests.conftest import statistics
from tests.diagnosis.conftest import Planted
from tests.diagnosis.planted import in_fp8, outside, sgd, train, trained
from tests.training import Loss, observed

LAYER = "4.fc"


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TE_PRECISION_QUIET")


def test_the_block_is_found_live_and_in_the_records(planted: Planted, tmp_path: Path) -> None:
    findings = planted.session.findings
    first = findings[0]
    assert (first.rule, first.layers, first.tensor, first.since) == ("sibling", (LAYER,), "gradient", 0)
    assert not planted.session.healthy
    assert repr(findings) == f"<Verdict: {findings}>"
    assert diagnose(planted.folder) == findings
    assert open_run(planted.folder).events["kind"].to_pylist().count("finding") == len(findings)
    assert train(tmp_path, records="off", statistics_log="off").findings == findings, "it needs no records"
    (said,) = [record for record in planted.log if "(sibling" in record.getMessage()]
    assert said.levelno == logging.WARNING
    assert said.getMessage().startswith(f"Warning: gradient of {LAYER}: ")
    assert "te-precision rules sibling" in said.getMessage()
    counts = [{key: value for key, value in planted.metrics[step].items() if "findings" in key} for step in (0, 1, 2)]
    assert counts == [{"te/findings": 0.0}] * 2 + [{"te/findings": 1.0, "te/findings/sibling": 1.0}]


def test_a_healthy_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = train(tmp_path, defect=False)
    assert session.healthy
    assert "What to do" not in caplog.text
    assert diagnose(tmp_path) == session.findings


def test_layers_without_statistics_are_named_in_the_first_line(tmp_path: Path) -> None:
    net = torch.nn.Sequential(te.Linear(32, 32), te.ops.Linear(32, 32))
    assert "; not observed: 1 of 2 layers (an operation of te.ops))" in trained(tmp_path, net, steps=6).summary


def test_a_run_that_fails_in_its_first_step_counts_the_same_rules(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    config = statistics(tensors=["activation"], stats=["cur_amax"])
    running = InspectSession(config, model=torch.nn.Sequential(net), log_dir=tmp_path)
    with pytest.raises(ZeroDivisionError), running:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            net(torch.randn(16, 32))
        raise ZeroDivisionError
    assert diagnose(tmp_path) == running.findings
    assert not [item for item in running.findings.not_checked if item.rule == "stale-scale" and item.essential]


@pytest.mark.parametrize("raised", [None, ValueError("the script's own")])
def test_a_finding_after_the_last_step_stops_the_run_at_its_end(tmp_path: Path, raised: Exception | None) -> None:
    net = te.Linear(32, 32)
    with pytest.raises(type(raised) if raised else PrecisionFindingError, match=r"the script's own|nonfinite"):
        with InspectSession(statistics(stats=["nonfinite_num"]), model=net, log_dir=tmp_path, on_finding="stop"):
            net(torch.full((16, 32), torch.nan)).sum().backward()
            if raised:
                raise raised


@pytest.mark.parametrize(
    ("error", "stopped"),
    [
        (ValueError("a bad batch"), "ValueError: a bad batch"),
        (KeyboardInterrupt(), "Ctrl-C"),
        (SIGTERMException(), "SIGTERM"),
    ],
)
@pytest.mark.usefixtures("loud")
def test_what_has_ended_a_run_is_said_before_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException, stopped: str
) -> None:
    """A user or a scheduler who ends a run is named, and the run has not failed."""
    net = te.Linear(32, 32)
    with pytest.raises(type(error)), InspectSession(None, model=net, log_dir=tmp_path) as session:
        net(torch.ones(16, 32)).sum().backward()
        session.step()
        raise error
    closing = capsys.readouterr().err
    first, second, *_ = closing.splitlines()
    assert first == f"te-precision: stopped: {stopped}"
    assert closing.count(stopped) == 1
    failed = ":" in stopped
    assert second.startswith("te-precision: Problems found: 1 error" if failed else "te-precision: Not enough checked")
    for verdict in (session.findings, diagnose(tmp_path)):
        since = [finding.since for finding in verdict if finding.rule == "failed-run"]
        assert since == [1] * failed, "step 0 has ended"
    assert outcome_notes(open_run(tmp_path)) == [
        f"The run failed (last step: 0): {stopped}."
        if failed
        else f"The run was ended by {stopped} after step 0: the steps until then were checked."
    ]


def test_a_model_in_evaluation_mode(tmp_path: Path) -> None:
    net = te.Linear(32, 32).eval()
    verdict = trained(tmp_path, net, sgd(net), around=outside, logs=False)
    assert [finding.rule for finding in verdict] == ["evaluation-mode"]
    assert "not observed: 1 of 1 layer (evaluation mode)" in verdict.summary
    assert "no Transformer Engine layers" not in str(verdict)
    assert "config" not in verdict.summary


def test_a_model_that_stays_in_evaluation_mode_from_some_step_on(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    verdict = trained(
        tmp_path, net, sgd(net), steps=20, loss=lambda step: net.train(step < 12)(torch.randn(16, 32)).square().mean()
    )
    assert [(finding.rule, finding.since) for finding in verdict.wrong] == [("evaluation-mode", 12)]


def test_a_model_outside_of_autocast(tmp_path: Path) -> None:
    net = torch.nn.Sequential(te.Linear(32, 64), te.LayerNormLinear(64, 32))
    verdict = trained(tmp_path, net, sgd(net), around=outside, logs=False)
    assert [(finding.rule, finding.severity) for finding in verdict] == [("no-low-precision", "note")]
    seen = verdict[0].seen
    assert seen.startswith("no product runs in low precision; 2 Transformer Engine layers; reason: "), seen


@pytest.mark.parametrize(
    ("steps", "explicit", "expected"),
    [
        (range(12), False, [("hole", "warning", 12)]),
        (range(12), True, [("no-low-precision", "note", 12)]),
        (range(8), True, [("no-low-precision", "warning", 8)]),
        (range(1, 20), True, []),  # after a warm-up
        (range(12, 20), True, []),
    ],
)
def test_low_precision_in_a_part_of_the_steps(
    tmp_path: Path, steps: range, explicit: bool, expected: list[tuple[str, str, int]]
) -> None:
    """A region that turns it off may be meant, as for the last steps of a training in NVFP4, but not for most of it."""
    net = te.Linear(32, 32)

    def around(step: int) -> AbstractContextManager[Any]:
        return te.autocast(enabled=step in steps) if explicit or step in steps else nullcontext()

    verdict = trained(tmp_path, net, sgd(net), steps=20, around=around, logs=False)
    ends = [(item.rule, item.severity, item.since) for item in verdict if item.rule in ("hole", "no-low-precision")]
    assert ends == expected
    assert "no-low-precision" in [*verdict.checked, *(item.rule for item in verdict)]


@pytest.mark.parametrize(
    ("until", "explicit", "severity", "seen"),
    [
        (0, False, "note", "2 of 4 similar layers run outside of te.autocast"),
        (10, False, "warning", "ran in high precision after steps in low precision: runs outside of te.autocast"),
        (
            *(7, True, "warning"),
            "ran in high precision after steps in low precision: runs inside te.autocast(enabled=False)",
        ),
    ],
)
def test_the_second_half_outside_of_autocast(
    tmp_path: Path, until: int, explicit: bool, severity: str, seen: str
) -> None:
    """From the beginning, and from a step on: without a majority of alike layers."""
    net = torch.nn.Sequential(*(te.Linear(32, 32) for _ in range(4)))

    def loss(step: int) -> torch.Tensor:
        with in_fp8(step):
            out = net[:2](torch.randn(16, 32))
        with te.autocast(enabled=step < until) if explicit or step < until else nullcontext():
            return net[2:](out).square().sum()

    verdict = trained(tmp_path, net, sgd(net, 1e-6), steps=16, loss=loss, around=outside, logs=False)
    (finding,) = (item for item in verdict if item.rule == "hole")
    assert (finding.severity, finding.layers, finding.since) == (severity, ("2", "3"), until or None)
    assert finding.seen == seen


def test_a_parameter_without_requires_grad_in_the_optimizer(tmp_path: Path) -> None:
    net = torch.nn.Sequential(*[te.Linear(32, 32) for _ in range(4)])
    net[2].weight.requires_grad_(False)
    verdict = trained(tmp_path, net, torch.optim.AdamW(net.parameters(), 1e-4))
    assert verdict.state == "no problems found"
    (finding,) = (item for item in verdict if item.rule == "missing-gradient")
    assert "an optimizer contains 2.weight" in finding.seen


def test_a_severity_stands_for_those_that_are_worse(planted: Planted) -> None:
    (warning,) = planted.session.findings
    error, note = (dataclasses.replace(warning, severity=severity, rule="") for severity in ("error", "note"))

    def stopping(on_finding: Any, *findings: Finding) -> list[bool]:
        return [read_on_finding(on_finding)(finding) == "stop" for finding in findings]

    assert stopping("stop: nonfinite, sibling", warning) == [True]
    assert stopping("stop: error, overflow", warning) == [False]
    for on_finding in ("stop", "stop: warning"):
        assert stopping(on_finding, error, warning, note) == [True, True, False]
    assert stopping("stop: error", error, warning, note) == [True, False, False]
    assert stopping("warn", error, warning, note) == [False] * 3
    rows = [RULE_OF_ID[rule] for rule in ("nonfinite", "zeros-in-wgrad")]
    of_rule = [dataclasses.replace(note, rule=row.id, title=row.title) for row in rows]
    assert stopping("stop: nonfinite, zeros-in-wgrad", *of_rule) == [False, True]
    assert stopping({"nonfinite": "stop", "zeros-in-wgrad": "stop"}, *of_rule, warning) == [False, True, False]
    by_rule = {"sibling": "warn", "nonfinite": lambda finding: "stop"}
    assert stopping(by_rule, warning, *of_rule) == [False, True, False]


def test_a_function_of_the_finding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results: list[Finding] = []

    def note(finding: Finding) -> None:
        results.append(finding)
        raise ValueError("of the script")

    assert list(train(tmp_path, 3, on_finding=note).findings) == results
    assert "on_finding=" in caplog.text, "the failure is reported"
    train(tmp_path, 3, on_finding=lambda finding: "dump")
    assert "the function may return 'stop' or None, not 'dump'" in caplog.text


@pytest.mark.parametrize(
    "on_finding",
    [lambda finding: "stop" if finding.rule == "sibling" else None, {"nonfinite": "warn", "sibling": "stop"}],
    ids=["a function", "a mapping"],
)
def test_what_stops_the_training(tmp_path: Path, on_finding: Any) -> None:
    with pytest.raises(PrecisionFindingError, match=f"gradient of {LAYER}"):
        train(tmp_path, steps=31, on_finding=on_finding)
    assert open_run(tmp_path).steps["iteration"].to_pylist() == [0, 1, 2]


@pytest.mark.usefixtures("loud")
def test_a_finding_that_stops_is_told_by_the_error_and_at_the_end(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(PrecisionFindingError) as caught:
        train(tmp_path, steps=31, on_finding="stop")
    (finding,) = caught.value.findings
    assert finding.rule == "sibling"
    assert f"gradient of {LAYER}" in str(caught.value)
    assert finding.seen in str(caught.value)
    assert open_run(tmp_path).steps["iteration"].to_pylist() == [0, 1, 2]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"te-precision: stopped: {finding.in_short}, because of the option on_finding"
    assert lines[1].startswith("te-precision: Problems found: 1 warning (")
    assert lines[2] == f"  warning: {finding}"
    assert f"The finding {finding.in_short} stops the training." in caplog.text
    assert finding.seen not in caplog.text


def test_several_findings_that_stop_have_their_remedies_in_order(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    with (
        pytest.raises(PrecisionFindingError) as caught,
        InspectSession(model=net, log_dir=tmp_path, on_finding="stop") as session,
    ):
        net(torch.full((16, 32), math.nan)).sum().backward()
        session.log({"loss": math.nan})
        session.step()
    first, second = caught.value.findings
    text = str(caught.value)
    assert text.index(f" For {first.rule}: {first.remedy}.") < text.index(f" For {second.rule}: {second.remedy}.")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("halt", "must be 'warn', 'stop'"),
        ("stop:", "must be 'warn'"),
        (3, "not 3"),
        ("stop: nonfinit", "'nonfinite'"),
        ({"nonfinit": "stop"}, "there is no rule 'nonfinit'. Did you mean 'nonfinite'"),
        ({3: "stop"}, "there is no rule 3"),
        ({"nonfinite": "halt"}, "the reaction to 'nonfinite' must be 'warn', 'stop' or a function.*, not 'halt'.$"),
        ({"nonfinite": None}, "not None"),
        ({"nonfinite": "dump, stop"}, "not 'dump, stop'"),
        ({"stop": "errors"}, "there is no rule 'errors'"),
    ],
)
def test_what_on_finding_does_not_take(value: Any, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        InspectSession(on_finding=value)


def test_yaml_reads_stop_as_a_mapping() -> None:
    assert InspectSession(on_finding={"stop": "error"})._options.on_finding == "stop: error"


@pytest.mark.usefixtures("loud")
def test_the_closing_lines_of_a_run_that_the_overflow_detector_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = torch.nn.Sequential(te.Linear(32, 32))
    with (
        pytest.raises(ActivationOverflowError),
        InspectSession(None, model=net, log_dir=tmp_path, debug="activation_overflow") as session,
    ):
        net(torch.full((16, 32), float("nan")))
        session.step()
    lines = capsys.readouterr().err.splitlines()
    [first] = [number for number, line in enumerate(lines) if line.startswith("te-precision: stopped: Activation")]
    assert lines[first + 1].startswith("te-precision: "), "the verdict comes behind it"


@pytest.mark.usefixtures("loud")
def test_the_closing_lines_of_notes_and_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "none", steps=0)
    assert "page:" not in capsys.readouterr().err
    note = Finding(
        **dict.fromkeys(("title", "tensor", "statistic", "why", "remedy", "patch", "disproof", "source"), ""),  # type: ignore[arg-type]
        **dict.fromkeys(("since", "until", "last_good", "checkpoint")),  # type: ignore[arg-type]
        rule="bf16-state",
        severity="note",
        layers=("h.0.fc",),
        seen="seen",
    )
    lines = closing_lines(Verdict((note,) * 9, ("bf16-state",)), [], "logs", "", "te-precision diagnose logs")
    assert len(lines) == 9
    assert lines[1] == "  note: h.0.fc: seen (bf16-state)"
    assert lines[7] == "  and 3 more: te-precision diagnose logs"


@pytest.mark.parametrize("how", ["option", "environment"])
def test_a_quiet_session_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    if how == "option":
        monkeypatch.delenv("TE_PRECISION_QUIET")
    train(tmp_path, steps=1, quiet=how == "option")
    assert "te-precision:" not in capsys.readouterr().err


def test_the_last_good_checkpoint(tmp_path: Path) -> None:
    net = torch.nn.Sequential(*(te.Linear(32, 32) for _ in range(2)))

    def loss(step: int) -> torch.Tensor:
        if step in (5, 12, 26):
            running_session().state_dict()
        return net(torch.randn(16, 32) * (math.nan if step > 14 else 1.0)).sum()

    first = trained(tmp_path, net, steps=31, loss=loss, logs=False)[0]
    assert (first.rule, first.since, first.last_good, first.checkpoint) == ("nonfinite", 15, 14, 12)


def test_a_checkpoint_after_the_last_due_step_is_known(tmp_path: Path) -> None:
    net = te.Linear(32, 32)

    def loss(step: int) -> torch.Tensor:
        if step == 3:
            running_session().state_dict()
        return net(torch.ones(16, 32)).sum() * (1.0 if step < 5 else math.nan)

    gradient, lost = trained(tmp_path, net, steps=6, loss=loss, config=statistics(freq=10)).wrong
    assert (gradient.rule, lost.rule) == ("nonfinite", "nonfinite")
    for finding in (gradient, lost):
        assert (finding.last_good, finding.checkpoint) == (4, 3)


@pytest.mark.parametrize("first_micro_batch", [None, True, False])
def test_stale_weights(tmp_path: Path, first_micro_batch: bool | None) -> None:
    """With ``is_first_microbatch=False`` for ever, the first step's weights stay in use."""
    net = te.Linear(32, 32)

    def loss(step: int) -> torch.Tensor:
        out = net(torch.randn(16, 32), is_first_microbatch=True if step == 0 else first_micro_batch)
        return (out - 1).square().sum()

    results = [finding.rule for finding in trained(tmp_path, net, sgd(net), steps=21, loss=loss, logs=False).wrong]
    assert results[:1] == (["stale-weights"] if first_micro_batch is False else [])


@pytest.mark.few
@pytest.mark.parametrize(
    ("dtype", "lr", "scale", "rules"),
    [
        (torch.bfloat16, 1e-6, 1.0, ["lost-updates"]),
        (torch.bfloat16, 1e-2, 1.0, []),
        (torch.float32, 1e-3, 1e-12, ["below-eps"]),
        (torch.float32, 1e-3, 1.0, []),
    ],
)
def test_updates_that_are_lost_and_gradients_below_eps(
    tmp_path: Path, dtype: torch.dtype, lr: float, scale: float, rules: list[str]
) -> None:
    net = te.Linear(32, 32, params_dtype=dtype)

    def loss(step: int) -> torch.Tensor:
        return scale * net(torch.randn(16, 32, dtype=dtype)).float().square().mean()

    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    verdict = trained(tmp_path, net, optimizer, steps=21, loss=loss, around=outside, logs=False)
    assert [finding.rule for finding in verdict.wrong] == rules


QUANTIZED = [
    (Float8CurrentScaling(), torch.bfloat16),
    (Float8CurrentScaling(), torch.float32),
    (MXFP8BlockScaling(), torch.float32),
    (Float8BlockScaling(), torch.bfloat16),
    (NVFP4BlockScaling(), torch.bfloat16),
]


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.few
@pytest.mark.parametrize(("lr", "quantized"), itertools.product((1e-7, 1e3), QUANTIZED))
def test_updates_of_weights_that_exist_only_quantized(tmp_path: Path, lr: float, quantized: tuple[Any, Any]) -> None:
    recipe, dtype = quantized
    stand_for((10, 0))
    with te.quantized_model_init(recipe=recipe):
        net = te.Linear(128, 128, params_dtype=dtype)
    verdict = trained(
        tmp_path,
        net,
        torch.optim.SGD(net.parameters(), lr=lr),
        steps=21,
        loss=lambda step: net(torch.randn(128, 128, dtype=dtype)).float().sum(),
        around=lambda step: te.autocast(recipe=recipe),
        logs=False,
    )
    assert [finding.rule for finding in verdict.wrong if finding.rule == "lost-updates"] == ["lost-updates"] * (lr < 1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_eps_is_a_rule_of_optimizers_that_have_one(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    net, other = te.Linear(32, 32), torch.nn.Linear(4, 4)
    verdict = trained(
        tmp_path,
        net,
        [kind(net.parameters(), lr=1e-3), torch.optim.Adam(other.parameters())],
        steps=2,
        loss=lambda step: net(torch.randn(16, 32)).sum() + other(torch.ones(2, 4)).sum(),
        config=statistics(),
    )
    assert ("below-eps" in [item.rule for item in verdict.not_checked]) == (kind is torch.optim.AdamW)


@pytest.mark.parametrize(
    ("dtype", "enabled", "rules"),
    [(torch.bfloat16, True, ["grad-scaler"]), (torch.bfloat16, False, []), (torch.float16, True, [])],
)
def test_a_scaler_of_gradients(tmp_path: Path, dtype: torch.dtype, enabled: bool, rules: list[str]) -> None:
    """A scaler for a model that is not observed does not count."""
    own = vars(GradScaler)["step"]
    net, other = te.Linear(32, 32), torch.nn.Linear(4, 4)
    optimizers = sgd(net), sgd(other)
    scalers = GradScaler("cpu", 8.0, enabled=enabled), GradScaler("cpu", 8.0)

    def loss(step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype), te.autocast(enabled=dtype is torch.bfloat16, recipe=Float8CurrentScaling()):
            out = net(torch.randn(16, 32))
        losses = (out.float() - 1).square().mean(), other(torch.ones(2, 4)).sum()
        return sum(scaler.scale(value) for scaler, value in zip(scalers, losses, strict=True))

    def step_optimizers() -> None:
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    verdict = trained(tmp_path, net, steps=2, loss=loss, around=outside, after=step_optimizers, logs=False)
    assert [finding.rule for finding in verdict.wrong] == rules
    assert "grad-scaler" in verdict.checked
    assert vars(GradScaler)["step"] is own, "what was wrapped is put back"


@pytest.mark.parametrize(("is_region", "severity"), [(True, "note"), (False, "warning")], ids=["region", "outside"])
def test_a_layer_that_the_script_keeps_in_high_precision(tmp_path: Path, is_region: bool, severity: str) -> None:
    net = torch.nn.ModuleList(te.Linear(32, 32) for _ in range(6))

    def loss(step: int) -> torch.Tensor:
        out = torch.ones(16, 32)
        for place, layer in enumerate(net):
            low = place != 3
            with te.autocast(enabled=low, recipe=Float8CurrentScaling()) if low or is_region else nullcontext():
                out = layer(out)
        return out.sum()

    session = observed(tmp_path, net=net, steps=1, loss=loss, records="off")
    assert [(finding.rule, finding.severity) for finding in session.findings] == [("hole", severity)]
    region = "runs inside te.autocast(enabled=False)" if is_region else "runs outside of te.autocast"
    assert f"'3' ({region})" in str(session.coverage())


def test_arguments_that_the_recipe_does_not_use(tmp_path: Path) -> None:
    recipe = Float8CurrentScaling(use_power_2_scales=True, fp8_dpa=True)
    (finding,) = trained(tmp_path, te.Linear(32, 32), steps=1, around=lambda step: te.autocast(recipe=recipe))
    assert finding.severity == "warning"
    assert finding.seen.startswith("Float8CurrentScaling: use_power_2_scales (True) has")


@pytest.mark.parametrize("logs_before", [True, False], ids=["before step()", "after step()"])
def test_a_loss_that_is_nan_stops_the_training(tmp_path: Path, logs_before: bool) -> None:
    """No statistic that shows inf or nan is collected."""
    net = te.Linear(32, 32)
    running = InspectSession(statistics(stats=["max"], freq=20), model=net, log_dir=tmp_path, on_finding="stop")
    with pytest.raises(PrecisionFindingError, match=r": loss is nan \(nonfinite, since step 2\)"):
        with running as session:
            for step in range(9):
                loss = {"loss": net(torch.ones(16, 32)).mean() * (math.nan if step >= 2 else 1)}
                if logs_before:
                    session.log(loss)
                session.step(step)
                if not logs_before:
                    session.log(loss, step)
    assert running.iteration == (3 if logs_before else 4)
    assert not running.healthy
    assert diagnose(tmp_path) == running.findings


@pytest.mark.parametrize("every", [99, 5], ids=["always", "four of five steps"])
def test_a_detach_before_the_only_layers_that_have_gradients(tmp_path: Path, every: int) -> None:
    net = torch.nn.Sequential(te.Linear(32, 32), torch.nn.Linear(32, 8))

    def loss(step: int) -> torch.Tensor:
        made = net[0](torch.randn(16, 32))
        return net[1](made.detach() if (step + 1) % every else made).square().mean()

    verdict = trained(tmp_path, net, sgd(net, 0.1), steps=21, loss=loss, around=outside, logs=False)
    assert [item.rule for item in verdict.wrong] == ["missing-gradient"] * (every == 99)
    unchecked = {item.rule: item.why for item in verdict.not_checked}
    assert unchecked["dead-gradient"] == "no layer with statistics had a backward in a collection step"


@pytest.mark.usefixtures("loud")
@pytest.mark.parametrize("forwards", [0, 1])
def test_a_run_without_a_step_is_checked_by_its_forwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forwards: int
) -> None:
    net = te.Linear(32, 32)
    with InspectSession(model=net, log_dir=tmp_path) as session:
        for _ in range(forwards):
            net(torch.ones(16, 32))
    assert bool(session.findings.checked) == bool(forwards)
    says = "te-precision: Not enough checked: no training step has run."
    assert (says in capsys.readouterr().err) == (not forwards)
    if forwards:
        assert diagnose(tmp_path) == session.findings
    else:
        assert not list_runs(tmp_path), "nothing has run that could be recorded"


def nonfinite_counts(folder: Path) -> list[tuple[int, float]]:
    run = open_run(folder)
    counts = run.values(run.select(statistic="nonfinite_num")).to_pylist()
    return [(row["iteration"], row["value"]) for row in counts]


def spoiled(net: torch.nn.Module, at: int, number: float) -> Loss:
    """A loss with this number in the batch of a step."""

    def loss(step: int) -> torch.Tensor:
        batch = torch.ones(16, 32)
        batch[3, 3] = number if step == at else 1.0
        return net(batch).sum()

    return loss


@pytest.mark.parametrize("asked", ["cur_amax", "std"])
def test_inf_and_nan_are_seen_without_being_asked_for(tmp_path: Path, asked: str) -> None:
    """Statistics leave them out, and the pass that measures these counts them anyway."""
    net = torch.nn.Sequential(te.Linear(32, 32))
    config = statistics(tensors=["activation", "gradient"], stats=[asked])
    with pytest.raises(PrecisionFindingError, match="1 element is inf or nan") as caught:
        observed(tmp_path, config, net=net, loss=spoiled(net, 2, math.inf), around=in_fp8, on_finding="stop: nonfinite")
    (finding,) = caught.value.findings
    assert (finding.rule, finding.since, finding.tensor) == ("nonfinite", 2, "activation")
    assert list(diagnose(tmp_path)) == [finding]
    assert nonfinite_counts(tmp_path) == [(2, 1.0)]


def test_inf_in_an_activation_stays_the_finding_where_the_weights_follow_in_the_same_step(tmp_path: Path) -> None:
    net = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = spoiled(net, 2, math.inf)
    verdict = trained(tmp_path, net, optimizer, steps=3, loss=loss, around=outside, logs=False, config=statistics())
    finding = next(finding for finding in verdict if finding.rule == "nonfinite")
    assert (finding.since, finding.tensor) == (2, "activation")


def test_inf_and_nan_are_counted_from_the_first_one_on(tmp_path: Path) -> None:
    """So that the series ends with the last step, and two runs have steps in common."""
    net = torch.nn.Sequential(te.Linear(32, 32))
    config = statistics(tensors=["activation"], stats=["cur_amax"])
    trained(tmp_path, net, steps=4, loss=spoiled(net, 1, math.nan), around=outside, logs=False, config=config)
    assert nonfinite_counts(tmp_path) == [(1, 1.0), (2, 0.0), (3, 0.0)]


def test_a_run_that_fails_before_its_first_step_is_recorded(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    with pytest.raises(ValueError, match="a bad batch"), InspectSession(model=net, log_dir=tmp_path) as session:
        session.log({"loss": 1.5})
        raise ValueError("a bad batch")
    run = open_run(tmp_path)
    assert [row["text"] for row in run.events.to_pylist() if row["kind"] == "segment_ended"] == [
        "ValueError: a bad batch"
    ]
    assert [(row["name"], row["value"]) for row in run.scalars.to_pylist()] == [("loss", 1.5)]
    assert {item.why for item in session.findings.not_checked} == {"no training step has run"}


def test_a_model_without_layers_of_transformer_engine(tmp_path: Path) -> None:
    """More statistics cannot be collected of it, so the verdict does not request them."""
    model = torch.nn.Linear(32, 4)
    summary = trained(tmp_path, model, sgd(model, 0.1), steps=8, around=outside).summary
    assert "nonfinite, dead-gradient: the model has no Transformer Engine layers" in summary
    assert "default_statistics" not in summary
