"""The shares outside of a format, and the depth profile: recorded numbers come first, an estimate is an interval."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe

from te_precision_callbacks import InspectSession
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.views.report import write_report
from tests.conftest import feature
from tests.report.conftest import Look

pytestmark = pytest.mark.slow  # a browser

LAYERS, STEPS = 4, 3
LOSSES = ["underflows%", "overflows%"]


class Trained(NamedTuple):
    """A run, and its page."""

    run: RecordedRun
    page: Path

    def recorded(self, statistic: str, step: int, layer: str = "0") -> float:
        grid = self.run.grid(statistic, "activation")
        return float(grid.values[grid.layers.index(layer), grid.iterations.tolist().index(step)])


def train(folder: Path, recipe: Recipe, tensor: list[str], quantized: list[str], growth: float) -> Trained:
    """Train on activations of which some of a hundred underflow, and that grow from step to step. The largest is at no
    power of two."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(te.Linear(32, 32) for _ in range(LAYERS))
    config = {
        "tensor": feature("LogTensorStats", ["all"], tensors=["activation"], stats=tensor, freq=1),
        "quantized": feature("LogFp8TensorStats", ["all"], tensors=["activation"], stats=quantized, freq=1),
    }
    with InspectSession(config, model=model, log_dir=folder) as session:
        for step in range(STEPS):
            x = torch.rand(64, 32) * torch.exp2(-15 * torch.rand(64, 32)) * growth**step
            x[0, 0] = 1.1 * growth**step
            with te.autocast(enabled=True, recipe=recipe):
                sum(layer(x).sum() for layer in model).backward()
            session.step()
    run = open_run(folder)
    return Trained(run, write_report(run, folder / "report.html"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Current scaling, with all that is needed to know the shares."""
    return train(
        tmp_path_factory.mktemp("whole"),
        Float8CurrentScaling(),
        ["exponent_histogram", "cur_amax"],
        ["scale_inv_max", *LOSSES],
        1.0,
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The same training with scales and histograms alone."""
    folder = tmp_path_factory.mktemp("bare")
    return train(folder, Float8CurrentScaling(), ["exponent_histogram"], ["scale_inv_max"], 1.0)


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Delayed scaling of activations that grow: some overflow in each step."""
    folder = tmp_path_factory.mktemp("delayed")
    stats = ["exponent_histogram", "cur_amax"]
    return train(folder, DelayedScaling(amax_history_len=1), stats, ["scale_inv_max", *LOSSES], 1.5)


def shares(look: Look, trained: Trained, step: int, name: str = "E4M3") -> tuple[list[str], list[str]]:
    """The words of the cells "becomes 0" and "above"."""
    look.open(trained.page, f"page=layer&layer=0&step={step}")
    row = look.page.locator(".magnitudes tbody tr", has_text=name).first
    row.wait_for()
    below, above = (row.locator("td").nth(place).inner_text().split() for place in (3, 4))
    return below, above


def interval(words: list[str]) -> tuple[float, float]:
    assert words[1] == "to"
    assert words[-2:] == ["%", "estimate"]
    return float(words[0]), float(words[2])


def test_what_was_recorded_is_shown(look: Look, whole: Trained) -> None:
    below, above = shares(look, whole, 2)
    assert above == ["0", "%", "recorded"], "current scaling puts the largest number on the format's largest"
    assert float(below[0]) == pytest.approx(whole.recorded("underflows%", 2), rel=1e-2)
    assert below[1:] == ["%", "recorded"]


OUTSIDE = "plot.data.find((trace) => trace.type === 'bar').marker.color.map((colour) => colour === '#d55e00')"


@pytest.mark.parametrize(("name", "above"), [("whole", False), ("bare", False), ("delayed", True)])
def test_the_profile_paints_what_is_outside_alone(
    look: Look, request: pytest.FixtureRequest, name: str, above: bool
) -> None:
    """Current scaling's E4M3 holds the largest number, whether that is recorded or known to a power of two."""
    trained: Trained = request.getfixturevalue(name)
    look.open(trained.page, "page=profile&tensor=activation&format=E4M3&step=2")
    look.everything_drawn()
    bars = look.plot("(({base, x}) => ({base, x}))(plot.data.find((trace) => trace.type === 'bar'))")
    tops = [base + width for base, width in zip(bars["base"], bars["x"], strict=True)]
    limits = look.plot("plot.data.find((trace) => trace.name === 'E4M3: largest').x")[::2]
    assert look.plot(OUTSIDE) == [above] * LAYERS
    assert [top > limit + 1e-5 for top, limit in zip(tops, limits, strict=True)] == [above] * LAYERS


def test_recorded_overflows_are_shown_as_they_are(look: Look, delayed: Trained) -> None:
    assert delayed.recorded("overflows%", 2) > 0
    below, above = shares(look, delayed, 2)
    assert float(above[0]) == pytest.approx(delayed.recorded("overflows%", 2), rel=1e-2)
    assert float(below[0]) == pytest.approx(delayed.recorded("underflows%", 2), rel=1e-2)
    assert (above[1:], below[1:]) == (["%", "recorded"], ["%", "recorded"])


def test_an_estimate_is_an_interval_with_the_truth_in_it(look: Look, whole: Trained, bare: Trained) -> None:
    below, above = (interval(words) for words in shares(look, bare, 2))
    assert above[0] == 0, "nothing says that anything overflows"
    assert above[1] > 0
    assert below[0] <= whole.recorded("underflows%", 2) <= below[1]
    below_5, above_5 = shares(look, bare, 2, "E5M2")
    assert above_5 == ["0", "%", "assumed"], "the scale is assumed to follow the largest number"
    assert below_5 == ["0", "%", "estimate"], "it holds all down to 2^-32"


def test_a_recorded_amax_shows_that_nothing_is_above(look: Look, whole: Trained, tmp_path: Path) -> None:
    trained = train(tmp_path, Float8CurrentScaling(), ["exponent_histogram", "cur_amax"], ["scale_inv_max"], 1.0)
    below, above = shares(look, trained, 2)
    assert above == ["0", "%", "by", "amax"]
    low, high = interval(below)
    assert low <= whole.recorded("underflows%", 2) <= high
