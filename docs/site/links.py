"""Links and images between files of the repository, as links and images between pages of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\[\]]+)\]\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")


def between_pages(markdown: str, own: str, pages: Mapping[str, str]) -> str:
    """The text of a page, with links to pages, whose titles take the place of file names.

    Links to files that are no pages are left out. Images are those of docs/.

    Args:
        markdown: the text, outside of blocks of code.
        own: the file that it is from, in the repository.
        pages: file of the repository -> page of the site.
    """
    folder = posixpath.dirname(pages[own]) or "."

    def link(found: re.Match[str]) -> str:
        target, anchor = found["target"], found["anchor"] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
        if found["image"]:
            return f"![{found['text']}]({posixpath.relpath(path.removeprefix('docs/'), folder)})"
        if path in pages:
            text = _title(ROOT / path) if found["text"].endswith(path.rpartition("/")[2]) else found["text"]
            return f"[{text}]({posixpath.relpath(pages[path], folder)}{anchor})"
        return found["text"] if (ROOT / path).exists() else found[0]

    return _LINK.sub(link, markdown)


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].removeprefix("# ")
