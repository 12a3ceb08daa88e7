"""Every ending in docs/endings.md: what the script, its summary, ``diagnose``, ``show`` and the page say of it."""

from pathlib import Path

import pytest

from tests.endings.results import result
from tests.endings.ways import WAYS, Way


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])
def test_ending(tmp_path: Path, way: Way) -> None:
    print(result(way, tmp_path))
