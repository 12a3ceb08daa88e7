"""Every relative link of the pages leads to a file of the repository, and to a heading in it, as GitHub reads them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests.docs.pages import PAGES, ROOT, tokens


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    found = tokens(page)
    titles = [inline.content for opened, inline in pairwise(found) if opened.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: str) -> list[str]:
    """The targets of its links."""
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
