"""Steps in which features act: early steps, steps that a run does not reach, spans that change precision."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.dumps import load
from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.conftest import Keeper, feature
from tests.lightning.models import logged_lines
from tests.training import observed

CHANGES: dict[str, Any] = {"gemms": ["fprop"]}
LOOKS: dict[str, Any] = {"tensors": ["weight"], "stats": ["max"]}


@pytest.mark.parametrize(
    ("name", "options", "start", "steps"),
    [
        ("DisableQuantizationGEMM", {**CHANGES, "start_step": 4}, 0, "steps 4 on"),
        ("DisableQuantizationGEMM", {"gemms_struct": [{"gemm": "fprop", "start_end_list": [[4, 4]]}]}, 0, "step 4"),
        ("LogTensorStats", {**LOOKS, "start_step": 1, "freq": 10}, 0, "steps 1 on that are multiples of 10"),
        ("LogGemmError", {**CHANGES, "start_step": 1}, 0, "steps 1 on that are multiples of 500"),
        ("DumpTensors", {**CHANGES, "start_step": 9}, 0, "steps 9 on"),
        ("LogTensorStats", {**LOOKS, "start_step": 3}, 0, ""),
        ("LogTensorStats", {**LOOKS, "freq": 100}, 0, ""),
        ("LogTensorStats", {**LOOKS, "end_step": 1}, 50, ""),  # a resumed run: it acted before
    ],
)
def test_what_the_run_does_not_reach(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, options: dict[str, Any], start: int, steps: str
) -> None:
    config = {"s": feature(name, ["all"], **options)}
    observed(tmp_path, config, net=torch.nn.Sequential(te.Linear(32, 32)), steps=4, start_step=start, records="off")
    messages = [record.getMessage() for record in caplog.records if "became active" in record.getMessage()]
    text = (
        "The run ended after step 3, before these features became active: the config mapping (section 's'):"
        f" {name}, {steps}. Choose steps up to 3, or run longer; steps start at 0."
    )
    assert messages == [text] * bool(steps)


@pytest.mark.parametrize(
    ("options", "session", "steps", "due"),
    [
        (None, {}, 101, [0, 1, 2, 5, 10, 20, 50, 100]),
        (None, {"start_step": 3}, 9, [5, 10]),  # a resumed run counts from the begin of the training
        ({"freq": 4}, {}, 7, [0, 4]),
    ],
)
def test_early_steps(
    tmp_path: Path, keeper: Keeper, options: Any, session: dict[str, Any], steps: int, due: list[int]
) -> None:
    config = options and {
        "own": feature("LogTensorStats", ["all"], stats=["cur_amax"], tensors=["gradient"], **options),
        "dumps": feature("DumpTensors", ["all"], tensors=["gradient"], high_precision_tensor=True, freq=4),
    }
    observed(tmp_path, config, steps=steps, sinks=[keeper], **session)
    assert sorted(keeper.values("cur_amax", tensor="gradient")) == due
    dumps = {load(path).header.iteration for path in tmp_path.rglob("*.safetensors")}
    assert dumps == (set() if options is None else {0, 4})


# --- spans that change precision: each step has the bits of a step from the same state ---

RECIPES: Mapping[str, tuple[recipes.Recipe, tuple[int, int]]] = {
    "delayed": (recipes.DelayedScaling(amax_history_len=3), (9, 0)),
    "current": (recipes.Float8CurrentScaling(), (9, 0)),
    "block": (recipes.Float8BlockScaling(), (9, 0)),
    "nvfp4": (recipes.NVFP4BlockScaling(), (10, 0)),
}
FEATURES: Mapping[str, dict[str, Any]] = {
    "DisableFP8Layer": {},
    "DisableQuantizationGEMM": {"gemms": ["fprop"]},
    "FakeQuant": {"quant_format": "FP8E4M3", "gemms": ["fprop", "wgrad"], "tensors": ["activation"]},
    "PerTensorScaling": {"gemms": ["fprop", "dgrad", "wgrad"], "tensors": ["activation", "weight", "gradient"]},
}
FLIPPING = [[0, 0], [2, 3]]
State = dict[str, Any]


def spanned(name: str, **span: Any) -> dict[str, Any]:
    own = {name: {"enabled": True, **FEATURES[name], **span}}
    logs = {"LogFp8TensorStats": {"enabled": True, "tensors": ["weight"], "stats": ["scale_inv_max"]}}
    return {"all": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": {**logs, **own}}}


class Training:
    """A model of two modules that trains with micro-batches and cached weights; it can begin from a state."""

    def __init__(self, recipe: recipes.Recipe, state: State | None = None) -> None:
        torch.manual_seed(0)
        self.recipe = recipe
        mlp = te.LayerNormMLP(64, 64, params_dtype=torch.bfloat16)
        self.model = torch.nn.Sequential(mlp, te.Linear(64, 64, params_dtype=torch.bfloat16))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it keeps the tensors

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        for micro_batch in range(2):
            with te.autocast(enabled=True, recipe=self.recipe):
                hidden = torch.randn(32, 64, dtype=torch.bfloat16) * (1 + number)
                for module in self.model:
                    hidden = module(hidden, is_first_microbatch=micro_batch == 0)
            hidden.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def trained(
    folder: Path, recipe: recipes.Recipe, sections: dict[str, Any], steps: range, state: State | None = None
) -> tuple[list[State], list[list[torch.Tensor]]]:
    """The states before the steps, and the weights after them, of a session that begins at the first step."""
    training = Training(recipe, state)
    states, weights = [], []
    with InspectSession(sections, model=training.model, log_dir=folder, records="off") as session:
        if state is not None:
            session.load_state_dict(state["session"])
        for number in steps:
            states.append({**training.state(), "session": session.state_dict()})
            training.step(number)
            session.step()
            weights.append(training.weights())
    return states, weights


@pytest.mark.slow
@pytest.mark.usefixtures("trusted_checkpoints")
@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("delayed", "DisableFP8Layer"),
        ("current", "FakeQuant"),
        pytest.param("delayed", "PerTensorScaling", marks=pytest.mark.extended),
        pytest.param("nvfp4", "DisableQuantizationGEMM", marks=pytest.mark.extended),
    ],
)
def test_each_step_is_that_of_a_run_that_begins_there(tmp_path: Path, name: str, feature: str) -> None:
    """In a span it equals a run with a feature that always acts, outside of it a run without a session."""
    recipe, capability = RECIPES[name]
    flipping = spanned(feature, start_end_list=FLIPPING)
    with any_capability():
        stand_for(capability)
        states, weights = trained(tmp_path / "run", recipe, flipping, range(4))
        for number, (state, after) in enumerate(zip(states, weights, strict=True)):
            alone = Training(recipe, state)
            alone.step(number)
            acts = any(first <= number <= last for first, last in FLIPPING)
            assert all(map(torch.equal, after, alone.weights())) is not acts, number
            if acts:  # the last one resumes in the middle of a span
                sections = spanned(feature) if number < 3 else flipping
                _, always = trained(tmp_path / str(number), recipe, sections, range(number, number + 1), state)
                assert all(map(torch.equal, after, always[0])), number


class Fixed:
    def __init__(self, folder: Path, sections: dict[str, Any]) -> None:
        self.layer = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16)
        self.session = InspectSession(sections, model=self.layer, log_dir=folder)
        self.recipe = recipes.DelayedScaling(amax_history_len=2)

    def step(self, amax: float, gradient: float) -> tuple[float, float]:
        """Train, and return the scales of the input and of the gradient for the next step."""
        with te.autocast(enabled=True, recipe=self.recipe):
            out = self.layer(torch.full((16, 32), amax, dtype=torch.bfloat16, requires_grad=True))
        out.backward(torch.full_like(out, gradient))
        self.session.step()
        forward, backward = (self.layer.fp8_meta[name].scale for name in ("scaling_fwd", "scaling_bwd"))
        return float(forward[0]), float(backward[0])


@pytest.mark.parametrize("name", ["DisableFP8Layer", "FakeQuant", "PerTensorScaling", "DisableFP8GEMM"])
def test_the_scales_of_delayed_scaling_follow_the_amaxes_of_a_span(tmp_path: Path, name: str) -> None:
    """scale = largest number of the format / amax: 448 for E4M3, 57344 for E5M2. And coverage knows the span."""
    options = dict(FEATURES.get(name, {"gemms": ["fprop"]}))
    if name in ("FakeQuant", "PerTensorScaling"):
        options |= {"gemms": ["fprop", "dgrad", "wgrad"], "tensors": ["activation", "weight", "gradient"]}
    run = Fixed(tmp_path, {"high": feature(name, ["all"], **options, start_step=1, end_step=2)})
    scales, reasons = [], []
    with run.session as session:
        for number in (1, 3, 5, 2):
            scales.append(run.step(2.0**number, 2.0 ** (4 - number)))
            reasons.append({product.why for product in session.coverage() if not product.is_low})
    assert [round(448 / forward, 3) for forward, _ in scales] == [2, 8, 32, 32]  # of the last two steps
    assert [round(57344 / backward, 3) for _, backward in scales] == [8, 8, 2, 4]
    if name == "DisableFP8GEMM":
        acts = {"DisableFP8GEMM in the config mapping (section 'high'), steps 1 to 2"}
        assert reasons == [set(), acts, acts, set()]


@pytest.mark.parametrize("feature", ["DisableFP8Layer", "FakeQuant"])
def test_a_span_between_due_steps_has_no_statistics(tmp_path: Path, feature: str) -> None:
    """On its debug path in the span, a layer is no longer looked at as on its fused path in the last due step."""
    sections = spanned(feature, start_step=5, end_step=9)
    statistics = {"enabled": True, "tensors": ["activation", "gradient"], "freq": 4}
    sections["all"]["transformer_engine"] |= {
        "LogTensorStats": {**statistics, "stats": ["cur_amax", "numel"]},
        "LogFp8TensorStats": {**statistics, "stats": ["underflows%"]},
    }
    training, names = Training(RECIPES["delayed"][0]), {}
    with InspectSession(sections, model=training.model, log_dir=tmp_path, observe="auto") as session:
        for number in range(12):
            training.step(number)
            session.step()
            names[number] = {(row.layer, row.tensor, row.statistic) for row in session.last_statistics if row.value}
    steps = {step for (name, step), _ in logged_lines(tmp_path).items() if "activation" in name or "gradient" in name}
    assert steps == {0, 4, 8}
    assert names[0] >= names[4] == names[8] == names[11] != set()
