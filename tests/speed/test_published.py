"""The model against published times: benchmarks/speed_model.py, its constants and its tables in docs/speed.md."""

import importlib
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("speed_model")
    sys.path.remove(str(ROOT / "benchmarks"))


def test_the_constants_are_those_of_the_script(model: ModuleType) -> None:
    remedy = "the model has changed: python benchmarks/speed_model.py --write"
    assert model.CONSTANTS.read_text(encoding="utf-8") == model.constants_text(), remedy


def test_the_page_has_the_tables_of_the_script(model: ModuleType) -> None:
    page = model.PAGE.read_text(encoding="utf-8")
    of_model = [line for line in model.tables() if line]
    shown = page.partition(model.BEGIN)[2].partition(model.END)[0].splitlines()
    assert [line for line in shown if line] == of_model


def test_the_cells_that_nothing_was_fitted_to(model: ModuleType) -> None:
    cells = model.cells(model.constants()["b300"])
    assert len(cells) == 20
    errors = [abs(cell.error) for cell in cells]
    assert statistics.median(errors) < 0.10
    assert max(errors) < 0.30
    low = {(cell.layer, cell.recipe): cell for cell in cells if cell.recipe != "bf16"}
    assert all(item.interval[0] <= item.measured_speedup <= item.interval[1] for item in low.values())
    not_resolved = low["attention output", model.CURRENT]  # 0.307 ms in BF16, 0.317 in current scaling
    assert not_resolved.measured_speedup == pytest.approx(0.97, abs=0.005)
    assert not_resolved.interval[0] < 1 < not_resolved.interval[1]


def test_the_transfer_to_another_device(model: ModuleType) -> None:
    for recipe, row in model.transferred(model.constants()["b300"]).items():
        assert all(abs(value - 1) < 0.15 for value in row["time"]), recipe
        assert all(abs(value - 1) < 0.05 for value in row["speed-up"]), recipe


def test_the_order_of_recipes_on_layer_totals(model: ModuleType) -> None:
    device = model.device_named("b300")
    measured = {recipe: sum(sums.values()) for recipe, sums in model.SUMS["b300"].items()}
    results = {
        recipe: sum(model.expected(shape, recipe, device) for shapes in model.SHAPES.values() for shape in shapes)
        for recipe in measured
    }
    assert sorted(results, key=results.__getitem__) == sorted(measured, key=measured.__getitem__)


def test_the_fit_does_not_read_the_cells(model: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model.fit("b300")
    monkeypatch.setattr(model, "CELLS", {})
    sums = {recipe: {**passes, "fprop": 1e6} for recipe, passes in model.SUMS["b300"].items()}
    monkeypatch.setattr(model, "SUMS", {**model.SUMS, "b300": sums})
    assert model.fit("b300") == before, "nor their sum"
