"""Reactions to findings: each acts from the next step on, in the same step on all ranks, and changes nothing before."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from typer.testing import CliRunner

from te_precision_callbacks import cli, dumps
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import InspectSession
from tests.capability import stand_for
from tests.conftest import feature
from tests.forked import ranks
from tests.instrumentation.gemm_spy import BLACKWELL
from tests.session.actions_script import NAN_AT, STEPS
from tests.session.test_every_step import Blocks

BROKEN = 6
LAST = 10
"""The steps in which one activation is nan, and nothing is learned, and the last step in high precision."""

pytestmark = pytest.mark.usefixtures("any_gpu")

Weights = list[dict[str, torch.Tensor]]


def train(
    log_dir: Path | None,
    recipe: str = "current",
    steps: int = 16,
    broken: tuple[int, ...] = (BROKEN,),
    *,
    model: Blocks | None = None,
    **options: Any,
) -> tuple[Weights, InspectSession | None]:
    """Train, and return the weights after each step."""
    model = Blocks(recipe) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(2)
    session = None if log_dir is None else InspectSession(log_dir=log_dir, model=model, **options).start()
    weights: Weights = []
    try:
        for step in range(steps):

            def at(where: str, x: torch.Tensor, step: int = step) -> torch.Tensor:
                if where == "between" and step in broken:
                    x = x.clone()
                    x[3, 5] = math.nan
                return x

            model.at = at
            model(torch.randn(32, 64, generator=draws)).square().mean().backward()
            if step not in broken:
                optimizer.step()
            optimizer.zero_grad()
            weights.append({name: value.detach().clone() for name, value in model.named_parameters()})
            if session is not None:
                session.step()
    finally:
        if session is not None:
            session.stop()
    return weights, session


def told(folder: Path) -> list[tuple[int, str]]:
    return [(row["iteration"], row["text"]) for row in open_run(folder).events.to_pylist() if row["kind"] == "action"]


def are_equal(first: Weights, second: Weights) -> list[bool]:
    return [
        all(a[name].equal(b[name]) or a[name].isnan().any() for name in a) for a, b in zip(first, second, strict=True)
    ]


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_high_precision_is_that_of_a_config_with_these_steps(tmp_path: Path, recipe: str) -> None:
    """Bit-identical to a config that names the layer and the steps beforehand, and before it to no session."""
    if recipe in BLACKWELL:
        stand_for((10, 0))
    section = {
        "enabled": True,
        "layers": {"exact_layer_names": ["linear"]},
        "transformer_engine": {"DisableFP8Layer": {"enabled": True, "start_step": BROKEN + 1, "end_step": LAST}},
    }
    plain, _ = train(None, recipe)
    planned, _ = train(tmp_path / "planned", recipe, config={"high": section})
    reaction = f"high precision: {LAST - BROKEN}"
    acting, session = train(tmp_path / "acting", recipe, on_finding={"nonfinite": reaction})
    texts = told(tmp_path / "acting")
    assert session is not None
    assert texts[0] == (
        BROKEN,
        f"high precision, because of nonfinite: linear, in the steps {BROKEN + 1} to {LAST}.",
    )
    assert texts[1] == (LAST, "high precision ends here: linear.")
    same_as_plain = are_equal(acting, plain)
    assert all(same_as_plain[: BROKEN + 1])
    assert not same_as_plain[BROKEN + 1]
    assert all(are_equal(acting, planned))


def test_the_layer_is_as_before_when_the_steps_are_over(tmp_path: Path) -> None:
    _, session = train(tmp_path, on_finding={"nonfinite": "high precision: 3"}, steps=30)
    assert session is not None
    assert [finding.rule for finding in session.findings] == ["nonfinite"], "it is still called, and it is no gap"
    spans = {(row["since"], row["until"]) for row in open_run(tmp_path).gemms.to_pylist() if row["layer"] == "linear"}
    low = {row["precision"] for row in open_run(tmp_path).gemms.to_pylist() if row["layer"] == "linear"}
    assert low == {"fp8", "fp32"}, spans
    assert "linear" not in str(session.coverage()), "it ends in low precision"


def test_a_model_that_is_attached_again(tmp_path: Path) -> None:
    """Its layers stay in high precision; the reaction ends where they are gone."""
    model = Blocks("current")
    shares = []
    with InspectSession(log_dir=tmp_path, model=model, on_finding={"nonfinite": "high precision: 20"}) as session:
        for step in range(12):
            x = torch.randn(32, 64)
            if step == 2:
                x[0, 0] = math.nan
            model(x).square().mean().backward()
            session.step()
            if step == 5:
                session.attach(model)
            if step == 8:
                model.mlp = te.LayerNormMLP(64, 128)
                session.attach(model.linear)
            shares.append("mlp.fc1" in str(session.coverage(step)))
            assert shares[-1] == ("DisableQuantizationLayer in a reaction to a finding" in str(session.coverage(step)))
    assert shares == [False] * 3 + [True] * 6 + [False] * 3
    assert session.iteration == 12


def test_a_dump_of_the_next_occurrence(tmp_path: Path) -> None:
    plain, _ = train(None, broken=(BROKEN, 11, 13))
    acting, _ = train(tmp_path, broken=(BROKEN, 11, 13), on_finding={"nonfinite": "dump"})
    assert all(are_equal(plain, acting)), "a dump changes no bit"
    ((step, text),) = told(tmp_path)
    assert step == BROKEN
    assert text.startswith("dump, because of nonfinite: fprop and wgrad of linear, in the steps 7 to 106")
    entries = dumps.list(tmp_path)
    assert {(entry.header.iteration, entry.header.layer) for entry in entries} == {(11, "linear")}, (
        "not again at step 13"
    )
    assert {entry.header.tensor for entry in entries} == {"fprop_gemm", "wgrad_gemm"}


def test_a_dump_for_another_rule_is_of_the_next_step(tmp_path: Path) -> None:
    model = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    with InspectSession(log_dir=tmp_path, model=model, on_finding={"spike": "dump"}) as session:
        for step in range(24):
            x = torch.randn(16, 32)
            with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
                model(x * 1000 if step == 20 else x).square().mean().backward()
            session.step()
    assert {(entry.header.iteration, entry.header.layer) for entry in dumps.list(tmp_path)} == {(21, "0")}
    assert told(tmp_path)[0] == (20, "dump, because of spike: fprop and wgrad of 0, in step 21.")


def test_several_findings_in_one_step(tmp_path: Path) -> None:
    """Two rules request actions on the same layer, and different actions: each is done once."""
    reactions = {
        "nonfinite": "dump, high precision: 4, protect checkpoint",
        "nonfinite-loss": "high precision: 4, protect checkpoint",
    }
    model = Blocks("current")
    with InspectSession(log_dir=tmp_path, model=model, on_finding=reactions) as session:
        for step in range(12):
            x = torch.randn(32, 64)
            if step == BROKEN:
                x[0, 0] = math.nan
            loss = model(x).square().mean()
            loss.backward()
            session.log({"loss": loss.detach()})
            session.step()
    texts = [text for _, text in told(tmp_path)]
    assert session.protects_checkpoints
    assert sum(", in the steps" in text and text.startswith("high") for text in texts) == 1
    assert "high precision, because of nonfinite-loss: the finding names no layer that debug features act on." in texts
    assert sum("no longer saved or deleted" in text for text in texts) == 2
    assert sum(text.startswith("dump") for text in texts) == 1


def test_experts_run_in_fp8_again(tmp_path: Path) -> None:
    """With delayed scaling, the quantizer of a feature must leave the recipe's quantizer as it is."""
    model = te.GroupedLinear(2, 32, 32)
    config = {"s": feature("DisableFP8Layer", ["all"], end_step=2)}
    with InspectSession(config, model=model, log_dir=tmp_path) as session:
        for _ in range(5):
            with te.autocast(enabled=True):
                model(torch.randn(64, 32), [32, 32]).sum().backward()
            session.step()
        operands = [session.precision(at=step)[0].operands["weight"] for step in range(5)]
    assert operands == ["FP32"] * 3 + ["FP8 E4M3"] * 2


def test_signals_leave_room_for_the_end(tmp_path: Path) -> None:
    model = Blocks("current")
    with InspectSession(log_dir=tmp_path, model=model) as session:
        for _ in range(12):
            model(torch.randn(32, 64)).sum().backward()
            session.step()
            signal.raise_signal(signal.SIGUSR1)
    records = [row["text"] for row in open_run(tmp_path).events.to_pylist() if row["kind"] == "last_steps"]
    assert len(records) < 8
    assert records[-1] == "The last 12 steps before: the end of the run."


def test_it_is_shown(tmp_path: Path) -> None:
    train(tmp_path, on_finding={"nonfinite": "high precision: 4"})
    text = f"After step {BROKEN}: high precision, because of nonfinite: linear, in the steps 7 to 10."
    shown = CliRunner().invoke(cli.app, ["show", str(tmp_path)], env={"COLUMNS": "300"}).output
    assert text in shown
    pytest.importorskip("plotly")
    from te_precision_callbacks.views.report.data import page_data

    content, _ = page_data(open_run(tmp_path), 10**7)
    assert text in content["run"]["reactions"]
    assert "action" in {event["kind"] for event in content["run"]["events"]}


def test_a_layer_that_cannot_be_switched(tmp_path: Path) -> None:
    with te.quantized_model_init(enabled=True, recipe=Float8CurrentScaling()):
        model = Blocks("current")
    train(tmp_path, model=model, steps=9, on_finding={"nonfinite": "high precision"})
    ((_, text),) = told(tmp_path)
    assert text.endswith("no further layer of Transformer Engine is concerned; linear cannot: quantized_model_init.")


def test_a_conflict_with_the_config(tmp_path: Path) -> None:
    section = {
        "enabled": True,
        "layers": {"exact_layer_names": ["linear"]},
        "transformer_engine": {"DisableQuantizationLayer": {"enabled": True, "start_step": 15}},
    }
    plain, _ = train(None, steps=12)
    acting, session = train(tmp_path, steps=12, config={"own": section}, on_finding={"nonfinite": "high precision"})
    ((_, text),) = told(tmp_path)
    assert "high precision, because of nonfinite: not possible: " in text
    assert "DisableQuantizationLayer" in text
    assert all(are_equal(plain, acting))
    assert session is not None
    assert session.iteration == 12


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"nonfinit": "dump"}, "there is no rule 'nonfinit'. Did you mean 'nonfinite'"),
        ({"nonfinite": "dumpp"}, "'nonfinite': 'dumpp' is not a reaction.*Did you mean 'dump'"),
        ({"nonfinite": "dump: 5"}, "'dump: 5' is not a reaction"),
        ({"nonfinite": "high precision: 0"}, "'high precision: 0' is not a reaction"),
        ({"nonfinite": "high precision: many"}, "not a reaction"),
        ({"nonfinite": ""}, "'' is not a reaction"),
        ({"nonfinite": None}, "must be a text with commas, such as 'dump, protect checkpoint', not None"),
        ({3: "dump"}, "there is no rule 3"),
        ({"nonfinite": "dump, stop"}, "'stop' ends the training, so 'dump' would have no effect"),
        ({"nonfinite": "stop, warn"}, "'warn' would have no effect"),
        ({"spike": "high precision: 5, high precision: 9"}, "'high precision' is given twice"),
    ],
)
def test_a_wrong_rule_or_reaction(value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        InspectSession(on_finding=value)


def test_yaml_reads_stop_as_a_mapping() -> None:
    assert InspectSession(on_finding={"stop": "error"})._options.on_finding == "stop: error"
    with pytest.raises(OptionError, match="there is no rule 'errors'"):
        InspectSession(on_finding={"stop": "errors"})


def test_a_mapping_stops_a_run_too(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nonfinite"):
        train(tmp_path, on_finding={"nonfinite": "stop, protect checkpoint", "overflow": "warn"})


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    ended = ranks(Path(__file__).with_name("actions_script.py"), [[str(rank), str(folder)] for rank in range(2)])
    assert [each.returncode for each in ended] == [0, 0], ended
    return folder


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "begin"), [("every step", NAN_AT + 2), ("default", 11), ("alone", 0), ("too late", 0)]
)
def test_all_ranks_act_in_the_same_step(of_ranks: Path, case: str, begin: int) -> None:
    """After a nan of one rank: in the next step that exchanges values."""
    first, second = (json.loads((of_ranks / f"{case} {rank}.json").read_text()) for rank in range(2))
    assert first == second
    is_high = [step for step in range(STEPS) if first["low"][step] < max(first["low"])]
    if begin:
        assert is_high == list(range(begin, begin + 5))
        assert first["protects"] == [step >= begin - 1 for step in range(STEPS)]
        return
    assert is_high == []
    assert not any(first["protects"])
    reason = {"alone": "not possible with reduce=False", "too late": "the run ended before the ranks could"}[case]
    assert any(reason in text for _, text in told(of_ranks / case))
