"""Each way a run can end, as reported by the script, its summary, ``diagnose``, ``show`` and the page."""

from pathlib import Path

import pytest

from te_precision_callbacks.runs import open_run
from te_precision_callbacks.views.show.view import LastStepsView, NothingToShowError
from tests.endings.results import TABLE, row
from tests.endings.ways import USUAL, WAYS, Way

ROWS = {line.split(" | ")[0].removeprefix("| "): line for line in TABLE.read_text().splitlines()}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=way.name, marks=() if way.name in USUAL else pytest.mark.extended) for way in WAYS],
)
def test_the_row_of_an_ending(tmp_path: Path, way: Way) -> None:
    assert row(way, tmp_path) == ROWS[way.name]
    if way.name == "SIGKILL":
        with pytest.raises(NothingToShowError, match="killed"):
            LastStepsView(open_run(tmp_path), 8)
