"""The worst layers of a run are the same in ``show``, in the report and in loggers."""

from collections import namedtuple
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks import InspectSession
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.runs import RecordedRun, UnknownSubjectError, open_run
from te_precision_callbacks.runs.tables import STEP0
from te_precision_callbacks.sinks.metrics import SeriesChoice
from te_precision_callbacks.sinks.worst import judged
from te_precision_callbacks.statistics.series import family_of
from te_precision_callbacks.views.report.data import page_data
from te_precision_callbacks.views.show.view import look
from tests.conftest import Keeper, feature

LAYERS, LOSSY, STEPS, MOST = 16, (3, 12), 4, 5
CONFIG = {
    "lost": feature(
        "LogFp8TensorStats",
        ["all"],
        tensors=["activation", "weight", "gradient"],
        stats=["sqnr_db", "underflows%"],
        freq=1,
    )
}


Trained = namedtuple("Trained", "run session keeper")
LOSSY_NAMES = [str(number) for number in LOSSY]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run under delayed scaling.

    In its first step, with the scale 1, nearly all of each gradient underflows. Later, the weights of the lossy layers
    lose most: a tenth of their elements vanish beside an outlier, which is kept so well that their SQNR is the best.
    """
    torch.manual_seed(0)
    model = torch.nn.ModuleList(te.Linear(32, 32, bias=False) for _ in range(LAYERS))
    with torch.no_grad():
        for number in LOSSY:
            model[number].weight.uniform_(-0.04, 0.04)
            model[number].weight[0, 0] = 2000.0 + number
    log_dir, keeper = tmp_path_factory.mktemp("trained"), Keeper()
    with InspectSession(CONFIG, model=model, log_dir=log_dir, sinks=[keeper]) as session:
        for _ in range(STEPS):
            with te.autocast(enabled=True, recipe=DelayedScaling()):
                outs = [layer(torch.randn(16, 32)) for layer in model]
            sum((out * torch.randn_like(out) * 7e-6).sum() for out in outs).backward()
            session.step()
    return Trained(open_run(log_dir), session, keeper)


def by_hand(run: RecordedRun, statistic: str, tensor: str) -> list[str]:
    worst = {}
    for number in run.select(statistic=statistic, tensor=tensor):
        table = run.values([number])
        columns = (table[name].to_pylist() for name in ("value", "flags"))
        kept = [value for value, flags in zip(*columns, strict=True) if not flags & STEP0]
        assert len(kept) == STEPS - 1, "the first step of delayed scaling is marked"
        worst[run.series["layer"][number].as_py()] = max(map(family_of(tensor, statistic).badness, kept))
    return sorted(worst, key=lambda layer: -worst[layer])


def test_the_losses_are_where_the_run_has_them(trained: Trained) -> None:
    assert by_hand(trained.run, "underflows%", "weight")[:2] != by_hand(trained.run, "sqnr_db", "weight")[:2]
    assert sorted(by_hand(trained.run, "underflows%", "weight")[:2]) == sorted(LOSSY_NAMES)
    assert set(by_hand(trained.run, "sqnr_db", "weight")[-2:]) == set(LOSSY_NAMES), "which the SQNR does not see"
    assert min(trained.keeper.steps[0].families[family_of("gradient", "underflows%")].values()) > 50


def test_show_chooses_after_it_has_left_the_first_step_out(trained: Trained) -> None:
    shown = look(trained.run, ["underflows%"], most=2).worst["underflows%"]
    assert {series.subject[1:3] for series in shown} == {(layer, "weight") for layer in LOSSY_NAMES}
    assert all(series.worst > 5 and series.worst_iteration > 0 for series in shown)


def test_the_report_names_the_same(trained: Trained) -> None:
    stated = page_data(trained.run, 10**7)[0]
    of_page = {
        (stated["families"][finding["family"]]["statistic"], stated["families"][finding["family"]]["tensor"]): finding
        for finding in stated["worst_layers"]
    }
    for tensor in ("activation", "weight", "gradient"):
        losses, sqnr = (by_hand(trained.run, name, tensor) for name in ("underflows%", "sqnr_db"))
        items = of_page["underflows%", tensor]["items"]
        named = [stated["layers"][item["layer"]]["name"] for item in items]
        assert named == losses[: len(named)]
        assert all(item["at"] > 0 for item in items)
        items = of_page["sqnr_db", tensor]["items"]
        named = [stated["layers"][item["layer"]]["name"] for item in items]
        assert named == sqnr[: len(named)]


def test_loggers_choose_the_same(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_precision_callbacks.sinks.metrics.MOST_SERIES", 1)
    monkeypatch.setattr("te_precision_callbacks.sinks.metrics.PLACES", 4)
    choice, records = SeriesChoice(), trained.keeper.steps[-1]
    choice.take(records.families, judged(records))
    assert set(LOSSY_NAMES) <= choice.logged(family_of("weight", "underflows%"))
    assert choice.logged(family_of("weight", "sqnr_db")) == set(by_hand(trained.run, "sqnr_db", "weight")[:4])


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"layer": "nope"}, r"the run has no layer 'nope'\. It has '0', '1', '10' and 13 more\."),
        ({"statistic": "sqnr"}, r"the run has no statistic 'sqnr'\. It has 'sqnr_db', 'underflows%'\."),
        ({"tensor": "grad"}, r"no tensor 'grad'\. It has 'activation', 'gradient', 'weight'\."),
        ({"rank": 3}, r"no rank 3\. All its numbers are reduced over ranks\."),
        ({"gemm": "fprop"}, r"no gemm 'fprop'\. It names no gemm\."),
    ],
)
def test_what_a_run_does_not_have_is_an_error(trained: Trained, wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(UnknownSubjectError, match=says):
        trained.run.select(**wanted)
    if wanted.keys() & {"statistic", "tensor"}:
        with pytest.raises(UnknownSubjectError, match=says):
            trained.run.grid(**{"statistic": "sqnr_db", "tensor": "weight"} | wanted)


def test_a_selection_by_another_name_is_an_error(trained: Trained) -> None:
    with pytest.raises(OptionError, match="takes no lyer="):
        trained.run.select(lyer="0")
