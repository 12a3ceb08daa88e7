"""Every relative link of the pages leads to a file of the repository, and to a heading in it, as GitHub reads them."""

import re
import runpy
from itertools import pairwise

import pytest

from tests.docs.pages import PAGES, ROOT, tokens


def anchors(page: str) -> set[str]:
    titles = [inline.content for opened, inline in pairwise(tokens(page)) if opened.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: str) -> list[str]:
    inside = [child for token in tokens(page) for child in token.children or ()]
    return [str(child.attrs["href"]) for child in inside if child.type == "link_open"]


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path.relative_to(ROOT).as_posix()), link


def test_the_site_has_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "docs").rglob("*.md"):
        page = path.relative_to(ROOT / "docs").as_posix()
        assert re.search(rf" {re.escape(page)}$", navigation, re.MULTILINE), f"mkdocs.yml: nav has no {page}"


@pytest.mark.parametrize(
    ("page", "text", "on_the_site"),
    [
        ("README.md", "![a map](docs/images/map.png)", "![a map](images/map.png)"),
        ("docs/report.md", "![a map](images/map.png)", "![a map](images/map.png)"),
        ("docs/tour/2.md", "![a map](../images/map.png)", "![a map](../images/map.png)"),
        ("README.md", "[a report](docs/report.md#report)", "[a report](report.md#report)"),
        ("docs/tour/2.md", "[report.md](../report.md)", "[Look at a run](../report.md)"),
        ("docs/report.md", "[the rules](../CONTRIBUTING.md)", "[the rules](contributing.md)"),
        ("docs/report.md", "[a test](../tests/conftest.py)", "a test"),
    ],
)
def test_links_and_images_of_the_site(page: str, text: str, on_the_site: str) -> None:
    pages = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
    pages |= {name: name.removeprefix("docs/") for name in ("docs/report.md", "docs/tour/2.md")}
    between_pages = runpy.run_path(str(ROOT / "docs" / "site" / "links.py"))["between_pages"]
    assert between_pages(text, page, pages) == on_the_site
