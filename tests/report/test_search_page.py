"""The page of a search, in the browser."""

from pathlib import Path

import pytest

from te_precision_callbacks.search import search
from tests.report.conftest import Look
from tests.search.models import RECIPES, Net, batches, closure_of


@pytest.mark.extended
@pytest.mark.slow
def test_the_frontier_is_drawn(look: Look, tmp_path: Path) -> None:
    model = Net(RECIPES["current"](), blocks=2)
    result = search(model, closure_of(model), batches(), low_share=0.7, folder=tmp_path, progress=False)
    look.open_in_the_dark(tmp_path / "search.html", {"summary": 1})
    costs = look.plot("plot.data[0].x")
    assert costs == pytest.approx([100 * (1 - point.low_share) for point in result.frontier])
    assert look.plot("plot.data[0].y") == pytest.approx([point.expected_error for point in result.frontier])
    choice = look.plot("[plot.data[2].x[0], plot.data[2].y[0]]")
    assert choice == pytest.approx([100 * (1 - result.low_share), result.effect.error])
    text = look.page.locator("main").inner_text()
    assert all(name in text for name in result.high)
    look.page.set_viewport_size({"width": 400, "height": 900})
    look.open(tmp_path / "search.html")
    assert look.everything_drawn() == 1
    assert look.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    assert look.plot("plot.clientWidth >= plot.querySelector('.main-svg').getBoundingClientRect().width")
