"""docs/start.md and docs/tour.md: the outputs and pictures on the pages are current."""

import sys
from typing import Any

import pytest
import torch

from tests.docs.pages import ROOT, blocks
from tools import tour

PAGES = ["docs/start.md", "docs/tour.md"]
REMEDY = "if the page should show this now: .venv/bin/python tools/tour.py"

pytestmark = pytest.mark.slow  # eight small trainings


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Page -> its outputs: all pages are run once, in their order, since later ones go on with runs of earlier ones."""
    threads = torch.get_num_threads()
    with tour.surroundings(tmp_path_factory.mktemp("tour")):
        results = {page.relative_to(ROOT).as_posix(): tour.run(page) for page in tour.PAGES}
    torch.set_num_threads(threads)
    sys.modules.pop("small_model", None)
    return results


@pytest.mark.parametrize("page", PAGES)
def test_the_outputs_of_a_page_are_current(page: str, outputs: dict[str, list[Any]]) -> None:
    result = outputs[page]
    assert len(result) == len(blocks(page, "text")) > 0
    for output in result:
        assert output.is_true, f"{page} shows\n{output.shown}\nand there came\n{output.renewed}\n{REMEDY}"


@pytest.mark.parametrize(
    ("shown", "came", "is_alike"),
    [
        ("loss 2.61", "loss  2.58", True),
        ("loss 2.61", "loss 4.1", False),
        ("loss 2.61", "lost 2.61", False),
        ("first at step 10", "first at step 11", False),
        ("layers.0.fc1 12.5", "layers.1.fc1 12.5", False),
        ("std 1.44e-03", "std 1.41e-03", True),
        ("std 1.44e-03", "std 1.44e-04", False),
        ("[5.6, nan]", "[5.6, 5.6]", False),
        ("one", "one\ntwo", False),
    ],
)
def test_similar_outputs(shown: str, came: str, is_alike: bool) -> None:
    assert tour.alike(shown, came) is is_alike


def test_lines_that_are_left_out() -> None:
    came = ["head", "a 1", "noise", "b 1", "b 2", "tail", "end"]
    assert tour.cut(["head", "...", "b 1", "-", "...", "end"], came) == ["head", "...", "b 1", "b 2", "...", "end"]
    assert tour.cut(["head"], came) == came
    with pytest.raises(LookupError, match="gone"):
        tour.cut(["...", "gone", "..."], came)
