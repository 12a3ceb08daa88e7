"""The audit of a resume: its findings in real runs, and that it is silent after a good resume."""

import gc
import io
import json
import logging
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformer_engine.pytorch as te
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.runs.fingerprints import FILE_NAME, Fingerprint, FingerprintError, ResumeReport, read
from te_precision_callbacks.session import InspectSession, ObservationError, ResumeAuditError
from tests import training
from tests.capability import any_capability, stand_for
from tests.conftest import feature, statistics
from tests.docs.pages import blocks
from tests.forked import ranks

DELAYED, CURRENT = recipes.DelayedScaling(amax_history_len=4), recipes.Float8CurrentScaling()
RECIPES: Mapping[str, tuple[recipes.Recipe, tuple[int, int]]] = {
    "delayed": (DELAYED, (9, 0)),
    "current": (recipes.Float8CurrentScaling(), (9, 0)),
    "block": (recipes.Float8BlockScaling(), (9, 0)),
    "mxfp8": (recipes.MXFP8BlockScaling(), (10, 0)),
    "nvfp4": (recipes.NVFP4BlockScaling(disable_rht=True), (10, 0)),
}
State = dict[str, Any]


pytestmark = pytest.mark.usefixtures("trusted_checkpoints")


def net(recipe: recipes.Recipe, *, quantized: bool, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        blocks = [te.LayerNormMLP(64, 64, params_dtype=dtype) for _ in range(2)]
        return torch.nn.Sequential(*blocks, te.Linear(64, 64, params_dtype=dtype))


def train(model: torch.nn.Module, session: InspectSession, recipe: recipes.Recipe | None, steps: int) -> None:
    dtype = next(model.parameters()).dtype
    options: dict[str, Any] = {"loss": lambda _: model(torch.randn(32, 64, dtype=dtype)).float().sum()}
    options["around"] = lambda _: te.autocast(enabled=recipe is not None, recipe=recipe)
    training.train(session, model, steps, torch.optim.SGD(model.parameters(), lr=0.01), **options)


_SAVED: dict[str, bytes] = {}


def saved(folder: Path, recipe: recipes.Recipe | None, **keywords: Any) -> State:
    """A checkpoint after three steps, by way of torch's file format; trained once for equal arguments."""
    key = repr((recipe, keywords))
    if key not in _SAVED:
        model, file = net(recipe or DELAYED, **{"quantized": False, **keywords}), io.BytesIO()
        with InspectSession(statistics(), model=model, log_dir=folder) as session:
            train(model, session, recipe, 3)
            torch.save({"model": model.state_dict(), "session": session.state_dict()}, file)
        _SAVED[key] = file.getvalue()
    return torch.load(io.BytesIO(_SAVED[key]))


def resumed(
    folder: Path,
    state: State,
    recipe: recipes.Recipe | None,
    *,
    quantized: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    config: Any = None,
    then: Callable[[torch.nn.Module], Any] | None = None,
    **keywords: Any,
) -> ResumeReport | None:
    model = net(recipe or DELAYED, quantized=quantized, dtype=dtype)
    with InspectSession(config or statistics(), model=model, log_dir=folder, **keywords) as session:
        session.load_state_dict(state["session"])
        model.load_state_dict(state["model"], strict=False)
        if then is not None:
            then(model)
        train(model, session, recipe, 2)
        assert session.iteration == 5
    return session.resume_report


def findings(report: Any) -> list[str]:
    return [str(finding) for finding in report.findings]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.endswith("session.resume") and record.levelno >= logging.WARNING
    ]


# ---------------------------------------------------------------------- silent resumes


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "quantized"), [*((name, False) for name in RECIPES), ("delayed", True), ("current", True)]
)
def test_a_good_resume_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, quantized: bool) -> None:
    recipe, capability = RECIPES[name]
    with any_capability():
        stand_for(capability)
        state = saved(tmp_path, recipe, quantized=quantized)
        fingerprint = Fingerprint.from_text(state["session"]["fingerprint"])
        caplog.clear()
        report = resumed(tmp_path, state, recipe, quantized=quantized, strict=True)
    assert findings(report) == [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert {layer.weights.kind for layer in fingerprint.layers} == {"quantized" if quantized else "high"}
    assert all((layer.forward is not None) == (name == "delayed") for layer in fingerprint.layers)


def test_a_new_state_is_not_missed(tmp_path: Path) -> None:
    """A checkpoint from before the first step has scales of 1, with or without the state."""
    with InspectSession(statistics(), model=net(DELAYED, quantized=True), log_dir=tmp_path) as session:
        state = {"model": {}, "session": {**session.state_dict(), "iteration": 3}}
    assert '"forward":{' in state["session"]["fingerprint"]
    assert findings(resumed(tmp_path, state, DELAYED, quantized=True)) == []


def test_strict_raises_before_the_parameters_change(tmp_path: Path) -> None:
    state = saved(tmp_path, DELAYED)

    def forward_and_backward() -> torch.Tensor:
        with te.autocast(recipe=DELAYED):
            loss = model(torch.ones(32, 64, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        return loss

    def plain_step() -> None:
        forward_and_backward()
        optimizer.step(lambda: 0.0)

    steps = (
        plain_step,
        lambda: optimizer.step(forward_and_backward),
        lambda: optimizer.step(closure=forward_and_backward),
    )
    for step in steps:
        model = net(DELAYED, quantized=False)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with (
            pytest.raises(ResumeAuditError, match="No scales and amax histories were restored"),
            InspectSession(statistics(), model=model, log_dir=tmp_path, strict=True) as session,
        ):
            session.load_state_dict(state["session"])
            step()
        assert all(map(torch.equal, before, model.parameters()))


# ---------------------------------------------------------------------- findings


MISSING = "No scales and amax histories were restored: the first step uses scales of 1"


def test_a_checkpoint_after_an_evaluation_in_high_precision(tmp_path: Path) -> None:
    """Transformer Engine then saves no state, and the fingerprint records that training was in FP8."""
    model = net(DELAYED, quantized=False)
    with InspectSession(statistics(), model=model, log_dir=tmp_path) as session:
        train(model, session, DELAYED, 3)
        with torch.no_grad():
            model(torch.ones(32, 64, dtype=torch.bfloat16))
        state = {"model": model.state_dict(), "session": session.state_dict()}
    (finding,) = findings(resumed(tmp_path, state, DELAYED))
    assert "it was saved after a forward outside of FP8, such as an evaluation" in finding


def test_quantized_weights_that_went_through_bfloat16(tmp_path: Path) -> None:
    """The largest value of a weight is not a number of bfloat16, and so the scale is another one."""
    recipe = recipes.Float8CurrentScaling()
    state = saved(tmp_path, recipe, quantized=True, dtype=torch.float32)
    scale = state["model"]["2.weight"]._scale_inv.item()
    for key, value in state["model"].items():
        if isinstance(value, te.Float8Tensor):
            state["model"][key] = value.dequantize(dtype=torch.bfloat16)

    def look(model: Any) -> None:
        assert model[2].weight._scale_inv.item() != scale

    assert findings(resumed(tmp_path, state, recipe, quantized=True, dtype=torch.float32, then=look)) == [
        "Quantized primary weights have changed: they were rounded again: all 5 layers."
    ]


# ---------------------------------------------------------------------- reports


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: "{", "is not JSON"),
        (lambda data: json.dumps({**data, "layers": [{}]}), r"is damaged: layers\.0\.scope: Field required"),
    ],
)
def test_a_damaged_fingerprint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Any], str], message: str
) -> None:
    state = saved(tmp_path, DELAYED)
    state["session"]["fingerprint"] = damage(json.loads(state["session"]["fingerprint"]))
    assert resumed(tmp_path, state, DELAYED) is None
    assert "The resume cannot be audited." in caplog.text
    with pytest.raises(FingerprintError, match=message):
        resumed(tmp_path, state, DELAYED, strict=True)


@pytest.mark.parametrize("place", ["compare", "with_layers"])
def test_a_failure_of_the_audit_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    state, failure = saved(tmp_path, DELAYED), mock.Mock(side_effect=ZeroDivisionError("no"))
    monkeypatch.setattr(f"te_precision_callbacks.session.resume.{place}", failure)
    assert resumed(tmp_path, state, DELAYED) is None
    assert "Precision debugging failed on rank 0: auditing the resume: ZeroDivisionError: no" in caplog.text
    with pytest.raises(ObservationError, match="auditing the resume"):
        resumed(tmp_path, state, DELAYED, strict=True)


def test_nothing_stays_behind(tmp_path: Path) -> None:
    def hooks() -> tuple[int, int]:
        return len(_global_forward_pre_hooks), len(_global_optimizer_pre_hooks)

    before = hooks()
    state = saved(tmp_path, DELAYED)
    model = net(DELAYED, quantized=False)
    with InspectSession(statistics(), model=model, log_dir=tmp_path) as session:
        own = hooks()[1] - before[1]  # the check of the parameters, until the end
        session.load_state_dict(state["session"])
        assert hooks() == (before[0] + 1, before[1] + own)
        model.load_state_dict(state["model"])
        train(model, session, DELAYED, 1)
        assert hooks() == (before[0], before[1] + own)
        session.load_state_dict(state["session"])
    assert hooks() == before


def test_a_checkpoint_is_complete_after_the_stop_as_well(tmp_path: Path) -> None:
    model = net(DELAYED, quantized=False)
    with InspectSession(statistics(), log_dir=tmp_path) as session:
        session.attach(model)
        train(model, session, DELAYED, 3)
        inside = session.state_dict()
    assert session.state_dict() == inside
    session.save_fingerprint(tmp_path)
    assert read(tmp_path, 0).to_text() == inside["fingerprint"] == (tmp_path / FILE_NAME).read_text()
    del model
    gc.collect()
    assert session.state_dict() == {"iteration": 3}, "the session does not keep the model"


# ---------------------------------------------------------------------- what differs, as docs/session.md shows it


def cut_histories(state: State) -> None:
    for key in [key for key in state["model"] if key.endswith("_extra_state")]:
        content = pickle.loads(state["model"][key].numpy().tobytes())
        content["recipe"] = recipes.DelayedScaling(amax_history_len=2)
        for direction in ("fwd", "bwd"):
            content[f"amax_history_{direction}"] = content[f"amax_history_{direction}"][-2:].clone()
        state["model"][key] = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)


def of_another_version(state: State) -> None:
    text = state["session"]["fingerprint"]
    state["session"]["fingerprint"] = re.sub('"transformer_engine": ?"[^"]*"', '"transformer_engine":"2.19.0"', text)


def lose(*names: str) -> Callable[[State], object]:
    """Remove the entries with these endings."""
    return lambda state: [state["model"].pop(key) for key in [*state["model"]] if key.endswith(names)]


def nothing(state: State) -> None:
    pass


HIGH = {"bf16": feature("DisableFP8Layer", ["fc1"])}


@pytest.mark.parametrize(
    ("change", "recipe", "config", "expected"),
    [
        (lose("_extra_state"), DELAYED, None, [f"{MISSING}: all 5 layers."]),
        (lose("0._extra_state", "1._extra_state"), DELAYED, None, [f"{MISSING}: {{0-1}}.fc1, {{0-1}}.fc2."]),
        (
            cut_histories,
            DELAYED,
            None,
            ["Amax histories of 2 steps instead of 4 in the checkpoint (forward and backward): all 5 layers."],
        ),
        (nothing, CURRENT, None, ["Another recipe: DelayedScaling -> Float8CurrentScaling: all 5 layers."]),
        (nothing, None, None, ["Another recipe: DelayedScaling -> no recipe: all 5 layers."]),
        (
            nothing,
            recipes.DelayedScaling(amax_history_len=8, margin=1),
            None,
            ["Other values of DelayedScaling: amax_history_len 4 -> 8, margin 0 -> 1: all 5 layers."],
        ),
        (
            of_another_version,
            DELAYED,
            {**statistics(freq=2), **HIGH},
            [
                "Other versions: transformer_engine 2.19.0 -> 2.20.2.",
                "Another config of precision debugging.",
            ],
        ),
    ],
    ids=["no state", "part of the state", "short histories", "recipe", "no recipe", "values", "version and config"],
)
def test_what_differs(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[State], object],
    recipe: recipes.Recipe | None,
    config: Any,
    expected: list[str],
) -> None:
    state = saved(tmp_path, DELAYED)
    change(state)
    caplog.clear()
    assert findings(resumed(tmp_path, state, recipe, config=config)) == expected
    (said,) = warned(caplog)
    assert all(text.rstrip(".") in said for text in expected)
    assert "(iteration 3, run " in said
    if "{" in expected[0]:
        shown = [text for text in blocks("docs/session.md", "text") if "differs from" in text]
        run_id = r"run \d{8}-\d{6}-\d{3}-[0-9a-f]{6}"
        assert re.sub(run_id, "run", shown[0].strip()) == re.sub(run_id, "run", said.rpartition("\n")[0])


# ---------------------------------------------------------------------- several ranks


OTHER_RECIPE = "Another recipe: DelayedScaling -> Float8CurrentScaling: all 2 layers."
OTHER_SCALES = "The scales differ from the checkpoint (forward): 0."
Found = list[tuple[str, bool]]  # a rank's findings, and whether it has logged them


@pytest.mark.processes
def test_two_ranks_tell_of_what_they_have_lost(tmp_path: Path) -> None:
    script = Path(__file__).with_name("resume_script.py")
    for ended in ranks(script, [[str(rank), str(tmp_path)] for rank in range(2)]):
        assert ended.returncode == 0, ended.stderr
    lost = f"{MISSING}: all 2 layers."
    cases: dict[str, list[Found]] = {
        **{name: [[], []] for name in ("delayed", "current", "quantized")},
        "sharded without": [[(lost, True)], [(lost, True)]],
        "replicas": [[], [(lost, True)]],  # DistributedDataParallel broadcasts the parameters, and no state of a recipe
        "another recipe": [[(OTHER_RECIPE, True)], [(OTHER_RECIPE, False)]],  # the first rank reports it for all
        "rank 0's alone": [[], [(OTHER_SCALES, True)]],  # as with Lightning: its checkpoints hold rank 0's state
    }
    for case, expected in cases.items():
        for rank in range(2):
            texts, _, logged = (tmp_path / case / f"told-{rank}.txt").read_text().partition("logged:")
            assert [(text, text.rstrip(".") in logged) for text in texts.splitlines()] == expected[rank], case
            assert bool(logged.strip()) == any(is_logged for _, is_logged in expected[rank]), case
            assert ("differs on rank 1 from" in logged) == (rank == 1 and bool(logged.strip())), case
    for case in ("delayed", "current", "quantized"):
        fingerprints: Any = [read(tmp_path / case, rank) for rank in range(2)]
        assert [fingerprint.rank for fingerprint in fingerprints] == [0, 1]
        weights = [[layer.weights for layer in fingerprint.layers] for fingerprint in fingerprints]
        assert all(weight.sharded for own in weights for weight in own)
        first, second = ([weight.hashes for weight in own] for own in weights)
        assert (first != second) == (case == "quantized"), "each rank has its own shards"
