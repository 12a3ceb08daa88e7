"""Steps in which other products ran in low precision than in the last one: on the terminal, in files, in views."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.coverage.other_steps import other_steps_of_run
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import InspectSession
from tests.conftest import feature
from tests.coverage.test_contract import CONFIG as WATCHED
from tests.coverage.test_contract import Net
from tests.instrumentation.steps import stepped

pytestmark = pytest.mark.filterwarnings("ignore:Recipe type changed")

CURRENT = Float8CurrentScaling()
ALL_GEMMS = "FP8 in 100 % of the multiply-adds (fprop 100, dgrad 100, wgrad 100)"
ONE_LAYER = "FP8 in 50.0 % of the multiply-adds (fprop 50.0, dgrad 50.0, wgrad 50.0)"


def trained(folder: Path, sections: dict[str, Any], recipes: list[Any]) -> InspectSession:
    return stepped(torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32)), folder, recipes, sections)


def lines(session: InspectSession) -> list[str]:
    return [str(steps) for steps in session._results.other_steps()]


def high(*intervals: list[int]) -> dict[str, Any]:
    return {"s": feature("DisableQuantizationLayer", ["1"], start_end_list=[list(interval) for interval in intervals])}


def test_a_step_that_an_error_ends_halfway_is_no_other_precision(tmp_path: Path) -> None:
    model = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))

    def fail(gradient: torch.Tensor) -> None:
        if session.iteration == 2:
            raise ValueError("the script's own")

    with (
        pytest.raises(ValueError, match="the script's own"),
        InspectSession(None, model=model, log_dir=tmp_path) as session,
    ):
        while True:
            with te.autocast(enabled=True, recipe=CURRENT):
                hidden = model[0](torch.randn(16, 32, requires_grad=True))
                hidden.register_hook(fail)
                out = model[1](hidden)
            out.sum().backward()
            session.step()
    assert lines(session) == other_steps_of_run(open_run(tmp_path)) == []


ONE_LAYER_OF_TE = f"{ONE_LAYER}; 50.0 % in FP32: head (not a TE layer)"


def of_steps(
    session: InspectSession, *, steps: int = 5, skipped: Collection[int] = (), raises: BaseException | None = None
) -> set[str]:
    """Train for some steps, some of which have no backward; with an error, that in another one after its forward. The
    optimizer steps in all of them, with gradients of 0 where there is no backward. What each step covers."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with session:
        session.attach(net)
        for step in range(steps + (raises is not None)):
            out = net(torch.ones(16, 32, requires_grad=True))
            if step == steps and raises:
                raise raises
            if step not in skipped:
                out.sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            session.step()
    return {str(session.coverage(at=step)) for step in range(steps)}


@pytest.mark.parametrize(("sections", "skipped"), [(None, (0, 1, 2)), (None, (2, 3)), (WATCHED, (0,)), (WATCHED, (4,))])
def test_a_batch_that_is_skipped_is_no_other_precision(
    skipped: Collection[int], sections: dict[str, Any] | None, tmp_path: Path
) -> None:
    session = InspectSession(sections, log_dir=tmp_path)
    assert of_steps(session, skipped=skipped) == {ONE_LAYER_OF_TE}
    assert lines(session) == other_steps_of_run(open_run(tmp_path)) == []
    last = {entry.gemm: (entry.operands, entry.not_run, entry.until) for entry in session.precision(at=4)}
    assert last["wgrad"] == ({"gradient": "FP8 E5M2", "activation": "FP8 E4M3"}, "", None)


def test_a_backward_that_comes_after_many_skipped_batches(tmp_path: Path) -> None:
    session = InspectSession(WATCHED, log_dir=tmp_path / "none")
    of_steps(session, steps=13, skipped=range(13))
    assert str(session.coverage()) == (
        "FP8 in 50.0 % of the multiply-adds (fprop 50.0); 50.0 % in FP32: head (not a TE layer); no product of a"
        " backward has been seen, so these are those of a forward alone"
    )
    session = InspectSession(WATCHED, log_dir=tmp_path / "two")
    assert of_steps(session, steps=15, skipped=range(13)) == {ONE_LAYER_OF_TE}


@pytest.mark.parametrize("skipped", [(0,), (0, 2)], ids=str)
def test_micro_batches_that_are_skipped_in_the_first_step(skipped: Collection[int], tmp_path: Path) -> None:
    """Where that is the one that counts for the others, the next step is counted instead."""
    net = Net()
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for step in range(2):
            for micro_batch in range(3):
                out = net(torch.ones(16, 32, requires_grad=True))
                if step or micro_batch not in skipped:
                    out.sum().backward()
            session.step()
    for coverage, backwards in ((session.coverage(at=0), 3 - len(skipped)), (session.coverage(at=1), 3)):
        assert {product.gemm: product.calls for product in coverage if product.layer == "head"} == {
            "fprop": 3,
            "dgrad": backwards,
            "wgrad": backwards,
        }
        assert (coverage.is_estimate, coverage.share("fp8")) == (False, 0.5)


@pytest.mark.parametrize(("error", "sections"), [(ValueError(), WATCHED), (KeyboardInterrupt(), None)])
def test_a_step_that_an_error_ends_after_its_forward_changes_nothing(
    error: BaseException, sections: dict[str, Any] | None, tmp_path: Path
) -> None:
    session = InspectSession(sections, log_dir=tmp_path)
    with pytest.raises(type(error)):
        of_steps(session, raises=error)
    assert str(session.coverage()) == str(session.coverage(at=4)) == ONE_LAYER_OF_TE
    assert lines(session) == other_steps_of_run(open_run(tmp_path)) == []


@pytest.mark.parametrize("has_masters", [False, True])
def test_a_layer_that_no_backward_reaches_any_more_is_told(tmp_path: Path, has_masters: bool) -> None:
    """Unlike in a step without a backward; the step of an optimizer shows that there was one, of torch's layer alone,
    also where it steps copies of the weights in float32."""
    net = Net()
    net.head.register_forward_pre_hook(lambda _, given: (given[0].detach(),) if session.iteration > 0 else None)
    masters = [parameter.detach().clone() if has_masters else parameter for parameter in net.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    with InspectSession(WATCHED, model=net, log_dir=tmp_path) as session:
        for step in range(4):
            loss = net(torch.ones(16, 32)).sum()
            if step != 1:  # a batch that is skipped, with the same forward
                loss.backward()
            for master, parameter in zip(masters, net.parameters(), strict=True):
                master.grad = parameter.grad
            optimizer.step()
            net.zero_grad()
            session.step()
    last = {entry.gemm: (entry.not_run, entry.since) for entry in session.precision(at=3)}
    assert last["wgrad"] == ("no backward has reached it", 2)


def test_every_output_has_the_steps_in_which_a_section_acted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TE_PRECISION_QUIET")
    trained(tmp_path, high([1, 2], [4, 4]), [CURRENT] * 6)
    line = f"In steps 1 to 2 and 4: {ONE_LAYER}; 50.0 % in FP32: '1' (DisableQuantizationLayer in "
    closing = capsys.readouterr().err.splitlines()
    place = closing.index(f"  {ALL_GEMMS}.")
    assert closing[place + 1].startswith(f"  {line}")
    assert closing[place + 1].count("1 to 2 and 4") == 1
    result = json.loads(CliRunner().invoke(cli.app, ["show", str(tmp_path), "--json"]).output)
    assert [item.startswith(line) for item in result["other_steps"]] == [True]


def test_a_run_in_one_precision_has_no_such_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TE_PRECISION_QUIET")
    trained(tmp_path / "fixed", {}, [CURRENT] * 3)
    assert "In step" not in capsys.readouterr().err
    assert lines(trained(tmp_path / "recipes", {}, [CURRENT, DelayedScaling(), CURRENT])) == []


def test_many_spans_are_short(tmp_path: Path) -> None:
    session = trained(tmp_path, high(*([step, step] for step in range(1, 12, 2))), [CURRENT] * 13)
    [line] = lines(session)
    assert line.startswith(f"In steps 1 and 3 and 5 and 7 and 2 more spans: {ONE_LAYER}")
    assert lines(session) == other_steps_of_run(open_run(tmp_path))


def test_what_was_before_the_changes_that_are_kept_is_not_told(tmp_path: Path) -> None:
    """The history has the last changes of a layer; what was before them is not known, and is not guessed."""
    session = trained(tmp_path, high(*([step, step] for step in range(1, 70, 2))), [CURRENT] * 71)
    rows = [row for row in open_run(tmp_path).gemms.to_pylist() if row["layer"] == "1"]
    for at in range(71):
        [known] = {
            row["precision"] for row in rows if row["since"] <= at and (row["until"] is None or at <= row["until"])
        }
        assert known == ("" if at < 7 else "fp32" if at % 2 else "fp8")
    [line] = lines(session)
    assert line.startswith(f"In steps 7 and 9 and 11 and 13 and 28 more spans: {ONE_LAYER}")
