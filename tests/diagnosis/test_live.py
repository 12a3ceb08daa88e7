"""What a session finds while it runs, says once, and acts on; and that a replay of its records finds the same."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.amp.grad_scaler import GradScaler
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.coverage.coverage import NOTHING
from te_precision_callbacks.diagnosis import Finding, PrecisionFindingError, Verdict, diagnose
from te_precision_callbacks.diagnosis.engine import reads_stop
from te_precision_callbacks.overflow.errors import ActivationOverflowError
from te_precision_callbacks.runs import list_runs, open_run
from te_precision_callbacks.runs.answers import outcome_notes
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.session.endings import closing_lines
from tests.conftest import statistics
from tests.diagnosis.conftest import Planted
from tests.diagnosis.planted import train

LAYER = "4.fc"


def test_the_block_is_found(planted: Planted) -> None:
    first = planted.session.findings[0]
    assert (first.rule, first.layers, first.tensor, first.since) == ("sibling", (LAYER,), "gradient", 0)
    assert not planted.session.healthy
    assert repr(planted.session.findings) == f"<Verdict: {planted.session.findings}>"


def test_a_replay_finds_the_same(planted: Planted) -> None:
    folder, session, *_ = planted
    assert diagnose(folder) == session.findings
    kinds = [row["kind"] for row in open_run(folder).events.to_pylist()]
    assert kinds.count("finding") == len(session.findings)


def test_the_verdict_needs_no_records(tmp_path: Path, planted: Planted) -> None:
    assert train(tmp_path, records="off", statistics_log="off").findings == planted.session.findings


def test_a_healthy_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = train(tmp_path, defect=False)
    assert session.healthy
    assert not [record for record in caplog.records if "What to do" in record.message]
    assert diagnose(tmp_path) == session.findings


def test_layers_without_statistics_are_named_in_the_first_line(tmp_path: Path) -> None:
    net = torch.nn.Sequential(te.Linear(32, 32), te.ops.Linear(32, 32))
    with InspectSession(model=net, log_dir=tmp_path) as session:
        for _ in range(6):
            with te.autocast(enabled=True):
                loss = net(torch.randn(32, 32)).square().mean()
            loss.backward()
            session.log({"loss": loss.item()})
            session.step()
    assert "; not observed: 1 of 2 layers (an operation of te.ops))" in session.findings.summary
    assert diagnose(tmp_path) == session.findings


def test_a_run_that_fails_in_its_first_step_counts_the_same_rules(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    config = statistics(tensors=["activation"], stats=["cur_amax"])
    running = InspectSession(config, model=torch.nn.Sequential(net), log_dir=tmp_path)
    with pytest.raises(ZeroDivisionError), running:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            net(torch.randn(16, 32))
        raise ZeroDivisionError
    assert diagnose(tmp_path) == running.findings
    assert "stale-scale" not in {item.rule for item in running.findings.not_judged}


def test_each_finding_is_said_once(planted: Planted) -> None:
    (said,) = [record for record in planted.log if "(sibling" in record.getMessage()]
    assert said.levelno == logging.WARNING
    assert said.getMessage().startswith(f"Warning: gradient of {LAYER}: ")
    assert "te-precision rules sibling" in said.getMessage()


def test_metrics_count_findings(planted: Planted) -> None:
    metrics = planted.metrics
    assert [metrics[step]["te/findings"] for step in (0, 1)] == [0.0, 0.0]
    assert "te/findings/sibling" not in metrics[1]
    assert (metrics[2]["te/findings"], metrics[2]["te/findings/sibling"]) == (1.0, 1.0)


def test_a_finding_after_the_last_step_stops_the_run_at_its_end(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    config = statistics(stats=["nonfinite_num"])
    with pytest.raises(PrecisionFindingError, match="nonfinite"):
        with InspectSession(config, model=net, log_dir=tmp_path, on_finding="stop"):
            net(torch.full((16, 32), torch.nan)).sum().backward()
    with pytest.raises(ValueError, match="the script's own"):
        with InspectSession(config, model=net, log_dir=tmp_path, on_finding="stop"):
            net(torch.full((16, 32), torch.nan)).sum().backward()
            raise ValueError("the script's own")


@pytest.mark.parametrize(
    ("error", "stopped"),
    [
        (ValueError("a bad batch"), "ValueError: a bad batch"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "Ctrl-C"),
        (SystemExit(0), "sys.exit()"),
        (SIGTERMException(), "SIGTERM"),
    ],
)
def test_what_has_ended_a_run_is_said_before_the_verdict(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    stopped: str,
) -> None:
    """A user or a scheduler who ends a run is named, and the run has not failed."""
    monkeypatch.delenv("TE_PRECISION_QUIET")
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
    assert ("failed-run" in {finding.rule for finding in diagnose(tmp_path)}) == failed
    assert outcome_notes(open_run(tmp_path)) == [
        f"The run failed with step 0 as the last one: {stopped}."
        if failed
        else f"The run was ended by {stopped} after step 0: the verdict is on the steps until then."
    ]


@pytest.mark.processes
def test_a_process_that_is_killed_or_ended_by_sigterm(tmp_path: Path) -> None:
    """SIGTERM leaves all files of a stop; after SIGKILL there is no all-clear."""
    from tests.forked import ranks

    script = Path(__file__).with_name("ending_script.py")
    ended, killed = ranks(script, [[number, str(tmp_path / number)] for number in ("TERM", "KILL")])
    assert (ended.returncode, killed.returncode) == (-15, -9)
    assert "te-precision: stopped: SIGTERM" in ended.stderr
    first, *_ = outcome_notes(open_run(tmp_path / "TERM"))
    assert first.startswith("The run was ended by SIGTERM after step 24")
    verdict = diagnose(tmp_path / "TERM")
    assert verdict.healthy
    assert verdict.summary in ended.stderr
    verdict = diagnose(tmp_path / "KILL")
    assert verdict.state == "not enough checked"
    assert "failed-run: the run stopped without an end after step" in verdict.summary


def test_a_model_in_evaluation_mode(tmp_path: Path) -> None:
    """The first line says so, and not that the config lacks statistics."""
    net = te.Linear(32, 32).eval()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for _ in range(10):
            net(torch.ones(16, 32)).pow(2).mean().backward()
            optimizer.step()
            session.step()
    for verdict in (session.findings, diagnose(tmp_path)):
        unobserved = "all observed layers are in evaluation mode, so nothing is observed: call model.train()"
        assert unobserved in verdict.summary
        assert "no Transformer Engine layers" not in verdict.summary
        assert "config" not in verdict.summary


@pytest.mark.parametrize("explicit", [False, True])
def test_low_precision_that_ends_in_the_middle(tmp_path: Path, explicit: bool) -> None:
    """A region that turns it off is meant, as for the last steps of a training in NVFP4."""
    net = te.Linear(32, 32)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for step in range(20):
            region = te.autocast(enabled=step < 12) if explicit or step < 12 else contextlib.nullcontext()
            with region:
                net(torch.randn(16, 32)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    for verdict in (session.findings, diagnose(tmp_path)):
        assert [
            (item.rule, item.severity, item.since) for item in verdict if item.rule in ("hole", "no-low-precision")
        ] == ([("no-low-precision", "note", None)] if explicit else [("hole", "warning", 12)])


def test_layers_that_leave_low_precision_without_a_majority_of_alike_ones(tmp_path: Path) -> None:
    net = torch.nn.ModuleList([te.Linear(32, 32) for _ in range(4)])
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for step in range(16):
            out = torch.randn(16, 32)
            for number, layer in enumerate(net):
                with (
                    te.autocast(recipe=Float8CurrentScaling()) if step < 10 or number < 2 else contextlib.nullcontext()
                ):
                    out = layer(out)
            out.pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    for verdict in (session.findings, diagnose(tmp_path)):
        (finding,) = verdict.wrong
        assert (finding.rule, finding.layers, finding.since) == ("hole", ("2", "3"), 10)
        assert "ran in high precision, after steps in low precision: runs outside of te.autocast" in finding.seen


def test_a_parameter_without_requires_grad_in_the_optimizer(tmp_path: Path) -> None:
    net = torch.nn.Sequential(*[te.Linear(32, 32) for _ in range(4)])
    net[2].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for _ in range(12):
            with te.autocast(recipe=Float8CurrentScaling()):
                out = net(torch.randn(16, 32))
            out.pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log({"loss": out.detach().pow(2).mean()})
            session.step()
    for verdict in (session.findings, diagnose(tmp_path)):
        assert verdict.state == "no problems found"
        assert [
            "an optimizer contains 2.weight" in item.seen for item in verdict if item.rule == "missing-gradient"
        ] == [True]


def test_a_model_that_stays_in_evaluation_mode_from_some_step_on(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for step in range(20):
            net.train(step < 12)
            net(torch.randn(16, 32)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    for verdict in (session.findings, diagnose(tmp_path)):
        assert "observation: in step 12, the optimizer has stepped, but all observed layers are in" in verdict.summary


def test_a_severity_stands_for_those_that_are_worse(planted: Planted) -> None:
    (warning,) = planted.session.findings
    error, note = (dataclasses.replace(warning, severity=severity, rule="") for severity in ("error", "note"))
    assert reads_stop("stop: nonfinite, sibling")(warning)
    assert not reads_stop("stop: error, overflow")(warning)
    assert [reads_stop("stop: warning")(item) for item in (error, warning, note)] == [True, True, False]
    assert [reads_stop("stop: error")(item) for item in (error, warning, note)] == [True, False, False]


def test_a_function_of_the_finding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results: list[Finding] = []

    def note(finding: Finding) -> None:
        results.append(finding)
        raise ValueError("of the script")

    session = train(tmp_path, 3, on_finding=note)
    assert results == list(session.findings)
    assert any("on_finding=" in record.message for record in caplog.records), "the failure is reported"


def test_a_function_stops_the_training(tmp_path: Path) -> None:
    with pytest.raises(PrecisionFindingError, match=f"gradient of {LAYER}"):
        train(tmp_path, steps=31, on_finding=lambda finding: "stop" if finding.rule == "sibling" else None)
    assert open_run(tmp_path).steps["iteration"].to_pylist() == [0, 1, 2]


def test_a_finding_that_stops_is_told_by_the_error_and_at_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("TE_PRECISION_QUIET")
    with pytest.raises(PrecisionFindingError) as caught:
        train(tmp_path, steps=31, on_finding="stop")
    (finding,) = caught.value.findings
    assert finding.rule == "sibling"
    assert f"gradient of {LAYER}" in str(caught.value)
    assert finding.seen in str(caught.value)
    assert open_run(tmp_path).steps["iteration"].to_pylist() == [0, 1, 2]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"te-precision: stopped: {finding.in_short}, by on_finding="
    assert lines[1].startswith("te-precision: Problems found: 1 warning (")
    assert lines[2] == f"  warning: {finding}"
    assert f"Warning: {finding.in_short} stops the training." in caplog.text
    assert finding.seen not in caplog.text


@pytest.mark.parametrize(
    ("value", "told"),
    [("halt", "must be 'warn', 'stop'"), ("stop:", "must be 'warn'"), (3, "not 3"), ("stop: nonfinit", "'nonfinite'")],
)
def test_what_on_finding_does_not_take(value: Any, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        reads_stop(value)
    with pytest.raises(OptionError, match=told):
        InspectSession(on_finding=value)


def test_the_closing_lines_of_a_run_that_the_overflow_detector_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TE_PRECISION_QUIET")
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


def test_the_closing_lines_of_notes_and_of_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notes are named, a page that exists is named, and a run without a step has no page."""
    monkeypatch.delenv("TE_PRECISION_QUIET")
    train(tmp_path / "none", steps=0)
    assert "page:" not in capsys.readouterr().err
    train(tmp_path / "page", steps=1, defect=False, report=True)
    assert f"  page: {tmp_path / 'page' / 'report.html'}" in capsys.readouterr().err.splitlines()
    note = Finding(
        **dict.fromkeys(("title", "tensor", "statistic", "why", "remedy", "patch", "disproof", "source"), ""),  # type: ignore[arg-type]
        **dict.fromkeys(("since", "until", "last_good", "checkpoint")),  # type: ignore[arg-type]
        rule="bf16-state",
        severity="note",
        layers=("h.0.fc",),
        seen="seen",
    )
    lines = closing_lines(Verdict((note,) * 9, ("bf16-state",)), NOTHING, tmp_path, "")
    assert len(lines) == 9
    assert lines[1] == "  note: h.0.fc: seen (bf16-state)"
    assert lines[7] == f"  and 3 more: te-precision diagnose {tmp_path}"


@pytest.mark.parametrize("how", ["option", "environment"])
def test_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str) -> None:
    if how == "option":
        monkeypatch.delenv("TE_PRECISION_QUIET")
    train(tmp_path, steps=1, quiet=how == "option")
    assert "te-precision:" not in capsys.readouterr().err


def test_the_last_good_checkpoint(tmp_path: Path) -> None:
    net = torch.nn.Sequential(*(te.Linear(32, 32) for _ in range(2)))
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for step in range(31):
            batch = torch.randn(16, 32) * (float("nan") if step > 14 else 1.0)
            with te.autocast(recipe=Float8CurrentScaling()):
                net(batch).sum().backward()
            session.step()
            if step in (4, 11, 25):
                session.state_dict()
    first = session.findings[0]
    assert (first.rule, first.since, first.last_good, first.checkpoint) == ("nonfinite", 20, 10, 5)
    assert diagnose(tmp_path) == session.findings


@pytest.mark.parametrize("first_micro_batch", [None, True, False])
def test_stale_weights(tmp_path: Path, first_micro_batch: bool | None) -> None:
    """With ``is_first_microbatch=False`` for ever, the weights are those of the first step."""
    torch.manual_seed(0)
    net = te.Linear(32, 32)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for step in range(21):
            with te.autocast(recipe=Float8CurrentScaling()):
                out = net(torch.randn(16, 32), is_first_microbatch=True if step == 0 else first_micro_batch)
            (out - 1).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    results = [finding.rule for finding in session.findings if finding.severity != "note"]
    assert results[:1] == (["stale-weights"] if first_micro_batch is False else [])


@pytest.mark.parametrize(("lr", "rules"), [(1e-6, ["lost-updates"]), (1e-2, [])])
def test_lost_updates(tmp_path: Path, lr: float, rules: list[str]) -> None:
    torch.manual_seed(0)
    net = te.Linear(32, 32, params_dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for _ in range(21):
            net(torch.randn(16, 32, dtype=torch.bfloat16)).float().pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    assert [finding.rule for finding in session.findings if finding.severity != "note"] == rules


@pytest.mark.parametrize(("scale", "rules"), [(1e-12, ["below-eps"]), (1.0, [])])
def test_gradients_below_eps(tmp_path: Path, scale: float, rules: list[str]) -> None:
    torch.manual_seed(0)
    net = te.Linear(32, 32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for _ in range(21):
            (scale * net(torch.randn(16, 32)).pow(2).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    assert [finding.rule for finding in session.findings if finding.severity != "note"] == rules


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_eps_is_a_rule_of_optimizers_that_have_one(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    net, other = te.Linear(32, 32), torch.nn.Linear(4, 4)
    optimizer, of_other = kind(net.parameters(), lr=1e-3), torch.optim.Adam(other.parameters())
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        for _ in range(2):
            (net(torch.randn(16, 32)).sum() + other(torch.ones(2, 4)).sum()).backward()
            optimizer.step()
            of_other.step()
            session.step()
    for verdict in (session.findings, diagnose(tmp_path)):
        assert ("below-eps" in [item.rule for item in verdict.not_judged]) == (kind is torch.optim.AdamW)


@pytest.mark.parametrize(("enabled", "rules"), [(True, ["grad-scaler"]), (False, [])])
def test_a_scaler_of_gradients_in_bfloat16(tmp_path: Path, enabled: bool, rules: list[str]) -> None:
    torch.manual_seed(0)
    own = vars(GradScaler)["step"]
    net, other = te.Linear(32, 32), torch.nn.Linear(4, 4)
    optimizer, of_other = (torch.optim.SGD(item.parameters(), lr=1e-3) for item in (net, other))
    scaler, scaler_of_other = GradScaler("cpu", enabled=enabled), GradScaler("cpu")
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16), te.autocast(recipe=Float8CurrentScaling()):
                out = net(torch.randn(16, 32))
            scaler.scale((out.float() - 1).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler_of_other.scale(other(torch.ones(2, 4)).sum()).backward()
            scaler_of_other.step(of_other)
            for item in (optimizer, of_other):
                item.zero_grad()
            scaler.update()
            scaler_of_other.update()
            session.step()
    assert [finding.rule for finding in session.findings if finding.severity != "note"] == rules
    assert diagnose(tmp_path) == session.findings
    assert vars(GradScaler)["step"] is own, "what was wrapped is put back"


@pytest.mark.parametrize(("is_region", "rules"), [(True, []), (False, ["hole"])], ids=["region", "outside"])
def test_a_layer_that_the_script_keeps_in_high_precision(tmp_path: Path, is_region: bool, rules: list[str]) -> None:
    net = torch.nn.ModuleList(te.Linear(32, 32) for _ in range(6))
    with InspectSession(None, model=net, log_dir=tmp_path, records="off") as session:
        out = torch.ones(16, 32)
        for place, layer in enumerate(net):
            low = place != 3
            with te.autocast(enabled=low, recipe=Float8CurrentScaling()) if low or is_region else nullcontext():
                out = layer(out)
        out.sum().backward()
        session.step()
    assert [finding.rule for finding in session.findings] == rules
    region = "runs inside te.autocast(enabled=False)" if is_region else "runs outside of te.autocast"
    assert f"'3' ({region})" in str(session.coverage())


def test_a_scaler_for_float16(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), GradScaler("cpu", 8.0)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        with torch.autocast("cpu", torch.float16):
            out = net(torch.randn(16, 32))
        scaler.scale((out.float() - 1).pow(2).mean()).backward()
        scaler.step(optimizer)
        session.step()
    assert "grad-scaler" in session.findings.judged
    assert not session.findings.wrong


def test_arguments_that_the_recipe_does_not_use(tmp_path: Path) -> None:
    recipe = Float8CurrentScaling(use_power_2_scales=True, fp8_dpa=True)
    net = te.Linear(32, 32)
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        with te.autocast(recipe=recipe):
            net(torch.randn(16, 32)).sum().backward()
        session.step()
    results = [(finding.severity, finding.seen.partition(" has")[0]) for finding in session.findings]
    assert results == [("warning", "Float8CurrentScaling: use_power_2_scales (True)")]
    assert diagnose(tmp_path) == session.findings


@pytest.mark.parametrize("logs_before", [True, False], ids=["before step()", "after step()"])
def test_a_loss_that_is_nan_stops_the_training(tmp_path: Path, logs_before: bool) -> None:
    """No statistic that shows inf or nan is collected."""
    net = te.Linear(32, 32)
    running = InspectSession(statistics(stats=["max"], freq=20), model=net, log_dir=tmp_path, on_finding="stop")
    with pytest.raises(PrecisionFindingError, match=r"the model: loss is nan \(nonfinite-loss, since step 2\)"):
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


class Detached(torch.nn.Module):
    """Layers of Transformer Engine before a head that is none, with a detach() between them in most steps."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.layer, self.head = te.Linear(32, 32), torch.nn.Linear(32, 8)
        self.step, self.every = 0, every

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self.layer(tensor)
        self.step += 1
        result: torch.Tensor = self.head(made.detach() if self.step % self.every else made)
        return result


@pytest.mark.parametrize("every", [99, 5], ids=["always", "four of five steps"])
def test_a_detach_before_the_only_layers_that_have_gradients(tmp_path: Path, every: int) -> None:
    net = Detached(every)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with InspectSession(model=net, log_dir=tmp_path) as session:
        for _ in range(21):
            net(torch.randn(16, 32)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    unjudged = {item.rule: item.why for item in session.findings.not_judged}
    assert [item.rule for item in session.findings.wrong] == ["missing-gradient"] * (every == 99)
    assert unjudged["dead-gradient"] == "no backward has reached a layer with statistics in a collection step"
    assert diagnose(tmp_path) == session.findings


def test_a_checkpoint_after_the_last_due_step_is_known(tmp_path: Path) -> None:
    with InspectSession(statistics(freq=10), model=(net := te.Linear(32, 32)), log_dir=tmp_path) as session:
        for step in range(6):
            net(torch.ones(16, 32)).sum().backward()
            session.log({"loss": 1.0 if step < 5 else float("nan")})
            session.step()
            if step == 2:
                session.state_dict()
    (finding,) = session.findings.wrong
    assert (finding.last_good, finding.checkpoint) == (4, 3)
    assert diagnose(tmp_path) == session.findings


@pytest.mark.parametrize("forwards", [0, 1])
def test_a_run_without_a_step_is_judged_by_its_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forwards: int
) -> None:
    monkeypatch.delenv("TE_PRECISION_QUIET")
    net = te.Linear(32, 32)
    with InspectSession(model=net, log_dir=tmp_path) as session:
        for _ in range(forwards):
            net(torch.ones(16, 32))
    assert bool(session.findings.judged) == bool(forwards)
    says = "te-precision: Not enough checked: no training step has run."
    assert (says in capsys.readouterr().err) == (not forwards)
    if forwards:
        assert diagnose(tmp_path) == session.findings
    else:
        assert not list_runs(tmp_path), "nothing has run that could be recorded"


@pytest.mark.parametrize("asked", ["cur_amax", "std"])
def test_inf_and_nan_are_seen_without_being_asked_for(tmp_path: Path, asked: str) -> None:
    """Statistics leave them out, and the pass that measures these counts them anyway."""
    net = te.Linear(32, 32)
    session = InspectSession(
        statistics(tensors=["activation", "gradient"], stats=[asked]),
        model=torch.nn.Sequential(net),
        log_dir=tmp_path,
        on_finding="stop: nonfinite",
    )
    with pytest.raises(PrecisionFindingError, match="1 element is inf or nan"), session:
        for step in range(4):
            batch = torch.randn(16, 32)
            batch[3, 3] = math.inf if step == 2 else 0.0
            with te.autocast(recipe=Float8CurrentScaling()):
                net(batch).sum().backward()
            session.step()
    assert [(finding.rule, finding.since, finding.tensor) for finding in session.findings] == [
        ("nonfinite", 2, "activation")
    ]
    assert diagnose(tmp_path) == session.findings
    run = open_run(tmp_path)
    counts = run.values(run.select(statistic="nonfinite_num")).to_pylist()
    assert [(row["iteration"], row["value"]) for row in counts] == [(2, 1.0)]


def test_inf_and_nan_are_counted_from_the_first_one_on(tmp_path: Path) -> None:
    """So that the last number of the series is that of the last step, and two runs have steps in common."""
    net = te.Linear(32, 32)
    config = statistics(tensors=["activation"], stats=["cur_amax"])
    with InspectSession(config, model=torch.nn.Sequential(net), log_dir=tmp_path) as session:
        for step in range(4):
            batch = torch.ones(16, 32)
            batch[3, 3] = math.nan if step == 1 else 1.0
            net(batch)
            session.step()
    run = open_run(tmp_path)
    counts = run.values(run.select(statistic="nonfinite_num")).to_pylist()
    assert [(row["iteration"], row["value"]) for row in counts] == [(1, 1.0), (2, 0.0), (3, 0.0)]


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
    assert {item.why for item in session.findings.not_judged} == {"no training step has run"}


def test_a_model_without_layers_of_transformer_engine(tmp_path: Path) -> None:
    """More statistics cannot be collected of it, so the verdict does not ask for them."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with InspectSession(model=model, log_dir=tmp_path, report=False) as session:
        for _ in range(8):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log({"loss": loss.detach()})
            session.step()
    for verdict in (session.findings, diagnose(tmp_path)):
        assert "nonfinite, dead-gradient: the model has no Transformer Engine layers" in verdict.summary
        assert "default_statistics" not in verdict.summary
